"""Reads one log file: blocks in order, rows in bulk, and an exact word about how the file ends.

A file is read in chunks of whole blocks, so memory is bounded by a chunk (or by the largest block). `chunks()` checks
checksums and decides what an irregular place is; `Chunk.decode()` decompresses and scans and may run in any thread.

A torn tail is what a crash leaves: nothing sound follows it, reading stops there and `ending` says where. Damage with
something sound behind it is an error, unless `force` is asked for; then it is skipped and `skipped` says what.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import zstandard

from flowstone.iproto import scan as rowscan
from flowstone.iproto.limits import BLOCK_SIZE_MAX
from flowstone.iproto.row import Row, RowError, decode_row
from flowstone.iproto.scan import Bytes, Cells
from flowstone.outside.disk import Disk, File
from flowstone.xlog.block import EOF_MAGIC, FIXHEADER_SIZE
from flowstone.xlog.errors import BlockTooLarge, DamagedFile
from flowstone.xlog.meta import HEADER_READ_SIZE, FileType, Meta, parse
from flowstone.xlog.transactions import Transaction, group
from flowstone.xlog.walk import (
    BLOCK_AT,
    BLOCK_COLUMNS,
    IS_ZSTD,
    NEED,
    PAYLOAD_AT,
    PAYLOAD_END,
    read_uint,
    walk,
)

CHUNK_SIZE = 1024 * 1024
"""Bytes of the file per chunk: some 50 000 rows, enough to make calls cheap and few enough to stay in the caches."""

BLOCKS_PER_CHUNK = 32 * 1024
EXPANSION_GUESS = 8
"""First guess of decompressed size over stored size. Servers do not write the content size into the frame."""

MAGIC_PREFIX = b"\xd5\xba\x0b"
SEARCH_BYTES_MAX = 4 * 1024**3
"""Bytes that may be checksummed while looking for a sound block behind damage, so that forged headers cannot stall."""


class EndingKind(Enum):
    COMPLETE = "complete"  # the end marker is there
    NO_MARKER = "no end marker"  # the file is being written, or its writer died between two blocks
    TORN = "torn"  # the last block was not written whole


@dataclass(frozen=True, slots=True)
class Ending:
    """How a file ends: `offset` is where its last whole block ends, `lost` the bytes behind that mean nothing."""

    kind: EndingKind
    offset: int
    lost: int = 0
    what: str = ""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A stretch of the file that `force` left out, and why."""

    path: str
    offset: int
    end: int
    why: str


