"""Compaction: write the rows of log files to one file, so that the log files are no longer needed.

Uses the Disk that is passed in, and blocks (`docs/spec/limestone.md#compaction`). Online and offline compaction share
`step`: a crash at any of its writes leaves a directory with the same rows, for Flowstone and for the original.
`recovery.py` decides which entries count; this module decides what is written where, and in which order. Replicas are
not notified.

An entry of the compacted file is older than any entry of a log file. Therefore all sessions up to one epoch are
compacted together, and no log file that is read afterwards may contain one of them. Sessions of later epochs that share
a file with them are copied to a file of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Final

from flowstone.limestone.errors import LimestoneError
from flowstone.limestone.format import catalog, copying, names
from flowstone.limestone.format.catalog import COMPACTED_VERSION, Catalog
from flowstone.limestone.format.entries import MARKER_SIZE, Entry, EntryType, Marker, WriteVersion, decode
from flowstone.limestone.format.snippets import Snippet, snippets
from flowstone.limestone.store import blobs
from flowstone.limestone.store.directory import free_name
from flowstone.limestone.store.recovery import recover
from flowstone.outside import Disk

TEMPORARY: Final = "compaction_temp"
"""The directory for new files. Like the original, Flowstone does not delete it."""

_LISTED: Final = ((names.COMPACTED, COMPACTED_VERSION),)


@dataclass(frozen=True)
class Collection:
    """A request to delete blobs with a compaction. No reader reads versions older than `boundary`.

    `held` is called just before the deletion, and returns blobs to keep even if no file names them."""

    boundary: WriteVersion
    held: Callable[[], AbstractSet[int]]


@dataclass(frozen=True)
class Compacted:
    """The result of a compaction. `catalog` is the new catalog; `inputs` are the log files that it replaced."""

    catalog: Catalog
    inputs: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    """New log files with the sessions of later epochs that were in the inputs."""
    rows: int = 0
    collected: tuple[int, ...] = ()
    """Blobs that were deleted."""


@dataclass(frozen=True)
class CompactedContent:
    """The content of a compacted file. `max_blob_id`: the largest id that any input has named."""

    rows: int
    max_blob_id: int
    blob_ids: frozenset[int]


Writer = Callable[[Disk, str, Sequence[str], int, str], CompactedContent]
"""Writes a compacted file to a new path, from the directory's compacted file and these log files, up to an epoch."""


def write_here(disk: Disk, directory: str, inputs: Sequence[str], epoch: int, path: str) -> CompactedContent:
    """The writer that runs in this process. Raise DamagedFile if an input has lost durable entries."""
    found = recover(disk, directory, repairs=False, durable_epoch=epoch, files=inputs).snapshot
    with disk.create(path) as file:
        rows = found.write_compacted(file)
        file.sync()
    return CompactedContent(rows, found.max_blob_id, frozenset(found.blob_ids()))


# --- online ---------------------------------------------------------------------------------------


def compact_online(
    disk: Disk, directory: str, epoch: int, milliseconds: int, *, collection: Collection | None = None
) -> Compacted:
    """Compact the rotated log files: all sessions up to `epoch`, which is durable. No channel writes to these files.

    Later sessions in those files are kept, and active files are not touched. The inputs stay until `remove_detached`.
    Raise LimestoneError if an active file still contains a session to compact, and DamagedFile if an input has lost
    one."""
    _check_active(disk, directory, epoch)
    settle(disk, directory)
    listed = catalog.read(disk, directory) or Catalog()
    inputs = detached_inputs(disk, directory, listed)
    if not inputs:
        return Compacted(listed)
    survey = _survey(disk, directory, inputs, epoch)
    kept = _keep_later(disk, directory, survey.later, milliseconds)
    new, written = step(disk, directory, listed, inputs, epoch)
    collected: list[int] = []
    if collection is not None:
        visible = blobs.visible_ids(survey.with_blobs, collection.boundary)
        needed = visible | survey.later_ids | collection.held() | written.blob_ids
        collected = blobs.garbage(blobs.stored_ids(disk, directory), needed, new.max_blob_id)
        blobs.delete(disk, directory, collected)
    return Compacted(new, tuple(inputs), kept, written.rows, tuple(collected))


def settle(disk: Disk, directory: str) -> None:
    """Complete an interrupted compaction, ours or the original's: delete unfinished files, and restore a file that was
    moved away before its successor was in place."""
    temporary = f"{directory}/{TEMPORARY}"
    if disk.kind(temporary) == "directory":
        for name in disk.list_directory(temporary):
            copying.remove(disk, f"{temporary}/{name}")
    compacted, previous = f"{directory}/{names.COMPACTED}", f"{directory}/{names.COMPACTED_PREVIOUS}"
    if disk.kind(previous) == "file":
        if disk.kind(compacted) == "file":
            disk.unlink(previous)
        else:
            disk.rename(previous, compacted)
        disk.sync_directory(directory)


def detached_inputs(disk: Disk, directory: str, listed: Catalog) -> list[str]:
    """Return the log files that no channel writes to and no compaction has read yet."""
    left_out = frozenset({names.COMPACTED, names.COMPACTED_PREVIOUS, *listed.detached})
    found = (name for name in disk.list_directory(directory) if names.is_detached(name) and name not in left_out)
    return [name for name in found if disk.kind(f"{directory}/{name}") == "file"]


