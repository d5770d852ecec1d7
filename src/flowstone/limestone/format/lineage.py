"""The former identities of a data directory.

A directory gets a new identity when its files no longer tell which of its epochs a replica may have: after offline
compaction, after a restore, and when a replica's directory becomes a store. Its replicas are then seeded; this small
file proves to the replicas that the master is the one they followed. Uses the Disk that is passed in; the caller holds
the lock of the directory. The original ignores files that it does not know.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Final

from flowstone.limestone.format import files
from flowstone.outside import Disk

FILE: Final = "flowstone-lineage.json"
TEMPORARY: Final = FILE + ".tmp"
FORMER_MAX: Final = 32
"""Older identities are dropped. A replica that has been away for longer must be seeded by hand."""

_UUID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)


def read(disk: Disk, directory: str) -> tuple[str, ...]:
    """Return the former identities, latest first; none if the file cannot be read, because nothing depends on it."""
    data = files.read_whole(disk, f"{directory}/{FILE}")
    try:
        found = json.loads(data or b"{}").get("formerly", [])
        return tuple(each for each in found if isinstance(each, str) and _UUID.fullmatch(each))[:FORMER_MAX]
    except (ValueError, AttributeError, TypeError, RecursionError):
        return ()


def add(disk: Disk, directory: str, former: Iterable[str | None]) -> None:
    """Add former identities durably. Call it before the manifest gets a new one."""
    known = read(disk, directory)
    new = [each.lower() for each in former if each is not None]
    found = tuple(dict.fromkeys((*new, *known)))[:FORMER_MAX]
    if found != known:
        files.replace(disk, directory, FILE, TEMPORARY, json.dumps({"formerly": found}).encode())
