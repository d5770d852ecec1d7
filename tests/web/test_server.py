"""The HTTP server: its address, its limits, and its end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from typing import Final

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from flowstone.errors import CannotListen
from flowstone.web import server
from flowstone.web.address import TokenNeeded, new_token
from flowstone.web.server import WebServer

SECONDS: Final = 30.0


async def _hello(request: Request) -> PlainTextResponse:
    return PlainTextResponse("hello")


async def _endless(request: Request) -> StreamingResponse:
    async def events() -> AsyncIterator[str]:
        yield "data: 1\n\n"
        await asyncio.Event().wait()

    return StreamingResponse(events(), media_type="text/event-stream")


APPLICATION: Final = Starlette(routes=[Route("/", _hello), Route("/endless", _endless)])


async def send(web: WebServer, request: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = web.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    writer.write(request)
    return reader, writer


async def ask(web: WebServer, request: bytes) -> bytes:
    """Return all bytes until the connection ends."""
    reader, writer = await send(web, request)
    async with asyncio.timeout(SECONDS):
        answer = await reader.read()
    writer.close()
    return answer


def get(path: str = "/") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode()


async def test_server_answers_at_the_chosen_port() -> None:
    async with WebServer(APPLICATION, "127.0.0.1:0") as web:
        assert web.url == f"http://{web.address}/"
        assert not web.address.endswith(":0")
        answer = await ask(web, get())
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert answer.endswith(b"hello")
    assert b"content-security-policy" in answer
    assert b"\r\nserver:" not in answer


async def test_server_installs_no_signal_handlers() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    async with WebServer(APPLICATION, "127.0.0.1:0"):
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


async def test_server_logs_nothing_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    async with WebServer(APPLICATION, "127.0.0.1:0") as web:
        await ask(web, get())
        await ask(web, b"no HTTP at all\r\n\r\n")
    assert capfd.readouterr() == ("", "")


async def test_server_stops_in_time_with_an_open_event_stream() -> None:
    async with WebServer(APPLICATION, "127.0.0.1:0") as web:
        reader, writer = await send(web, get("/endless"))
        await reader.readuntil(b"data: 1")
        async with asyncio.timeout(server.STOP_SECONDS + 2):
            await web.stop()
        async with asyncio.timeout(SECONDS):
            await reader.read()  # the connection has ended
        writer.close()


async def test_error_names_an_address_in_use() -> None:
    async with WebServer(APPLICATION, "127.0.0.1:0") as web:
        with pytest.raises(CannotListen, match=f"cannot serve HTTP at {web.address}: Address already in use"):
            await WebServer(APPLICATION, web.address).start()


async def test_server_can_be_stopped_before_its_start() -> None:
    await WebServer(APPLICATION, "127.0.0.1:0").stop()


async def test_long_headers_are_rejected() -> None:
    async with WebServer(APPLICATION, "127.0.0.1:0") as web:
        answer = await ask(web, b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"x" * 2 * server.HEADER_SIZE_MAX)
    assert answer.startswith(b"HTTP/1.1 400")


async def test_client_with_an_incomplete_request_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REQUEST_SECONDS", 0.1)
    async with WebServer(APPLICATION, "127.0.0.1:0") as web:
        assert await ask(web, b"") == b""
        assert await ask(web, b"GET / HTTP/1.1\r\nHost: ") == b""
        answer = await ask(web, b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET / HTTP/1.1\r\n")
        assert answer.count(b"hello") == 1


async def test_full_server_closes_unfinished_requests_and_answers_new_ones() -> None:
    """300 half-open requests made every probe fail for 30 s."""
    async with WebServer(APPLICATION, "127.0.0.1:0") as web:
        stream, streaming = await send(web, get("/endless"))
        await stream.readuntil(b"data: 1")
        half_open = [await send(web, b"GET / HTTP/1.1\r\nHost: ") for _ in range(300)]
        for _ in range(3):
            assert (await ask(web, get())).startswith(b"HTTP/1.1 200")
        assert len(web._server.server_state.connections) <= server.CONNECTIONS_MAX + 1
        assert await half_open[0][0].read() == b""
        assert not stream.at_eof()
        for _, writer in [*half_open, (stream, streaming)]:
            writer.close()


async def test_full_server_closes_a_connection_of_the_address_with_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "CONNECTIONS_MAX", 3)
    async with WebServer(APPLICATION, "127.0.0.1:0") as web:
        port = int(web.address.rpartition(":")[2])
        lonely, lonely_writer = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
        crowd = [await send(web, b"") for _ in range(8)]
        lonely_writer.write(get())
        async with asyncio.timeout(SECONDS):
            assert (await lonely.read()).startswith(b"HTTP/1.1 200")
            assert await crowd[0][0].read() == b""
        for _, writer in [*crowd, (lonely, lonely_writer)]:
            writer.close()


async def test_full_server_closes_the_oldest_stream_if_all_connections_are_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "CONNECTIONS_MAX", 2)
    async with WebServer(APPLICATION, "127.0.0.1:0") as web:
        streams = []
        for _ in range(2):
            streams.append(await send(web, get("/endless")))
            await streams[-1][0].readuntil(b"data: 1")
        assert (await ask(web, get())).startswith(b"HTTP/1.1 200")
        for _, writer in streams:
            writer.close()


async def test_token_is_required_for_other_addresses_than_loopback() -> None:
    with pytest.raises(TokenNeeded, match=r"0\.0\.0\.0:8081 is reachable from other machines; set a token"):
        WebServer(APPLICATION, "*:8081")
    async with WebServer(APPLICATION, "0.0.0.0:0", token=new_token()) as web:
        assert (await ask(web, get())).startswith(b"HTTP/1.1 401")


def test_weak_token_is_rejected_and_not_shown() -> None:
    with pytest.raises(TokenNeeded) as refused:
        WebServer(APPLICATION, "127.0.0.1:0", token="hunter2")
    assert "hunter2" not in str(refused.value)