def _check_active(disk: Disk, directory: str, epoch: int) -> None:
    """Raise LimestoneError if an active file has a session up to `epoch`. Epochs grow along a file, so the first
    session that is not invalidated has the smallest."""
    for name in disk.list_directory(directory):
        path = f"{directory}/{name}"
        if not names.is_pwal(name) or names.is_detached(name) or disk.kind(path) != "file":
            continue
        first = next(_epochs(disk, path), None)
        if first is not None and first <= epoch:
            raise LimestoneError(
                f"cannot compact {directory} up to epoch {epoch}: {name} contains a session of epoch {first}",
                hint="rotate every log file first",
            )


def _epochs(disk: Disk, path: str) -> Iterator[int]:
    """Yield the epochs of the sessions that are not invalidated. The first is read from the head of the file, because
    its session may be long and still open."""
    with disk.open(path) as file:
        head = file.read_at(0, MARKER_SIZE)
    token = decode(head)[0] if head else None
    if isinstance(token, Marker) and token.type is EntryType.MARKER_BEGIN:
        yield token.epoch
    yield from (snippet.epoch for snippet in snippets(disk, path) if not snippet.is_marked)


@dataclass(frozen=True)
class _Survey:
    """Facts about the inputs of a compaction, besides their rows."""

    later: dict[str, list[Snippet]] = field(default_factory=dict)
    later_ids: set[int] = field(default_factory=set)
    with_blobs: list[Entry] = field(default_factory=list)


def _survey(disk: Disk, directory: str, inputs: Sequence[str], epoch: int) -> _Survey:
    survey = _Survey()
    has_compacted = disk.kind(f"{directory}/{names.COMPACTED}") == "file"
    for name in [*inputs, names.COMPACTED] if has_compacted else inputs:
        for snippet in snippets(disk, f"{directory}/{name}"):
            if snippet.is_marked:
                continue
            if snippet.epoch <= epoch:
                survey.with_blobs.extend(snippet.with_blobs)
                continue
            survey.later.setdefault(name, []).append(snippet)
            for entry in snippet.with_blobs:
                survey.later_ids.update(entry.blob_ids)
    return survey


def _keep_later(disk: Disk, directory: str, later: dict[str, list[Snippet]], milliseconds: int) -> tuple[str, ...]:
    """Copy the sessions of later epochs to new log files. Until the catalog detaches their old files, these sessions
    exist twice, which changes no result."""
    kept: list[str] = []
    disk.make_directory(f"{directory}/{TEMPORARY}")
    for name, found in later.items():
        made = f"{directory}/{TEMPORARY}/{name}"
        with disk.open(f"{directory}/{name}") as source, disk.create(made) as target:
            for snippet in found:
                copying.copy_range(source, target, snippet.at, snippet.end)
            target.sync()
        kept.append(free_name(disk, directory, name.partition(".")[0], milliseconds))
        disk.rename(made, f"{directory}/{kept[-1]}")
    if kept:
        disk.sync_directory(directory)
    return tuple(kept)


# --- the step -------------------------------------------------------------------------------------


def step(
    disk: Disk, directory: str, listed: Catalog, inputs: Sequence[str], epoch: int
) -> tuple[Catalog, CompactedContent]:
    """Write the rows of the inputs, up to `epoch`, to the compacted file, and update the catalog."""
    made, written = prepare(disk, directory, inputs, epoch)
    return commit(disk, directory, listed, inputs, epoch, made, written), written


def prepare(
    disk: Disk,
    directory: str,
    inputs: Sequence[str],
    epoch: int,
    *,
    write: Writer = write_here,
    temporary: str | None = None,
) -> tuple[str, CompactedContent]:
    """Write the new compacted file to a temporary place; return its path and its content."""
    temporary = temporary or f"{directory}/{TEMPORARY}"
    disk.make_directory(temporary)
    made = f"{temporary}/{names.COMPACTED}"
    copying.remove(disk, made)
    return made, write(disk, directory, inputs, epoch, made)


def commit(
    disk: Disk, directory: str, listed: Catalog, inputs: Sequence[str], epoch: int, made: str, written: CompactedContent
) -> Catalog:
    """Move the new compacted file into place, then detach the inputs; return the new catalog."""
    if listed.compacted != _LISTED:
        # The original hides removed keys of a compacted file only if the catalog names the file.
        catalog.write(disk, directory, replace(listed, compacted=_LISTED))
    disk.rename(made, f"{directory}/{names.COMPACTED}")
    disk.sync_directory(directory)
    present = frozenset(disk.list_directory(directory))
    detached = tuple(sorted(present.intersection([*listed.detached, *inputs])))
    new = Catalog(_LISTED, detached, epoch, max(listed.max_blob_id, written.max_blob_id))
    catalog.write(disk, directory, new)
    return new


def remove_detached(disk: Disk, directory: str, listed: Catalog) -> Catalog:
    """Delete the log files that a compaction has replaced: first the files, then their names in the catalog."""
    for name in listed.detached:
        copying.remove(disk, f"{directory}/{name}")
    disk.sync_directory(directory)
    new = replace(listed, detached=())
    catalog.write(disk, directory, new)
    return new
