"""Check directories of simulated machines by the recovery rules of 2.11 and 3.8 (`tests/judges`).

The checks of `endings.py` read logs by our own rules, which may forgive what a real server does not. Judging takes some
tenths of a second, so only every JUDGED_EVERYth seed is judged.
"""

from __future__ import annotations

import posixpath
from typing import Any, Final

import msgpack

from flowstone.box.box import Box
from flowstone.box.system import FIRST_USER_SPACE_ID
from tests.judges.files import Unreadable, list_files
from tests.judges.judging import FLAGS_SINCE
from tests.judges.recovery import Verdict, frozen, recovered
from tests.simulation.disk import SimulatedDisk, Storage
from tests.simulation.loop import Life

JUDGED_EVERY: Final = 4
VERSIONS: Final = ((2, 11, 9), (3, 8, 0))
SHOWN_MAX: Final = 3


def files_of(name: str, storage: Storage) -> dict[str, bytes]:
    """Return the files in the directory of machine `name`."""
    disk, directory = SimulatedDisk(storage, Life("judge")), f"/{name}"
    found: dict[str, bytes] = {}
    for each in disk.list_directory(directory):
        if each.endswith((".snap", ".xlog")):
            with disk.open(posixpath.join(directory, each)) as file:
                found[each] = file.read_at(0, file.size())
    return found


def judged(name: str, storage: Storage, box: Box | None = None) -> list[str]:
    """Return why servers would not start from the directory of `name`, or which rows would differ from `box`."""
    files = files_of(name, storage)
    try:
        snapshots, logs = list_files(files)
        if () < (logs or snapshots)[-1].version < FLAGS_SINCE:
            return []
    except Unreadable as error:
        return [f"no server would start from the directory of {name}: {error}"]
    found: list[str] = []
    for version in VERSIONS:
        verdict = recovered(files, version)
        if verdict.refusal is not None:
            found.append(f"a server of {version} would not start from the directory of {name}: {verdict.refusal}")
        elif box is not None:
            found += _differences(name, version, verdict, box)
    return found


def _differences(name: str, version: tuple[int, ...], verdict: Verdict, box: Box) -> list[str]:
    found: list[str] = []
    for number, space in sorted(box.spaces.items()):
        if number < FIRST_USER_SPACE_ID or space.definition.is_temporary:
            continue
        ours = frozenset(map(_values, space.tuples()))
        theirs = verdict.rows.get(number, frozenset())
        if ours != theirs:
            some = sorted(map(repr, ours ^ theirs))[:SHOWN_MAX]
            found.append(f"a server of {version} would have other rows in space {number} than {name}: {some}")
    return found


def _values(raw: bytes) -> Any:
    return frozen(msgpack.unpackb(raw, raw=True, strict_map_key=False))
