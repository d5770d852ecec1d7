"""Access to an application, and the security headers of its answers."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import Message

from flowstone.web.guard import POLICY, SECURITY_HEADERS, Guard

TOKEN: Final = "a token of sixteen and more"


async def _show(request: Request) -> PlainTextResponse:
    return PlainTextResponse(f"secret {request.url.path}?{request.url.query}")


APPLICATION: Final = Starlette(
    routes=[Route("/health/live", _show), Route("/{path:path}", _show, methods=["GET", "POST"])]
)


class Answer:
    """Return status, headers and body of one answer."""

    def __init__(self, messages: list[Message]) -> None:
        self.status: int = messages[0]["status"]
        self.headers = {name.decode(): value.decode() for name, value in messages[0]["headers"]}
        self.body = b"".join(message.get("body", b"") for message in messages[1:]).decode()


def ask(guard: Guard, path: str = "/", method: str = "GET", **headers: str) -> Answer:
    """Send one request; headers are spelled with underscores, and Host defaults to an address."""
    place, _, query = path.partition("?")
    given = {"host": "127.0.0.1:8081"} | {name.replace("_", "-"): value for name, value in headers.items()}
    scope: dict[str, Any] = {
        "type": "http",
        "method": method,
        "path": place,
        "raw_path": place.encode(),
        "root_path": "",
        "query_string": query.encode(),
        "scheme": "http",
        "server": ("127.0.0.1", 8081),
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
    }
    messages: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(message: Message) -> None:
        messages.append(message)

    asyncio.run(guard(scope, receive, send))
    return Answer(messages)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:8081", "localhost:8081", "LOCALHOST", "[::1]:8081", "[::1]", "10.1.2.3:80"]
)
def test_loopback_addresses_and_localhost_are_served(host: str) -> None:
    assert ask(Guard(APPLICATION), host=host).status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8081", "localhost.evil.example", "127.0.0.1.nip.io", ""]
)
def test_host_name_that_could_be_rebound_is_rejected(host: str) -> None:
    answer = ask(Guard(APPLICATION, hosts=["board.example"]), host=host)
    assert answer.status == 421
    assert "secret" not in answer.body


def test_configured_host_name_is_served() -> None:
    assert ask(Guard(APPLICATION, hosts=["Board.example"]), host="board.EXAMPLE:443").status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT"])
def test_only_read_requests_are_allowed(method: str) -> None:
    answer = ask(Guard(APPLICATION), method=method)
    assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("headers", [{"content_length": "5"}, {"transfer_encoding": "chunked"}])
def test_request_with_a_body_is_rejected(headers: dict[str, str]) -> None:
    assert ask(Guard(APPLICATION), **headers).status == 413


def test_every_answer_has_security_headers() -> None:
    for answer in (ask(Guard(APPLICATION)), ask(Guard(APPLICATION), method="POST"), ask(Guard(APPLICATION), host="x")):
        assert {name: answer.headers[name] for name in SECURITY_HEADERS} == SECURITY_HEADERS
        assert answer.headers["cache-control"] == "no-store"
    assert "unsafe" not in POLICY
    assert "default-src 'none'" in POLICY


def test_pages_require_the_token() -> None:
    guard = Guard(APPLICATION, token=TOKEN)
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {TOKEN}"}, {"cookie": "x=y"}):
        answer = ask(guard, **headers)
        assert answer.status == 401
        assert answer.headers["www-authenticate"].startswith("Bearer")
        assert "secret" not in answer.body
        assert TOKEN not in answer.body
    assert ask(guard, "/?token=wrong").status == 401


def test_token_is_accepted_as_a_bearer() -> None:
    assert ask(Guard(APPLICATION, token=TOKEN), authorization=f"bearer {TOKEN}").status == 200


def test_any_host_name_is_served_with_a_token() -> None:
    """A page after DNS rebinding has no cookie for its name, and no token."""
    assert ask(Guard(APPLICATION, token=TOKEN), host="db1:8081", authorization=f"Bearer {TOKEN}").status == 200


def test_token_in_the_address_becomes_a_cookie() -> None:
    guard = Guard(APPLICATION, token=TOKEN)
    moved = ask(guard, f"/api/state?set=1&token={TOKEN.replace(' ', '+')}&space=a%26b")
    assert (moved.status, moved.headers["location"]) == (303, "/api/state?set=1&space=a%26b")
    cookie = moved.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    answer = ask(guard, "/api/state", cookie=cookie.partition(";")[0])
    assert (answer.status, answer.body) == (200, "secret /api/state?")


@pytest.mark.parametrize("path", ["//evil.example/", "/\\evil.example/", "///evil.example"])
def test_token_exchange_redirects_to_no_other_host(path: str) -> None:
    moved = ask(Guard(APPLICATION, token=TOKEN), f"{path}?token={TOKEN.replace(' ', '+')}")
    assert moved.status == 303
    assert moved.headers["location"].startswith("/evil.example")


def test_malformed_cookie_is_not_an_error() -> None:
    assert ask(Guard(APPLICATION, token=TOKEN), cookie="\x7f=;;[").status == 401


def test_cookies_of_other_applications_on_the_host_are_ignored() -> None:
    guard = Guard(APPLICATION, token=TOKEN)
    ours = ask(guard, f"/?token={TOKEN.replace(' ', '+')}").headers["set-cookie"].partition(";")[0]
    for theirs in ('prefs={"a":1}', 'prefs={"a": [1, 2]}', "plain", "=", '"'):
        assert ask(guard, cookie=f"{theirs}; {ours}; {theirs}").status == 200, theirs


def test_open_paths_need_no_token() -> None:
    guard = Guard(APPLICATION, token=TOKEN, open_paths=["/health/live"])
    assert ask(guard, "/health/live").status == 200
    assert ask(guard, "/health/live/").status == 401
    assert ask(guard, "/health/live", "POST").status == 405
