"""The position at which a streaming query resumes, read from the directory of its checkpoint.

Reads the offset and commit logs that Spark keeps there, and changes nothing. A source needs the position when Spark
asks for its columns, and cannot get it from Spark at that time.
"""

from __future__ import annotations

import json
import os
from typing import Final
from urllib.parse import unquote, urlsplit

from flowstone.errors import FlowstoneError
from flowstone.spark.sources.offsets import INITIAL, Offset, WrongOffset

OFFSETS, COMMITS = "offsets", "commits"
_VERSION: Final = "v1"


class UnreadableCheckpoint(FlowstoneError):
    """A directory is not the checkpoint of a query with one source, or is not on a local file system."""


def position_of(checkpoint: str) -> Offset:
    """Return the offset at which the next batch begins; for an uncommitted batch, the offset at which that batch began.

    Returns INITIAL if the query has not begun.
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
            f"checkpoint {checkpoint} is not on a local file system",
            hint="set schemaAt to the last offset in the query's progress",
        )
    return unquote(parts.path) if parts.scheme else checkpoint


def _batches(directory: str) -> list[int]:
    try:
        return sorted(int(name) for name in os.listdir(directory) if name.isdecimal())
    except FileNotFoundError:
        return []


def _offset(path: str) -> Offset:
    """Parse an offset file: a version, the metadata of the batch, and one line per source."""
    with open(path, encoding="utf-8") as file:
        lines = file.read().splitlines()
    if len(lines) != 3 or lines[0] != _VERSION:
        raise UnreadableCheckpoint(
            f"{path} is not a valid offset file: expected version {_VERSION} and exactly one source"
        )
    try:
        return Offset.from_json(json.loads(lines[2]))
    except (ValueError, WrongOffset) as error:
        raise UnreadableCheckpoint(f"{path} is not an offset of this source: {error}") from None
