"""The index beside an archived log: what its blocks hold, so that a reader can plan without reading them.

`NAME.blocks.jsonl` stands beside `NAME.xlog`: a line that says what it is, then one line per run of blocks (one, or
several small ones), in the order of the log. It says nothing that the log does not, and is made again from the log
where it is missing, behind or damaged. `docs/reference/archive.md` tells the fields.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self

import msgspec
import numpy as np

from flowstone.iproto import scan
from flowstone.node.archive_manifest import Lsns
from flowstone.node.archive_verdicts import Range, Verdicts, newest
from flowstone.outside.disk import Disk, File
from flowstone.replication.vclock import VClock
from flowstone.xlog.meta import Meta
from flowstone.xlog.reader import Chunk, Slab
from flowstone.xlog.walk import BLOCK_AT, PAYLOAD_END

FORMAT = "flowstone-blocks"
VERSION = 1
EXTENSION = ".blocks.jsonl"

RUN_SIZE = 64 * 1024
"""Bytes of the log from which on a run ends with its block: few enough lines, and fine enough to share the work."""

SPACES_MAX = 64
"""Runs that touch more spaces than this do not name them."""


class Header(msgspec.Struct, frozen=True):
    """The first line: the log `log` begins at `vclock`, its first block at byte `offset`."""

    log: str
    instance_uuid: str
    vclock: Lsns
    offset: int
    format: str = FORMAT
    version: int = VERSION


class Run(msgspec.Struct, frozen=True, omit_defaults=True):
    """Whole blocks from byte `offset` to `end` of the log, and what their rows are.

    `vclock` is the position behind them; before them it is that of the run before. `settled` is what a reader knows to
    be settled once it has read them. `spaces` is None where they are too many to be named.
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
    """Rows of `_space` or `_index`: behind them the schema may be another."""
    has_synchronous: bool = False
    """Transactions that wait for a verdict."""
    has_control: bool = False
    """CONFIRM, ROLLBACK, PROMOTE, DEMOTE: verdicts on transactions before them."""
    rolled_back: tuple[Range, ...] = ()
    """What these verdicts withdraw, here or in earlier runs: originator, first and last LSN."""

    @property
    def is_plain(self) -> bool:
        """A reader whom nothing waits for learns nothing from these rows about others."""
        return not (self.has_definitions or self.has_synchronous or self.has_control)


@dataclass(frozen=True, slots=True)
class Blocks:
    """An index as it was read; it ends at byte `end` of the log."""

    header: Header
    runs: tuple[Run, ...]
    size: int
    """Bytes of the index file that these lines are."""

    @property
    def end(self) -> int:
        return self.runs[-1].end if self.runs else self.header.offset

    def up_to(self, size: int) -> tuple[Run, ...]:
        """The runs within the first `size` bytes of the log."""
        return tuple(run for run in self.runs if run.end <= size)


def path_of(log_path: str) -> str:
    return log_path.removesuffix(".xlog") + EXTENSION


def read_blocks(disk: Disk, log_path: str) -> Blocks | None:
    """The index of a log as far as it can be used; None where there is none, or none that fits the log."""
    path = path_of(log_path)
    if disk.kind(path) is None:
        return None
    with disk.open(path) as file:
        data = file.read_at(0, file.size())
    lines = data.split(b"\n")[:-1]  # what has no end was not written whole
    try:
        header = msgspec.json.decode(lines[0], type=Header) if lines else None
    except (ValueError, RecursionError):
        return None
    if header is None or header.format != FORMAT or header.version > VERSION:
        return None
    if header.log != posixpath.basename(log_path):
        return None
    runs: list[Run] = []
    size = len(lines[0]) + 1
    at = header.offset
    for line in lines[1:]:
        try:
            run = msgspec.json.decode(line, type=Run)
        except (ValueError, RecursionError):
            break
        if run.offset != at or run.end <= at:
            break
        runs.append(run)
        at, size = run.end, size + len(line) + 1
    return Blocks(header, tuple(runs), size)


