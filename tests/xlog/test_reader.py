"""Reading log files: exact prefixes of the rows, errors for damage, and how a file ends."""

from __future__ import annotations

import itertools
import random
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from flowstone.iproto.scan import SPAN
from flowstone.outside import production
from flowstone.xlog import reader
from flowstone.xlog.block import EOF_MAGIC, encode_fixheader
from flowstone.xlog.errors import BlockTooLarge, DamagedLog, XlogError
from flowstone.xlog.meta import FileType, Meta
from flowstone.xlog.reader import Ending, EndingKind, LogFile
from flowstone.xlog.transactions import make_transaction
from flowstone.xlog.writer import LogWriter, SnapWriter
from tests.conftest import FULL
from tests.xlog.files import INSTANCE, MemoryFile, block, framed, header, opened, row, small_log
from tests.xlog.model import LATE, World

LOG, BLOCKS, OFFSETS = small_log()
ROWS = list(itertools.chain(*BLOCKS))
HEADER_SIZE = OFFSETS[0]


def raw_rows(log: LogFile) -> list[bytes]:
    return [found.raw for found in log.rows()]


def read(data: bytes, **how: object) -> tuple[list[bytes], Ending | None, XlogError | None]:
    """Return the rows before the end or the error, the ending, and the error."""
    rows: list[bytes] = []
    try:
        log = opened(data, **how)
        for slab in log.slabs():
            rows += [found.raw for found in slab.rows()]
    except XlogError as error:
        return rows, None, error
    return rows, log.ending, None


@pytest.fixture(params=[1024 * 1024, 200, 19, 7, 1], ids=lambda size: f"chunks of {size}")
def chunk_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    size: int = request.param
    monkeypatch.setattr(reader, "CHUNK_SIZE", size)
    return size


def test_rows_do_not_depend_on_chunk_sizes(chunk_size: int) -> None:
    assert read(LOG) == (ROWS, Ending(EndingKind.COMPLETE, len(LOG) - 4), None)


def test_rows_have_the_offset_of_their_block(chunk_size: int) -> None:
    found = [offset for slab in opened(LOG).slabs() for offset in slab.offsets[slab.cells[SPAN]].tolist()]
    assert found == [OFFSETS[0], OFFSETS[1], OFFSETS[1], OFFSETS[2], OFFSETS[3]]


@pytest.mark.parametrize("marker", [True, False])
def test_file_without_blocks_has_no_rows(marker: bool, chunk_size: int) -> None:
    data = header() + (EOF_MAGIC if marker else b"")
    kind = EndingKind.COMPLETE if marker else EndingKind.NO_MARKER
    assert read(data) == ([], Ending(kind, len(header())), None)


def test_format_012_is_read() -> None:
    data = header(format="0.12") + LOG[HEADER_SIZE:]
    assert b"Server: " in data
    assert read(data)[0] == ROWS


def test_log_without_marker_is_read_to_its_last_block(chunk_size: int) -> None:
    data = LOG[:-4]
    assert read(data) == (ROWS, Ending(EndingKind.NO_MARKER, len(data)), None)


def test_log_torn_at_any_byte_yields_its_complete_blocks_and_the_position() -> None:
    data = LOG[:-4]
    edges = [*OFFSETS, len(data)]
    for size in range(HEADER_SIZE, len(data)):
        whole = sum(edge <= size for edge in edges) - 1
        rows, ending, error = read(data[:size])
        assert error is None
        assert ending is not None
        assert rows == list(itertools.chain(*BLOCKS[:whole]))
        assert (ending.offset, ending.lost) == (edges[whole], size - edges[whole])
        assert ending.kind is (EndingKind.TORN if ending.lost else EndingKind.NO_MARKER)
        assert bool(ending.what) == bool(ending.lost)


def test_last_block_that_ends_in_zeros_is_torn() -> None:
    """A loss of power can leave the length of a file, but zeros in its last pages; the checksum of zeros is 0."""
    data = LOG[:-4]
    last = OFFSETS[-1]
    for size in range(last, len(data)):
        blank = data[:size] + bytes(len(data) - size)
        if blank == data:  # the block itself ends in zeros
            continue
        rows, ending, error = read(blank)
        assert error is None, size
        assert rows == list(itertools.chain(*BLOCKS[:-1]))
        assert ending is not None
        assert (ending.kind, ending.offset) == (EndingKind.TORN, last), size


