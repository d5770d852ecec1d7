"""What every request passes before an application sees it: who asks, by what name, by which method, how much.

An ASGI middleware without knowledge of what it guards. A page that a browser has open elsewhere must not read what is
served here: on loopback the Host header has to be one that no such page can bring (an address, `localhost`, or a name
that was given), everywhere else a token has to be shown, which no such page has. Answers of the application get the
headers that keep a browser from doing more than this server meant.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Collection, Iterable
from typing import Final
from urllib.parse import parse_qsl, quote, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flowstone.web.token_failures import TokenFailures

METHODS: Final = ("GET", "HEAD")

POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""All that a page of ours may do: no other origin, nothing inline."""

SECURITY_HEADERS: Final = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}

TOKEN_FAILURES: Final = "token_failures"
"""Key in the state of an ASGI scope: number of wrong tokens that this server has received, for metrics."""

_UNAUTHORIZED: Final = 401

COOKIE: Final = "flowstone"
"""With the port behind it: browsers do not keep the cookies of one host's ports apart."""


class Guard:
    """`application`, for those who may ask.

    `token`: what has to be shown, as `Authorization: Bearer`, or once as `?token=`, which becomes a cookie. Without one
    the Host header must be an address, `localhost` or among `hosts`. `open_paths` need no token: probes have none.
    """

    def __init__(
        self,
        application: ASGIApp,
        *,
        token: str | None = None,
        hosts: Iterable[str] = (),
        open_paths: Collection[str] = (),
    ) -> None:
        self._application = application
        self._token = token
        self._hosts = frozenset(host.lower() for host in hosts)
        self._open_paths = frozenset(open_paths)
        self._failures = TokenFailures()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        answer = _with_headers(send)
        headers = Headers(scope=scope)
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            if refusal.status_code == _UNAUTHORIZED and _shows_token(scope, headers):
                client = scope.get("client")
                if not await self._failures.failed(client[0] if client else "", scope["path"]):
                    refusal = PlainTextResponse("too many wrong tokens\n", 429, {"retry-after": "1"})
            await refusal(scope, receive, answer)
            return
        scope.setdefault("state", {})[TOKEN_FAILURES] = self._failures.count
        await self._application(scope, receive, answer)

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        """What is answered in the application's place; None: it may answer."""
        if scope["method"] not in METHODS:
            return PlainTextResponse("read-only: GET and HEAD\n", 405, {"allow": ", ".join(METHODS)})
        if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
            return PlainTextResponse("a request here has no body\n", 413, {"connection": "close"})
        if self._token is None:
            return None if self._is_known(headers.get("host", "")) else _wrong_host()
        if scope["path"] in self._open_paths:
            return None
        return self._unless_token(scope, headers, self._token)

    def _unless_token(self, scope: Scope, headers: Headers, token: str) -> Response | None:
        kind, _, shown = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and _is_equal(shown.strip(), token):
            return None
        name = _cookie_name(scope)
        if _is_equal(_cookie(headers, name), token):
            return None
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        if any(key == "token" and _is_equal(value, token) for key, value in query):
            return _exchange(scope["path"], [pair for pair in query if pair[0] != "token"], name, token)
        text = "a token is needed: open the address that was printed at the start, or send Authorization: Bearer …\n"
        return PlainTextResponse(text, _UNAUTHORIZED, {"www-authenticate": 'Bearer realm="flowstone"'})

    def _is_known(self, host: str) -> bool:
        """A page of another site comes by that site's name, whatever that name resolves to: an address is none."""
        name = _name_of(host)
        if name == "localhost" or name in self._hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _with_headers(send: Send) -> Send:
    async def answer(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in SECURITY_HEADERS.items():
                headers.setdefault(name, value)
            headers.setdefault("cache-control", "no-store")
        await send(message)

    return answer


def _name_of(host: str) -> str:
    """The name in a Host header, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0].lower() if host.rpartition(":")[2].isdecimal() and ":" in host else host.lower()


def _wrong_host() -> Response:
    text = (
        "this name is not served here: use the address or localhost. Any name is served where a token is asked for "
        "(FLOWSTONE_HTTP_TOKEN), and by flowstone serve those in its http_hosts\n"
    )
    return PlainTextResponse(text, 421)


def _exchange(path: str, query: list[tuple[str, str]], cookie: str, token: str) -> Response:
    """Back to the same place without the token in it: addresses are kept in histories, logs and bookmarks."""
    # One slash in front, and nothing that a browser takes for another: `//host` would be another host.
    place = "/" + quote(path.lstrip("/\\"), safe="/")
    answer = RedirectResponse(f"{place}?{urlencode(query)}" if query else place, 303)
    answer.set_cookie(cookie, token, httponly=True, samesite="strict", path="/")
    return answer


def _shows_token(scope: Scope, headers: Headers) -> bool:
    """Return True if a request has a token, right or wrong."""
    query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    return bool(
        headers.get("authorization") or _cookie(headers, _cookie_name(scope)) or any(key == "token" for key, _ in query)
    )


def _cookie_name(scope: Scope) -> str:
    server = scope.get("server")
    return f"{COOKIE}-{server[1]}" if server else COOKIE


def _cookie(headers: Headers, name: str) -> str:
    """Other applications on this host have cookies that no standard allows, such as JSON: those are passed by."""
    return cookie_parser(headers.get("cookie", "")).get(name, "")


def _is_equal(shown: str, token: str) -> bool:
    return hmac.compare_digest(shown.encode(), token.encode())
