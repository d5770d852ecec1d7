"""A Spark session for the commands: on this machine unless told otherwise, quiet, quick to start, nothing left behind.

Programs that have a session of their own use that, with `flowstone.spark.register`. Where a session is already running
in this process, the commands take it and leave it running.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from flowstone.errors import FlowstoneError
from flowstone.spark.clear_errors import HIDE_TRACEBACK

if TYPE_CHECKING:
    from pyspark import SparkConf
    from pyspark.sql import SparkSession

MASTER: Final = "local[*]"
MEMORY: Final = "1g"

QUIET: Final = """\
rootLogger.level = {level}
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{{HH:mm:ss}} %p %c{{1}}: %m%n
"""
OUTPUT_TAIL: Final = 800
POLL_SECONDS: Final = 0.02
STOP_SECONDS: Final = 20.0


_OURS: Final = re.compile(r"from the Python worker:\s*(?!Traceback)[\w.]+: (.*?)\s*(?:SQLSTATE: \w+)?\s*\Z", re.DOTALL)
"""What Spark says where a worker met an error of ours, which has no traceback (`clear_errors.py`)."""


class SparkUnavailable(FlowstoneError):
    """Spark cannot be started here."""


class SparkJobFailed(FlowstoneError):
    """A worker of Spark met an error of ours; its message is this one's."""