def test_file_cut_inside_its_text_header_raises_an_error() -> None:
    for size in range(HEADER_SIZE):
        rows, _, error = read(LOG[:size])
        assert isinstance(error, XlogError)
        assert not rows


def test_snapshot_torn_at_any_byte_raises_an_error() -> None:
    snap, _, _ = small_log(file_type=FileType.SNAP)
    assert read(snap)[0] == ROWS
    for size in range(HEADER_SIZE, len(snap)):
        _, _, error = read(snap[:size])
        assert isinstance(error, DamagedLog)
        assert "no end marker" in error.what


def test_changed_byte_yields_a_prefix_of_the_rows_or_an_xlog_error() -> None:
    """All rows are read, or a prefix of them and an error."""
    shuffled = random.Random(1)
    for place in range(len(LOG)):
        values = range(1, 256) if FULL else [1, 0x80, *shuffled.sample(range(2, 256), 2)]
        for value in values:
            changed = bytearray(LOG)
            changed[place] ^= value
            rows, ending, error = read(bytes(changed))
            assert rows == ROWS[: len(rows)]
            if error is None:
                assert ending is not None
                is_in_marker = place >= len(LOG) - 4
                assert rows == ROWS
                assert ending.kind is (EndingKind.TORN if is_in_marker else EndingKind.COMPLETE)


def test_force_skips_only_the_block_with_a_changed_byte() -> None:
    """Nothing is skipped if the byte is not covered by the checksum."""
    edges = [*OFFSETS, len(LOG) - 4]
    for place in range(HEADER_SIZE, len(LOG) - 4):
        number = max(n for n, edge in enumerate(edges) if edge <= place)
        without = list(itertools.chain(*(rows for n, rows in enumerate(BLOCKS) if n != number)))
        for value in range(1, 256) if FULL else (1, 0x11, 0xFF):
            changed = bytearray(LOG)
            changed[place] ^= value
            log = opened(bytes(changed), force=True)
            rows = raw_rows(log)
            if rows == ROWS:
                assert log.skipped == []
            else:
                assert rows == without
                assert [(entry.offset, entry.end) for entry in log.skipped] == [(edges[number], edges[number + 1])]
                assert log.skipped[0].why
            assert log.ending == Ending(EndingKind.COMPLETE, len(LOG) - 4)


@given(st.data())
def test_several_changed_bytes_never_yield_a_wrong_row(data: st.DataObject) -> None:
    changed = bytearray(LOG)
    for _ in range(data.draw(st.integers(2, 6))):
        changed[data.draw(st.integers(HEADER_SIZE, len(LOG) - 1))] = data.draw(st.integers(0, 255))
    rows, _, _ = read(bytes(changed))
    assert rows == ROWS[: len(rows)]
    forced, _, error = read(bytes(changed), force=True)
    assert error is None
    assert [found for found in ROWS if found in forced] == forced


def test_damage_in_the_middle_raises_an_error_with_file_and_offset() -> None:
    changed = bytearray(LOG)
    changed[OFFSETS[1] + 30] ^= 1
    rows, _, error = read(bytes(changed))
    assert rows == BLOCKS[0]
    assert isinstance(error, DamagedLog)
    assert (error.path, error.offset) == ("some.xlog", OFFSETS[1])
    assert error.what == "block checksum does not match"


def test_damaged_last_block_before_the_end_marker_is_not_a_torn_tail() -> None:
    changed = bytearray(LOG)
    changed[OFFSETS[3] + 30] ^= 1
    assert isinstance(read(bytes(changed))[2], DamagedLog)
    rows, ending, error = read(bytes(changed[:-4]))
    assert (rows, error) == (ROWS[:-1], None)
    assert ending == Ending(EndingKind.TORN, OFFSETS[3], len(LOG) - 4 - OFFSETS[3], "block checksum does not match")


def test_bytes_after_the_end_marker_are_damage_that_force_skips() -> None:
    data = LOG + b"more"
    _, _, error = read(data)
    assert isinstance(error, DamagedLog)
    assert (error.offset, error.what) == (len(LOG), "4 bytes follow the end marker")
    log = opened(data, force=True)
    assert raw_rows(log) == ROWS
    assert [(entry.offset, entry.end) for entry in log.skipped] == [(len(LOG), len(data))]


