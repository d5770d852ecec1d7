"""The schema of one member as its clients see it: spaces and indexes by name, read from `_vspace` and `_vindex`.

Members count their schema versions independently, so each connection has its own. A request carries the version that it
was encoded with, and a server with another version rejects it: no field is written under a wrong name.
"""

from __future__ import annotations

from typing import Any, Final

from flowstone.box.definitions import (
    DefinitionError,
    IndexDefinition,
    SpaceDefinition,
    read_index,
    read_space,
    with_indexes,
)
from flowstone.box.schema import Schema
from flowstone.box.system import INDEX_ID, SPACE_ID, VIEWS
from flowstone.box.tuples import field_numbers
from flowstone.client.connection import Connection
from flowstone.errors import FlowstoneError, RemoteProtocolError
from flowstone.iproto import errors
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import pack

ATTEMPTS: Final = 10
"""How often the schema is read until no definition changes meanwhile."""

_LIMIT_MAX: Final = 0xFFFF_FFFF
_ALL: Final = 2


class KnownSpace:
    """A space with what encoding a statement needs: the beginning of its bodies, and the numbers of its fields."""

    __slots__ = ("_get_heads", "_index_heads", "definition", "id", "names", "numbers", "store_head")

    def __init__(self, definition: SpaceDefinition) -> None:
        self.definition = definition
        self.id = definition.id
        self.names = definition.field_names
        self.numbers = field_numbers(self.names)
        self.store_head = b"\x82\x10" + pack(definition.id) + b"\x21"

        self._index_heads: dict[int | str, bytes] = {}
        self._get_heads: dict[int | str, tuple[bytes, int]] = {}

    def index_head(self, index: int | str) -> bytes:
        """Return the entries of a body that name an index. Raise the error of a server if it does not exist."""
        head = self._index_heads.get(index)
        if head is None:
            number = index if index == 0 else self.index(index).id
            head = self._index_heads[index] = b"\x10" + pack(self.id) + b"\x11" + pack(number)
        return head

    def get_head(self, index: int | str) -> tuple[bytes, int]:
        """Return the beginning of a body that selects one tuple by its key, and the number of parts of the key; 0 if
        the index is not unique."""
        found = self._get_heads.get(index)
        if found is None:
            definition = self.index(index)
            head = b"\x84" + self.index_head(index) + b"\x12\x02\x20"  # a limit of 2, as in real clients
            found = self._get_heads[index] = head, len(definition.parts) if definition.unique else 0
        return found

    def index(self, index: int | str) -> IndexDefinition:
        """Return an index by id or name. Raise the error of a server if it does not exist."""
        for found in self.definition.indexes:
            if index in (found.id, found.name):
                return found
        name = self.definition.name
        if isinstance(index, int):
            raise errors.NoSuchIndexId(f"No index #{index} is defined in space '{name}'")
        raise errors.NoSuchIndexName(f"No index '{index}' is defined in space '{name}'")


class KnownSchema:
    """All spaces that the user may see, at one schema version."""

    def __init__(self, schema: Schema, version: int) -> None:
        self.version = version
        self._schema = schema
        self._spaces: dict[int | str, KnownSpace] = {}

    def space(self, space: int | str) -> KnownSpace:
        """Return a space by id or name; raise UnknownSpace if the user sees none."""
        found = self._spaces.get(space)
        if found is None:
            found = self._spaces[space] = KnownSpace(self._schema.space(space))
        return found


async def read_schema(connection: Connection, *, timeout: float) -> KnownSchema:
    """Read the schema of the server."""
    for _ in range(ATTEMPTS):
        asked = [connection.send(RequestType.SELECT, _everything_in(VIEWS[table])) for table in (SPACE_ID, INDEX_ID)]
        spaces, indexes = [await connection.answer(future, timeout=timeout) for future in asked]
        rows = [connection.values(response).get(Key.DATA, ()) for response in (spaces, indexes)]
        if spaces.schema_version == indexes.schema_version:
            return KnownSchema(_schema_of(*rows), spaces.schema_version)
    raise FlowstoneError(f"schema of {connection.address} changed {ATTEMPTS} times while it was read")


def _everything_in(space_id: int) -> bytes:
    body = {Key.SPACE_ID: space_id, Key.INDEX_ID: 0, Key.ITERATOR: _ALL, Key.OFFSET: 0, Key.LIMIT: _LIMIT_MAX}
    return pack({key.value: value for key, value in body.items()} | {Key.KEY.value: ()})


def _schema_of(space_rows: Any, index_rows: Any) -> Schema:
    """Return the schema of these rows. A definition that we cannot read makes only its own space unusable."""
    if not all(
        isinstance(rows, tuple) and all(isinstance(row, tuple) and row for row in rows)
        for rows in (space_rows, index_rows)
    ):
        raise RemoteProtocolError("rows of _vspace and _vindex are not arrays")
    spaces: dict[int, SpaceDefinition] = {}
    problems: dict[int, str] = {}
    indexes: dict[int, list[IndexDefinition]] = {}
    for row in space_rows:
        try:
            space = read_space(row)
            spaces[space.id] = space
        except DefinitionError as error:
            problems[row[0]] = error.message
    for row in index_rows:
        try:
            index = read_index(row, spaces[row[0]].fields if row[0] in spaces else ())
            indexes.setdefault(index.space_id, []).append(index)
        except DefinitionError as error:
            problems[row[0]] = error.message
    for number, found in indexes.items():
        if number in spaces:
            spaces[number] = with_indexes(spaces[number], found)
    return Schema(spaces, problems)
