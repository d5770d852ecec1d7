"""The names in a data directory: which file is what, and where a blob lies.

Pure text (reference: data directory). Never looks whether a file is there.
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
"""Log channels of one directory: four digits in the name of a file, and the real replica's limit."""

_PWAL_LENGTH: Final = len("pwal_0000")
_BLOB: Final = re.compile(r"([0-9a-f]{16})\.blob", re.ASCII)


def pwal(number: int) -> str:
    """The active log file of a channel."""
    return f"{PWAL_PREFIX}{number:04d}"


def is_pwal(name: str) -> bool:
    """Whether the real program takes a file for a log, the compacted one and rotated ones included."""
    return name.startswith(PWAL_PREFIX)


def is_detached(name: str) -> bool:
    """Whether no channel writes to this log file any more."""
    return is_pwal(name) and len(name) > _PWAL_LENGTH


def rotated(name: str, milliseconds: int, number: int) -> str:
    """What `pwal_0000` or `epoch` is called when it is put aside; `number` is 0, a free one, or the epoch."""
    return f"{name}.{milliseconds:014d}.{number}"


def is_epoch_file(name: str) -> bool:
    """The epoch file, or one that was put aside."""
    return name == EPOCH or name.startswith(EPOCH + ".")


def blob_directory(blob_id: int) -> str:
    return f"blob/dir_{blob_id % 100:02d}"


def blob(blob_id: int) -> str:
    """The path of a blob, from the data directory."""
    return f"{blob_directory(blob_id)}/{blob_id:016x}.blob"


def blob_id(name: str) -> int | None:
    """The blob that a file of this name holds, without its directory; None if it is no name of a blob."""
    found = _BLOB.fullmatch(name)
    return int(found[1], 16) if found else None