def test_force_ignores_blocks_inside_a_damaged_block() -> None:
    """A log stored in a field of a row is data."""
    inner = block([row(1000, "not of this log")])
    data = header() + block([row(6, "z" * 50)]) + framed(b"\x81\x00" + inner) + block([row(8)]) + EOF_MAGIC
    place = data.index(inner) - 1
    changed = data[:place] + b"\x01" + data[place + 1 :]
    assert read(changed, force=True)[0] == [row(6, "z" * 50), row(8)]


BAD_PAYLOADS = {
    "row": (row(7)[:-1], False),
    "second row": (row(7) + b"\xc1", False),
    "empty frame": (b"", True),
    "no frame": (b"not zstd at all, but long enough", True),
    "cut frame": (zstandard.ZstdCompressor().compress(row(7) * 90)[:-2], True),
    "frame and more": (zstandard.ZstdCompressor().compress(row(7)) + b"x", True),
    "damaged frame": (zstandard.ZstdCompressor(write_checksum=True).compress(row(7))[:-1] + b"\0", True),
    "row in a frame": (zstandard.ZstdCompressor().compress(row(7)[:-1]), True),
}


@pytest.mark.parametrize("name", BAD_PAYLOADS)
def test_malformed_block_with_a_valid_checksum_is_damage(name: str) -> None:
    payload, is_compressed = BAD_PAYLOADS[name]
    bad = framed(payload, is_compressed)
    start = len(header()) + len(block([row(6)]))
    data = header() + block([row(6)]) + bad + block([row(8)]) + EOF_MAGIC
    _, _, error = read(data)
    assert isinstance(error, DamagedLog)
    assert error.offset == start
    log = opened(data, force=True)
    assert raw_rows(log) == [row(6), row(8)]
    assert [(entry.offset, entry.end) for entry in log.skipped] == [(start, start + len(bad))]


@pytest.mark.parametrize("with_size", [True, False])
def test_zstd_frame_is_read_with_and_without_a_content_size(with_size: bool) -> None:
    rows = [row(n, "content") for n in range(6, 400)]
    frame = zstandard.ZstdCompressor(write_content_size=with_size).compress(b"".join(rows))
    assert (zstandard.frame_content_size(frame) >= 0) == with_size
    assert read(header() + framed(frame, True) + EOF_MAGIC)[0] == rows


