"""Reads one log file: blocks in order, rows in bulk, and exactly how the file ends.

A file is read in chunks of whole blocks, so memory is bounded by a chunk or by the largest block. `chunks()` verifies
checksums and classifies irregular places; `Chunk.decode()` decompresses and scans, and may run in any thread.

A torn tail is what a crash leaves: nothing sound follows it, reading stops there and `ending` says where. Damage with
sound data after it is an error, unless `force` is set; then the damage is skipped and listed in `skipped`
(`docs/spec/files.md#damage`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Self

import numpy as np
import zstandard

from flowstone.iproto import row_scanner
from flowstone.iproto.limits import BLOCK_SIZE_MAX
from flowstone.iproto.row import Row
from flowstone.iproto.scan import Bytes, Cells
from flowstone.iproto.slab import Skipped, Slab
from flowstone.outside.disk import Disk, File
from flowstone.xlog.block import EOF_MAGIC, ROW_MAGIC, checksum, decode_fixheader, decompress
from flowstone.xlog.block_table import (
    BLOCK_AT,
    BLOCK_COLUMNS,
    CONTENT_BOUND,
    FIXHEADER_SIZE,
    IS_ZSTD,
    NEED,
    PAYLOAD_AT,
    PAYLOAD_END,
)
from flowstone.xlog.errors import BlockTooLarge, DamagedLog
from flowstone.xlog.meta import HEADER_READ_SIZE, FileType, Meta, parse
from flowstone.xlog.transactions import LogTransaction, group
from flowstone.xlog.walk import walk

CHUNK_SIZE = 1024 * 1024
"""Bytes of the file per chunk: some 50 000 rows, enough to make calls cheap and few enough to stay in the caches."""

CONTENT_SIZE = 32 * 1024 * 1024
"""Limit on the decompressed size of a chunk of several blocks: few bytes can decompress to very many."""

BLOCKS_PER_CHUNK = 32 * 1024

MAGIC_PREFIX = ROW_MAGIC[:3]

SEARCH_FACTOR = 16
"""Limit on the search for sound blocks after damage, in bytes checksummed per byte of the file.

