"""Which master a replica's data belongs to, and where the old data is while a master seeds the replica.

Uses the Disk that is passed in, and blocks. Old data is moved to a directory of its own, file by file, and moved back
if the new data never becomes durable. A small file records the phase and is replaced by rename, so `bring_back`
completes or reverts a seeding at the next start, wherever a crash interrupted it. The caller holds the lock of the
directory.

    SETTLED --put_aside--> MOVING ----> SEEDING --keep--> DISCARDING --discard--> SETTLED
                             ^-- bring_back -'
    MOVING ---------------- bring_back ---------------------------------------> SETTLED
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from flowstone.limestone.errors import DamagedFile
from flowstone.limestone.format import catalog, epoch_file, files, lineage, names
from flowstone.limestone.format.catalog import Catalog
from flowstone.limestone.store.blobs import ROOT as BLOBS
from flowstone.outside import Disk

FILE: Final = "flowstone-replica.json"
TEMPORARY: Final = FILE + ".tmp"
ASIDE: Final = "put_aside"
"""A directory in the data directory; the original ignores directories that it does not know."""

_KEPT: Final = frozenset({names.MANIFEST, names.MANIFEST_BACK, FILE, TEMPORARY, lineage.FILE, lineage.TEMPORARY})


class Phase(Enum):
    """The progress of replacing old data."""

    SETTLED = "settled"
    MOVING = "moving"
    """Old data is in both places; there is no new data."""

    SEEDING = "seeding"
    """Old data is put aside, new data is arriving."""

    DISCARDING = "discarding"
    """New data is durable; the data put aside is no longer needed."""


TRANSITIONS: Final[dict[Phase, frozenset[Phase]]] = {
    Phase.SETTLED: frozenset({Phase.MOVING}),
    Phase.MOVING: frozenset({Phase.SEEDING, Phase.SETTLED}),
    # Old data is moved back if the new data never becomes durable.
    Phase.SEEDING: frozenset({Phase.DISCARDING, Phase.MOVING}),
    Phase.DISCARDING: frozenset({Phase.SETTLED}),
}
"""Maps each phase to the phases that may follow it."""


@dataclass(frozen=True)
class SeedingState:
    """`follows`: the identity of the master whose epochs the directory holds; None if unknown."""

    follows: str | None = None
    phase: Phase = Phase.SETTLED


def read(disk: Disk, directory: str) -> SeedingState:
    path = f"{directory}/{FILE}"
    data = files.read_whole(disk, path)
    if data is None:
        return SeedingState()
    try:
        fields = json.loads(data)
        follows, phase = fields["follows"], Phase(fields["phase"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DamagedFile(path, 0, "file does not name the master of this data") from None
    if follows is not None and not isinstance(follows, str):
        raise DamagedFile(path, 0, "file does not name the master of this data")
    return SeedingState(follows, phase)


def write(disk: Disk, directory: str, state: SeedingState) -> None:
    data = json.dumps({"follows": state.follows, "phase": state.phase.value}).encode()
    files.replace(disk, directory, FILE, TEMPORARY, data)


def _advance(disk: Disk, directory: str, state: SeedingState, phase: Phase) -> SeedingState:
    assert phase in TRANSITIONS[state.phase], f"invalid transition of a seeding: {state.phase.value} to {phase.value}"
    state = replace(state, phase=phase)
    write(disk, directory, state)
    return state


def put_aside(disk: Disk, directory: str) -> SeedingState:
    """Move all data aside, and leave an empty directory."""
    state = read(disk, directory)
    assert state.phase is Phase.SETTLED
    delete_aside(disk, directory)
    state = _advance(disk, directory, state, Phase.MOVING)
    _move(disk, directory, f"{directory}/{ASIDE}")
    epoch_file.EpochWriter.open(disk, directory)
    catalog.write(disk, directory, Catalog())
    return _advance(disk, directory, state, Phase.SEEDING)


def keep(disk: Disk, directory: str, follows: str) -> SeedingState:
    """Record that the new data of this master is durable; the old data can no longer be restored."""
    return _advance(disk, directory, replace(read(disk, directory), follows=follows), Phase.DISCARDING)


def discard(disk: Disk, directory: str, state: SeedingState) -> SeedingState:
    """Delete the data that was put aside."""
    assert state.phase is Phase.DISCARDING
    delete_aside(disk, directory)
    return _advance(disk, directory, state, Phase.SETTLED)


def delete_aside(disk: Disk, directory: str) -> None:
    """Delete data that was put aside, so that it cannot be mixed with other data later."""
    _delete(disk, f"{directory}/{ASIDE}")


def has_data_aside(disk: Disk, directory: str) -> bool:
    """Return True if the data put aside is the current data of the directory."""
    return read(disk, directory).phase in (Phase.MOVING, Phase.SEEDING)


def bring_back(disk: Disk, directory: str) -> tuple[SeedingState, bool]:
    """Complete or revert what a crash or a lost master interrupted; return True if old data was restored."""
    state = read(disk, directory)
    if state.phase is Phase.DISCARDING:
        return discard(disk, directory, state), False
    if state.phase is Phase.SETTLED:
        return state, False
    if state.phase is Phase.SEEDING:
        _delete(disk, directory)
        state = _advance(disk, directory, state, Phase.MOVING)
    _move(disk, f"{directory}/{ASIDE}", directory)
    catalog.settle(disk, directory)
    return _advance(disk, directory, state, Phase.SETTLED), True


def promote(disk: Disk, directory: str) -> bool:
    """Make the directory a store of its own, which writes epochs that its master does not have.

    It no longer follows its master, so it is not resumed as a replica; the master is recorded in its lineage. Return
    True if old data was restored because it was being seeded."""
    state, was_restored = bring_back(disk, directory)
    if state.follows is not None:
        lineage.add(disk, directory, [state.follows])
        write(disk, directory, replace(state, follows=None))
    return was_restored


def _content(disk: Disk, root: str) -> dict[str, list[str]]:
    """Return the names of log files, epoch file, catalog and blobs, by their directory relative to `root`."""
    if disk.kind(root) != "directory":
        return {}
    found = {"": [name for name in disk.list_directory(root) if name not in _KEPT and _is_file(disk, root, name)]}
    if disk.kind(f"{root}/{BLOBS}") == "directory":
        for child in disk.list_directory(f"{root}/{BLOBS}"):
            place = f"/{BLOBS}/{child}"
            if disk.kind(root + place) == "directory":
                found[place] = [
                    name for name in disk.list_directory(root + place) if _is_file(disk, root + place, name)
                ]
    return found


def _is_file(disk: Disk, directory: str, name: str) -> bool:
    return disk.kind(f"{directory}/{name}") == "file"


def _move(disk: Disk, source: str, target: str) -> None:
    places = _content(disk, source)
    for place, found in places.items():
        disk.make_directory(target + place)
        for name in found:
            disk.rename(f"{source}{place}/{name}", f"{target}{place}/{name}")
    _sync(disk, target, list(places))
    _sync(disk, source, list(places))


def _delete(disk: Disk, root: str) -> None:
    places = _content(disk, root)
    for place, found in places.items():
        for name in found:
            disk.unlink(f"{root}{place}/{name}")
    _sync(disk, root, list(places))


def _sync(disk: Disk, root: str, places: list[str]) -> None:
    for place in places:
        disk.sync_directory(root + place)
    if len(places) > 1:
        disk.sync_directory(f"{root}/{BLOBS}")
