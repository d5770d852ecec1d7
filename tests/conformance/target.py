"""A server under test: runs a case and returns the replies.

Uses only IPROTO, and does not distinguish the real server from a node. After each case the system spaces are restored
row by row.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

from flowstone.iproto.auth import hash_of_hash
from flowstone.iproto.msgpack import pack, unpack
from tests.conformance.case import (
    ADMIN,
    ALL,
    SPACE,
    Case,
    Request,
    create_index,
    create_space,
    delete,
    insert,
    replace,
    select,
    update,
)
from tests.conformance.reply import CLOSED, Reply, read_reply
from tests.conformance.wire import Client, ConnectionClosed, Raw
from tests.served_node import PASSWORD as FIRST_PASSWORD
from tests.served_node import USER as FIRST_USER

PASSWORDS = {ADMIN: "administrator's", FIRST_USER: FIRST_PASSWORD, "alice": "wonderland", "bob": ""}
"""Those of the super user that a server was started with, who lets `admin` in, and of users that a case may create."""

RESTORED = (340, 312, 288, 330, 280, 285, 284, 296, 304, 276, 272, 320)
"""System spaces in an order in which their rows can go: what refers before what is referred to."""

KEY_FIELDS = {312: (1, 2, 3), 288: (0, 1)}
"""Their primary keys, where that is not the first field."""


def password_hash(user: str) -> str:
    return base64.b64encode(hash_of_hash(PASSWORDS[user])).decode()


class Target:
    """One running server, listening on `port` of loopback, whose first user is `FIRST_USER`."""

    def __init__(self, name: str, port: int) -> None:
        self.name = name
        self.port = port
        first = self._connect(FIRST_USER)
        self._must(update([1], ["=", 4, {"chap-sha1": password_hash(ADMIN)}], space=304), first)
        first.close()
        self._admin = self._connect(ADMIN)
        self._uuids = [str(self._admin.greeting.uuid).encode(), self._cluster_uuid()]
        self._baseline = {space: self._rows(space) for space in RESTORED}

    def close(self) -> None:
        self._admin.close()

    def run(self, case: Case) -> list[Reply]:
        """Return the replies to the requests of the case, then the content of each of its spaces by each index."""
        with self._prepared(case) as clients:
            return [self._answer(request, clients) for request in (*case.requests, *_contents(case))]

    def run_in_batches(self, case: Case, copies: int) -> list[Reply]:
        """As `run`, with each request sent several times in one write."""
        with self._prepared(case) as clients:
            replies = []
            for request in case.requests:
                packets = self._client(request.user, clients).batch(request.type, request.body, copies)
                replies += [self._comparable(read_reply(packet), request) for packet in packets]
            return replies + [self._answer(request, clients) for request in _contents(case)]

    @contextmanager
    def _prepared(self, case: Case) -> Iterator[dict[str, Client]]:
        """Create the spaces of the case, and yield its connections by user; restore the server afterwards."""
        clients: dict[str, Client] = {}
        try:
            for request in (*_set_up(case), *case.before):
                self._must(request, self._admin)
            yield clients
        finally:
            for client in clients.values():
                client.close()
            self._restore()

    def _connect(self, user: str) -> Client:
        client = Client(self.port)
        if user != "guest":
            reply = read_reply(client.authenticate(user, PASSWORDS[user]))
            if reply.code:
                raise AssertionError(f"{self.name} does not let {user} in: {reply}")
        return client

    def _client(self, user: str, clients: dict[str, Client]) -> Client:
        if user not in clients:
            clients[user] = self._connect(user)
        return clients[user]

    def _answer(self, request: Request, clients: dict[str, Client]) -> Reply:
        try:
            return self._comparable(read_reply(_send(self._client(request.user, clients), request)), request)
        except ConnectionClosed:
            clients.pop(request.user).close()
            return CLOSED

    def _comparable(self, reply: Reply, request: Request) -> Reply:
        """Return the reply without UUIDs, which differ between servers, and sorted if it has no order."""
        if reply.data is None:
            return reply
        data = list(reply.data)
        for number, uuid in enumerate(self._uuids):
            data = [item.replace(uuid, f"{number}".rjust(36).encode()) for item in data]
        return dataclasses.replace(reply, data=tuple(sorted(data) if request.unordered else data))

    def _must(self, request: Request, client: Client) -> Reply:
        reply = read_reply(_send(client, request))
        if reply.code:
            raise AssertionError(f"{self.name} cannot prepare with {request}: {reply}")
        return reply

    def _cluster_uuid(self) -> bytes:
        reply = self._must(select(["cluster"], space=272), self._admin)
        assert reply.data is not None
        uuid: str = unpack(reply.data[0])[1]
        return uuid.encode()

    def _rows(self, space: int) -> dict[bytes, bytes]:
        """Return the tuples of a system space by their encoded primary keys."""
        reply = self._must(select([], ALL, space=space), self._admin)
        fields = KEY_FIELDS.get(space, (0,))
        rows = {}
        for row in reply.data or ():
            values = unpack(row)
            rows[pack([values[field] for field in fields])] = row
        return rows

    def _restore(self) -> None:
        for space, before in self._baseline.items():
            now = self._rows(space)
            for key in reversed(now):
                if key not in before:
                    self._must(delete(Raw(key), space=space), self._admin)
            for key, row in before.items():
                if now.get(key) != row:
                    self._must(replace(Raw(row), space=space), self._admin)


def _set_up(case: Case) -> Iterator[Request]:
    for id, space in enumerate(case.spaces, SPACE):
        flags = dict(space.flags)
        count, format = space.field_count, space.format
        yield create_space(id, space.name, engine=space.engine, field_count=count, flags=flags, format=format)
        for number, index in enumerate(space.indexes):
            name, options = index.name or f"i{number}", dict(index.options)
            yield create_index(index.parts, id=number, space=id, name=name, type=index.type, options=options)
        for item in space.tuples:
            yield insert(item, space=id)


def _contents(case: Case) -> Iterator[Request]:
    """Return requests for all tuples of the spaces after the case. A space that the case dropped is an error on both
    servers.
    """
    for id, space in enumerate(case.spaces, SPACE):
        for number, index in enumerate(space.indexes):
            if index.type in ("tree", "hash"):
                yield select([], ALL, space=id, index=number, unordered=index.type == "hash")


def _send(client: Client, request: Request) -> bytes:
    if request.data is not None:
        return client.exchange_bytes(request.data)
    if request.payload is not None:
        return client.exchange(request.payload)
    if request.schema_version is not None:
        return client.request(request.type, request.body, schema_version=request.schema_version)
    return client.request(request.type, request.body)
