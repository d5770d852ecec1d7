"""The runs of an archive's logs, read from its manifest and the indexes beside its logs. Reads no rows.

A poll reads only what was appended since the last one, so that a growing archive can be polled several times a second.
The format is described in `docs/reference/archive.md`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from flowstone.archive.block_index import BlockRun, path_of, read_blocks
from flowstone.archive.definitions_file import DefinitionFile, definition_files_among
from flowstone.archive.manifest import Gap, NotAnArchive, load
from flowstone.errors import FlowstoneError
from flowstone.outside.disk import Disk
from flowstone.replication.vclock import VClock
from flowstone.xlog.directory import ListedFile, LogDirectory, scan_directory


class BrokenIndex(FlowstoneError):
    """The indexes of an archive do not cover its logs."""


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    """A complete snapshot."""

    path: str
    vclock: VClock
    size: int
    row_count: int | None = None


@dataclass(frozen=True, slots=True)
class DirectoryFacts:
    """Facts about a directory, besides its runs.

    `reached` is the position that its files reach, `settled` the position up to which they are settled. `known_until`
    is the time up to which no row after the last one is missing; None if it was not recorded.
    """

    replicaset_uuid: str
    settled: VClock
    reached: VClock
    gaps: tuple[Gap, ...] = ()
    images_since: VClock | None = None
    snapshots: tuple[SnapshotFile, ...] = ()
    definitions: tuple[DefinitionFile, ...] = ()
    known_until: float | None = None

    def defined_at(self, position: VClock) -> str | None:
        """Return the newest snapshot or definition file that gives the definitions at `position`."""
        snapshots = [(each.vclock.signature, each.path) for each in self.snapshots if each.vclock <= position]
        alone = [(each.signature, each.path) for each in self.definitions if each.signature <= position.signature]
        return max(snapshots + alone, default=(0, None))[1]


@dataclass(frozen=True, slots=True)
class Added:
    """Consecutive runs of the log `path`, starting at the position `before`."""

    path: str
    before: VClock
    runs: Sequence[BlockRun]


@dataclass(frozen=True, slots=True)
class News:
    """The result of a poll: logs that were removed or rewritten, and runs to append after all others."""

    facts: DirectoryFacts
    gone: frozenset[str] = frozenset()
    added: Sequence[Added] = ()


class RunFeed(Protocol):
    """A source of runs."""

    def poll(self) -> News:
        """Return what is new since the last call."""
        ...


@dataclass(slots=True)
class _Known:
    """A log whose index was read up to byte `size`; its runs end at byte `end` of the log, at `vclock`.

    A log `is_final` if the next log existed before this one was read.
    """

    size: int
    end: int
    vclock: VClock
    is_final: bool = False


_decode_run = msgspec.json.Decoder(BlockRun).decode


@dataclass
class ArchiveRuns:
    """The run feed of the archive in `directory`."""

    disk: Disk
    directory: str
    _logs: dict[str, _Known] = field(default_factory=dict)
    _snapshots: dict[str, SnapshotFile] = field(default_factory=dict)

    def poll(self) -> News:
        # The order matters: the indexes cover all that the manifest names, and a log is complete before the next one
        # begins.
        manifest = load(self.disk, self.directory)
        if manifest is None:
            raise NotAnArchive(
                f"{self.directory}: not an archive", hint="specify a directory written by `flowstone archive`"
            )
        listed = scan_directory(self.disk, self.directory)
        gone = frozenset(self._logs) - {log.path for log in listed.logs}
        for path in gone:
            del self._logs[path]
        facts = DirectoryFacts(
            manifest.replicaset_uuid or "",
            VClock(manifest.settled),
            VClock(manifest.position),
            tuple(manifest.gaps),
            VClock(manifest.images_since) if manifest.images_since is not None else None,
            snapshots_of(listed, self._snapshots),
            tuple(definition_files_among(self.directory, listed.others)),
            manifest.known_until,
        )
        added: list[Added] = []
        again: set[str] = set()
        untils = {VClock(gap.until) for gap in manifest.gaps}
        before: VClock | None = None
        last = len(listed.logs) - 1
        for number, log in enumerate(listed.logs):
            known = self._logs.get(log.path)
            if known is None or not known.is_final:
                found = self._read_on(log, known) if known is not None else None
                if found is None:
                    again |= {log.path} if known is not None else set()
                    found = self._read(log, before, untils, is_last=number == last)
                if found is not None and found.runs:
                    added.append(found)
            if log.path in self._logs:
                self._logs[log.path].is_final = number < last
                before = self._logs[log.path].vclock
        return News(facts, gone | again, added)

    def _read(self, log: ListedFile, before: VClock | None, gaps: set[VClock], *, is_last: bool) -> Added | None:
        """Read the index of a new log."""
        blocks = read_blocks(self.disk, log.path)
        start = VClock(log.meta.vclock)
        if before is not None and start != before and start not in gaps:
            raise BrokenIndex(
                f"{self.directory}: its indexes end at {before}, but the next log starts at {start}",
                hint="run `flowstone archive` on it once to rebuild them",
            )
        if blocks is None:
            if is_last:  # the log was just created
                return None
            raise BrokenIndex(
                f"{log.path} has no index", hint="run `flowstone archive` on its directory once to rebuild the index"
            )
        vclock = VClock(blocks.runs[-1].vclock) if blocks.runs else start
        self._logs[log.path] = _Known(blocks.size, blocks.end, vclock)
        return Added(log.path, start, blocks.runs)

    def _read_on(self, log: ListedFile, known: _Known) -> Added | None:
        """Read what was appended to an index; None if the index was replaced."""
        path = path_of(log.path)
        if self.disk.kind(path) is None:
            return None
        with self.disk.open(path) as file:
            size = file.size()
            if size < known.size:
                return None
            data = file.read_at(known.size, size - known.size)
        before, runs = known.vclock, []
        for line in data.split(b"\n")[:-1]:
            try:
                run = _decode_run(line)
            except (ValueError, RecursionError):
                return None
            if run.offset != known.end:
                return None
            runs.append(run)
            known.end, known.size = run.end, known.size + len(line) + 1
        if runs:
            known.vclock = VClock(runs[-1].vclock)
        return Added(log.path, before, runs)


def snapshots_of(listed: LogDirectory, known: dict[str, SnapshotFile]) -> tuple[SnapshotFile, ...]:
    """Return the snapshots of a directory in ascending order; `known` caches what was read of them."""
    for path in known.keys() - {each.path for each in listed.snapshots}:
        del known[path]
    for each in listed.snapshots:
        if each.path not in known:
            known[each.path] = SnapshotFile(each.path, VClock(each.meta.vclock), each.disk.size(each.path))
    return tuple(sorted(known.values(), key=lambda snapshot: snapshot.vclock.signature))


def newest_at(snapshots: Iterable[SnapshotFile], position: VClock) -> SnapshotFile | None:
    """Return the newest snapshot from which the state at `position` can be built."""
    found = [snapshot for snapshot in snapshots if snapshot.vclock <= position]
    return found[-1] if found else None
