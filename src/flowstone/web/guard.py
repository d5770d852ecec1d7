"""Access control in front of every application: checks method, body, Host header and token of each request.

An ASGI middleware that knows nothing about the application. It keeps pages of other sites, open in the same browser,
from reading this server: without a token the Host header must be one that such a page cannot send (an IP address,
`localhost`, or a configured name); otherwise a token is required, which such a page does not have. Responses get
headers that restrict what a browser may do with them.
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
"""Content security policy of our pages: no other origins, nothing inline."""

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
"""Key in the state of an ASGI scope: the number of wrong tokens that this server has received, for metrics."""

_UNAUTHORIZED: Final = 401

COOKIE: Final = "flowstone"
"""Cookie name, to which the port is appended: browsers share cookies among all ports of a host."""


class Guard:
    """Passes permitted requests to `application` and rejects all others.

    If `token` is set, a request must send it as `Authorization: Bearer`, or once as `?token=`, which is exchanged for a
    cookie. Without `token`, the Host header must be an IP address, `localhost` or one of `hosts`. `open_paths` require
    no token: probes have none.
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
        """Return the response that rejects the request; None if the request is permitted."""
        if scope["method"] not in METHODS:
            text = "method not allowed: this server is read-only, use GET or HEAD\n"
            return PlainTextResponse(text, 405, {"allow": ", ".join(METHODS)})
        if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
            return PlainTextResponse("request body not allowed\n", 413, {"connection": "close"})
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
        text = "token required: open the URL that was printed at startup, or send Authorization: Bearer …\n"
        return PlainTextResponse(text, _UNAUTHORIZED, {"www-authenticate": 'Bearer realm="flowstone"'})

    def _is_known(self, host: str) -> bool:
        """Return True if a page of another site cannot send this Host header.

        Such a page sends its own host name, even if that name resolves to this machine; it never sends an IP address.
        """
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
    """Return the host name in a Host header, without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0].lower() if host.rpartition(":")[2].isdecimal() and ":" in host else host.lower()


def _wrong_host() -> Response:
    text = (
        "unknown host name: use the IP address or localhost, set a token (FLOWSTONE_HTTP_TOKEN) to accept any name, "
        "or add the name to http_hosts of flowstone serve\n"
    )
    return PlainTextResponse(text, 421)


def _exchange(path: str, query: list[tuple[str, str]], cookie: str, token: str) -> Response:
    """Set the cookie and redirect to the same URL without the token: URLs end up in histories, logs and bookmarks."""
    # Exactly one leading slash: browsers treat `//host` and `/\host` as another host.
    place = "/" + quote(path.lstrip("/\\"), safe="/")
    answer = RedirectResponse(f"{place}?{urlencode(query)}" if query else place, 303)
    answer.set_cookie(cookie, token, httponly=True, samesite="strict", path="/")
    return answer


def _shows_token(scope: Scope, headers: Headers) -> bool:
    """Return True if the request has a token, right or wrong."""
    query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    return bool(
        headers.get("authorization") or _cookie(headers, _cookie_name(scope)) or any(key == "token" for key, _ in query)
    )


def _cookie_name(scope: Scope) -> str:
    server = scope.get("server")
    return f"{COOKIE}-{server[1]}" if server else COOKIE


def _cookie(headers: Headers, name: str) -> str:
    """Return a cookie, or "" if there is none. Skips malformed cookies (JSON, for example) of other applications."""
    return cookie_parser(headers.get("cookie", "")).get(name, "")


def _is_equal(shown: str, token: str) -> bool:
    return hmac.compare_digest(shown.encode(), token.encode())
