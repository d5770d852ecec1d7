"""Prepare a Spark session for the data sources: register their classes, apply settings, choose the workers' Python.

Works with classic sessions and with Spark Connect, where the server has its own Python and only settings apply.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import TYPE_CHECKING, Final

from flowstone.errors import FlowstoneError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SETTINGS: Final = {
    "spark.sql.execution.arrow.pyspark.enabled": "true",
}
PYTHON_CONF: Final = "spark.pyspark.python"
PYTHON_ENVIRONMENT: Final = "PYSPARK_PYTHON"


class CannotRegister(FlowstoneError):
    """The session rejects a setting that the data sources need."""


def register_sources(spark: SparkSession) -> None:
    """See `flowstone.spark.register`."""
    from flowstone.spark.sources.limestone.source import LimestoneSource
    from flowstone.spark.sources.tarantool.source import TarantoolSource
    from flowstone.spark.sources.xlog.source import XlogSource

    for name, value in SETTINGS.items():
        _set(spark, name, value)
    if not _is_connect(spark):
        _choose_python(spark)
    for source in (XlogSource, TarantoolSource, LimestoneSource):
        spark.dataSource.register(source)


def _is_connect(spark: SparkSession) -> bool:
    """Decide by module name: importing the class needs packages that classic sessions do without."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


def _set(spark: SparkSession, name: str, value: str) -> None:
    from pyspark.errors import PySparkException

    if spark.conf.get(name, None) == value:
        return
    try:
        spark.conf.set(name, value)
    except PySparkException as error:
        raise CannotRegister(
            f"cannot set {name} to {value} in the Spark session: {str(error).splitlines()[0]}",
            hint="set it when the session is created",
        ) from error


def _choose_python(spark: SparkSession) -> None:
    """Let local workers run this Python unless another is configured; warn about a cluster.

    The default, the system's python3, rarely has the packages that this Python has.
    """
    context = spark.sparkContext
    named = context.getConf().get(PYTHON_CONF)
    if os.environ.get(PYTHON_ENVIRONMENT) or context.pythonExec == sys.executable:
        return
    if named:
        context.pythonExec = named  # Spark itself reads this setting only in spark-submit
        return
    if str(context.master).startswith(("local", "local-cluster")):
        context.pythonExec = sys.executable
        return
    warnings.warn(
        f"executors of {context.master} run {context.pythonExec!r}, which must have flowstone installed; "
        f"set {PYTHON_ENVIRONMENT} or {PYTHON_CONF} before the session is created",
        stacklevel=4,
    )
