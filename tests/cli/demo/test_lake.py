"""The demo's story at a small scale: run to its verified end, and interrupted by Ctrl-C without leftovers."""

from __future__ import annotations

import asyncio
import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from flowstone.cli.demo.lake import Scale, show_lake

SECONDS = 120.0


pytestmark = pytest.mark.usefixtures("java")


def processes_of(directory: Path) -> list[str]:
    """Return the command lines that name a directory."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            try:
                line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(directory) in line:
                found.append(line)
    return found


async def test_story_ends_with_a_lake_equal_to_the_cluster(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    assert isinstance(console.file, io.StringIO)
    code = await show_lake(tmp_path, console, Scale(seconds=2, customers=500, rate=600))
    shown = console.file.getvalue()
    assert code == 0, shown
    assert re.search(r"was elected \d+\.\d s later, in term \d+", shown), shown
    assert "follows. It has rolled back" in shown
    assert re.search(r"equal: \d+ rows of 5 spaces", shown), shown
    assert re.search(r"\d+ orders; 0 of them are missing in the lake, 0 are unexpected there", shown), shown
    assert re.search(r"Osaka +[\d,]+ +[\d,]+\n", shown), shown
    assert processes_of(tmp_path) == []


async def test_story_raises_the_timeout_of_its_caller(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await show_lake(tmp_path, Console(file=io.StringIO()), Scale(seconds=2, customers=500, rate=600))
    assert processes_of(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_demo_leaves_no_files(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "flowstone.cli", "demo"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "flowstone mirror" in line:
                break
        wait_for_java(tmp_path)
        process.send_signal(number)
        process.communicate(timeout=SECONDS)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert processes_of(tmp_path) == []
    assert list(tmp_path.glob("flowstone-*")) == []


def wait_for_java(directory: Path) -> None:
    """Wait until the mirror has started Spark, which must then be stopped, too."""
    deadline = time.monotonic() + SECONDS
    while not any("java" in line for line in processes_of(directory)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
