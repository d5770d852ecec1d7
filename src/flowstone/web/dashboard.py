"""The dashboard as an ASGI application: the page, its assets, and the JSON feed; all read-only.

Queries are bounded and checked: an unknown, repeated, too long or invalid parameter gets status 400 and one line that
says why. Access control is in `guard.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from flowstone.errors import FlowstoneError
from flowstone.web.feed import Feed, TransactionFilter
from flowstone.web.feed_metrics import FeedMonitored
from flowstone.web.feed_state import to_json
from flowstone.web.monitoring import monitoring

TEXT_LENGTH_MAX: Final = 200
"""Maximum length of a parameter's value, in characters."""

LIMIT_MAX: Final = 500
"""Maximum number of transactions in one answer."""

_KINDS: Final = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml", "html": "text/html"}
_NUMBER: Final = re.compile(r"\d{1,9}", re.ASCII)
_PARAMETERS: Final = ("set", "space", "type", "replica", "text", "limit")


class BadParameter(FlowstoneError):
    """A query parameter is invalid."""


def dashboard(feed: Feed) -> Starlette:
    """Return the dashboard with `/metrics` and `/health`. The caller starts and stops `feed`."""
    return monitoring(FeedMonitored(feed), page(feed))


def page(feed: Feed) -> Starlette:
    """Return the page and its feed alone, for a process that serves `/metrics` and `/health` itself."""
    assets = _page_files()

    async def index(request: Request) -> Response:
        return _file(assets["index.html"])

    async def asset(request: Request) -> Response:
        found = assets.get(request.path_params["name"])
        return _file(found) if found is not None else PlainTextResponse("no such file\n", 404)

    async def state(request: Request) -> Response:
        _query(request, ())
        return _json(feed.state())

    async def history(request: Request) -> Response:
        uuid = _query(request, ("set",)).get("set")
        if uuid is not None and not feed.watches(uuid):
            raise BadParameter("unknown replica set")
        return _json(feed.history(uuid))

    async def transactions(request: Request) -> Response:
        return _json(await feed.transactions(_wanted(_query(request, _PARAMETERS))))

    return Starlette(
        routes=[
            Route("/", index),
            Route("/assets/{name}", asset),
            Route("/api/state", state),
            Route("/api/history", history),
            Route("/api/transactions", transactions),
            Route("/api/events", _Events(feed)),
        ],
        exception_handlers={BadParameter: _refuse},
    )


class _Events:
    """The event stream as an ASGI application: Starlette treats a function as an endpoint that returns one response."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._feed.events.handle(scope, receive, send)


def _page_files() -> dict[str, tuple[bytes, str]]:
    """Read the page and its assets; return their content and media type by file name."""
    found: dict[str, tuple[bytes, str]] = {}
    for file in files("flowstone.web").joinpath("page").iterdir():
        kind = _KINDS.get(file.name.rpartition(".")[2])
        if kind is not None:
            found[file.name] = file.read_bytes(), kind
    return found


def _file(file: tuple[bytes, str]) -> Response:
    content, kind = file
    return Response(content, media_type=kind, headers={"cache-control": "no-cache"})


def _json(value: object) -> Response:
    return Response(to_json(value), media_type="application/json")


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, BadParameter)
    return PlainTextResponse(f"{error.message}\n", 400)


def _query(request: Request, allowed: tuple[str, ...]) -> Mapping[str, str]:
    """Return the parameters that have a value; raise BadParameter for a parameter that is not allowed."""
    found: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name not in allowed:
            # The name is not repeated: the answer contains no text of the client.
            raise BadParameter(f"unknown parameter; allowed: {', '.join(allowed) or 'none'}")
        if name in found:
            raise BadParameter(f"{name} is given more than once")
        if len(value) > TEXT_LENGTH_MAX:
            raise BadParameter(f"{name} is longer than {TEXT_LENGTH_MAX} characters")
        found[name] = value
    return {name: value for name, value in found.items() if value}


def _wanted(query: Mapping[str, str]) -> TransactionFilter:
    limit = _number(query, "limit")
    if limit is not None and not 1 <= limit <= LIMIT_MAX:
        raise BadParameter(f"limit must be a number from 1 to {LIMIT_MAX}")
    return TransactionFilter(
        set=query.get("set"),
        space=query.get("space"),
        type=query.get("type"),
        replica=_number(query, "replica"),
        text=query.get("text"),
        limit=limit or TransactionFilter.limit,
    )


def _number(query: Mapping[str, str], name: str) -> int | None:
    text = query.get(name)
    if text is None:
        return None
    if not _NUMBER.fullmatch(text):
        raise BadParameter(f"{name} must be a number")
    return int(text)
