"""Where a streaming query goes on, from the directory of its checkpoint: what Spark itself will ask for first.

Reads the logs of offsets and commits that Spark keeps there, and changes nothing. A source cannot ask Spark for the
position of a query when it is asked for its columns; that is what this is for.
"""

from __future__ import annotations

import json
import os
from typing import Final
from urllib.parse import unquote, urlsplit

from flowstone.errors import FlowstoneError
from flowstone.spark.offsets import INITIAL, Offset, WrongOffset

OFFSETS, COMMITS = "offsets", "commits"
_VERSION: Final = "v1"


class UnreadableCheckpoint(FlowstoneError):
    """A directory is not a checkpoint of a query with one source, or is where it cannot be read."""


def position_of(checkpoint: str) -> Offset:
    """The offset from which on the next batch is read: of a batch that was not committed, where that began.

    Before everything where the query has not begun.
    """
    directory = _local(checkpoint)
    planned = _batches(os.path.join(directory, OFFSETS))
    if not planned:
        return INITIAL
    last = planned[-1]
    if last in _batches(os.path.join(directory, COMMITS)):
        return _offset(os.path.join(directory, OFFSETS, str(last)))
    return _offset(os.path.join(directory, OFFSETS, str(planned[-2]))) if len(planned) > 1 else INITIAL


def _local(checkpoint: str) -> str:
    parts = urlsplit(checkpoint)
    if parts.scheme not in ("", "file"):
        raise UnreadableCheckpoint(
            f"the checkpoint {checkpoint} is not on a local file system",
            hint="give its last offset as schemaAt, as the query's progress shows it",
        )
    return unquote(parts.path) if parts.scheme else checkpoint


def _batches(directory: str) -> list[int]:
    try:
        return sorted(int(name) for name in os.listdir(directory) if name.isdecimal())
    except FileNotFoundError:
        return []


def _offset(path: str) -> Offset:
    """A version, the metadata of the batch, and a line for each source."""
    with open(path, encoding="utf-8") as file:
        lines = file.read().splitlines()
    if len(lines) != 3 or lines[0] != _VERSION:
        raise UnreadableCheckpoint(f"{path} is no offset of a query with one source")
    try:
        return Offset.from_json(json.loads(lines[2]))
    except (ValueError, WrongOffset) as error:
        raise UnreadableCheckpoint(f"{path} is no offset of this source: {error}") from None