@dataclass(frozen=True, slots=True)
class Slab:
    """Decompressed, scanned rows of consecutive blocks. `payload` and `buf` are the same bytes."""

    path: str
    payload: bytes
    buf: Bytes
    cells: Cells
    offsets: Cells  # file offset of the block per span, indexed by cells[SPAN]
    skipped: tuple[Skipped, ...] = ()

    def __len__(self) -> int:
        return self.cells.shape[1]

    def rows(self, selected: Cells | None = None) -> Iterator[Row]:
        """The rows as objects, all or those of the given numbers."""
        cells = self.cells if selected is None else self.cells[:, selected]
        payload = self.payload
        lines = (
            rowscan.TYPE,
            rowscan.REPLICA_ID,
            rowscan.GROUP_ID,
            rowscan.LSN,
            rowscan.TSN,
            rowscan.FLAGS,
            rowscan.ROW_AT,
            rowscan.BODY_AT,
            rowscan.ROW_END,
        )
        timestamps = np.ascontiguousarray(cells[rowscan.TIMESTAMP]).view(np.float64).tolist()
        for kind, replica, grp, lsn, tsn, flags, at, body, end, timestamp in zip(
            *(cells[line].tolist() for line in lines), timestamps, strict=True
        ):
            yield Row(kind, replica, grp, lsn, timestamp, tsn, flags, 0, 0, payload[body:end], payload[at:end])


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive sound blocks as they are stored; `base` is the file offset of `raw`."""

    path: str
    raw: bytes
    base: int
    blocks: Cells
    block_size_max: int
    force: bool

    @property
    def end(self) -> int:
        """File offset behind the last block."""
        return self.base + int(self.blocks[-1, PAYLOAD_END])

    def decode(self) -> Slab:
        """Decompresses and scans. A block that cannot be is an error, or skipped with `force`."""
        skipped: list[Skipped] = []
        payload, spans, offsets = self._unpack(skipped)
        buf: Bytes = np.frombuffer(payload, np.uint8)
        while True:
            found = rowscan.scan(buf, spans)
            if found.wrong_at < 0:
                return Slab(self.path, payload, buf, found.cells, offsets, tuple(skipped))
            bad = int(np.searchsorted(spans[:, 0], found.wrong_at, side="right")) - 1
            why = _row_problem(payload[found.wrong_at : int(spans[bad, 1])], found.wrong_at - int(spans[bad, 0]))
            self._skip(int(offsets[bad]), why, skipped)
            spans, offsets = np.delete(spans, bad, 0), np.delete(offsets, bad)

    def _unpack(self, skipped: list[Skipped]) -> tuple[bytes, Cells, Cells]:
        blocks = self.blocks
        offsets = blocks[:, BLOCK_AT] + self.base
        if not blocks[:, IS_ZSTD].any():
            return self.raw, np.ascontiguousarray(blocks[:, PAYLOAD_AT : PAYLOAD_END + 1]), offsets
        parts: list[bytes] = []
        kept: list[int] = []
        decompressor = zstandard.ZstdDecompressor()
        table = zip(offsets.tolist(), blocks.tolist(), strict=True)
        for number, (offset, (_, start, end, is_zstd)) in enumerate(table):
            stored = self.raw[start:end]
            try:
                parts.append(self._decompress(decompressor, stored, offset) if is_zstd else stored)
                kept.append(number)
            except zstandard.ZstdError as error:
                self._skip(offset, f"its compressed rows cannot be unpacked ({error})", skipped)
        ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
        spans = np.stack([np.concatenate([[0], ends[:-1]]).astype(np.int64), ends], axis=1)
        return b"".join(parts), spans, offsets[kept]

    def _decompress(self, decompressor: zstandard.ZstdDecompressor, stored: bytes, offset: int) -> bytes:
        size = zstandard.frame_content_size(stored)
        if size > self.block_size_max:
            raise BlockTooLarge(self.path, offset, size, self.block_size_max)
        if size >= 0:
            return decompressor.decompress(stored, max_output_size=self.block_size_max, allow_extra_data=False)
        # No content size: guess, and grow while the frame does not fit. A broken frame fails at any size.
        room = max(len(stored) * EXPANSION_GUESS, 4096)
        while True:
            try:
                return decompressor.decompress(
                    stored, max_output_size=min(room, self.block_size_max), allow_extra_data=False
                )
            except zstandard.ZstdError as error:
                if "did not decompress full frame" not in str(error) or not _has_more(stored, room):
                    raise
                if room >= self.block_size_max:
                    raise BlockTooLarge(self.path, offset, room, self.block_size_max) from error
                room *= 4

    def _skip(self, offset: int, why: str, skipped: list[Skipped]) -> None:
        if not self.force:
            raise DamagedFile(self.path, offset, why)
        place = int(np.searchsorted(self.blocks[:, BLOCK_AT] + self.base, offset))
        skipped.append(Skipped(self.path, offset, self.base + int(self.blocks[place, PAYLOAD_END]), why))


def _has_more(stored: bytes, room: int) -> bool:
    """True if the frame really holds at least `room` bytes: a frame cut short says the same as one that is larger."""
    reader = zstandard.ZstdDecompressor().stream_reader(stored)
    seen = 0
    while seen < room:
        piece = reader.read(min(room - seen, CHUNK_SIZE))
        if not piece:
            return False
        seen += len(piece)
    return True


def _row_problem(data: bytes, position: int) -> str:
    """What is wrong with the row at the start of `data`, in words."""
    try:
        decode_row(data)
        why = "not a row"
    except RowError as error:
        why = str(error)
    return f"the row at byte {position} of its rows is malformed ({why})"


@dataclass
class LogFile:
    """One `.xlog` or `.snap`, open for reading. Close it, or use it in a `with` statement.

    `ending` is known once `chunks()` (or what is built on it) has run to the end of the file.
    """

    path: str
    file: File
    meta: Meta
    first_block: int
    force: bool = False
    block_size_max: int = BLOCK_SIZE_MAX
    ending: Ending | None = None
    skipped: list[Skipped] = field(default_factory=list)

    @classmethod
    def open(
        cls, disk: Disk, path: str, *, force: bool = False, block_size_max: int = BLOCK_SIZE_MAX
    ) -> LogFile:
        """Opens the file and reads its text header."""
        file = disk.open(path)
        try:
            meta, length = parse(file.read_at(0, HEADER_READ_SIZE), path)
        except BaseException:
            file.close()
            raise
        return cls(path, file, meta, length, force, block_size_max)

    def close(self) -> None:
        self.file.close()

    def __enter__(self) -> LogFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def chunks(self, start: int | None = None, end: int | None = None) -> Iterator[Chunk]:
        """Sound blocks from `start` to `end`, both block boundaries as `ranges()` gives them; the whole file without."""
        at = self.first_block if start is None else start
        size = self.file.size()
        stop = size if end is None else end
        want = CHUNK_SIZE
        table: Cells = np.empty((BLOCKS_PER_CHUNK, BLOCK_COLUMNS), np.int64)
        while end is None or at < end:
            raw = self.file.read_at(at, max(0, min(want, stop - at)))
            count, after, why = walk(np.frombuffer(raw, np.uint8), 0, table, 0, True)
            if count:
                yield Chunk(self.path, raw, at, table[:count].copy(), self.block_size_max, self.force)
                at += after
                want = CHUNK_SIZE
            elif why == NEED and at + len(raw) < stop:
                want = self._block_size(at, raw)
            else:
                resumed = self._irregular(at, size)
                if resumed is None:
                    return
                at = resumed

    def slabs(self, start: int | None = None, end: int | None = None) -> Iterator[Slab]:
        """Decoded chunks, in order."""
        for chunk in self.chunks(start, end):
            slab = chunk.decode()
            self.skipped.extend(slab.skipped)
            yield slab

    def rows(self) -> Iterator[Row]:
        """Every row, in order."""
        for slab in self.slabs():
            yield from slab.rows()

    def transactions(self) -> Iterator[Transaction]:
        """Every whole transaction, in order."""
        return group(self.rows())

    def ranges(self, target_size: int) -> list[tuple[int, int]]:
        """Block-aligned ranges of about `target_size` bytes that decode independently; they cover the whole file."""
        cuts = [self.first_block]
        at, size, want = self.first_block, self.file.size(), CHUNK_SIZE
        table: Cells = np.empty((BLOCKS_PER_CHUNK, BLOCK_COLUMNS), np.int64)
        while True:
            raw = self.file.read_at(at, want)
            count, after, why = walk(np.frombuffer(raw, np.uint8), 0, table, 0, False)
            if count == 0 and why == NEED and at + len(raw) < size:
                want = self._block_size(at, raw)
                continue
            for block_end in (table[:count, PAYLOAD_END] + at).tolist():
                if block_end - cuts[-1] >= target_size:
                    cuts.append(block_end)
            at, want = at + after, CHUNK_SIZE
            if count == 0:
                break
        # What is irregular from here on is for whoever reads the last range to judge: it goes to the end of the file.
        return list(zip(cuts, [*cuts[1:], size], strict=True))

    def _block_size(self, at: int, raw: bytes) -> int:
        """The size of the block at `at`, which is larger than what was read of it."""
        if len(raw) < FIXHEADER_SIZE:
            return FIXHEADER_SIZE
        size, _ = read_uint(np.frombuffer(raw, np.uint8), 4, FIXHEADER_SIZE)
        if size > self.block_size_max:
            raise BlockTooLarge(self.path, at, size, self.block_size_max)
        return FIXHEADER_SIZE + size

    def _irregular(self, at: int, size: int) -> int | None:
        """Judges a place that is no sound block: the end (None), or, with `force`, where to go on."""
        head = self.file.read_at(at, FIXHEADER_SIZE)
        if head[:4] == EOF_MAGIC:
            if size > at + 4:
                self._damage(at + 4, size, f"{size - at - 4} bytes follow the end marker")
            self.ending = Ending(EndingKind.COMPLETE, at)
            return None
        if not head:
            self._end_without_marker(Ending(EndingKind.NO_MARKER, at))
            return None
        what = self._problem(at, head, size)
        resumed = self._find_sound(at + 1, size)
        if resumed is None:
            self._end_without_marker(Ending(EndingKind.TORN, at, size - at, what))
            return None
        self._damage(at, resumed, what)
        return resumed

    def _end_without_marker(self, ending: Ending) -> None:
        """Fine for a log, which may be in use or cut by a crash. A snapshot is complete or worthless."""
        if self.meta.file_type is not FileType.XLOG and not self.force:
            what = f"the file has no end marker, so it is not complete ({ending.what or 'it just stops'})"
            raise DamagedFile(self.path, ending.offset, what)
        self.ending = ending

    def _damage(self, at: int, end: int, what: str) -> None:
        if not self.force:
            raise DamagedFile(self.path, at, what)
        self.skipped.append(Skipped(self.path, at, end, what))

    def _problem(self, at: int, head: bytes, size: int) -> str:
        """Why the bytes at `at` are no sound block, in words."""
        if len(head) < FIXHEADER_SIZE:
            return f"the file ends {len(head)} bytes into a block header"
        if head[:3] != MAGIC_PREFIX or head[3] not in (0xAB, 0xBA):
            return f"no block starts here (the bytes are {head[:4].hex()})"
        stored, after = read_uint(np.frombuffer(head, np.uint8), 4, FIXHEADER_SIZE)
        if after < 0:
            return "the block header is garbled"
        if at + FIXHEADER_SIZE + stored > size:
            return f"the block says {stored} bytes, the file has {size - at - FIXHEADER_SIZE} left"
        return "the block's checksum does not match"

    def _find_sound(self, start: int, size: int) -> int | None:
        """The offset of the next sound block or of an end marker that ends the file; None if there is neither."""
        budget = SEARCH_BYTES_MAX
        at = start
        while at < size:
            window = self.file.read_at(at, CHUNK_SIZE + len(MAGIC_PREFIX) - 1)
            found = window.find(MAGIC_PREFIX)
            while found >= 0:
                checked = self._sound_block_size(at + found, size)
                if checked > 0 or budget <= 0:
                    return at + found
                budget += checked - FIXHEADER_SIZE
                found = window.find(MAGIC_PREFIX, found + 1)
            at += CHUNK_SIZE
        if size - 4 >= start and self.file.read_at(size - 4, 4) == EOF_MAGIC:
            return size - 4
        return None

    def _sound_block_size(self, at: int, size: int) -> int:
        """The size of the sound block at `at`; where there is none, minus the bytes read to find that out."""
        head = np.frombuffer(self.file.read_at(at, FIXHEADER_SIZE), np.uint8)
        if len(head) < FIXHEADER_SIZE:
            return 0
        stored, after = read_uint(head, 4, FIXHEADER_SIZE)
        if after < 0 or stored > self.block_size_max or at + FIXHEADER_SIZE + stored > size:
            return 0
        raw = self.file.read_at(at, FIXHEADER_SIZE + stored)
        table: Cells = np.empty((1, BLOCK_COLUMNS), np.int64)
        count, after, _ = walk(np.frombuffer(raw, np.uint8), 0, table, 0, True)
        return after if count else -len(raw)
