"""A driver that is killed at any moment leaves no reader behind, and every change is in exactly one batch."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Self

import pytest

from tests.conftest import FULL
from tests.node.archived_server import SCHEMA, RealServer
from tests.places import ROOT
from tests.spark.spooled_servers import until

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("tarantool", "java")]

KILLS = 10 if FULL else 2
ROWS_BEFORE = 2000
CHANGES = 21_000 if FULL else 1_500
"""Number of changes in each life of the driver, in transactions of three."""

BATCH_ROWS = 2000 if FULL else 400
"""Maximum rows of a batch: several batches per life, and not a multiple of three, so that transactions cross their
ends.
"""

SECONDS = 1500 if FULL else 300
WRITER = """
written = 0
function write_beside(count)
    require('fiber').create(function()
        for transaction = 1, count / 3 do
            box.begin()
            for i = 1, 3 do
                written = written + 1
                box.space.t:replace{1000000 + written, 'change'}
            end
            box.commit()
            require('fiber').sleep(0.002)
        end
    end)
end
"""


class Driver:
    """`stream_program` as a separate process group."""

    def __init__(self, server: RealServer, directory: Path) -> None:
        command = [sys.executable, "-m", "tests.spark.stream_program", server.uri, str(directory), str(BATCH_ROWS)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        self.directory = directory
        assert self.process.stdout is not None
        assert self.process.stdout.readline().startswith("streaming"), "the driver did not start"
        self.jvm = int((directory / "jvm").read_text())

    def kill(self, how: str) -> None:
        """Kill the JVM, or ask the driver to end."""
        readers = children(self.jvm)
        if how == "kill":
            os.kill(self.jvm, signal.SIGKILL)
        else:
            self.process.terminate()
        until(lambda: not any(map(is_alive, readers)), SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.jvm, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def children(pid: int) -> list[int]:
    text = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False).stdout
    return [int(line) for line in text.split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def batches(directory: Path) -> list[int]:
    return sorted(int(path.stem) for path in directory.glob("*.json"))


def wait_for_batches(directory: Path, count: int) -> None:
    until(lambda: len(batches(directory)) >= count, SECONDS)


def wait_for_rows(directory: Path, count: int) -> None:
    """Count each batch only once: counting all of them at every poll would take a core from the processes
    under test.
    """
    counted: dict[int, int] = {}

    def are_there() -> bool:
        for number in batches(directory):
            if number not in counted:
                counted[number] = len(json.loads((directory / f"{number}.json").read_text()))
        return sum(counted.values()) >= count

    until(are_there, SECONDS)


def changes(directory: Path) -> list[tuple[int, str, str]]:
    """Return version, operation and tuple of the changes in all batches, in order."""
    rows = (row for number in batches(directory) for row in json.loads((directory / f"{number}.json").read_text()))
    return [(version, operation, text) for _, version, operation, text in rows]


def test_every_change_is_in_one_batch_despite_kills(tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    chance = random.Random(seed)
    cfg = "replication_timeout=0.2, wal_max_size=100000"
    directory = tmp_path / "out"
    directory.mkdir()
    with RealServer(tmp_path / "master", setup=SCHEMA, cfg=cfg) as server:
        server.eval("fill(...)", 1, ROWS_BEFORE)
        server.eval(WRITER)
        for number in range(KILLS):
            with Driver(server, directory) as driver:
                wait_for_batches(directory, 1)
                before = len(batches(directory))
                server.eval("write_beside(...)", CHANGES)
                wait_for_batches(directory, before + 1)
                time.sleep(chance.random())
                driver.kill("kill" if number % 2 == 0 else "terminate")
        total = KILLS * CHANGES
        with Driver(server, directory) as driver:
            wait_for_rows(directory, ROWS_BEFORE + total)
            driver.kill("terminate")
    ids = [json.loads(text)[0] for _, _, text in changes(directory)]
    assert sorted(ids) == [*range(1, ROWS_BEFORE + 1), *range(1_000_001, 1_000_001 + total)], f"seed {seed}"
    assert not list(directory.glob("*.differs")), f"seed {seed}"
    of_transactions = Counter(version for version, operation, _ in changes(directory) if operation == "replace")
    assert set(of_transactions.values()) <= {3}
    assert batches(directory) == list(range(len(batches(directory))))
