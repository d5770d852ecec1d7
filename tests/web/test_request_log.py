"""Ids of HTTP requests: their origin, their use in answers and logs, and secrets that logs omit."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Final

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from flowstone.web.request_log import HEADER
from flowstone.web.server import WebServer
from tests.web.test_server import ask


async def _hello(request: Request) -> PlainTextResponse:
    return PlainTextResponse("hello")


async def _fail(request: Request) -> PlainTextResponse:
    raise RuntimeError("a bug")


async def _fail_later(request: Request) -> StreamingResponse:
    async def body() -> AsyncIterator[str]:
        yield "half"
        raise RuntimeError("a later bug")

    return StreamingResponse(body())


APPLICATION: Final = Starlette(
    routes=[Route("/", _hello), Route("/fail", _fail), Route("/later", _fail_later)],
)


async def answered(path: str, *headers: str) -> tuple[str, dict[str, str]]:
    """Return status line and headers of the answer."""
    lines = [f"GET {path} HTTP/1.1", "Host: 127.0.0.1", "Connection: close", *headers, "", ""]
    async with WebServer(APPLICATION, "127.0.0.1:0") as web:
        head = (await ask(web, "\r\n".join(lines).encode())).partition(b"\r\n\r\n")[0].decode()
    first, *rest = head.split("\r\n")
    return first, dict(line.split(": ", 1) for line in rest)


async def test_every_answer_has_an_id() -> None:
    ids = [(await answered("/"))[1][HEADER] for _ in range(2)]
    assert ids[0] != ids[1]
    assert all(len(each) == 16 for each in ids)
    assert HEADER in (await answered("/nowhere"))[1]


async def test_request_id_of_a_client_is_kept() -> None:
    assert (await answered("/", "X-Request-Id: proxy-1:2.a"))[1][HEADER] == "proxy-1:2.a"


@pytest.mark.parametrize("given", ["x" * 65, "a b", "<script>", 'x"y', ""])
async def test_invalid_request_id_is_replaced(given: str) -> None:
    assert (await answered("/", f"X-Request-Id: {given}"))[1][HEADER] != given


async def test_failure_is_logged_with_its_id_and_answered(caplog: pytest.LogCaptureFixture) -> None:
    status, headers = await answered("/fail?token=secret", "X-Request-Id: r1")
    assert status == "HTTP/1.1 500 Internal Server Error"
    assert headers[HEADER] == "r1"
    record = next(record for record in caplog.records if record.levelno == logging.ERROR)
    assert (record.getMessage(), record.request_id) == ("GET '/fail' failed", "r1")  # type: ignore[attr-defined]
    assert "secret" not in caplog.text


async def test_a_failure_in_the_middle_of_an_answer_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    await answered("/later", "X-Request-Id: r2")
    assert "a later bug" in caplog.text


async def test_requests_are_logged_without_secrets(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "flowstone.web"):
        await answered("/%0Aforged?token=secret", "X-Request-Id: r3")
    [record] = [record for record in caplog.records if record.name == "flowstone.web"]
    peer = record.peer  # type: ignore[attr-defined]
    assert record.getMessage() == f"GET '/\\nforged' from {peer}: 404"
    assert record.levelno == logging.INFO
    assert record.request_id == "r3"  # type: ignore[attr-defined]
    assert peer.startswith("127.0.0.1:")


async def test_lines_about_requests_without_a_token_are_limited(caplog: pytest.LogCaptureFixture) -> None:
    request = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    with caplog.at_level(logging.INFO, "flowstone.web"):
        async with WebServer(APPLICATION, "127.0.0.1:0", token="x" * 20) as web:
            for _ in range(50):
                await ask(web, request)
    assert 10 <= sum("401" in record.getMessage() for record in caplog.records) < 50


async def test_lines_about_rejected_requests_are_limited(caplog: pytest.LogCaptureFixture) -> None:
    request = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    with caplog.at_level(logging.INFO, "flowstone.web"):
        async with WebServer(APPLICATION, "127.0.0.1:0", token="x" * 20) as web:
            for _ in range(50):
                await ask(web, request)
    assert 10 <= sum("405" in record.getMessage() for record in caplog.records) < 50
