"""Asks a peer whether this instance is still a member, on a client connection of its own.

A master registers any instance that joins. So an instance that wants to replace its old data queries `_cluster` first:
if the instance was expelled while it was stopped, only an operator may let it join again. The ballots of 2.6 do not
list the members, and the right to read everything, which JOIN needs, includes `_cluster`.
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

from flowstone.box.system import CLUSTER_ID
from flowstone.client.connection import CONNECT_SECONDS, Connection, ConnectionFailed
from flowstone.errors import RemoteProtocolError
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import pack
from flowstone.iproto.uri import Uri
from flowstone.outside import Outside
from flowstone.replication.applier.states import ConnectionLost

_UUID_INDEX: Final = 1


async def is_registered(outside: Outside, uri: Uri, peer_uuid: UUID, uuid: UUID) -> bool:
    """Return True if `_cluster` of the peer lists the instance `uuid`, under any id.

    Raise ConnectionLost if the peer does not answer or another instance does, and the error of the peer if it rejects
    the login or the request.
    """
    keys = {Key.SPACE_ID: CLUSTER_ID, Key.INDEX_ID: _UUID_INDEX, Key.LIMIT: 1, Key.KEY: (str(uuid),)}
    body = pack({key.value: value for key, value in keys.items()})
    try:
        async with await Connection.open(outside, uri, instance=str(peer_uuid)) as connection:
            answer = await connection.request(RequestType.SELECT, body, timeout=CONNECT_SECONDS)
    except ConnectionFailed as error:
        raise ConnectionLost(error.message, hint=error.hint) from error
    rows = answer.get(Key.DATA)
    if not isinstance(rows, tuple):
        raise RemoteProtocolError(f"{uri.address} sent an invalid response: tuples are not an array")
    return len(rows) > 0
