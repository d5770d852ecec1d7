"""The original's tools on the directory of a Flowstone replica that was killed during a session."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flowstone.limestone.format.endpoint import Endpoint
from flowstone.outside import production
from tests.limestone.interop.real_limestone import logutil
from tests.limestone.peer import Connector, Master, row, session
from tests.limestone.running_replica import rows, until

COMMAND = [sys.executable, "-m", "flowstone.cli", "limestone", "replica"]


@contextmanager
def running(directory: Path) -> Iterator[Endpoint]:
    """Run a replica process; it is killed at the end."""
    command = [*COMMAND, str(directory), "--listen", "tcp://127.0.0.1:0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        try:
            yield Endpoint.parse(json.loads(process.stdout.readline())["endpoint"])
        finally:
            process.kill()


async def killed(directory: Path, torn_bytes: int) -> None:
    """Return a directory with epoch 2 durable, a session of epoch 3 acknowledged, and another one torn at some byte."""
    connector = Connector(production().network)
    with running(directory) as endpoint:
        master = Master(connector, endpoint)
        await master.begin()
        log, other = await master.open(0), await master.open(1)
        for epoch in (1, 2):
            await log.acknowledged(session(epoch, row(f"k{epoch}", "v", epoch)))
            await other.acknowledged(session(epoch, row(f"o{epoch}", "v", epoch)))
            await master.commit(epoch)
        await log.acknowledged(session(3, row("never", "v", 3)))
        size = (directory / "pwal_0000").stat().st_size
        log.send(session(3, *(row(f"never{number}", "v" * 1000, 3) for number in range(3000)), flags=1))
        # the replica spills sessions that exceed its memory
        await until(lambda: (directory / "pwal_0000").stat().st_size > size)
    await connector.close()
    with (directory / "pwal_0000").open("r+b") as file:
        file.truncate(size + torn_bytes)


@pytest.mark.parametrize("torn_bytes", [0, 4, 9, 25, 5000])
async def test_the_real_tools_find_the_durable_epochs(torn_bytes: int, tmp_path: Path) -> None:
    await killed(tmp_path / "data", torn_bytes)
    looked = logutil("inspect", tmp_path / "data")
    assert (looked.status, looked.code) == ("auto-repairable", 1), looked.log
    assert looked.fields["durable-epoch"] == "2"
    repaired = logutil("repair", tmp_path / "data")
    assert (repaired.status, repaired.code) == ("repaired", 0), repaired.log
    assert logutil("inspect", tmp_path / "data").status == "OK"
    assert [key for key, _ in rows(tmp_path / "data")] == [b"k1", b"k2", b"o1", b"o2"]
