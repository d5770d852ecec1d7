"""Gives every HTTP request an id, which its answer and its line in the log have, and an answer where there is none.

A client that has an id of its own, as proxies do, keeps it, if it looks like one. Addresses are logged without what
follows their `?`: a token may be there.
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
"""Lines about rejected requests (4xx) that are allowed at once, and the seconds until one more is allowed: any client
can cause them, with or without a token."""


class RequestLog:
    """`application`, with ids."""

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
                raise  # half an answer is none: the connection has to end
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
