"""The process of a reader ends with its driver, on request or when orphaned."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

CHILD = """
import os, sys, time
from flowstone.spark.sources.tarantool.driver_watch import watch_driver

def let_go():
    os.write(1, b"let go\\n")  # the signal may come while the main thread is in print()
    {hang}

watch_driver(let_go)
print(os.getpid(), flush=True)
time.sleep(60)
"""
PARENT = "import subprocess, sys, time\nsubprocess.Popen([sys.executable, sys.argv[1]])\ntime.sleep(60)"


def script(tmp_path: Path, hang: str = "pass") -> str:
    path = tmp_path / "child.py"
    path.write_text(textwrap.dedent(CHILD).replace("{hang}", hang))
    return str(path)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"


def test_sigterm_releases_and_exits(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, script(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    child.stdout.readline()
    child.send_signal(signal.SIGTERM)
    assert child.stdout.readline() == "let go\n"
    assert child.wait(10) == 0
    child.stdout.close()


@pytest.mark.parametrize("hang", ["pass", "time.sleep(60)"])
def test_orphaned_process_releases_and_exits(tmp_path: Path, hang: str) -> None:
    child = script(tmp_path, hang)
    parent = subprocess.Popen([sys.executable, "-c", PARENT, child], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 15
    while is_alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert parent.stdout.readline() == "let go\n"
    parent.stdout.close()
