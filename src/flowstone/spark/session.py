"""A Spark session for the commands: on this machine unless told otherwise, quiet, quick to start, nothing left behind.

Programs that have a session of their own use that, with `flowstone.spark.register`. Where a session is already running
in this process, the commands take it and leave it running.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from flowstone.errors import FlowstoneError

if TYPE_CHECKING:
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
        started = _start(app_name, _settings(directory, master, memory, log_level) | dict(conf or {}), directory)
        try:
            with _lasting_errors():
                yield started
        finally:
            _stop(started)
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
    } | (_local(directory) if is_local(master) else {})


def is_local(master: str) -> bool:
    """True where driver and executors share this machine, so that nothing has to be heard outside of it."""
    return master.startswith(("local[", "local-cluster[")) or master == "local"


def _local(directory: Path) -> dict[str, str]:
    return {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.local.dir": str(directory / "local"),
        "spark.sql.shuffle.partitions": str(len(os.sched_getaffinity(0))),
        # Without checksums beside each file, and with a rename as the commit of one: a third of a micro-batch's cost.
        "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
        "spark.sql.streaming.checkpointFileManagerClass": (
            "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
        ),
    }


def _start(app_name: str, settings: Mapping[str, str], directory: Path) -> SparkSession:
    from pyspark import SparkConf, SparkContext
    from pyspark.errors import PySparkRuntimeError
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

    check_java()
    conf = SparkConf(loadDefaults=False).setAppName(app_name).setAll(list(settings.items()))
    loud = settings["spark.log.level"] != "OFF"
    output = directory / "java.log"
    with _environment(settings["spark.master"]), output.open("wb") as file:
        try:
            # Ctrl-C is for us alone, who then stop it. It ends with us in any case: it reads from a pipe that we hold.
            how = {"stdout": subprocess.DEVNULL, "stderr": None if loud else file, "start_new_session": True}
            gateway = launch_gateway(conf, how)  # type: ignore[no-untyped-call]
        except PySparkRuntimeError as error:
            said = " ".join(output.read_text(errors="replace")[-OUTPUT_TAIL:].split())
            raise SparkUnavailable(
                f"Spark did not start: {said or error}",
                hint="it needs Java 17 or newer (Debian package openjdk-17-jre-headless), and the memory it is given",
            ) from error
        return SparkSession(SparkContext(gateway=gateway, conf=conf))


def check_java() -> None:
    home = os.environ.get("JAVA_HOME")
    if shutil.which("java") is None and not (home and os.access(Path(home) / "bin/java", os.X_OK)):
        raise SparkUnavailable(
            "Spark runs on Java, which is not installed here",
            hint="install Java 17 (Debian package openjdk-17-jre-headless), or set JAVA_HOME",
        )


@contextmanager
def _environment(master: str) -> Iterator[None]:
    """What Spark takes from the environment while it starts. What the user has set there stands."""
    wanted = {"PYSPARK_PYTHON": sys.executable} | ({"SPARK_LOCAL_IP": "127.0.0.1"} if is_local(master) else {})
    added = [name for name in wanted if name not in os.environ]
    os.environ.update({name: wanted[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _stop(started: SparkSession) -> None:
    """Ends the JVM, too: another session in this process may want other memory."""
    from pyspark import SparkContext

    gateway: Any = started.sparkContext._gateway
    started.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait()
    SparkContext._gateway = None
    SparkContext._jvm = None
