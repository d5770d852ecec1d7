"""Spark sessions for the commands and for library calls: local by default, quiet, quick to start, no leftover files.

If a session is already running in this process, it is used and left running.
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
from flowstone.spark.worker_errors import HIDE_TRACEBACK

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
"""Matches Spark's text for an error of ours in a worker, which has no traceback (`worker_errors.py`)."""


class SparkUnavailable(FlowstoneError):
    """Spark cannot be started here."""


class SparkJobFailed(FlowstoneError):
    """A Spark worker raised one of our errors; this error has the same message."""


@contextmanager
def session(
    app_name: str,
    *,
    master: str = MASTER,
    memory: str = MEMORY,
    conf: Mapping[str, str] | None = None,
    log_level: str = "OFF",
) -> Iterator[SparkSession]:
    """Yield the running Spark session of this process, or start one that is stopped after the block.

    A new session is quiet, starts quickly and leaves no files. Its executors use this Python.

    Args:
        app_name: Name that Spark shows for the session.
        master: Spark master, as for `spark-submit --master`.
        memory: Memory of the driver.
        conf: Spark settings. They override all settings that are made here.
        log_level: With a level other than OFF, Spark logs to standard error.

    Returns:
        A context manager that yields the session.

    Raises:
        SparkUnavailable: Java is not installed, or Spark does not start.
        SparkJobFailed: A Spark worker raised one of our errors in the block.

    Example:
        with flowstone.spark.session("report") as spark:
            flowstone.spark.register(spark)
            spark.read.format("xlog").option("space", "orders").load("/backup/db1").show()
    """
    from pyspark.sql import SparkSession

    running = SparkSession.getActiveSession()
    if running is not None:
        with lasting_errors():
            yield running
        return
    directory = Path(tempfile.mkdtemp(prefix="flowstone-spark-"))
    try:
        with _interrupted_by_sigterm():
            settings = _settings(directory, master, memory, log_level) | dict(conf or {})
            started, java = _start(app_name, settings, directory)
        try:
            with lasting_errors():
                yield started
        finally:
            _stop(started, java)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def session_for(
    spark: SparkSession | None, app_name: str, *, master: str = MASTER, conf: Mapping[str, str] | None = None
) -> Iterator[SparkSession]:
    """Yield `spark`, which is left running, or the session of `session` if it is None."""
    if spark is None:
        with session(app_name, master=master, conf=conf) as started:
            yield started
    else:
        with lasting_errors():
            yield spark


@contextmanager
def lasting_errors() -> Iterator[None]:
    """Convert Spark's errors: they fetch their text from the JVM when printed, and the JVM is gone by then."""
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
    """Return True if driver and executors share this machine, so that listening on loopback is enough."""
    return is_one_process(master) or master.startswith("local-cluster[")


def is_one_process(master: str) -> bool:
    """Return True if executors run in the driver's process and see the same files."""
    return master.startswith("local[") or master == "local"


def _local(directory: Path, master: str) -> dict[str, str]:
    return ({"spark.local.dir": str(directory / "local")} if is_one_process(master) else {}) | {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.shuffle.partitions": str(len(os.sched_getaffinity(0))),
        # No checksum files, and a rename as the commit of a file: a third of a micro-batch's cost.
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
            gateway = launch_gateway(conf)  # type: ignore[no-untyped-call]  # connects to the JVM started above
            return SparkSession(SparkContext(gateway=gateway, conf=conf)), java
    except BaseException:
        _kill(java)
        raise


def _launch(conf: SparkConf, environment: Mapping[str, str], directory: Path) -> subprocess.Popen[bytes]:
    """Start the JVM as PySpark does; PySpark itself does not expose the process while it waits for it."""
    from pyspark.find_spark_home import _find_spark_home

    command = [os.path.join(_find_spark_home(), "bin", "spark-submit")]
    command += [part for name, value in conf.getAll() for part in ("--conf", f"{name}={value}")]
    loud = conf.get("spark.log.level") != "OFF"
    own = {"SPARK_CONNECT_MODE": "0", "_PYSPARK_DRIVER_CONN_INFO_PATH": str(directory / "gateway")}
    own[HIDE_TRACEBACK] = ""  # one of our errors may have set it in this process; workers set it themselves
    with (directory / "java.log").open("wb") as output:
        # A session of its own shields the JVM from Ctrl-C: we stop it. If this process dies, its end of the stdin pipe
        # closes and the JVM exits.
        return subprocess.Popen(
            [*command, "pyspark-shell"],
            env=os.environ | dict(environment) | own,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=None if loud else output,
            start_new_session=True,
        )


def _gateway(java: subprocess.Popen[bytes], directory: Path) -> tuple[str, str]:
    """Wait for the JVM to start. Return the port and the secret of its gateway."""
    path = directory / "gateway"
    while not path.exists():
        if java.poll() is not None:
            said = " ".join((directory / "java.log").read_text(errors="replace")[-OUTPUT_TAIL:].split())
            raise SparkUnavailable(
                f"Spark did not start: {said or f'Java exited with code {java.returncode}'}",
                hint="Spark needs Java 17 or newer (Debian package openjdk-17-jre-headless) and the configured memory",
            )
        time.sleep(POLL_SECONDS)
    content = path.read_bytes()
    size = int.from_bytes(content[4:8], "big")
    return str(int.from_bytes(content[:4], "big")), content[8 : 8 + size].decode()


def check_java() -> None:
    home = os.environ.get("JAVA_HOME")
    if shutil.which("java") is None and not (home and os.access(Path(home) / "bin/java", os.X_OK)):
        raise SparkUnavailable(
            "Spark needs Java, which is not installed",
            hint="install Java 17 (Debian package openjdk-17-jre-headless), or set JAVA_HOME",
        )


def _environment(master: str) -> dict[str, str]:
    """Return the environment variables that Spark reads at start, except variables that the user has set."""
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
    """Treat SIGTERM as Ctrl-C while Spark starts, so that a half-started JVM is stopped.

    The former handler is restored after the block.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _stop(started: SparkSession, java: subprocess.Popen[bytes]) -> None:
    """Stop the session and its JVM: the next session in this process may need other memory settings."""
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
    """Kill the whole process group: spark-submit is a script that runs a launcher JVM before the actual one."""
    with suppress(ProcessLookupError):
        os.killpg(java.pid, signal.SIGKILL)
    java.wait()
