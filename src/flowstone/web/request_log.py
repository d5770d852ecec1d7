"""Request ids and the request log: a middleware that also answers status 500 if the application fails.

Every request has an id, in its response and in its log line. An id that the client sends, as proxies do, is used if it
is well-formed. Paths are logged without the query string, which may contain a token.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flowstone.rate_limit import RateLimit

LOG = logging.getLogger("flowstone.web")

HEADER: Final = "x-request-id"
_SANE: Final = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_FAILED, _REFUSED = 500, 400
_REFUSALS_BURST: Final = 10
_REFUSAL_SECONDS: Final = 1.0
"""Rate limit for log lines about rejected requests (4xx): the burst, and the seconds until one more line is allowed.
Any client can cause them, with or without a token."""


class RequestLog:
    """Wraps `application` and logs its requests."""

    def __init__(self, application: ASGIApp) -> None:
        self._application = application
        self._refusals = RateLimit(_REFUSALS_BURST, _REFUSAL_SECONDS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        given = Headers(scope=scope).get(HEADER, "")
        request_id = given if _SANE.fullmatch(given) else secrets.token_hex(8)
        begun, status = time.monotonic(), 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        try:
            await self._application(scope, receive, answer)
        except Exception:
            LOG.exception("%s %r failed", scope["method"], scope["path"], extra={"request_id": request_id})
            if status:
                raise  # the response has begun and cannot be replaced: the server must close the connection
            await PlainTextResponse("internal error\n", _FAILED)(scope, receive, answer)
            return
        now = time.monotonic()
        is_told = status >= _FAILED or (status >= _REFUSED and self._refusals.take(now) is not None)
        level = logging.INFO if is_told else logging.DEBUG
        peer = _peer(scope)
        more = {"request_id": request_id, "peer": peer, "seconds": round(now - begun, 6)}
        LOG.log(level, "%s %r from %s: %d", scope["method"], scope["path"], peer, status, extra=more)


def _peer(scope: Scope) -> str:
    client = scope.get("client")
    return f"{client[0]}:{client[1]}" if client else "unknown"
