"""A session without a socket: requests as packets, replies decoded."""

from __future__ import annotations

import itertools
from typing import Any

from flowstone.box.dialect import Dialect
from flowstone.iproto import auth
from flowstone.iproto.constants import RequestType
from flowstone.iproto.msgpack import pack
from flowstone.iproto.packet import Response, decode_response, encode_request, split
from flowstone.iproto.requests import decode_request
from flowstone.node.instance import Instance
from flowstone.node.server.procedures_box import built_in
from flowstone.node.server.request_batch import Reply
from flowstone.node.server.session import Session
from flowstone.node.server.streams import OpenTransactions
from flowstone.node.server.watchers import Watchers, sources_of

SALT = bytes(range(32))


class Conversation:
    """One client of an instance. Error replies are raised, as by our client."""

    def __init__(
        self,
        instance: Instance,
        *,
        user: int = 1,
        watchers: Watchers | None = None,
        open_transactions: OpenTransactions | None = None,
    ) -> None:
        self.instance = instance
        self.events: list[Response] = []
        self.watchers = watchers or Watchers(sources_of(instance))
        self.session = Session(
            instance,
            self.watchers,
            built_in(),
            self._hear,
            id=5,
            salt=SALT,
            peer="127.0.0.1:5000",
            open_transactions=open_transactions,
        )
        self.session.user = user
        self._syncs = itertools.count(1)

    def _hear(self, packet: bytes) -> None:
        self.events.append(_decoded(packet))

    async def response(
        self, type: int, body: Any = None, *, stream: int = 0, raw: bytes | None = None
    ) -> Response | None:
        """Return the reply, possibly an error, when it is written; None if there is none."""
        sync = next(self._syncs)
        payload = raw if raw is not None else pack(body if body is not None else {})
        ((packet,), _) = split(encode_request(type, sync, payload, stream_id=stream))
        is_2_6 = self.instance.box.dialect is Dialect.V2_6
        reply = self.session.handle(decode_request(packet, is_2_6=is_2_6))
        if not isinstance(reply, Reply):
            reply = await reply
        if reply.transaction is not None:
            await self.instance.commits.commit(reply.transaction)
        if not reply.packet:
            return None
        response = _decoded(reply.packet)
        assert response.sync == sync
        return response

    async def request(self, type: int, body: Any = None, *, stream: int = 0) -> dict[int, Any]:
        response = await self.response(type, body, stream=stream)
        assert response is not None
        return response.values()

    async def data(self, type: int, body: Any, *, stream: int = 0) -> tuple[Any, ...]:
        result: tuple[Any, ...] = (await self.request(type, body, stream=stream))[0x30]
        return result

    async def call(self, name: str, *arguments: Any, stream: int = 0, type: int = RequestType.CALL) -> tuple[Any, ...]:
        return await self.data(type, {0x22: name, 0x21: arguments}, stream=stream)

    async def replace(self, *fields: Any, space: int = 512, stream: int = 0) -> tuple[Any, ...]:
        return await self.data(RequestType.REPLACE, {0x10: space, 0x21: fields}, stream=stream)

    async def insert(self, *fields: Any, space: int = 512, stream: int = 0) -> tuple[Any, ...]:
        return await self.data(RequestType.INSERT, {0x10: space, 0x21: fields}, stream=stream)

    async def select(self, *key: Any, space: int = 512, stream: int = 0, **body: Any) -> tuple[Any, ...]:
        fields = {0x10: space, 0x12: 1000, 0x20: key, 0x14: 0 if key else 2}
        return await self.data(RequestType.SELECT, fields, stream=stream)

    async def log_in(self, user: str, password: str) -> None:
        proof = ("chap-sha1", auth.scramble(password, SALT))
        await self.request(RequestType.AUTH, {0x23: user, 0x21: proof})


def _decoded(packet: bytes) -> Response:
    ((content,), _) = split(packet)
    return decode_response(content)
