"""States rebuilt in memory: whatever was committed up to a position, in the files that Spark would write."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import flowstone
from flowstone.archive.past_state import CannotRebuild, rebuild
from flowstone.outside.disk import SystemDisk
from flowstone.replication.vclock import VClock
from flowstone.xlog.directory import scan_directory

Contents = dict[int, list[int]]


async def history(directory: Path, random: random.Random) -> dict[int, list[tuple[int, int]]]:
    """Write random transactions; return the tuples after each of them, by LSN."""
    found: dict[int, list[tuple[int, int]]] = {}
    async with flowstone.Node(directory, checkpoint_count=100) as node:
        space = await node.create_space("numbers", format=[("id", "unsigned"), ("value", "unsigned")])
        await space.create_index("primary")
        for _ in range(60):
            async with node.transaction() as transaction:
                for _ in range(random.randint(1, 3)):
                    key = random.randrange(20)
                    if random.random() < 0.3:
                        transaction.space("numbers").delete(key)
                    else:
                        transaction.space("numbers").replace((key, random.randrange(1000)))
            found[node.info()["lsn"]] = [(each[0], each[1]) for each in space.select()]
            if random.random() < 0.05:
                await node.snapshot()
    return found


def snapshot_before(directory: Path, lsn: int) -> str:
    snapshots = scan_directory(SystemDisk(), str(directory)).snapshots
    return max((each for each in snapshots if each.signature <= lsn), key=lambda each: each.signature).path


@pytest.mark.parametrize("seed", range(3))
async def test_state_of_every_past_transaction_can_be_written_and_started(tmp_path: Path, seed: int) -> None:
    source, disk = tmp_path / "source", SystemDisk()
    expected = await history(source, random.Random(seed))
    for lsn in random.Random(seed).sample(sorted(expected), 5):
        state = rebuild(disk, str(source), snapshot_before(source, lsn), VClock({1: lsn}))
        (out := tmp_path / f"restored-{lsn}").mkdir()
        path, counts = state.write(disk, str(out), 1.0)
        assert Path(path).name == f"{lsn:020d}.snap"
        async with flowstone.Node(out) as node:
            assert [(each[0], each[1]) for each in node.space("numbers").select()] == expected[lsn]
            assert node.info()["lsn"] == lsn
            assert counts[node.space("numbers").id] == len(expected[lsn])


async def test_position_after_the_end_of_the_log_is_refused(tmp_path: Path) -> None:
    last = max(await history(tmp_path, random.Random(1)))
    with pytest.raises(CannotRebuild, match="do not lead to a settled state"):
        rebuild(SystemDisk(), str(tmp_path), snapshot_before(tmp_path, last), VClock({1: last + 1}))
