"""The names of files in a data directory.

Pure text (`docs/spec/limestone.md#data-directory`). Never checks whether a file exists.
"""

from __future__ import annotations

import re
from typing import Final

MANIFEST: Final = "limestone-manifest.json"
MANIFEST_BACK: Final = MANIFEST + ".back"
EPOCH: Final = "epoch"
EPOCH_TEMPORARY: Final = ".epoch.tmp"
CATALOG: Final = "compaction_catalog"
CATALOG_BACK: Final = CATALOG + ".back"
CATALOG_TEMPORARY: Final = f".{CATALOG}.tmp"
COMPACTED: Final = "pwal_0000.compacted"
COMPACTED_PREVIOUS: Final = COMPACTED + ".prev"
SNAPSHOT: Final = "data/snapshot"

PWAL_PREFIX: Final = "pwal_"
CHANNELS_MAX: Final = 10_000
"""Maximum number of log channels of a directory: file names have four digits, and the original replica has this limit.
"""

_PWAL_LENGTH: Final = len("pwal_0000")
_BLOB: Final = re.compile(r"([0-9a-f]{16})\.blob", re.ASCII)


def pwal(number: int) -> str:
    """Return the name of the active log file of a channel."""
    return f"{PWAL_PREFIX}{number:04d}"


def is_pwal(name: str) -> bool:
    """Return True if the original treats a file as a log file, including the compacted one and rotated ones."""
    return name.startswith(PWAL_PREFIX)


def is_detached(name: str) -> bool:
    """Return True if no channel writes to this log file any more."""
    return is_pwal(name) and len(name) > _PWAL_LENGTH


def rotated(name: str, milliseconds: int, number: int) -> str:
    """Return the name of a rotated `pwal_0000` or `epoch`; `number` is 0, an unused number, or the epoch."""
    return f"{name}.{milliseconds:014d}.{number}"


def is_epoch_file(name: str) -> bool:
    """Return True for the epoch file and for rotated ones."""
    return name == EPOCH or name.startswith(EPOCH + ".")


def blob_directory(blob_id: int) -> str:
    return f"blob/dir_{blob_id % 100:02d}"


def blob(blob_id: int) -> str:
    """Return the path of a blob, relative to the data directory."""
    return f"{blob_directory(blob_id)}/{blob_id:016x}.blob"


def blob_id(name: str) -> int | None:
    """Return the id in the file name of a blob, without its directory; None if it is not such a name."""
    found = _BLOB.fullmatch(name)
    return int(found[1], 16) if found else None
