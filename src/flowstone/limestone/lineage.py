"""The identities that a data directory has had before the one in its manifest.

A directory gets another one when it can no longer be told from its files which of its epochs a replica may have:
after offline compaction, when it is restored, and when the directory of a replica becomes a store. Its replicas are
seeded then; this small file lets them know that it is not somebody else who wants to. Through the Disk one is handed,
by who holds the directory. The real programs pass over files that they do not know.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Final

from flowstone.limestone import files
from flowstone.outside import Disk

FILE: Final = "flowstone-lineage.json"
TEMPORARY: Final = FILE + ".tmp"
FORMER_MAX: Final = 32
"""Older ones are forgotten: a replica that has been away for so long is told to take the data by hand."""

_UUID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)


def read(disk: Disk, directory: str) -> tuple[str, ...]:
    """The former identities, the latest first; none where the file cannot be read, for nothing depends on it."""
    data = files.read_whole(disk, f"{directory}/{FILE}")
    try:
        found = json.loads(data or b"{}").get("formerly", [])
        return tuple(each for each in found if isinstance(each, str) and _UUID.fullmatch(each))[:FORMER_MAX]
    except (ValueError, AttributeError, TypeError, RecursionError):
        return ()


def add(disk: Disk, directory: str, former: Iterable[str | None]) -> None:
    """Remember these, durably, before the manifest has another one."""
    known = read(disk, directory)
    new = [each.lower() for each in former if each is not None]
    found = tuple(dict.fromkeys((*new, *known)))[:FORMER_MAX]
    if found != known:
        files.replace(disk, directory, FILE, TEMPORARY, json.dumps({"formerly": found}).encode())
