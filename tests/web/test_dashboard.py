"""The dashboard's application: its page, its JSON, and its answers to invalid requests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from flowstone.iproto.uri import parse_uri
from flowstone.observation.survey import Survey
from flowstone.outside import production
from flowstone.web.dashboard import LIMIT_MAX, TEXT_LENGTH_MAX, dashboard
from flowstone.web.feed import Feed
from flowstone.web.server import WebServer
from tests.node.upstream_server import Upstream
from tests.web.http_client import get, listen


@pytest.fixture
async def web(tmp_path: Path) -> AsyncIterator[WebServer]:
    """Yield the dashboard of one node."""
    upstream, outside = Upstream(tmp_path / "node", dialect="2.11"), production()
    await upstream.start()
    feed = Feed(outside, Survey(outside, [parse_uri(upstream.uri)]))
    await feed.start()
    try:
        async with WebServer(dashboard(feed), "127.0.0.1:0") as server:
            yield server
    finally:
        await feed.stop()
        await upstream.stop()


async def test_dashboard_serves_only_the_page_and_its_files(web: WebServer) -> None:
    page = await get(web, "/")
    assert page.status == 200
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for name, kind in {"dashboard.css": "text/css", "dashboard.js": "text/javascript"}.items():
        file = await get(web, f"/assets/{name}")
        assert (file.status, file.headers["content-type"].split(";")[0]) == (200, kind)
    for path in ("/assets/../feed.py", "/assets/%2e%2e%2ffeed.py", "/assets/feed.py", "/feed.py", "/assets/", "/api"):
        assert (await get(web, path)).status == 404, path


async def test_state_contains_all_data_of_the_page(web: WebServer) -> None:
    state = (await get(web, "/api/state")).json()
    assert list(state) == ["now", "version", "sets", "findings", "pipeline"]
    assert list(state["sets"][0]) == [
        "uuid",
        "name",
        "label",
        "term",
        "leader",
        "vclock",
        "queue",
        "members",
        "links",
        "rows_per_second",
        "waiting",
        "tail",
        "elections",
    ]
    assert list(state["sets"][0]["tail"]) == ["status", "from", "message", "rows_per_second", "seen"]
    assert state["sets"][0]["members"][0]["mode"] == "rw"
    assert "secret" not in str(state)


async def test_events_begin_with_the_state(web: WebServer) -> None:
    events = await listen(web)
    assert (await events.next())["sets"][0]["members"]
    events.close()


async def test_history_is_stored_per_set(web: WebServer) -> None:
    uuid = (await get(web, "/api/state")).json()["sets"][0]["uuid"]
    points = (await get(web, f"/api/history?set={uuid}")).json()["points"]
    assert list(points[0]) == ["at", "links", "rows"]
    assert (await get(web, "/api/history?set=another")).status == 400


@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        f"limit={LIMIT_MAX + 1}",
        "limit=-1",
        "limit=x",
        "limit=%D9%A1",
        "replica=x",
        "replica=99999999999",
        "limit=1&limit=2",
        "colour=red",
        f"text={'x' * (TEXT_LENGTH_MAX + 1)}",
    ],
)
async def test_invalid_parameter_is_rejected_with_one_line(web: WebServer, query: str) -> None:
    answer = await get(web, f"/api/transactions?{query}")
    assert answer.status == 400
    assert answer.headers["content-type"].startswith("text/plain")
    assert answer.body.count(b"\n") == 1
    assert b"<" not in answer.body


async def test_empty_parameters_select_everything(web: WebServer) -> None:
    answer = (await get(web, "/api/transactions?set=&space=&type=&replica=&text=&limit=")).json()
    assert list(answer) == ["transactions", "kept", "seen"]
