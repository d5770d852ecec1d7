"""Whose data a replica holds, and where its old data is while a master sends it all anew.

Through the Disk one is handed, and blocking. Old data is moved into a directory of its own, file by file, and moved
back if the new data never became durable: a small file says how far that is, and is replaced by rename, so a crash
between any two steps is put right by `bring_back` at the next start. Only who holds the lock of the directory calls
these.

    SETTLED --put_aside--> MOVING ----> SEEDING --keep--> DISCARDING --discard--> SETTLED
                             ^-- bring_back -'
    MOVING ---------------- bring_back ---------------------------------------> SETTLED
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from flowstone.limestone import catalog, epoch_file, files, lineage, names
from flowstone.limestone.blobs import ROOT as BLOBS
from flowstone.limestone.catalog import Catalog
from flowstone.limestone.errors import DamagedFile
from flowstone.outside import Disk

FILE: Final = "flowstone-replica.json"
TEMPORARY: Final = FILE + ".tmp"
ASIDE: Final = "put_aside"
"""A directory in the data directory; the original looks into none that it does not know."""

_KEPT: Final = frozenset({names.MANIFEST, names.MANIFEST_BACK, FILE, TEMPORARY, lineage.FILE, lineage.TEMPORARY})


class Phase(Enum):
    """How far the replacement of old data is."""

    SETTLED = "settled"
    MOVING = "moving"
    """Old data is in both places; there is no new data."""

    SEEDING = "seeding"
    """Old data is aside, new data is coming."""

    DISCARDING = "discarding"
    """New data is durable; what is aside is not needed."""


@dataclass(frozen=True)
class State:
    """`follows`: the instance of the master whose epochs the directory holds, None if unknown."""

    follows: str | None = None
    phase: Phase = Phase.SETTLED


def read(disk: Disk, directory: str) -> State:
    path = f"{directory}/{FILE}"
    data = files.read_whole(disk, path)
    if data is None:
        return State()
    try:
        fields = json.loads(data)
        follows, phase = fields["follows"], Phase(fields["phase"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DamagedFile(path, 0, "it does not say whose data this is") from None
    if follows is not None and not isinstance(follows, str):
        raise DamagedFile(path, 0, "it does not say whose data this is")
    return State(follows, phase)


def write(disk: Disk, directory: str, state: State) -> None:
    data = json.dumps({"follows": state.follows, "phase": state.phase.value}).encode()
    files.replace(disk, directory, FILE, TEMPORARY, data)


def put_aside(disk: Disk, directory: str) -> State:
    """Move all data away; the directory is then one without any."""
    state = read(disk, directory)
    assert state.phase is Phase.SETTLED
    delete_aside(disk, directory)
    write(disk, directory, replace(state, phase=Phase.MOVING))
    _move(disk, directory, f"{directory}/{ASIDE}")
    epoch_file.EpochWriter.open(disk, directory)
    catalog.write(disk, directory, Catalog())
    state = replace(state, phase=Phase.SEEDING)
    write(disk, directory, state)
    return state


def keep(disk: Disk, directory: str, follows: str) -> State:
    """The new data, of this master, is durable: there is no way back."""
    state = State(follows, Phase.DISCARDING)
    write(disk, directory, state)
    return state


def discard(disk: Disk, directory: str, state: State) -> State:
    """Delete what is aside."""
    assert state.phase is Phase.DISCARDING
    delete_aside(disk, directory)
    state = replace(state, phase=Phase.SETTLED)
    write(disk, directory, state)
    return state


def delete_aside(disk: Disk, directory: str) -> None:
    """Nobody needs what is aside: it must not come back among other data."""
    _delete(disk, f"{directory}/{ASIDE}")


def has_data_aside(disk: Disk, directory: str) -> bool:
    """Whether the data of the directory is what is aside, and not what is in its place."""
    return read(disk, directory).phase in (Phase.MOVING, Phase.SEEDING)


def bring_back(disk: Disk, directory: str) -> tuple[State, bool]:
    """End whatever a crash, or a master that went away, has left half done; True if old data is back."""
    state = read(disk, directory)
    if state.phase is Phase.DISCARDING:
        return discard(disk, directory, state), False
    if state.phase is Phase.SETTLED:
        return state, False
    if state.phase is Phase.SEEDING:
        _delete(disk, directory)
        write(disk, directory, replace(state, phase=Phase.MOVING))
    _move(disk, f"{directory}/{ASIDE}", directory)
    catalog.settle(disk, directory)
    state = replace(state, phase=Phase.SETTLED)
    write(disk, directory, state)
    return state, True


def promote(disk: Disk, directory: str) -> bool:
    """The directory is a store of its own from now on, and writes epochs that its master does not have.

    Nobody resumes it after that, as if it still followed; whom it followed is in its lineage. True if old data is back
    because it was being seeded."""
    state, was_restored = bring_back(disk, directory)
    if state.follows is not None:
        lineage.add(disk, directory, [state.follows])
        write(disk, directory, replace(state, follows=None))
    return was_restored


def _content(disk: Disk, root: str) -> dict[str, list[str]]:
    """Names of files by the directory they are in, from `root`: log, epoch file, catalog and blobs."""
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
