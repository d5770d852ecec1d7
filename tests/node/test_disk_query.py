"""Queries of a disk that may hang: each has a time limit, and all of them together use one worker."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from flowstone.node.disk_query import DiskQuery
from flowstone.outside import production
from tests.node.hanging_disk import HangingDisk
from tests.node.upstream.test_applier import until


async def test_query_of_a_hanging_disk_times_out_and_holds_one_worker(tmp_path: Path) -> None:
    disk = HangingDisk()
    outside, query = replace(production(), disk=disk), DiskQuery[int]()
    with disk.hanging():
        for _ in range(10):
            with pytest.raises(TimeoutError, match="the disk does not answer"):
                await query.get(outside, disk.free_space, str(tmp_path), timeout=0.02)
        assert disk.waiting == 1
    await until(lambda: not disk.waiting)
    assert await query.get(outside, disk.free_space, str(tmp_path), timeout=60) > 0


async def test_each_query_asks_the_disk_again_and_raises_its_error() -> None:
    answers = iter([1, 2])
    query = DiskQuery[int]()
    assert [await query.get(production(), lambda: next(answers), timeout=60) for _ in range(2)] == [1, 2]

    def fail() -> int:
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input/output error"):
        await query.get(production(), fail, timeout=60)
