"""A process forked by the starter behaves like one in a fresh interpreter."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.warm_process import WarmProcess, starter_address

SECONDS = 240.0
"""A node may have to compile its kernels first."""

MODULE = "flowstone.cli"
ASKER = """
import sys, time
from tests.warm_process import WarmProcess

with open(sys.argv[2], "wb") as log:
    process = WarmProcess(sys.argv[3:], stdout=log, starter=sys.argv[1])
    print(process.pid, flush=True)
    time.sleep(60)
"""


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def serve(directory: Path) -> list[str]:
    return [MODULE, "serve", "--listen=127.0.0.1:0", f"--work-dir={directory}"]


@pytest.mark.parametrize(
    ("arguments", "code"), [(["--version"], 0), (["cat", "nosuch"], 2), (["completion", "bash"], 0), (["--help"], 0)]
)
def test_command_prints_and_exits_as_in_a_fresh_interpreter(tmp_path: Path, arguments: list[str], code: int) -> None:
    environment = os.environ | {"COLUMNS": "90", "TERM": "dumb"}
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        process = WarmProcess([MODULE, *arguments], stdout=out, stderr=err, cwd=tmp_path, env=environment)
    assert process.wait(SECONDS) == process.poll() == code
    command = [sys.executable, "-m", MODULE, *arguments]
    fresh = subprocess.run(command, capture_output=True, cwd=tmp_path, env=environment, check=False)
    assert ((tmp_path / "out").read_bytes(), (tmp_path / "err").read_bytes()) == (fresh.stdout, fresh.stderr)
    assert fresh.returncode == code


def test_standard_input_is_read_if_given(tmp_path: Path, log: Path) -> None:
    read, write = os.pipe()
    with os.fdopen(read, "rb") as stdin, log.open("wb") as out:
        process = WarmProcess(["json.tool", "--compact"], stdin=stdin, stdout=out)
    with os.fdopen(write, "wb") as text:
        text.write(b'{"a":  1}')
    assert process.wait(SECONDS) == 0
    assert json.loads(log.read_text()) == {"a": 1}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGKILL, -signal.SIGKILL)])
def test_signal_ends_the_process(tmp_path: Path, log: Path, number: signal.Signals, code: int) -> None:
    with log.open("wb") as out:
        process = WarmProcess(serve(tmp_path / "node"), stdout=out)
    until(lambda: "ready" in log.read_text())
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.send_signal(number)
    assert process.wait(SECONDS) == code
    process.kill()  # signal to a process that has already ended


def test_process_is_killed_with_its_requester(tmp_path: Path, log: Path) -> None:
    command = [sys.executable, "-c", ASKER, starter_address(), str(log), *serve(tmp_path / "node")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as asker:
        assert asker.stdout is not None
        pid = int(asker.stdout.readline())
        until(lambda: "ready" in log.read_text())
        asker.kill()
    until(lambda: not Path(f"/proc/{pid}").exists())