def bomb(size: int, with_size: bool) -> bytes:
    """Return a few kilobytes that decompress to `size` bytes."""
    compressor = zstandard.ZstdCompressor(level=3, write_content_size=with_size)
    frame = compressor.compress(b"\x81\x00\x0c" * (size // 3))
    assert len(frame) * 1000 < size
    return frame


def peak_of(action: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("with_size", [True, False])
def test_compressed_block_beyond_the_bound_is_rejected_in_bounded_memory(with_size: bool) -> None:
    data = header() + block([row(6)]) + framed(bomb(64 << 20, with_size), True) + block([row(7)]) + EOF_MAGIC
    bound = 1 << 20

    def refuse() -> None:
        with pytest.raises(BlockTooLarge, match="at most 1048576 are allowed"):
            raw_rows(opened(data, block_size_max=bound))

    refuse()
    assert peak_of(refuse) < 8 * bound
    log = opened(data, block_size_max=bound, force=True)
    assert raw_rows(log) == [row(6), row(7)]
    assert len(log.skipped) == 1


def test_many_frames_in_a_chunk_are_not_unpacked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "CONTENT_SIZE", 1 << 20)
    frame = bomb(768 << 10, False)
    data = header() + framed(frame, True) * 40 + EOF_MAGIC
    chunks = list(opened(data).chunks())
    assert [chunk.base for chunk in chunks] == [len(header()), *(chunk.end for chunk in chunks[:-1])]
    assert [len(chunk.decode()) for chunk in chunks] == [(768 << 10) // 3] * 40


def test_zstd_frame_with_a_wrong_content_size_is_damage() -> None:
    frame = bytearray(zstandard.ZstdCompressor().compress(row(6) * 300))
    assert frame[4] >> 6 == 1  # the content size has two bytes
    claim = bytes(frame[:4]) + bytes((frame[4] & 0x3F | 0x80,)) + (1 << 30).to_bytes(4, "little") + bytes(frame[7:])
    data = header() + framed(claim, True) + EOF_MAGIC
    assert peak_of(lambda: read(data)) < 1 << 22
    assert isinstance(read(data)[2], DamagedLog)


@pytest.mark.parametrize("chunk", [1 << 20, 64])
def test_plain_block_beyond_the_bound_is_rejected(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "CHUNK_SIZE", chunk)
    data = header() + block([row(6)]) + block([row(7, "n" * 1500)]) + block([row(8)]) + EOF_MAGIC
    _, _, error = read(data, block_size_max=1000)
    assert isinstance(error, BlockTooLarge)
    assert error.offset == len(header()) + len(block([row(6)]))
    assert read(data, block_size_max=1000, force=True)[0] == [row(6), row(8)]
    assert read(data, block_size_max=2000)[0] == [row(6), row(7, "n" * 1500), row(8)]


def test_length_beyond_the_end_of_the_file_reads_no_more_than_the_file() -> None:
    data = header() + encode_fixheader(False, 2**40, 0) + bytes(100)
    file = MemoryFile(data)
    meta = opened(data)
    log = LogFile("some.xlog", file, meta.meta, meta.first_block)  # type: ignore[arg-type]
    assert raw_rows(log) == []
    assert log.ending is not None
    assert log.ending.kind is EndingKind.TORN
    assert peak_of(lambda: read(data)) < 4 << 20


@pytest.mark.parametrize("force", [False, True])
def test_file_full_of_forged_headers_is_read_in_bounded_time(force: bool) -> None:
    """Each header announces a block of half the file, so a naive search would checksum that much for every header."""
    forged = encode_fixheader(False, 100_000, 12345)
    data = header() + block([row(6)]) + forged * 12_000
    started = time.process_time()
    rows, _, _ = read(data, force=force)
    assert rows == [row(6)]
    log = opened(data, force=force)
    file = log.file
    read_until_end(log)
    assert isinstance(file, MemoryFile)
    assert file.bytes_read < 40 * len(data)
    assert time.process_time() - started < 60


def read_until_end(log: LogFile) -> None:
    try:
        raw_rows(log)
    except XlogError:
        return


@given(
    st.lists(st.lists(st.integers(0, 3000), min_size=1, max_size=3), max_size=12), st.integers(1, 9000), st.randoms()
)
def test_ranges_cover_all_rows_once_and_decode_independently(
    sizes: list[list[int]], target: int, rng: random.Random
) -> None:
    numbers = itertools.count(6)
    blocks = [[row(next(numbers), "r" * size) for size in rows] for rows in sizes]
    data = header() + b"".join(map(block, blocks)) + EOF_MAGIC
    log = opened(data)
    ranges = log.ranges(target)
    assert ranges[0][0] == log.first_block
    assert ranges[-1][1] == len(data)
    assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))
    shuffled = list(enumerate(ranges))
    rng.shuffle(shuffled)
    found = {}
    for number, (start, end) in shuffled:
        part = opened(data)
        found[number] = [entry.raw for slab in part.slabs(start, end) for entry in slab.rows()]
        assert (part.ending is not None) == (end == len(data))
    assert [raw for number in sorted(found) for raw in found[number]] == list(itertools.chain(*blocks))


@pytest.mark.parametrize("cut", [4, 5, 40])
def test_last_range_of_a_snapshot_without_end_marker_raises_an_error(cut: int) -> None:
    snap, _, _ = small_log(file_type=FileType.SNAP)
    data = snap[:-cut]
    ranges = opened(data).ranges(1)
    assert len(ranges) >= 3
    for start, end in ranges[:-1]:
        list(opened(data).slabs(start, end))
    with pytest.raises(DamagedLog, match="no end marker"):
        list(opened(data).slabs(*ranges[-1]))


def test_ranges_of_a_damaged_file_skip_only_the_damaged_block_with_force(chunk_size: int) -> None:
    for place in range(HEADER_SIZE, len(LOG) - 4, 1 if FULL else 5):
        changed = bytearray(LOG)
        changed[place] ^= 0xFF
        data = bytes(changed)
        ranges = opened(data).ranges(1)
        found = [
            r.raw for start, end in ranges for slab in opened(data, force=True).slabs(start, end) for r in slab.rows()
        ]
        assert found == raw_rows(opened(data, force=True))


def test_blocks_larger_than_a_chunk_are_planned_without_reading_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "CHUNK_SIZE", 100)
    data = header() + framed(row(6, "b" * 50_000)) + framed(row(7, "c" * 50_000)) + EOF_MAGIC
    log = opened(data)
    assert len(log.ranges(1)) == 2
    assert isinstance(log.file, MemoryFile)
    assert log.file.bytes_read < 1000
    assert raw_rows(log) == [row(6, "b" * 50_000), row(7, "c" * 50_000)]