Without it, forged headers could stall the reader.
"""


class EndingKind(Enum):
    COMPLETE = "complete"  # the end marker is present
    NO_MARKER = "no end marker"  # the file is being written, or its writer died between two blocks
    TORN = "torn"  # the last block was not written whole


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a file: `offset` is the end of its last whole block, `lost` the number of unusable bytes after it."""

    kind: EndingKind
    offset: int
    lost: int = 0
    what: str = ""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive sound blocks as stored; `base` is the file offset of `raw`."""

    path: str
    raw: bytes
    base: int
    blocks: Cells
    block_size_max: int
    force: bool

    @property
    def end(self) -> int:
        """Return the file offset of the end of the last block."""
        return self.base + int(self.blocks[-1, PAYLOAD_END])

    def decode(self) -> Slab:
        """Decompress and scan the blocks. A block that cannot be decoded is an error; with `force` it is skipped."""
        skipped: list[Skipped] = []
        payload, spans, offsets = self._unpack(skipped)
        buf: Bytes = np.frombuffer(payload, np.uint8)
        found = row_scanner.scan(buf, spans, leave_out_wrong=self.force)
        for span, wrong_at in found.wrong:
            why = f"row at byte {wrong_at - int(spans[span, 0])} of the block's rows is malformed"
            self._skip(DamagedLog(self.path, int(offsets[span]), why), skipped)
        return Slab(self.path, payload, buf, found.cells, offsets, tuple(skipped))

    def _unpack(self, skipped: list[Skipped]) -> tuple[bytes, Cells, Cells]:
        """Return the bytes of all rows, the span of each block in them, and the file offset of each of these blocks."""
        blocks = self.blocks
        offsets = blocks[:, BLOCK_AT] + self.base
        if not blocks[:, IS_ZSTD].any() and blocks[:, CONTENT_BOUND].max() <= self.block_size_max:
            return self.raw, np.ascontiguousarray(blocks[:, PAYLOAD_AT : PAYLOAD_END + 1]), offsets
        parts: list[bytes | memoryview] = []
        kept: list[int] = []
        decompressor = zstandard.ZstdDecompressor()
        raw = memoryview(self.raw)
        table = zip(offsets.tolist(), blocks.tolist(), strict=True)
        for number, (offset, (_, start, end, is_zstd, bound)) in enumerate(table):
            stored = raw[start:end]
            try:
                if is_zstd:
                    parts.append(decompress(decompressor, stored, bound, self.block_size_max, self.path, offset))
                elif bound <= self.block_size_max:
                    parts.append(stored)
                else:
                    raise BlockTooLarge(self.path, offset, bound, self.block_size_max)
                kept.append(number)
            except (BlockTooLarge, DamagedLog) as error:
                self._skip(error, skipped)
        edges = np.zeros(len(parts) + 1, np.int64)
        np.cumsum([len(part) for part in parts], out=edges[1:])
        return b"".join(parts), np.stack([edges[:-1], edges[1:]], axis=1), offsets[kept]

    def _skip(self, error: BlockTooLarge | DamagedLog, skipped: list[Skipped]) -> None:
        if not self.force:
            raise error
        assert error.offset is not None
        number = int(np.searchsorted(self.blocks[:, BLOCK_AT], error.offset - self.base))
        end = self.base + int(self.blocks[number, PAYLOAD_END])
        skipped.append(Skipped(self.path, error.offset, end, _reason(error)))


def _reason(error: BlockTooLarge | DamagedLog) -> str:
    """Return why a block is skipped, without the path and offset that `Skipped` has as fields."""
    if isinstance(error, DamagedLog):
        return error.what
    return f"block may hold {error.size} bytes: at most {error.limit} are allowed"


@dataclass
class LogFile:
    """One `.xlog` or `.snap`, open for reading. Close it, or use it in a `with` statement.

    `ending` is set once `chunks()`, or a method built on it, has read to the end of the file.
    """

    path: str
    file: File
    meta: Meta
    first_block: int
    force: bool = False
    block_size_max: int = BLOCK_SIZE_MAX
    ending: Ending | None = None
    skipped: list[Skipped] = field(default_factory=list)
    _searched: int = field(default=0, init=False, repr=False)

    @classmethod
    def open(cls, disk: Disk, path: str, *, force: bool = False, block_size_max: int = BLOCK_SIZE_MAX) -> LogFile:
        """Open the file and read its text header."""
        file = disk.open(path)
        try:
            meta, length = parse(file.read_at(0, HEADER_READ_SIZE), path)
        except BaseException:
            file.close()
            raise
        return cls(path, file, meta, length, force, block_size_max)

    def close(self) -> None:
        self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def chunks(self, start: int | None = None, end: int | None = None) -> Iterator[Chunk]:
        """Yield the sound blocks from `start` to `end`, block boundaries from `ranges()`; by default the whole file.

        Reading to the end of the file sets `ending`, or raises DamagedFile for an incomplete snapshot.
        """
        at = self.first_block if start is None else start
        size = self.file.size()
        stop = size if end is None else min(end, size)
        want = CHUNK_SIZE
        table: Cells = np.empty((BLOCKS_PER_CHUNK, BLOCK_COLUMNS), np.int64)
        while at < stop or stop == size:
            raw = self.file.read_at(at, max(0, min(want, stop - at)))
            count, after, why = walk(np.frombuffer(raw, np.uint8), 0, table, 0, True)
            if count:
                yield from self._pieces(raw, at, table[:count].copy())
                at += after
                want = CHUNK_SIZE
                continue
            whole = self._size_of_block(at, raw, stop) if why == NEED else None
            if whole is not None and whole > len(raw) and (len(raw) == want or at + len(raw) == stop):
                want = whole
                continue
            resumed = self._irregular(at, size)
            if resumed is None:
                return
            at, want = resumed, CHUNK_SIZE

    def _pieces(self, raw: bytes, at: int, blocks: Cells) -> Iterator[Chunk]:
        """Yield the blocks as chunks that decompress to CONTENT_SIZE at most, or consist of one block."""
        total = np.cumsum(np.maximum(blocks[:, CONTENT_BOUND], 0))
        if len(blocks) == 1 or total[-1] <= CONTENT_SIZE:
            yield Chunk(self.path, raw, at, blocks, self.block_size_max, self.force)
            return
        first = 0
        while first < len(blocks):
            before = int(total[first - 1]) if first else 0
            after = max(first + 1, int(np.searchsorted(total, before + CONTENT_SIZE, side="right")))
            piece = blocks[first:after].copy()
            start = int(piece[0, BLOCK_AT])
            part = raw[start : int(piece[-1, PAYLOAD_END])]
            piece[:, : PAYLOAD_END + 1] -= start
            yield Chunk(self.path, part, at + start, piece, self.block_size_max, self.force)
            first = after

    def slabs(self, start: int | None = None, end: int | None = None) -> Iterator[Slab]:
        """Yield the decoded chunks, in order."""
        for chunk in self.chunks(start, end):
            slab = chunk.decode()
            self.skipped.extend(slab.skipped)
            yield slab

    def rows(self) -> Iterator[Row]:
        """Yield every row, in order."""
        for slab in self.slabs():
            yield from slab.rows()

    def transactions(self) -> Iterator[LogTransaction]:
        """Yield every whole transaction, in order."""
        return group(self.rows())

    def ranges(self, target_size: int) -> list[tuple[int, int]]:
        """Return ranges of whole blocks, of about `target_size` bytes, that decode independently and cover the file."""
        cuts = [self.first_block]
        at, size = self.first_block, self.file.size()
        table: Cells = np.empty((BLOCKS_PER_CHUNK, BLOCK_COLUMNS), np.int64)
        while at < size:
            raw = self.file.read_at(at, min(max(CHUNK_SIZE, FIXHEADER_SIZE), size - at))
            count, after, why = walk(np.frombuffer(raw, np.uint8), 0, table, 0, False)
            header = decode_fixheader(raw[:FIXHEADER_SIZE]) if why == NEED and not count else None
            if not count and header is None:
                break
            for block_at in (table[:count, BLOCK_AT] + at).tolist() if count else (at,):
                if block_at - cuts[-1] >= target_size:
                    cuts.append(block_at)
            at += FIXHEADER_SIZE + header.size if header else after
        # The last range extends to the end of the file: its reader classifies anything irregular from here on.
        return list(zip(cuts, [*cuts[1:], max(size, cuts[-1])], strict=True))

    def _size_of_block(self, at: int, raw: bytes, stop: int) -> int | None:
        """Return the bytes to read for the block at `at`, which starts with `raw`; None if no block ends by `stop`."""
        if at + FIXHEADER_SIZE > stop:
            return None
        header = decode_fixheader(raw[:FIXHEADER_SIZE])
        if header is None:
            return FIXHEADER_SIZE if len(raw) < FIXHEADER_SIZE else None
        if at + FIXHEADER_SIZE + header.size > stop:
            return None
        if header.size > self.block_size_max:
            if self.force:
                return None
            raise BlockTooLarge(self.path, at, header.size, self.block_size_max)
        return FIXHEADER_SIZE + header.size

    def _irregular(self, at: int, size: int) -> int | None:
        """Classify a place that is not a sound block. Return None at the end, or with `force` where to continue."""
        head = self.file.read_at(at, max(0, min(FIXHEADER_SIZE, size - at)))
        if head[:4] == EOF_MAGIC:
            if size > at + 4:
                self._damage(at + 4, size, f"{size - at - 4} bytes follow the end marker")
            self.ending = Ending(EndingKind.COMPLETE, at)
            return None
        if not head:
            self._end_without_marker(Ending(EndingKind.NO_MARKER, at))
            return None
        what = self._problem(at, head, size)
        resumed = self._find_sound(at, head, size, what)
        if resumed is None:
            self._end_without_marker(Ending(EndingKind.TORN, at, size - at, what))
            return None
        self._damage(at, resumed, what)
        return resumed

    def _end_without_marker(self, ending: Ending) -> None:
        """Accept a log without an end marker, which may be in use or cut by a crash; reject an incomplete snapshot."""
        if self.meta.file_type not in (FileType.XLOG, FileType.VYLOG) and not self.force:
            what = f"no end marker, so the file is not complete ({ending.what or 'the file just ends'})"
            raise DamagedLog(self.path, ending.offset, what)
        self.ending = ending

    def _damage(self, at: int, end: int, what: str) -> None:
        if not self.force:
            raise DamagedLog(self.path, at, what)
        self.skipped.append(Skipped(self.path, at, end, what))

    def _problem(self, at: int, head: bytes, size: int) -> str:
        """Return, in words, why the bytes at `at` are not a sound block."""
        if len(head) < FIXHEADER_SIZE:
            return f"file ends {len(head)} bytes into a block header"
        header = decode_fixheader(head)
        if header is None:
            garbled = head.startswith(MAGIC_PREFIX)
            return "block header is malformed" if garbled else f"no block starts here (the bytes are {head[:4].hex()})"
        if at + FIXHEADER_SIZE + header.size > size:
            return f"block claims {header.size} bytes, but the file has {size - at - FIXHEADER_SIZE} left"
        if header.size > self.block_size_max:
            return f"block claims {header.size} bytes: at most {self.block_size_max} are allowed"
        return "block has only zeros after its length" if header.crc == 0 else "block checksum does not match"

    def _find_sound(self, damaged: int, head: bytes, size: int, what: str) -> int | None:
        """Return the offset of the next sound block, or of an end marker that ends the file; None if there is neither.

        Usually the rows are damaged: then the block after them is sound, and anything inside them that looks like a
        block is data. If the length is damaged instead, the rows up to the next block match the checksum.
        """
        header = decode_fixheader(head)
        next_at = damaged + FIXHEADER_SIZE + header.size if header else size
        is_next_sound = self._is_sound(next_at, size)
        at, end = damaged + 1, next_at if is_next_sound else size
        while at < end:
            window = self.file.read_at(at, min(CHUNK_SIZE + len(MAGIC_PREFIX) - 1, end - at))
            found = window.find(MAGIC_PREFIX)
            while found >= 0:
                if self._is_sound(at + found, size) and (
                    not is_next_sound or header is None or self._is_rows(damaged, at + found, header.crc)
                ):
                    return at + found
                if self._searched > SEARCH_FACTOR * size:
                    if is_next_sound or self.force:
                        return next_at if is_next_sound else None
                    raise DamagedLog(
                        self.path, damaged, f"{what}, and the rest is too large to search for an intact block"
                    )
                found = window.find(MAGIC_PREFIX, found + 1)
            at += CHUNK_SIZE
        if is_next_sound:
            return next_at
        return size - 4 if size - 4 > damaged and self._is_sound(size - 4, size) else None

    def _is_rows(self, block_at: int, end: int, crc: int) -> bool:
        """Return True if the rows of the block at `block_at` end at `end` according to their checksum."""
        raw = self.file.read_at(block_at + FIXHEADER_SIZE, max(0, end - block_at - FIXHEADER_SIZE))
        self._searched += len(raw)
        return checksum(raw) == crc

    def _is_sound(self, at: int, size: int) -> bool:
        """Return True if a sound block starts at `at`, or an end marker that ends the file."""
        head = self.file.read_at(at, min(FIXHEADER_SIZE, size - at)) if at < size else b""
        self._searched += len(head)
        header = decode_fixheader(head)
        if header is None:
            return head == EOF_MAGIC
        if header.size > self.block_size_max or at + FIXHEADER_SIZE + header.size > size:
            return False
        raw = self.file.read_at(at, FIXHEADER_SIZE + header.size)
        self._searched += len(raw)
        table: Cells = np.empty((1, BLOCK_COLUMNS), np.int64)
        return walk(np.frombuffer(raw, np.uint8), 0, table, 0, True)[0] == 1
