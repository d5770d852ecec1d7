"""Compactions that are killed or cancelled at any of their disk operations.

The original opens the directory with the same rows, and no removed row reappears.
"""

from __future__ import annotations

import asyncio
import shutil
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest

from flowstone.limestone.settings import Settings
from flowstone.limestone.store import compaction
from flowstone.limestone.store.datastore import AsyncDatastore
from flowstone.outside import production
from tests.conftest import FULL
from tests.limestone.interop.real_master import opened_by_the_original
from tests.limestone.stoppable_disk import StoppableDisk, cancelled

STEP = 1 if FULL else 5
EXPECTED = [(0, b"a", b"3"), (0, b"d", b"2")]
"""Storage 0: `a` was set again in epoch 3; `b` and `c` were removed after their values had been compacted."""


class _Died(BaseException):
    pass


class DyingDisk(StoppableDisk):
    """Ends all work where StoppableDisk would stop, as in a killed process."""

    def _pass(self, path: str) -> None:
        self._left -= 1
        if self._left <= 0:
            raise _Died


async def prepared(path: Path) -> None:
    """Prepare a directory that was compacted once; later, rows were changed and removed, and the files rotated."""
    async with AsyncDatastore(production(), Settings(str(path))) as store:
        channel = await store.create_channel()
        await store.ready()

        async def session(epoch: int, keys: bytes, removed: bytes = b"") -> None:
            await store.switch_epoch(epoch)
            await channel.begin_session()
            for minor, key in enumerate(keys):
                channel.add_entry(0, bytes((key,)), b"%d" % epoch, (epoch, minor))
            for minor, key in enumerate(removed, 100):
                channel.remove_entry(0, bytes((key,)), (epoch, minor))
            await channel.end_session()

        await session(1, b"abc")
        compacting = asyncio.ensure_future(store.compact())
        await asyncio.sleep(0)
        await session(2, b"d", b"b")
        await compacting
        rotating = asyncio.ensure_future(store.rotate())
        await asyncio.sleep(0)
        await session(3, b"a", b"c")
        await rotating
        await store.switch_epoch(4)


async def test_compaction_killed_at_any_operation_leaves_the_same_rows(tmp_path: Path) -> None:
    await prepared(tmp_path / "whole")
    for number in count(1, STEP):
        path = Path(shutil.copytree(tmp_path / "whole", tmp_path / str(number)))
        disk = DyingDisk()
        disk.stop_at(number)
        is_done = False
        with suppress(_Died):
            compaction.compact_online(disk, str(path), 2, 1)
            is_done = True
        assert opened_by_the_original(path) == (3, EXPECTED), number
        if is_done:
            break
    assert number > 10


async def test_compaction_cancelled_at_any_operation_leaves_the_same_rows(tmp_path: Path) -> None:
    await prepared(tmp_path / "whole")
    for number in count(1, STEP):
        path = Path(shutil.copytree(tmp_path / "whole", tmp_path / str(number)))
        disk = StoppableDisk()
        async with AsyncDatastore(disk.outside(), Settings(str(path))) as store:
            await store.create_channel()
            await store.ready()
            disk.stop_at(number)
            compacting = asyncio.ensure_future(store.compact())
            await asyncio.sleep(0)
            await store.switch_epoch(store.last_epoch + 1)
            is_stopped = await disk.until_stopped(compacting)
            await cancelled(compacting)
            disk.may_go_on.set()
        found = opened_by_the_original(path)
        assert found is not None
        assert found[1] == EXPECTED, number
        if not is_stopped:
            break
    assert number > 10


pytestmark = pytest.mark.timeout(600)
