"""`/metrics`, `/health`, `/health/live` and `/health/ready` of whatever can tell about itself, beside an application.

The two probes say nothing but yes and no, so they need no token; reasons are for those who may read the metrics.
"""

from __future__ import annotations

from typing import Final, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp

from flowstone.web.health import Health
from flowstone.web.metrics import Families, encode

PROBES: Final = ("/health/live", "/health/ready")
"""What may be asked without a token."""

_OK, _UNAVAILABLE = 200, 503
_INDEX: Final = "/metrics\n/health\n/health/live\n/health/ready\n"


class Monitored(Protocol):
    """A process that can tell about itself."""

    async def metrics(self) -> Families: ...

    async def health(self) -> Health: ...


def monitoring(monitored: Monitored, application: ASGIApp | None = None) -> Starlette:
    """An application that tells how `monitored` is; `application`, where there is one, answers all else."""

    async def metrics(request: Request) -> Response:
        body, content_type = encode(await monitored.metrics(), request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def health(request: Request) -> Response:
        found = await monitored.health()
        shown = {"status": "ok" if found.is_well else "unwell", "state": found.state, "reasons": found.reasons}
        status = _OK if found.is_well else _UNAVAILABLE
        return Response(msgspec.json.encode(shown) + b"\n", status, media_type="application/json")

    async def live(request: Request) -> Response:
        return PlainTextResponse("live\n")

    async def ready(request: Request) -> Response:
        is_ready = (await monitored.health()).is_ready
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
