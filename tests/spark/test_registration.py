"""`flowstone.spark.register`: its settings, the supported sessions, and its errors."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

import flowstone
from flowstone.spark import registration
from flowstone.spark.registration import CannotRegister, register_sources


class Conf:
    """Settings of a session; those in `fixed` cannot be set."""

    def __init__(self, *fixed: str) -> None:
        self.values: dict[str, str] = {}
        self._fixed = fixed

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)

    def set(self, name: str, value: str) -> None:
        if name in self._fixed:
            raise AnalysisException(f"Cannot modify the value of {name}\nmore")
        self.values[name] = value


class Context:
    def __init__(self, master: str, **settings: str) -> None:
        self.master = master
        self.pythonExec = "python3"
        self._settings = settings

    def getConf(self) -> Any:  # noqa: N802
        return self._settings


class Session:
    """The part of a classic session that registration inspects."""

    def __init__(self, conf: Conf | None = None, context: Context | None = None) -> None:
        self.conf = conf or Conf()
        self.sparkContext = context or Context("local[2]")
        self.registered: list[str] = []
        self.dataSource = self

    def register(self, source: Any) -> None:
        self.registered.append(source.name())


class ConnectSession(Session):
    """A session of Spark Connect: it has no context."""

    @property
    def sparkContext(self) -> Context:  # noqa: N802
        raise AttributeError("not available in Spark Connect")

    @sparkContext.setter
    def sparkContext(self, context: Context) -> None:  # noqa: N802
        pass


ConnectSession.__module__ = "pyspark.sql.connect.session"


@pytest.fixture(autouse=True)
def no_python_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(registration.PYTHON_ENVIRONMENT, raising=False)


def test_local_session_gets_sources_settings_and_this_python() -> None:
    session: Any = Session()
    register_sources(session)
    register_sources(session)
    assert session.registered == ["xlog", "tarantool", "limestone"] * 2
    assert session.conf.values == registration.SETTINGS
    assert session.sparkContext.pythonExec == sys.executable


def test_configured_python_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    session: Any = Session(context=Context("local", **{registration.PYTHON_CONF: "some-python"}))
    register_sources(session)
    assert session.sparkContext.pythonExec == "some-python"
    monkeypatch.setenv(registration.PYTHON_ENVIRONMENT, "another-python")
    session = Session()
    register_sources(session)
    assert session.sparkContext.pythonExec == "python3"


def test_remote_executors_cause_a_warning() -> None:
    session: Any = Session(context=Context("spark://master:7077"))
    with pytest.warns(UserWarning, match="executors of spark://master:7077 run 'python3', which must have flowstone"):
        register_sources(session)
    assert session.registered == ["xlog", "tarantool", "limestone"]


def test_spark_connect_session_is_registered() -> None:
    session: Any = ConnectSession()
    register_sources(session)
    assert session.registered == ["xlog", "tarantool", "limestone"]


def test_setting_that_cannot_be_changed_is_one_error() -> None:
    session: Any = Session(Conf("spark.sql.execution.arrow.pyspark.enabled"))
    with pytest.raises(
        CannotRegister, match=r"cannot set spark.sql.execution.arrow.pyspark.enabled to true .*set it when"
    ):
        register_sources(session)


def test_real_session_has_the_formats(spark: SparkSession) -> None:
    flowstone.spark.register(spark)
    flowstone.spark.register(spark)
    assert spark.conf.get("spark.sql.execution.arrow.pyspark.enabled") == "true"


def test_importing_flowstone_loads_no_spark() -> None:
    heavy = "[name for name in ('pyspark', 'pyarrow') if name in sys.modules]"
    program = f"import flowstone, sys; flowstone.spark.register; print({heavy})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