@dataclass(slots=True)
class _Gathered:
    """A run in the making."""

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

    def run(self, vclock: VClock, settled: VClock) -> Run:
        return Run(
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
    """Makes runs of the blocks of a log, in its order: `add` each, `take` those that are whole."""

    def __init__(self, vclock: VClock, end: int, verdicts: Verdicts) -> None:
        """The log goes on at byte `end`, where its position is `vclock`."""
        self.vclock = vclock
        self._verdicts = verdicts
        self._runs: list[Run] = []
        self._run = _Gathered(end, end)

    def add(self, slab: Slab, first: int, stop: int, end: int) -> None:
        """The next block ends at byte `end` of the log and holds the rows from `first` to `stop` of `slab`."""
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

    def take(self, *, unfinished: bool) -> list[Run]:
        """The runs since the last call; one that more blocks could join only if it is asked for, and ends with it."""
        if unfinished and self._run.row_count:
            self._end_run()
        runs, self._runs = self._runs, []
        return runs

    def _end_run(self) -> None:
        run = self._run.run(self.vclock, self._verdicts.settled)
        self._runs.append(run)
        self._run = _Gathered(run.end, run.end)


class BlockWriter:
    """Writes the index of the log that is being written: `add` each block, `flush` from time to time.

    Only what is in the log for certain may be added, for nobody looks back.
    """

    def __init__(self, file: File, vclock: VClock, end: int, verdicts: Verdicts) -> None:
        self._file = file
        self._size = file.size()
        """Bytes of the file that are whole lines."""
        self._runs = RunBuilder(vclock, end, verdicts)
        self._unwritten: list[Run] = []

    @classmethod
    def create(cls, disk: Disk, log_path: str, meta: Meta, first_block: int, verdicts: Verdicts) -> Self:
        """A new index, in place of any that there is."""
        path = path_of(log_path)
        with suppress(FileNotFoundError):
            disk.unlink(path)
        header = Header(posixpath.basename(log_path), meta.instance_uuid, dict(meta.vclock), first_block)
        file = disk.create(path)
        try:
            file.append(msgspec.json.encode(header) + b"\n")
        except BaseException:
            file.close()
            raise
        return cls(file, VClock(meta.vclock), first_block, verdicts)

    @classmethod
    def resume(cls, disk: Disk, log_path: str, blocks: Blocks, verdicts: Verdicts) -> Self:
        """Goes on behind the lines of `blocks`, the index as it was read; what follows them is cut off."""
        file = disk.append_to(path_of(log_path))
        try:
            file.truncate(blocks.size)
        except BaseException:
            file.close()
            raise
        start = blocks.runs[-1].vclock if blocks.runs else blocks.header.vclock
        return cls(file, VClock(start), blocks.end, verdicts)

    @property
    def vclock(self) -> VClock:
        """The position behind the last block added."""
        return self._runs.vclock

    def add(self, slab: Slab, first: int, stop: int, end: int) -> None:
        """The next block ends at byte `end` of the log and holds the rows from `first` to `stop` of `slab`."""
        self._runs.add(slab, first, stop, end)

    def flush(self) -> None:
        """Write everything added to the file. After an OSError, the next call tries again."""
        self._unwritten += self._runs.take(unfinished=True)
        if not self._unwritten:
            return
        if self._file.size() != self._size:
            self._file.truncate(self._size)  # an append failed, and may have left part of a line
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
        """Gives the file back as it is; harmless after `close`."""
        self._file.close()


def blocks_of(chunk: Chunk, slab: Slab) -> Iterator[tuple[int, int, int]]:
    """The blocks of a chunk that was decoded as `slab`: first row, row behind the last, byte where the block ends."""
    ats, behind = chunk.blocks[:, BLOCK_AT] + chunk.base, chunk.blocks[:, PAYLOAD_END] + chunk.base
    ends = dict(zip(ats.tolist(), behind.tolist(), strict=True))
    spans = slab.cells[scan.SPAN]
    edges = np.searchsorted(spans, np.arange(len(slab.offsets) + 1)).tolist()
    for offset, first, stop in zip(slab.offsets.tolist(), edges[:-1], edges[1:], strict=True):
        yield first, stop, ends[offset]
