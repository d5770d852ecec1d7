"""The index of an archived log: a summary of its blocks, so that a reader can plan without reading the log.

`NAME.blocks.jsonl` is next to `NAME.xlog`. It has a header line, then one line per run of blocks (one block, or several
small ones), in log order. The index has no information of its own: where it is missing, out of date or damaged, it is
rebuilt from the log. `docs/reference/archive.md` describes the fields.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self

import msgspec
import numpy as np

from flowstone.archive.manifest import Lsns
from flowstone.archive.settled_tracker import Range, Verdicts, newest
from flowstone.iproto import scan
from flowstone.iproto.slab import Slab
from flowstone.outside.disk import Disk, File
from flowstone.replication.vclock import VClock
from flowstone.xlog.block_table import BLOCK_AT, PAYLOAD_END
from flowstone.xlog.meta import Meta
from flowstone.xlog.reader import Chunk

FORMAT = "flowstone-blocks"
VERSION = 1
EXTENSION = ".blocks.jsonl"

RUN_SIZE = 64 * 1024
"""Bytes of the log after which a run ends: large enough for a short index, small enough to share work evenly."""

SPACES_MAX = 64
"""Most spaces that a run lists. A run that touches more spaces lists none."""


class Header(msgspec.Struct, frozen=True):
    """The first line: the log file `log` starts at `vclock`, and its first block at byte `offset`."""

    log: str
    instance_uuid: str
    vclock: Lsns
    offset: int
    format: str = FORMAT
    version: int = VERSION


class BlockRun(msgspec.Struct, frozen=True, omit_defaults=True):
    """A run of whole blocks, from byte `offset` to `end` of the log, and a summary of their rows.

    `vclock` is the position after the run; the position before it is the `vclock` of the previous run. `settled` is the
    position that a reader knows to be settled after reading the run. `spaces` is None if there are too many to list.
    """

    offset: int
    end: int
    row_count: int
    vclock: Lsns
    settled: Lsns
    first_timestamp: float
    last_timestamp: float
    spaces: tuple[int, ...] | None
    has_definitions: bool = False
    """True if there are rows of `_space` or `_index`: the schema may be different after them."""
    has_synchronous: bool = False
    """True if there are synchronous transactions, which stay pending until they are confirmed or rolled back."""
    has_control: bool = False
    """True if there are rows that decide about earlier transactions: CONFIRM, ROLLBACK, PROMOTE, DEMOTE."""
    rolled_back: tuple[Range, ...] = ()
    """The rows, here or in earlier runs, that these rows roll back: originator, first and last LSN."""

    @property
    def is_plain(self) -> bool:
        """True if a reader without pending transactions can skip the run: its rows affect no other rows."""
        return not (self.has_definitions or self.has_synchronous or self.has_control)


@dataclass(frozen=True, slots=True)
class Blocks:
    """The index as read from its file. It covers the log up to byte `end`."""

    header: Header
    runs: tuple[BlockRun, ...]
    size: int
    """Size of the valid lines in the index file, in bytes."""

    @property
    def end(self) -> int:
        return self.runs[-1].end if self.runs else self.header.offset

    def up_to(self, size: int) -> tuple[BlockRun, ...]:
        """Return the runs within the first `size` bytes of the log."""
        return tuple(run for run in self.runs if run.end <= size)


def path_of(log_path: str) -> str:
    return log_path.removesuffix(".xlog") + EXTENSION


def read_blocks(disk: Disk, log_path: str) -> Blocks | None:
    """Return the valid part of the index of a log; None if there is no index, or it belongs to another log."""
    path = path_of(log_path)
    if disk.kind(path) is None:
        return None
    with disk.open(path) as file:
        data = file.read_at(0, file.size())
    lines = data.split(b"\n")[:-1]  # a line without its newline is incomplete
    try:
        header = msgspec.json.decode(lines[0], type=Header) if lines else None
    except (ValueError, RecursionError):
        return None
    if header is None or header.format != FORMAT or header.version > VERSION:
        return None
    if header.log != posixpath.basename(log_path):
        return None
    runs: list[BlockRun] = []
    size = len(lines[0]) + 1
    at = header.offset
    for line in lines[1:]:
        try:
            run = msgspec.json.decode(line, type=BlockRun)
        except (ValueError, RecursionError):
            break
        if run.offset != at or run.end <= at:
            break
        runs.append(run)
        at, size = run.end, size + len(line) + 1
    return Blocks(header, tuple(runs), size)


@dataclass(slots=True)
class _Gathered:
    """A run that is being built."""

    offset: int
    end: int
    row_count: int = 0
    first_timestamp: float = float("inf")
    last_timestamp: float = 0.0
    spaces: set[int] = field(default_factory=set)
    has_definitions: bool = False
    has_synchronous: bool = False
    has_control: bool = False
    rolled_back: list[Range] = field(default_factory=list)

    def run(self, vclock: VClock, settled: VClock) -> BlockRun:
        return BlockRun(
            self.offset,
            self.end,
            self.row_count,
            vclock.to_mapping(),
            settled.to_mapping(),
            self.first_timestamp if self.row_count else 0.0,
            self.last_timestamp,
            tuple(sorted(self.spaces)) if len(self.spaces) <= SPACES_MAX else None,
            self.has_definitions,
            self.has_synchronous,
            self.has_control,
            tuple(self.rolled_back),
        )


class RunBuilder:
    """Combines the blocks of a log, in log order, into runs: `add` each block, `take` the finished runs."""

    def __init__(self, vclock: VClock, end: int, verdicts: Verdicts) -> None:
        """Start at byte `end` of the log, which is position `vclock`."""
        self.vclock = vclock
        self._verdicts = verdicts
        self._runs: list[BlockRun] = []
        self._run = _Gathered(end, end)

    def add(self, slab: Slab, first: int, stop: int, end: int) -> None:
        """Add the next block, which ends at byte `end` of the log and has rows `first` to `stop` of `slab`."""
        run, cells = self._run, slab.cells
        judged = self._verdicts.push(slab, first, stop)
        run.end = end
        run.row_count += stop - first
        stamps = np.ascontiguousarray(cells[scan.TIMESTAMP, first:stop]).view(np.float64)
        run.first_timestamp = min(run.first_timestamp, float(stamps.min()))
        run.last_timestamp = max(run.last_timestamp, float(stamps.max()))
        run.spaces.update(np.unique(cells[scan.SPACE_ID, first:stop]).tolist())
        run.spaces.discard(-1)
        run.has_definitions |= judged.has_definitions
        run.has_synchronous |= judged.has_synchronous
        run.has_control |= judged.has_control
        run.rolled_back += judged.rolled_back
        self.vclock = self.vclock.merged(newest(slab, first, stop))
        if run.end - run.offset >= RUN_SIZE:
            self._end_run()

    def take(self, *, unfinished: bool) -> list[BlockRun]:
        """Return the runs finished since the last call; with `unfinished`, first end the run that is being built."""
        if unfinished and self._run.row_count:
            self._end_run()
        runs, self._runs = self._runs, []
        return runs

    def _end_run(self) -> None:
        run = self._run.run(self.vclock, self._verdicts.settled)
        self._runs.append(run)
        self._run = _Gathered(run.end, run.end)


class BlockWriter:
    """Writes the index of a log that is being written: `add` each block, `flush` from time to time.

    Add a block only when it is durable in the log: an entry is never withdrawn.
    """

    def __init__(self, file: File, vclock: VClock, end: int, verdicts: Verdicts) -> None:
        self._file = file
        self._size = file.size()
        """Size of the complete lines in the file, in bytes."""
        self._runs = RunBuilder(vclock, end, verdicts)
        self._unwritten: list[BlockRun] = []

    @classmethod
    def create(cls, disk: Disk, log_path: str, meta: Meta, first_block: int, verdicts: Verdicts) -> Self:
        """Create a new index and delete an existing one."""
        path = path_of(log_path)
        with suppress(FileNotFoundError):
            disk.unlink(path)
        header = Header(posixpath.basename(log_path), meta.instance_uuid, dict(meta.vclock), first_block)
        file = disk.create(path)
        try:
            file.append(msgspec.json.encode(header) + b"\n")
            return cls(file, VClock(meta.vclock), first_block, verdicts)
        except BaseException:
            file.close()
            raise

    @classmethod
    def resume(cls, disk: Disk, log_path: str, blocks: Blocks, verdicts: Verdicts) -> Self:
        """Continue the index after the lines of `blocks`; the rest of the file is truncated."""
        start = blocks.runs[-1].vclock if blocks.runs else blocks.header.vclock
        file = disk.append_to(path_of(log_path))
        try:
            file.truncate(blocks.size)
            return cls(file, VClock(start), blocks.end, verdicts)
        except BaseException:
            file.close()
            raise

    @property
    def vclock(self) -> VClock:
        """The position after the last added block."""
        return self._runs.vclock

    def add(self, slab: Slab, first: int, stop: int, end: int) -> None:
        """Add the next block, which ends at byte `end` of the log and has rows `first` to `stop` of `slab`."""
        self._runs.add(slab, first, stop, end)

    def flush(self) -> None:
        """Write everything added to the file. After an OSError, the next call tries again."""
        self._unwritten += self._runs.take(unfinished=True)
        if not self._unwritten:
            return
        if self._file.size() != self._size:
            self._file.truncate(self._size)  # a failed append may have left part of a line
        lines = b"".join([msgspec.json.encode(run) + b"\n" for run in self._unwritten])
        self._file.append(lines)
        self._size += len(lines)
        self._unwritten = []

    def close(self) -> None:
        try:
            self.flush()
            self._file.sync()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the file without writing. No effect after `close`."""
        self._file.close()


def blocks_of(chunk: Chunk, slab: Slab) -> Iterator[tuple[int, int, int]]:
    """Yield first row, end row and end offset of each block of a chunk; `slab` has the decoded rows of the chunk."""
    ats, payload_ends = chunk.blocks[:, BLOCK_AT] + chunk.base, chunk.blocks[:, PAYLOAD_END] + chunk.base
    ends = dict(zip(ats.tolist(), payload_ends.tolist(), strict=True))
    spans = slab.cells[scan.SPAN]
    edges = np.searchsorted(spans, np.arange(len(slab.offsets) + 1)).tolist()
    for offset, first, stop in zip(slab.offsets.tolist(), edges[:-1], edges[1:], strict=True):
        yield first, stop, ends[offset]