@contextmanager
def session(
    app_name: str,
    *,
    master: str = MASTER,
    memory: str = MEMORY,
    conf: Mapping[str, str] | None = None,
    log_level: str = "OFF",
) -> Iterator[SparkSession]:
    """The running session of this process, which stays, or a new one, which is stopped behind the block.

    `memory` is the driver's. `conf` wins over everything that is set here. A `log_level` other than OFF has Spark's log
    on standard error.
    """
    from pyspark.sql import SparkSession

    running = SparkSession.getActiveSession()
    if running is not None:
        with _lasting_errors():
            yield running
        return
    directory = Path(tempfile.mkdtemp(prefix="flowstone-spark-"))
    try:
        with _interrupted_by_sigterm():
            settings = _settings(directory, master, memory, log_level) | dict(conf or {})
            started, java = _start(app_name, settings, directory)
        try:
            with _lasting_errors():
                yield started
        finally:
            _stop(started, java)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _lasting_errors() -> Iterator[None]:
    """Spark's errors ask the JVM for their text when they are printed, and it is gone by then."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JError) as error:
        text = str(error)
        ours = _OURS.search(text)
        if ours is not None:
            raise SparkJobFailed(ours[1]) from None
        raise RuntimeError(text) from None


def _settings(directory: Path, master: str, memory: str, log_level: str) -> dict[str, str]:
    (directory / "log4j2.properties").write_text(QUIET.format(level=log_level))
    return {
        "spark.master": master,
        "spark.driver.memory": memory,
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={(directory / 'log4j2.properties').as_uri()}",
        "spark.log.level": log_level,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.warehouse.dir": (directory / "warehouse").as_uri(),
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.python.worker.reuse": "true",
    } | (_local(directory, master) if is_local(master) else {})


def is_local(master: str) -> bool:
    """True where driver and executors share this machine, so that nothing has to be heard outside of it."""
    return is_one_process(master) or master.startswith("local-cluster[")


def is_one_process(master: str) -> bool:
    """True where whatever the driver sees, executors see as well."""
    return master.startswith("local[") or master == "local"


def _local(directory: Path, master: str) -> dict[str, str]:
    return ({"spark.local.dir": str(directory / "local")} if is_one_process(master) else {}) | {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.shuffle.partitions": str(len(os.sched_getaffinity(0))),
        # Without checksums beside each file, and with a rename as the commit of one: a third of a micro-batch's cost.
        "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
        "spark.sql.streaming.checkpointFileManagerClass": (
            "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
        ),
    }


def _start(app_name: str, settings: Mapping[str, str], directory: Path) -> tuple[SparkSession, subprocess.Popen[bytes]]:
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

    check_java()
    conf = SparkConf(loadDefaults=False).setAppName(app_name).setAll(list(settings.items()))
    environment = _environment(settings["spark.master"])
    java = _launch(conf, environment, directory)
    try:
        port, secret = _gateway(java, directory)
        with _environment_with(environment | {"PYSPARK_GATEWAY_PORT": port, "PYSPARK_GATEWAY_SECRET": secret}):
            gateway = launch_gateway(conf)  # type: ignore[no-untyped-call]  # it connects to the one that is there
            return SparkSession(SparkContext(gateway=gateway, conf=conf)), java
    except BaseException:
        _kill(java)
        raise


def _launch(conf: SparkConf, environment: Mapping[str, str], directory: Path) -> subprocess.Popen[bytes]:
    """As PySpark does it, which would not tell us whom it has started while it waits."""
    from pyspark.find_spark_home import _find_spark_home

    command = [os.path.join(_find_spark_home(), "bin", "spark-submit")]
    command += [part for name, value in conf.getAll() for part in ("--conf", f"{name}={value}")]
    loud = conf.get("spark.log.level") != "OFF"
    own = {"SPARK_CONNECT_MODE": "0", "_PYSPARK_DRIVER_CONN_INFO_PATH": str(directory / "gateway")}
    own[HIDE_TRACEBACK] = ""  # an error of ours may have set it in this process; workers decide for themselves
    with (directory / "java.log").open("wb") as output:
        # Ctrl-C is for us alone, who then stop it. It ends with us in any case: it reads from a pipe that we hold.
        return subprocess.Popen(
            [*command, "pyspark-shell"],
            env=os.environ | dict(environment) | own,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=None if loud else output,
            start_new_session=True,
        )


def _gateway(java: subprocess.Popen[bytes], directory: Path) -> tuple[str, str]:
    """Where it listens, and what it wants to hear."""
    path = directory / "gateway"
    while not path.exists():
        if java.poll() is not None:
            said = " ".join((directory / "java.log").read_text(errors="replace")[-OUTPUT_TAIL:].split())
            raise SparkUnavailable(
                f"Spark did not start: {said or f'it ended with {java.returncode}'}",
                hint="it needs Java 17 or newer (Debian package openjdk-17-jre-headless), and the memory it is given",
            )
        time.sleep(POLL_SECONDS)
    content = path.read_bytes()
    size = int.from_bytes(content[4:8], "big")
    return str(int.from_bytes(content[:4], "big")), content[8 : 8 + size].decode()


def check_java() -> None:
    home = os.environ.get("JAVA_HOME")
    if shutil.which("java") is None and not (home and os.access(Path(home) / "bin/java", os.X_OK)):
        raise SparkUnavailable(
            "Spark runs on Java, which is not installed here",
            hint="install Java 17 (Debian package openjdk-17-jre-headless), or set JAVA_HOME",
        )


def _environment(master: str) -> dict[str, str]:
    """What Spark takes from the environment while it starts. What the user has set there stands."""
    wanted = {"PYSPARK_PYTHON": sys.executable} | ({"SPARK_LOCAL_IP": "127.0.0.1"} if is_local(master) else {})
    return {name: value for name, value in wanted.items() if name not in os.environ}


@contextmanager
def _environment_with(added: Mapping[str, str]) -> Iterator[None]:
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """While Spark starts SIGTERM is Ctrl-C: what was begun is ended. Whoever works with it then may do as he likes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _stop(started: SparkSession, java: subprocess.Popen[bytes]) -> None:
    """Ends the JVM, too: another session in this process may want other memory."""
    from pyspark import SparkContext

    gateway: Any = started.sparkContext._gateway
    started.stop()
    gateway.shutdown()
    SparkContext._gateway = None
    SparkContext._jvm = None
    assert java.stdin is not None
    java.stdin.close()
    try:
        java.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        _kill(java)


def _kill(java: subprocess.Popen[bytes]) -> None:
    """With its whole session: it begins as a script, which asks another JVM how to start the one that stays."""
    with suppress(ProcessLookupError):
        os.killpg(java.pid, signal.SIGKILL)
    java.wait()