def test_file_that_grows_while_being_read_ends_at_its_initial_size() -> None:
    log = opened(LOG[:-4])
    file = log.file
    assert isinstance(file, MemoryFile)
    rows = []
    for slab in log.slabs():
        rows += [found.raw for found in slab.rows()]
        file.data += block([row(11)])
    assert rows == ROWS
    assert log.ending == Ending(EndingKind.NO_MARKER, len(LOG) - 4)


def test_file_that_shrinks_while_being_read_ends_or_raises_an_xlog_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "CHUNK_SIZE", 60)
    for size in range(HEADER_SIZE, len(LOG), 3):
        log = opened(LOG)
        file = log.file
        assert isinstance(file, MemoryFile)
        rows: list[bytes] = []
        try:
            for slab in log.slabs():
                rows += [found.raw for found in slab.rows()]
                file.data = LOG[:size]
        except DamagedLog:
            pass
        assert rows == ROWS[: len(rows)]


def test_memory_use_does_not_grow_with_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "CHUNK_SIZE", 1 << 14)

    def scan_all(data: bytes) -> None:
        for _ in opened(data).slabs():
            pass

    some = block([row(n, "m" * 100) for n in range(6, 700)])
    short, long = header() + some * 20, header() + some * (4000 if FULL else 200)
    assert len(some) * 10 > reader.CHUNK_SIZE
    scan_all(short)
    assert peak_of(lambda: scan_all(long)) < 1.2 * peak_of(lambda: scan_all(short)) + (1 << 16)


def test_files_of_our_writers_are_read_back(tmp_path: Path) -> None:
    disk = production().disk
    world = World(seed=3, vclock={1: 5})
    world.define(LATE)
    writer = LogWriter.create(disk, str(tmp_path), Meta(FileType.XLOG, INSTANCE, {1: 5}))
    transactions = [make_transaction([world.change(LATE) for _ in range(count)]) for count in (1, 3, 1, 400, 2)]
    for transaction in transactions:
        writer.append([transaction])
    writer.close()
    with LogFile.open(disk, writer.path) as log:
        assert raw_rows(log) == [found.encode() for transaction in transactions for found in transaction.rows]
        assert log.ending is not None
        assert log.ending.kind is EndingKind.COMPLETE
    with LogFile.open(disk, writer.path) as log:
        assert [len(transaction.rows) for transaction in log.transactions()] == [1, 3, 1, 400, 2]


def test_snapshot_of_our_writer_is_read_back(tmp_path: Path) -> None:
    tuples = [b"\x91" + bytes((n,)) for n in range(100)]
    with SnapWriter(production().disk, str(tmp_path), Meta(FileType.SNAP, INSTANCE, {1: 5}), 1.7e9) as snap:
        snap.add_tuples(512, tuples)
    with LogFile.open(production().disk, snap.path) as log:
        slabs = list(log.slabs())
    assert [found.body[-2:] for slab in slabs for found in slab.rows()] == tuples
    assert [found.lsn for slab in slabs for found in slab.rows(np.arange(5, 7))] == [5, 6]


def test_file_is_closed_when_its_header_is_invalid(tmp_path: Path) -> None:
    bad = tmp_path / "x.xlog"
    bad.write_bytes(b"not a log")
    with pytest.raises(XlogError, match="not a log file"):
        LogFile.open(production().disk, str(bad))
