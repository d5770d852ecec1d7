"""A client's connection to the real server and to misbehaving peers."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from flowstone.client.connection import Connection, ConnectionFailed
from flowstone.errors import RemoteProtocolError
from flowstone.iproto.constants import Feature, Key, RequestType
from flowstone.iproto.errors import CredsMismatch, NoSuchUser, UnknownRequestType
from flowstone.iproto.greeting import GreetingError
from flowstone.iproto.msgpack import pack
from flowstone.iproto.uri import parse_uri
from flowstone.outside import production
from tests.node.fake_server import OK, Streaming, answering, greeting, peer
from tests.real_tarantool import Server, free_port

USER = "box.schema.user.create('bob', {password='se:cr@et'})"


@pytest.fixture(scope="module")
def server(tarantool: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with tarantool.serve(tmp_path_factory.mktemp("server"), setup=USER) as running:
        yield running


def eval_body(expression: str, *arguments: object) -> bytes:
    return pack({Key.EXPR.value: expression, Key.TUPLE.value: arguments})


async def connect(uri: str, *, timeout: float = 10) -> Connection:
    return await Connection.open(production(), parse_uri(uri), timeout=timeout)


@pytest.mark.real
async def test_real_server_is_connected_and_answers(server: Server) -> None:
    async with await connect(server.uri) as connection:
        assert connection.greeting.version >= (2, 6, 0)
        assert await connection.request(RequestType.PING) == {}
        answer = await connection.request(RequestType.EVAL, eval_body("return ..., 'b'", 1))
        assert answer == {Key.DATA: (1, "b")}


@pytest.mark.real
async def test_answers_are_matched_to_requests_in_any_order(server: Server) -> None:
    slow = "local c = require('fiber').channel() box.session.storage.c = c return c:get(20)"
    async with await connect(server.uri) as connection:
        first = connection.send(RequestType.EVAL, eval_body(slow))
        pings = [connection.send(RequestType.PING) for _ in range(50)]
        for ping in pings:
            await connection.answer(ping)
        assert not first.done()
        await connection.request(RequestType.EVAL, eval_body("box.session.storage.c:put('late')"))
        assert (await connection.answer(first)).values() == {Key.DATA: ("late",)}


@pytest.mark.real
async def test_connection_is_usable_after_an_error_answer(server: Server) -> None:
    async with await connect(server.uri) as connection:
        with pytest.raises(UnknownRequestType):
            await connection.request(RequestType.VY_INDEX_RUN_INFO)
        assert await connection.request(RequestType.PING) == {}


@pytest.mark.real
async def test_correct_password_logs_in_the_user(server: Server) -> None:
    async with await connect(f"bob:se:cr@et@{server.uri}") as connection:
        body = eval_body("return box.session.user()")
        with pytest.raises(Exception, match="bob"):  # the user has no privileges, and the error contains the name
            await connection.request(RequestType.EVAL, body)


@pytest.mark.real
async def test_wrong_password_is_rejected_and_not_shown(server: Server) -> None:
    with pytest.raises(CredsMismatch) as caught:
        await connect(f"bob:wrong-hidden@{server.uri}")
    assert "hidden" not in str(caught.value)


@pytest.mark.real
async def test_unknown_user_is_rejected(server: Server) -> None:
    with pytest.raises((NoSuchUser, CredsMismatch)):
        await connect(f"nobody:x@{server.uri}")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_connection_refused_is_one_error(host: str) -> None:
    uri = f"bob:hidden@{host}:{free_port()}"
    with pytest.raises(ConnectionFailed, match=rf"^cannot connect to {host}:\d+: connection refused$") as caught:
        await connect(uri)
    assert "hidden" not in str(caught.value)


async def test_missing_unix_socket_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ConnectionFailed, match=r"cannot connect to unix/:.*: No such file"):
        await connect(f"unix/:{tmp_path}/none")


async def test_silent_peer_times_out() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with peer(talk) as uri:
        with pytest.raises(ConnectionFailed, match=r"no answer within 0\.05 s; the server may require TLS"):
            await connect(uri, timeout=0.05)


async def test_error_mentions_tls_if_the_peer_closes_at_once() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pass

    async with peer(talk) as uri:
        with pytest.raises(GreetingError, match=r"without a greeting; check host and port; the server may require TLS"):
            await connect(uri)


async def test_error_names_a_peer_without_tls() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting())
        await reader.read()

    async with peer(talk) as uri:
        with pytest.raises(ConnectionFailed, match="server does not use TLS"):
            await connect(f"{uri}?transport=ssl")


@pytest.mark.parametrize("said", [b"HTTP/1.1 400 Bad Request\r\n".ljust(128), b"short"])
async def test_peer_that_is_not_tarantool_is_rejected(said: bytes) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        await writer.drain()

    async with peer(talk) as uri:
        with pytest.raises(GreetingError):
            await connect(uri)


@pytest.mark.parametrize("garbage", [b"\xc1", b"\xce\xff\xff\xff\xff", b"\x05\x82\x00\x00\x01\x63", b"\x01\xc0"])
async def test_invalid_packet_fails_every_pending_request(garbage: bytes) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting())
        await reader.read(1)
        writer.write(garbage)
        await reader.read()

    async with peer(talk) as uri, await connect(uri) as connection:
        waiting = [connection.send(RequestType.PING) for _ in range(3)]
        for one in waiting:
            with pytest.raises(RemoteProtocolError, match="sent an invalid packet"):
                await connection.answer(one)
        with pytest.raises(RemoteProtocolError):
            await connection.request(RequestType.PING)


async def test_malformed_answer_closes_the_connection() -> None:
    async with peer(answering(lambda row: (0, b"\x81\xc1"), (2, 6, 0))) as uri, await connect(uri) as connection:
        with pytest.raises(RemoteProtocolError, match="sent an invalid response"):
            await connection.request(RequestType.PING)
        with pytest.raises(RemoteProtocolError, match="sent an invalid response"):
            await connection.request(RequestType.PING)


async def test_lost_connection_fails_every_pending_request() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting())
        await reader.read(1)

    async with peer(talk) as uri, await connect(uri) as connection:
        waiting = [connection.send(RequestType.PING) for _ in range(3)]
        for one in waiting:
            with pytest.raises(ConnectionFailed):
                await connection.answer(one)


async def test_request_sent_on_a_lost_connection_without_await_logs_nothing() -> None:
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["message"]))
    async with peer(answering(lambda row: (0, b"\x80"), (2, 6, 0))) as uri, await connect(uri) as connection:
        await connection.close()
        connection.send(RequestType.PING)
        gc.collect()
    assert not complaints


async def test_request_without_an_answer_closes_the_connection() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting())
        await reader.read()

    async with peer(talk) as uri, await connect(uri) as connection:
        with pytest.raises(ConnectionFailed, match="did not answer"):
            await connection.request(RequestType.PING, timeout=0.05)
        with pytest.raises(ConnectionFailed, match="did not answer"):
            await connection.request(RequestType.PING)


async def test_features_are_requested_from_servers_that_have_them() -> None:
    async with peer(answering(Streaming(), (2, 11, 9))) as uri, await connect(uri) as connection:
        assert connection.has(Feature.STREAMS, Feature.TRANSACTIONS)
        assert not connection.has(Feature.INSERT_ARROW)


async def test_no_login_is_sent_to_an_unexpected_instance() -> None:
    seen = []

    def answer(row: Any) -> tuple[int, bytes]:
        seen.append(row.type)
        return OK

    there, meant = (str(UUID(int=number)) for number in (1, 2))
    async with peer(answering(answer, (2, 11, 9))) as address:
        uri = parse_uri(f"bob:hidden@{address}")
        told = f"^another instance answers at this address: {there}; expected {meant}$"
        with pytest.raises(ConnectionFailed, match=told):
            await Connection.open(production(), uri, instance=meant)
        assert seen == []
        async with await Connection.open(production(), uri, instance=there):
            assert seen == [RequestType.ID, RequestType.AUTH]


async def test_id_request_is_not_sent_to_servers_without_it() -> None:
    seen = []

    def answer(row: Any) -> tuple[int, bytes]:
        seen.append(row.type)
        return OK

    async with peer(answering(answer, (2, 8, 4))) as uri, await connect(uri) as connection:
        await connection.request(RequestType.PING)
        assert connection.features == ()
    assert seen == [RequestType.PING]
