"""`/metrics` and `/health` over HTTP: content types, status codes, and public paths."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import Message

from flowstone.web.address import new_token
from flowstone.web.health import Health
from flowstone.web.metrics import Families
from flowstone.web.monitoring import PROBES, monitoring
from flowstone.web.server import WebServer
from tests.web.exposition import checked
from tests.web.http_client import get


@dataclass
class OnDone:
    """A health check that returns the configured state."""

    found: Health = field(default_factory=lambda: Health(state="running", is_ready=True))

    async def metrics(self) -> Families:
        families = Families()
        families.gauge("tnt_info_lsn", "Tarantool lsn", 5, alias="a")
        return families

    async def health(self) -> Health:
        return self.found


async def test_metrics_are_served_as_prometheus_text() -> None:
    async with WebServer(monitoring(OnDone()), "127.0.0.1:0") as web:
        answer = await get(web, "/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert checked(answer.body.decode()).value("tnt_info_lsn", alias="a") == 5


class Counted(OnDone):
    """A health check that counts its queries."""

    asked = 0

    async def metrics(self) -> Families:
        self.asked += 1
        await asyncio.sleep(0)
        return await super().metrics()

    async def health(self) -> Health:
        self.asked += 1
        await asyncio.sleep(0)
        return await super().health()


@pytest.mark.parametrize("path", ["/metrics", "/health", "/health/ready"])
async def test_concurrent_requests_are_answered_together(path: str) -> None:
    """Otherwise a few hundred requests would block the event loop, and with it probes and the node, for seconds."""
    counted = Counted()
    application = monitoring(counted)
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "headers": [], "query_string": b"", "root_path": ""}
    await asyncio.gather(*(application(dict(scope), receive, send) for _ in range(100)))
    assert [message["status"] for message in sent if message["type"] == "http.response.start"] == [200] * 100
    assert counted.asked <= 3


async def test_monitoring_never_replies_with_an_older_result() -> None:
    told = OnDone()
    async with WebServer(monitoring(told), "127.0.0.1:0") as web:
        for is_ready in (True, False, True):
            told.found = Health(state="running", is_ready=is_ready)
            assert (await get(web, "/health/ready")).status == (200 if is_ready else 503)


async def test_healthy_process_answers_200_at_every_endpoint() -> None:
    async with WebServer(monitoring(OnDone()), "127.0.0.1:0") as web:
        assert (await get(web, "/health")).json() == {"status": "ok", "state": "running", "reasons": []}
        assert [(await get(web, path)).status for path in PROBES] == [200, 200]


async def test_health_lists_reasons_and_a_probe_gets_only_the_status() -> None:
    told = OnDone(Health(state="running", is_ready=True, reasons=("no leader in term 7",)))
    async with WebServer(monitoring(told), "127.0.0.1:0") as web:
        answer = await get(web, "/health")
        assert (answer.status, msgspec.json.decode(answer.body)["reasons"]) == (503, ["no leader in term 7"])
        assert [(await get(web, path)).status for path in PROBES] == [200, 200]
        told.found = Health(state="orphan", is_ready=False, reasons=("orphan",))
        assert [(await get(web, path)).status for path in PROBES] == [200, 503]


async def test_probes_need_no_token_and_return_only_the_status() -> None:
    async with WebServer(monitoring(OnDone()), "127.0.0.1:0", token=new_token(), open_paths=PROBES) as web:
        assert [(await get(web, path)).status for path in PROBES] == [200, 200]
        assert [(await get(web, path)).status for path in ("/metrics", "/health", "/")] == [401, 401, 401]


async def test_other_paths_are_answered_by_the_application() -> None:
    async def hello(request: Request) -> PlainTextResponse:
        return PlainTextResponse("hello")

    page = Starlette(routes=[Route("/", hello), Route("/api/state", hello)])
    async with WebServer(monitoring(OnDone(), page), "127.0.0.1:0") as web:
        assert [(await get(web, path)).body for path in ("/", "/api/state")] == [b"hello", b"hello"]
        assert (await get(web, "/metrics")).status == 200
        assert (await get(web, "/nothing")).status == 404


async def test_usage_is_shown_without_a_token() -> None:
    async with WebServer(monitoring(OnDone()), "127.0.0.1:0") as web:
        assert (await get(web, "/")).body.split() == [b"/metrics", b"/health", b"/health/live", b"/health/ready"]


async def test_wrong_tokens_are_counted() -> None:
    token = new_token()
    async with WebServer(monitoring(OnDone()), "127.0.0.1:0", token=token) as web:
        for _ in range(3):
            assert (await get(web, "/metrics?token=wrong")).status == 401
        assert (await get(web, "/metrics")).status == 401
        answer = await get(web, "/metrics", authorization=f"Bearer {token}")
    assert checked(answer.body.decode()).value("flowstone_http_token_failures_total") == 3
