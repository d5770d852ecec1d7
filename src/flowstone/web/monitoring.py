"""The endpoints `/metrics`, `/health`, `/health/live` and `/health/ready`, optionally in front of an application.

The two probes answer only yes or no, so they require no token. `/health`, which lists reasons, requires one, like
`/metrics`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, Generic, Protocol, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp

from flowstone.web.guard import TOKEN_FAILURES
from flowstone.web.health import Health
from flowstone.web.metrics import OPEN_METRICS, Families, accepted, add_token_failures, encode

PROBES: Final = ("/health/live", "/health/ready")
"""Paths that require no token."""

_OK, _UNAVAILABLE = 200, 503
_INDEX: Final = "/metrics\n/health\n/health/live\n/health/ready\n"


class Monitored(Protocol):
    """A process that reports its metrics and health."""

    async def metrics(self) -> Families: ...

    async def health(self) -> Health: ...


T = TypeVar("T")


class _Shared(Generic[T]):
    """Shares one computation among concurrent requests, so that many requests cannot starve the rest of the loop.

    No caller gets a result whose computation began before the call.
    """

    def __init__(self, compute: Callable[[], Awaitable[T]]) -> None:
        self._compute = compute
        self._next: asyncio.Future[T] | None = None
        self._one_at_a_time = asyncio.Lock()

    async def get(self) -> T:
        if self._next is None:
            self._next = asyncio.ensure_future(self._run())
        return await asyncio.shield(self._next)

    async def _run(self) -> T:
        async with self._one_at_a_time:
            self._next = None  # later callers wait for the next computation
            return await self._compute()


def monitoring(monitored: Monitored, application: ASGIApp | None = None) -> Starlette:
    """Return an application that serves the metrics and health of `monitored`, and `application` at all other paths."""

    token_failures: int | None = None

    async def encoded(accept: str) -> tuple[bytes, str]:
        families = await monitored.metrics()
        add_token_failures(families, token_failures)
        return encode(families, accept)

    shared_metrics = {accept: _Shared(partial(encoded, accept)) for accept in ("", OPEN_METRICS)}
    shared_health = _Shared(monitored.health)

    async def metrics(request: Request) -> Response:
        nonlocal token_failures
        token_failures = getattr(request.state, TOKEN_FAILURES, None)
        body, content_type = await shared_metrics[accepted(request.headers.get("accept", ""))].get()
        return Response(body, headers={"content-type": content_type})

    async def health(request: Request) -> Response:
        found = await shared_health.get()
        shown = {"status": "ok" if found.is_well else "unwell", "state": found.state, "reasons": found.reasons}
        status = _OK if found.is_well else _UNAVAILABLE
        return Response(msgspec.json.encode(shown) + b"\n", status, media_type="application/json")

    async def live(request: Request) -> Response:
        return PlainTextResponse("live\n")

    async def ready(request: Request) -> Response:
        is_ready = (await shared_health.get()).is_ready
        return PlainTextResponse("ready\n" if is_ready else "not ready\n", _OK if is_ready else _UNAVAILABLE)

    async def index(request: Request) -> Response:
        return PlainTextResponse(_INDEX)

    routes: list[BaseRoute] = [
        Route("/metrics", metrics),
        Route("/health", health),
        Route("/health/live", live),
        Route("/health/ready", ready),
    ]
    routes.append(Route("/", index) if application is None else Mount("/", application))
    return Starlette(routes=routes)
