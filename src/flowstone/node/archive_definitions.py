"""What is defined where a log begins, in a file of its own: an archive that has no snapshot there goes by it.

`N.definitions` stands beside the log that begins at signature N and holds the rows of `_space` and `_index` as of then,
and whose the queue of synchronous transactions is; no data. Spools have them: they may begin in the middle of a log,
and drop snapshots and logs that nobody asks for again. Replaced as a whole, never changed.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from flowstone.box.schema import SchemaTracker
from flowstone.box.system import SCHEMA_SPACE_IDS
from flowstone.errors import FlowstoneError
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import pack
from flowstone.node.archive_manifest import Lsns
from flowstone.outside.disk import Disk
from flowstone.replication.synchro import Promote
from flowstone.replication.vclock import VClock

FORMAT = "flowstone-definitions"
VERSION = 1
EXTENSION = ".definitions"
_NAME = re.compile(r"(\d{20})\.definitions", re.ASCII)

DefinitionRow = tuple[int, bytes]
"""280 or 288, and a tuple of `_space` or `_index` as MessagePack."""


class DamagedDefinitions(FlowstoneError):
    """A file of definitions is not what an archive writes."""


@dataclass(frozen=True, slots=True)
class DefinitionFile:
    """A file of definitions, found by its name."""

    signature: int
    path: str


class Definitions(msgspec.Struct, frozen=True):
    """What is defined at `vclock`; `owner` of the queue: its replica id, the last LSN confirmed, the term."""

    vclock: Lsns
    instance_uuid: str
    server: str
    rows: tuple[DefinitionRow, ...]
    owner: tuple[int, int, int] | None = None
    format: str = FORMAT
    version: int = VERSION

    def apply_to(self, tracker: SchemaTracker) -> None:
        for space_id, row in self.rows:
            tracker.apply(RequestType.INSERT, _body(space_id, row))

    @property
    def promote(self) -> Promote | None:
        return Promote(*self.owner) if self.owner is not None else None


def rows_of(tracker: SchemaTracker) -> tuple[DefinitionRow, ...]:
    """What a tracker knows, to be kept."""
    return tuple((space_id, pack(row)) for space_id, row in tracker.rows())


def path_of(directory: str, vclock: VClock) -> str:
    return posixpath.join(directory, f"{vclock.signature:020d}{EXTENSION}")


def definition_files(disk: Disk, directory: str) -> list[DefinitionFile]:
    """All that are there, in the order of their positions."""
    names = ((name, _NAME.fullmatch(name)) for name in disk.list_directory(directory))
    return [DefinitionFile(int(match[1]), posixpath.join(directory, name)) for name, match in names if match]


def read_definitions(disk: Disk, path: str) -> Definitions:
    with disk.open(path) as file:
        data = file.read_at(0, file.size())
    try:
        found = msgspec.msgpack.decode(data, type=Definitions)
    except (ValueError, RecursionError) as error:
        raise DamagedDefinitions(f"{path}: not a file of definitions: {error}") from error
    if found.format != FORMAT or found.version > VERSION:
        raise DamagedDefinitions(f"{path}: definitions of format {found.format!r}, version {found.version}")
    return found


def write_definitions(disk: Disk, directory: str, definitions: Definitions) -> str:
    """Durable on return, in place of any that there are for this position; its path."""
    path = path_of(directory, VClock(definitions.vclock))
    temporary = f"{path}.new"
    with suppress(FileNotFoundError):
        disk.unlink(temporary)
    with disk.create(temporary) as file:
        file.append(msgspec.msgpack.encode(definitions))
        file.sync()
    disk.rename(temporary, path)
    disk.sync_directory(directory)
    return path


def check_rows(rows: Sequence[DefinitionRow]) -> tuple[DefinitionRow, ...]:
    """Rows that somebody gives; an error where one is of another space."""
    for space_id, _ in rows:
        if space_id not in SCHEMA_SPACE_IDS:
            raise FlowstoneError(f"a row of space {space_id} defines nothing", hint="give rows of _space and _index")
    return tuple(rows)


def _body(space_id: int, row: bytes) -> bytes:
    return bytes((0x82, Key.SPACE_ID.value)) + pack(space_id) + bytes((Key.TUPLE.value,)) + row
