"""The index of an archived log: it describes the blocks, and is rebuilt from them when unusable."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flowstone.archive import block_index as archive_blocks
from flowstone.archive.block_index import BlockRun, BlockWriter, blocks_of, path_of, read_blocks
from flowstone.archive.settled_tracker import Verdicts
from flowstone.replication.vclock import VClock
from flowstone.xlog.meta import FileType, Meta
from flowstone.xlog.reader import LogFile
from flowstone.xlog.writer import LogWriter
from tests.node.archived_rows import INSTANCE, SYNC, SYNC_SPACE, alone, confirm, define_space, new_disk, rollback, slab

META = Meta(FileType.XLOG, INSTANCE, {1: 5}, version="2.11.9")
LOG = "dir/00000000000000000005.xlog"


def verdicts() -> Verdicts:
    found = Verdicts()
    found.start(VClock({1: 5}))
    return found


def indexed(disk: Any, *blocks: list[bytes]) -> tuple[BlockRun, ...]:
    """Return the runs of an index after adding these blocks, 100 bytes each."""
    writer = BlockWriter.create(disk, LOG, META, 200, verdicts())
    for number, rows in enumerate(blocks, 1):
        together = slab(*rows)
        writer.add(together, 0, len(together), 200 + 100 * number)
        writer.flush()
    writer.close()
    read = read_blocks(disk, LOG)
    assert read is not None
    return read.runs


def test_run_describes_its_rows() -> None:
    runs = indexed(new_disk(), [alone(6), alone(7, 600), alone(1, origin=2, at=50.0)], [define_space(8, 700)])
    assert runs[0] == BlockRun(200, 300, 3, {1: 7, 2: 1}, {1: 7, 2: 1}, 50.0, 107.0, (512, 600))
    assert runs[0].is_plain
    assert runs[1] == BlockRun(300, 400, 1, {1: 8, 2: 1}, {1: 8, 2: 1}, 108.0, 108.0, (280,), has_definitions=True)
    assert not runs[1].is_plain


def test_verdicts_keep_their_positions() -> None:
    runs = indexed(
        new_disk(),
        [alone(6, SYNC_SPACE, flags=SYNC)],
        [confirm(7, 6), alone(8, SYNC_SPACE, flags=SYNC)],
        [rollback(9, 8)],
    )
    assert [run.settled for run in runs] == [{1: 5}, {1: 7}, {1: 9}]
    assert [run.rolled_back for run in runs] == [(), (), ((1, 8, 8),)]
    assert [run.has_synchronous for run in runs] == [True, True, False]
    assert [run.has_control for run in runs] == [False, True, True]


def test_small_blocks_share_a_line_and_large_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_blocks, "RUN_SIZE", 250)
    disk = new_disk()
    writer = BlockWriter.create(disk, LOG, META, 200, verdicts())
    for number in range(1, 9):
        writer.add(slab(alone(5 + number)), 0, 1, 200 + 100 * number)
    writer.close()
    read = read_blocks(disk, LOG)
    assert read is not None
    assert [(run.offset, run.end, run.row_count) for run in read.runs] == [(200, 500, 3), (500, 800, 3), (800, 1000, 2)]


def test_runs_with_many_spaces_do_not_list_them() -> None:
    runs = indexed(new_disk(), [alone(6 + number, 600 + number) for number in range(65)])
    assert runs[0].spaces is None


def test_index_lines_are_plain_json() -> None:
    disk = new_disk()
    indexed(disk, [alone(6)])
    first, second, rest = bytes(disk.names[path_of(LOG)].data).split(b"\n")
    assert json.loads(first)["format"] == "flowstone-blocks"
    assert json.loads(first)["log"] == "00000000000000000005.xlog"
    assert json.loads(second)["vclock"] == {"1": 6}
    assert rest == b""


@pytest.mark.parametrize("is_cut_refused", [False, True])
def test_flush_writes_runs_again_after_a_failed_append(is_cut_refused: bool) -> None:
    disk = new_disk()
    writer = BlockWriter.create(disk, LOG, META, 200, verdicts())
    writer.add(slab(alone(6)), 0, 1, 300)
    writer.flush()
    writer.add(slab(alone(7)), 0, 1, 400)
    disk.room, disk.broken = 20, {"truncate"} if is_cut_refused else set()
    for _ in range(2):
        with pytest.raises(OSError, match=r"No space left|Input/output"):
            writer.flush()
    disk.room, disk.broken = None, set()
    writer.add(slab(alone(8)), 0, 1, 500)
    writer.close()
    read = read_blocks(disk, LOG)
    assert read is not None
    assert [(run.end, run.vclock) for run in read.runs] == [(300, {1: 6}), (400, {1: 7}), (500, {1: 8})]
    assert read.size == disk.size(path_of(LOG))


@pytest.mark.parametrize("damage", [b"\x00\x00", b'{"offset": 1}\n', b"nonsense\n", b'{"offset":300,"end":3'])
def test_unusable_parts_of_an_index_are_ignored(damage: bytes) -> None:
    disk = new_disk()
    runs = indexed(disk, [alone(6)])
    disk.names[path_of(LOG)].data += damage
    read = read_blocks(disk, LOG)
    assert read is not None
    assert read.runs == runs
    writer = BlockWriter.resume(disk, LOG, read, verdicts())
    writer.add(slab(alone(7)), 0, 1, 400)
    writer.close()
    again = read_blocks(disk, LOG)
    assert again is not None
    assert [run.end for run in again.runs] == [300, 400]
    assert again.up_to(399) == runs


@pytest.mark.parametrize("text", [b"", b"{}\n", b"nonsense\n"])
def test_invalid_index_is_ignored(text: bytes) -> None:
    disk = new_disk()
    disk.create(path_of(LOG)).append(text)
    assert read_blocks(disk, LOG) is None
    assert read_blocks(new_disk(), LOG) is None


def test_index_of_another_log_is_ignored() -> None:
    disk = new_disk()
    indexed(disk, [alone(6)])
    disk.rename(path_of(LOG), path_of("dir/00000000000000000006.xlog"))
    assert read_blocks(disk, "dir/00000000000000000006.xlog") is None


def test_block_offsets_of_a_chunk_equal_those_of_the_file() -> None:
    disk = new_disk()
    disk.make_directory("dir")
    log = LogWriter.create(disk, "dir", META)
    sizes = []
    for lsn in (6, 7, 8):
        log.append_encoded([alone(lsn, size=3000) + alone(lsn + 10)], {1: lsn})
        sizes.append(log.size)
    log.close()
    with LogFile.open(disk, log.path) as file:
        (chunk,) = file.chunks()
        assert list(blocks_of(chunk, chunk.decode())) == [(0, 2, sizes[0]), (2, 4, sizes[1]), (4, 6, sizes[2])]
