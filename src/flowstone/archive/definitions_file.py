"""Definitions files: the schema at the start of a log, for an archive that has no snapshot there.

`N.definitions` is next to the log that starts at signature N. It has the rows of `_space` and `_index` at that position
and the owner of the limbo, but no data. Spools need these files: a spool may start in the middle of a log,
and deletes snapshots and logs that its reader no longer needs. A file is replaced as a whole, never modified.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from flowstone.archive.manifest import Lsns
from flowstone.box.schema import SchemaTracker
from flowstone.box.system import SCHEMA_SPACE_IDS
from flowstone.errors import FlowstoneError
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import pack
from flowstone.outside.disk import Disk
from flowstone.replication.limbo.control_rows import Promote
from flowstone.replication.vclock import VClock

FORMAT = "flowstone-definitions"
VERSION = 1
EXTENSION = ".definitions"
_NAME = re.compile(r"(\d{20})\.definitions", re.ASCII)

DefinitionRow = tuple[int, bytes]
"""A space id (280 or 288), and a tuple of that space (`_space` or `_index`) as MessagePack."""


class DamagedDefinitions(FlowstoneError):
    """A definitions file is damaged, or of an unsupported format."""


@dataclass(frozen=True, slots=True)
class DefinitionFile:
    """A definitions file in a directory."""

    signature: int
    path: str


class DefinitionsFile(msgspec.Struct, frozen=True):
    """The definitions at `vclock`. `owner`: owner of the limbo (replica id), its last confirmed LSN, and the term."""

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
    """Return the rows that define the schema of a tracker."""
    return tuple((space_id, pack(row)) for space_id, row in tracker.rows())


def path_of(directory: str, vclock: VClock) -> str:
    return posixpath.join(directory, f"{vclock.signature:020d}{EXTENSION}")


def definition_files(disk: Disk, directory: str) -> list[DefinitionFile]:
    """Return all definitions files of a directory, in the order of their positions."""
    return definition_files_among(directory, disk.list_directory(directory))


def definition_files_among(directory: str, names: Iterable[str]) -> list[DefinitionFile]:
    """Return the definitions files among the sorted names of a directory, in the order of their positions."""
    found = ((name, _NAME.fullmatch(name)) for name in names)
    return [DefinitionFile(int(match[1]), posixpath.join(directory, name)) for name, match in found if match]


def read_definitions(disk: Disk, path: str) -> DefinitionsFile:
    """Read a definitions file; raise DamagedDefinitions if it is damaged or of an unsupported format."""
    with disk.open(path) as file:
        data = file.read_at(0, file.size())
    try:
        found = msgspec.msgpack.decode(data, type=DefinitionsFile)
    except (ValueError, RecursionError) as error:
        raise DamagedDefinitions(f"{path}: not a definitions file: {error}") from error
    if found.format != FORMAT or found.version > VERSION:
        raise DamagedDefinitions(f"{path}: unsupported format {found.format!r}, version {found.version}")
    return found


def write_definitions(disk: Disk, directory: str, definitions: DefinitionsFile) -> str:
    """Write a definitions file, replacing an existing one of this position. Return its path when it is durable."""
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
    """Return the rows a caller passed; raise FlowstoneError if a row is not of `_space` or `_index`."""
    for space_id, _ in rows:
        if space_id not in SCHEMA_SPACE_IDS:
            raise FlowstoneError(f"space {space_id} is not a schema space", hint="pass rows of _space or _index")
    return tuple(rows)


def _body(space_id: int, row: bytes) -> bytes:
    return bytes((0x82, Key.SPACE_ID.value)) + pack(space_id) + bytes((Key.TUPLE.value,)) + row
