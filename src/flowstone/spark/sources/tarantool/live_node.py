"""Client access to a live server: find a member that answers, read its spaces, and explain its errors.

Calls block, because Spark's workers have no event loop. Bulk reads are in `live_snapshot` and `index_scan`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from flowstone.archive.received_snapshot import REPLICASET_KEYS
from flowstone.box.definitions import DefinitionError, SpaceDefinition, read_index, read_space, with_indexes
from flowstone.box.engine import keys
from flowstone.box.schema import Schema
from flowstone.box.system import SCHEMA_ID
from flowstone.client import rights
from flowstone.client.connection import Connection, ConnectionFailed
from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.msgpack import pack
from flowstone.iproto.uri import Uri
from flowstone.outside import production
from flowstone.replication.applier.states import ConnectionLost

T = TypeVar("T")

VSPACE_ID: Final = 281
VINDEX_ID: Final = 289
NO_LIMIT: Final = 0xFFFFFFFF

_LOGIN: Final = (errors.NoSuchUser, errors.CredsMismatch)


class CannotUse(FlowstoneError):
    """A server is unreachable, rejects the login, or denies the operation."""


class UnknownSpaceThere(FlowstoneError):
    """The server has no such space, or does not show it to this user."""


@dataclass(frozen=True)
class LiveDefinitions:
    """The spaces of a server that the user may see. `replicaset_uuid` is empty if the user may not read it."""

    address: str
    user: str | None
    replicaset_uuid: str
    schema: Schema

    def space(self, wanted: int | str) -> SpaceDefinition:
        found = self.schema.get(wanted)
        if found is not None:
            return found
        names = [space.name for space in self.schema if not space.name.startswith("_")]
        some = ", ".join(names[:10]) + (", …" if len(names) > 10 else "")
        raise UnknownSpaceThere(
            f"no space {wanted!r} at {self.address}, or user {self.user or 'guest'!r} lacks the right to see it",
            hint=f"visible spaces: {some}"
            if names
            else f"user {self.user or 'guest'!r} sees no user space at {self.address}",
        )


def definitions(members: Sequence[Uri]) -> LiveDefinitions:
    """Return the definitions of the first of `members` that answers."""
    return at_first(members, _definitions)


def at_first(members: Sequence[Uri], work: Callable[[Connection, Uri], Awaitable[T]]) -> T:
    """Return the result of `work` on a connection to the first of `members` that can be reached; explain its errors."""
    return asyncio.run(_at_first(members, work))


async def _at_first(members: Sequence[Uri], work: Callable[[Connection, Uri], Awaitable[T]]) -> T:
    connection, uri = await connect(members)
    async with connection:
        try:
            return await work(connection, uri)
        except FlowstoneError as error:
            raise explained(error, uri, "read") from error


async def connect(members: Sequence[Uri]) -> tuple[Connection, Uri]:
    """Return a connection to the first of `members` that answers, and its URI."""
    failures = []
    for uri in members:
        try:
            return await Connection.open(production(), uri), uri
        except ConnectionFailed as error:
            failures.append(error)
        except FlowstoneError as error:
            raise explained(error, uri, "log in to") from error
    raise unreachable(failures)


def unreachable(failures: Sequence[FlowstoneError]) -> CannotUse:
    """Return an error that lists all members tried, each with its reason."""
    return CannotUse(
        "; ".join(error.message for error in failures), hint=failures[0].hint or "check that the server is running"
    )


def explained(error: FlowstoneError, uri: Uri, what: str) -> FlowstoneError:
    """Return an error of the server at `uri` with advice for the user; `what` names the attempted operation."""
    if isinstance(error, (CannotUse, UnknownSpaceThere)):
        return error
    if isinstance(error, ConnectionFailed | ConnectionLost):
        return CannotUse(error.message, hint=error.hint)
    if not isinstance(error, TarantoolError):
        return error
    user = uri.user or rights.GUEST
    if isinstance(error, _LOGIN):
        return CannotUse(
            f"{uri.address} rejects user {user!r}: {error.message}",
            hint="check the user and the password in uri",
        )
    hint = error.hint
    if isinstance(error, errors.AccessDenied):
        grant = f"grant the right: box.schema.user.grant('{user}', …)"
        hint = rights.NO_USER if rights.is_guest(user) else grant
    return CannotUse(f"cannot {what} {uri.address}: {error.message} ({error.name}, {error.code})", hint=hint)


def select_body(
    space_id: int,
    key: tuple[Any, ...] = (),
    *,
    iterator: int = keys.EQ,
    limit: int = NO_LIMIT,
    raw_key: bytes | None = None,
) -> bytes:
    """Return the body of a SELECT by the primary key; `raw_key` is a key as MessagePack."""
    values = {
        Key.SPACE_ID.value: space_id,
        Key.INDEX_ID.value: 0,
        Key.LIMIT.value: limit,
        Key.OFFSET.value: 0,
        Key.ITERATOR.value: iterator,
    }
    pairs = b"".join(map(pack, [each for pair in values.items() for each in pair]))
    return (
        bytes([0x80 + len(values) + 1]) + pairs + pack(Key.KEY.value) + (raw_key if raw_key is not None else pack(key))
    )


async def _definitions(connection: Connection, uri: Uri) -> LiveDefinitions:
    spaces = await _rows(connection, VSPACE_ID)
    indexes: dict[int, list[tuple[Any, ...]]] = {}
    for row in await _rows(connection, VINDEX_ID):
        indexes.setdefault(row[0], []).append(row)
    found: dict[int, SpaceDefinition] = {}
    problems: dict[int, str] = {}
    for row in spaces:
        try:
            space = read_space(row)
            found[space.id] = with_indexes(
                space, [read_index(each, space.fields) for each in indexes.get(space.id, ())]
            )
        except DefinitionError as error:
            problems[row[0]] = error.message
    return LiveDefinitions(connection.address, uri.user, await _replicaset_uuid(connection), Schema(found, problems))


async def _rows(connection: Connection, space_id: int) -> tuple[tuple[Any, ...], ...]:
    answer = await connection.request(RequestType.SELECT, select_body(space_id, iterator=keys.ALL))
    rows: tuple[tuple[Any, ...], ...] = answer.get(Key.DATA, ())
    return rows


async def _replicaset_uuid(connection: Connection) -> str:
    """Return the replica set UUID; empty if the user may not read `_schema`."""
    for name in REPLICASET_KEYS:
        try:
            answer = await connection.request(RequestType.SELECT, select_body(SCHEMA_ID, (name,)))
        except errors.AccessDenied:
            return ""
        match answer.get(Key.DATA):
            case ((_, uuid, *_),):
                return str(uuid)
    return ""
