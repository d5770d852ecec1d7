"""A master lies to `follow` and to an archive after a valid snapshot: each reports the reason, and stores nothing.

Both victims have less state to compare with than a node, so no master may ever send these lies.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Final
from uuid import UUID

import pytest

import flowstone
from flowstone.archive.archive import Archive
from flowstone.box.dialect import Dialect
from flowstone.errors import FlowstoneError
from flowstone.outside import production
from flowstone.replication.vclock import VClock
from flowstone.xlog.reader import LogFile
from tests.hostile.liar import MARK, Liar, Role
from tests.hostile.lie import Lie
from tests.hostile.master_lies import BYTES, ROWS
from tests.hostile.stage import TIMEOUT, until

SECRET: Final = "never-to-be-said"
OF_NODES: Final = ("row of our own", "known row of our own", "deep nesting")
"""An anonymous replica has no rows of its own; without the space it does not decode tuples."""

DIALECTS: Final = {"2.6": Dialect.V2_6, "2.11": Dialect.V2_11}
LIES: Final = [
    lie
    for lie in (*BYTES, *ROWS)
    if "sent a" in lie.reason or "row" in lie.reason or "packet" in lie.reason or "no master" in lie.reason
    if lie.name not in OF_NODES
]

lies = pytest.mark.parametrize("lie", LIES, ids=str)
dialects = pytest.mark.parametrize("dialect", DIALECTS)


def liar(lie: Lie, dialect: str) -> Liar:
    return Liar(Role(DIALECTS[dialect], UUID("55555555-5555-4555-8555-555555555555"), VClock({1: 4})), lie.tell)


def has_mark(directory: Path) -> bool:
    """Return True if a log in `directory` has a row with the mark of a lie."""
    for path in directory.glob("*.xlog"):
        with LogFile.open(production().disk, str(path)) as log:
            if any(MARK.encode() in slab.payload for slab in log.slabs()):
                return True
    return False


@dialects
@lies
async def test_follow_stops_and_keeps_the_valid_rows(lie: Lie, dialect: str, caplog: pytest.LogCaptureFixture) -> None:
    async with liar(lie, dialect) as told:
        uri = f"spy:{SECRET}@{told.address}"
        async with flowstone.follow(uri, replication_timeout=TIMEOUT) as replica:
            await until(lambda: replica.info()["upstream"]["status"] == "stopped")
            assert re.search(lie.reason, replica.info()["upstream"]["message"])
            assert replica.vclock == VClock({1: 4})
            assert len(replica.box.spaces) > 10
            assert SECRET not in str(replica.info())
    assert SECRET not in caplog.text
    assert "Traceback" not in caplog.text


@dialects
@lies
async def test_archive_stops_without_storing_forged_rows(
    lie: Lie, dialect: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with liar(lie, dialect) as told:
        archive = Archive(f"spy:{SECRET}@{told.address}", tmp_path, replication_timeout=TIMEOUT)
        with pytest.raises(FlowstoneError, match=lie.reason) as caught:
            async with asyncio.timeout(60):
                await archive.run()
    assert archive.position == VClock({1: 4})
    assert not has_mark(tmp_path)
    assert SECRET not in str(caught.value) + caplog.text
    assert "Traceback" not in caplog.text
