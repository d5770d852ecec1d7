"""Queries a server about itself and its definitions, for an archive that starts in the middle of the log.

Each query uses its own client connection. The role `replication` may read everything that is queried.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import UUID

import msgspec

from flowstone.archive.definitions_file import DefinitionRow
from flowstone.archive.received_snapshot import REPLICASET_KEYS
from flowstone.box.system import CLUSTER_ID, INDEX_ID, SCHEMA_ID, SPACE_ID
from flowstone.client.connection import Connection
from flowstone.errors import FlowstoneError, RemoteProtocolError
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import pack, unpack
from flowstone.iproto.uri import Uri
from flowstone.outside import Outside
from flowstone.replication.messages import Ballot, decode_ballot

T = TypeVar("T")

PAGE_SIZE = 1000
"""Tuples per SELECT."""
_LAST_2_6 = (2, 6, 0)


class NotBooted(FlowstoneError):
    """The server is not bootstrapped yet."""


@dataclass(frozen=True, slots=True)
class UpstreamFacts:
    """The identity, the ballot and the current definitions of a server."""

    instance_uuid: UUID
    version: str
    replicaset_uuid: str
    ballot: Ballot
    definitions: tuple[DefinitionRow, ...]


async def first_of(members: Sequence[Uri], ask: Callable[[Uri], Awaitable[T]]) -> T:
    """Return the answer of the first member that answers; raise the error of the last one if none does."""
    failure: FlowstoneError | None = None
    for uri in members:
        try:
            return await ask(uri)
        except FlowstoneError as error:
            failure = error
    assert failure is not None, "a replica set has members"
    raise failure


async def ask_ballot(outside: Outside, uri: Uri) -> Ballot:
    """Return the ballot of a server: its position and the start of its oldest log."""
    async with await Connection.open(outside, uri) as connection:
        return await _ballot(connection)


async def ask_id(outside: Outside, uri: Uri) -> int | None:
    """Return the replica id of a server; None for one that is not registered."""
    async with await Connection.open(outside, uri) as connection:
        members = [unpack(row) for row in await _select(connection, CLUSTER_ID)]
        uuid = str(connection.greeting.uuid)
        return next((member[0] for member in members if isinstance(member, tuple) and member[1] == uuid), None)


async def ask_facts(outside: Outside, uri: Uri) -> UpstreamFacts:
    """Return the facts about a server; the definitions are at least as new as the vclock of the ballot.

    Raise NotBooted if the server is not bootstrapped yet.
    """
    async with await Connection.open(outside, uri) as connection:
        ballot = await _ballot(connection)
        pairs = [unpack(row) for row in await _select(connection, SCHEMA_ID)]
        found = next(
            (pair[1] for pair in pairs if isinstance(pair, tuple) and len(pair) > 1 and pair[0] in REPLICASET_KEYS),
            None,
        )
        if found is None:
            raise NotBooted(f"{uri.address} has no replica set UUID yet", hint="wait until it is bootstrapped")
        definitions = [(space, row) for space in (SPACE_ID, INDEX_ID) for row in await _select(connection, space)]
        greeting = connection.greeting
        version = ".".join(map(str, greeting.version))
        return UpstreamFacts(greeting.uuid, version, str(found), ballot, tuple(definitions))


async def _ballot(connection: Connection) -> Ballot:
    response = await connection.answer(connection.send(RequestType.VOTE))
    connection.values(response)  # raises the error if the server answered with one
    return decode_ballot(response.body, is_2_6=connection.greeting.version <= _LAST_2_6)


async def _select(connection: Connection, space_id: int) -> list[bytes]:
    """Return all tuples of a system space; read them page by page."""
    found: list[bytes] = []
    while True:
        keys: dict[Key, Any] = {Key.SPACE_ID: space_id, Key.INDEX_ID: 0, Key.ITERATOR: 2, Key.KEY: ()}
        keys |= {Key.LIMIT: PAGE_SIZE, Key.OFFSET: len(found)}
        body = pack({key.value: value for key, value in keys.items()})
        response = await connection.answer(connection.send(RequestType.SELECT, body))
        connection.values(response)
        rows = tuples_of(response.body)
        found += rows
        if len(rows) < PAGE_SIZE:
            return found


def tuples_of(body: bytes) -> list[bytes]:
    """Return the raw tuples in the response to a SELECT."""
    try:
        page = msgspec.msgpack.decode(body or b"\x80", type=dict[int, msgspec.Raw]).get(Key.DATA.value)
        tuples = msgspec.msgpack.decode(page, type=list[msgspec.Raw]) if page is not None else []
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"invalid response to SELECT: {error}") from error
    return [bytes(each) for each in tuples]
