"""What a server says of itself and its definitions: what an archive needs that begins in the middle of its log.

Asks on a connection of its own, as any client does; the role `replication` may read all that is asked for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import UUID

import msgspec

from flowstone.box.system import CLUSTER_ID, INDEX_ID, SCHEMA_ID, SPACE_ID
from flowstone.errors import FlowstoneError, RemoteProtocolError
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import pack, unpack
from flowstone.iproto.uri import Uri
from flowstone.node.archive_definitions import DefinitionRow
from flowstone.node.archive_snapshot import REPLICASET_KEYS
from flowstone.node.connection import Connection
from flowstone.outside import Outside
from flowstone.replication.messages import Ballot, decode_ballot

T = TypeVar("T")

PAGE_SIZE = 1000
_LAST_2_6 = (2, 6, 0)


class NotBooted(FlowstoneError):
    """A server that has no data yet."""


@dataclass(frozen=True, slots=True)
class UpstreamFacts:
    """Who answers at an address, where it is in its log, and what is defined there about now."""

    instance_uuid: UUID
    version: str
    replicaset_uuid: str
    ballot: Ballot
    definitions: tuple[DefinitionRow, ...]


async def first_of(members: Sequence[Uri], ask: Callable[[Uri], Awaitable[T]]) -> T:
    """What the first member answers that can be asked; the error of the last one where none can."""
    failure: FlowstoneError | None = None
    for uri in members:
        try:
            return await ask(uri)
        except FlowstoneError as error:
            failure = error
    assert failure is not None, "a replica set has members"
    raise failure


async def ask_ballot(outside: Outside, uri: Uri) -> Ballot:
    """Where a server is in its log, and where its oldest log begins."""
    async with await Connection.open(outside, uri) as connection:
        return await _ballot(connection)


async def ask_id(outside: Outside, uri: Uri) -> int | None:
    """Return the replica id of a server; None for one that is not registered."""
    async with await Connection.open(outside, uri) as connection:
        members = [unpack(row) for row in await _select(connection, CLUSTER_ID)]
        uuid = str(connection.greeting.uuid)
        return next((member[0] for member in members if isinstance(member, tuple) and member[1] == uuid), None)


async def ask_facts(outside: Outside, uri: Uri) -> UpstreamFacts:
    """The definitions are at least as new as the ballot's vclock."""
    async with await Connection.open(outside, uri) as connection:
        ballot = await _ballot(connection)
        pairs = [unpack(row) for row in await _select(connection, SCHEMA_ID)]
        found = next(
            (pair[1] for pair in pairs if isinstance(pair, tuple) and len(pair) > 1 and pair[0] in REPLICASET_KEYS),
            None,
        )
        if found is None:
            raise NotBooted(f"{uri.address} is of no replica set yet", hint="wait until it is bootstrapped")
        definitions = [(space, row) for space in (SPACE_ID, INDEX_ID) for row in await _select(connection, space)]
        greeting = connection.greeting
        version = ".".join(map(str, greeting.version))
        return UpstreamFacts(greeting.uuid, version, str(found), ballot, tuple(definitions))


async def _ballot(connection: Connection) -> Ballot:
    response = await connection.answer(connection.send(RequestType.VOTE))
    connection.values(response)  # raises what the server answers instead
    return decode_ballot(response.body, is_2_6=connection.greeting.version <= _LAST_2_6)


async def _select(connection: Connection, space_id: int) -> list[bytes]:
    """All tuples of a system space, page by page."""
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
    """The tuples in the answer to a SELECT, each as it came."""
    try:
        page = msgspec.msgpack.decode(body or b"\x80", type=dict[int, msgspec.Raw]).get(Key.DATA.value)
        tuples = msgspec.msgpack.decode(page, type=list[msgspec.Raw]) if page is not None else []
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"the answer to a SELECT holds no tuples: {error}") from error
    return [bytes(each) for each in tuples]
