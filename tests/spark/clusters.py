"""Spark as several processes on loopback, from the installed PySpark package; driver and executors share nothing.

Executors work in their own directories, and their Python may not open files below `hidden`: any file that a driver
keeps there must be sent to them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyspark

from tests.places import SOURCES
from tests.real_tarantool import free_port
from tests.short_java import USE

PACKAGE = Path(pyspark.__file__).parent
SECONDS = 90.0
WORKERS = 2

HIDING = """\
import os, sys
from pathlib import Path

if "app-" in os.getcwd():  # an executor's working directory
    hidden = {hidden!r}

    def hide(event, arguments):
        if event in ("open", "os.listdir", "os.scandir") and str(arguments[0]).startswith(hidden):
            raise FileNotFoundError("executors do not see " + str(arguments[0]))

    sys.addaudithook(hide)
"""


@contextmanager
def local_cluster(directory: Path, hidden: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the master URL and the environment for a driver."""
    environment = _environment(directory, hidden)
    yield f"local-cluster[{WORKERS},1,1024]", environment


@contextmanager
def standalone(directory: Path, hidden: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Run a master and two workers, each a process in its own directory."""
    environment = _environment(directory, hidden)
    port = free_port()
    address = f"spark://127.0.0.1:{port}"
    with ExitStack() as stack:
        host = ["--host", "127.0.0.1", "--webui-port", str(free_port())]
        log = _run(stack, directory / "master", environment, "master.Master", *host, "--port", str(port))
        _wait(log, "New state: ALIVE")
        logs = []
        for number in range(WORKERS):
            host = ["--host", "127.0.0.1", "--webui-port", str(free_port())]
            place = directory / f"worker-{number}"
            logs.append(_run(stack, place, environment, "worker.Worker", *host, "-c", "1", "-m", "1g", address))
        for log in logs:
            _wait(log, "Successfully registered with master")
        yield address, environment


def _environment(directory: Path, hidden: Path) -> dict[str, str]:
    """Return the environment of drivers and daemons.

    The home directory consists of links, because Spark writes below it.
    """
    home, site = directory / "home", directory / "site"
    home.mkdir(parents=True)
    site.mkdir()
    for part in PACKAGE.iterdir():
        if part.name in ("bin", "sbin", "jars", "python"):
            (home / part.name).symlink_to(part)
    (site / "sitecustomize.py").write_text(HIDING.format(hidden=str(hidden)))
    return os.environ | {
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": USE,
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join([str(site), SOURCES]),
    }


def _run(stack: ExitStack, place: Path, environment: dict[str, str], name: str, *arguments: str) -> Path:
    """Start a daemon of Spark; return the path of its log."""
    place.mkdir()
    log = place / "log"
    command = [str(PACKAGE / "bin/spark-class"), f"org.apache.spark.deploy.{name}", *arguments]
    with log.open("wb") as file:
        # The daemon has its own process group, because the script that starts Java may be its parent.
        process = subprocess.Popen(
            command,
            cwd=place,
            env=environment | {"SPARK_WORKER_DIR": str(place / "work")},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    stack.callback(_end, process)
    return log


def _end(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(log: Path, said: str) -> None:
    deadline = time.monotonic() + SECONDS
    while said not in log.read_text(errors="replace"):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{log} does not contain {said!r}:\n{log.read_text(errors='replace')[-3000:]}")
        time.sleep(0.05)
