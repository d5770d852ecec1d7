"""`/metrics` and `/health` over HTTP: content types, status codes, and what needs no token."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from flowstone.web.address import new_token
from flowstone.web.health import Health
from flowstone.web.metrics import Families
from flowstone.web.monitoring import PROBES, monitoring
from flowstone.web.server import WebServer
from tests.web.exposition import checked
from tests.web.http_client import get


@dataclass
class Told:
    """Says what it was told to say."""

    found: Health = field(default_factory=lambda: Health(state="running", is_ready=True))

    async def metrics(self) -> Families:
        families = Families()
        families.gauge("tnt_info_lsn", "Tarantool lsn", 5, alias="a")
        return families

    async def health(self) -> Health:
        return self.found


async def test_metrics_are_prometheus_text() -> None:
    async with WebServer(monitoring(Told()), "127.0.0.1:0") as web:
        answer = await get(web, "/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert checked(answer.body.decode()).value("tnt_info_lsn", alias="a") == 5


async def test_who_is_well_is_200_everywhere() -> None:
    async with WebServer(monitoring(Told()), "127.0.0.1:0") as web:
        assert (await get(web, "/health")).json() == {"status": "ok", "state": "running", "reasons": []}
        assert [(await get(web, path)).status for path in PROBES] == [200, 200]


async def test_reasons_are_told_and_a_probe_hears_only_whether_it_is_ready() -> None:
    told = Told(Health(state="running", is_ready=True, reasons=("no leader in term 7",)))
    async with WebServer(monitoring(told), "127.0.0.1:0") as web:
        answer = await get(web, "/health")
        assert (answer.status, msgspec.json.decode(answer.body)["reasons"]) == (503, ["no leader in term 7"])
        assert [(await get(web, path)).status for path in PROBES] == [200, 200]
        told.found = Health(state="orphan", is_ready=False, reasons=("orphan",))
        assert [(await get(web, path)).status for path in PROBES] == [200, 503]


async def test_probes_need_no_token_and_say_little() -> None:
    async with WebServer(monitoring(Told()), "127.0.0.1:0", token=new_token(), open_paths=PROBES) as web:
        assert [(await get(web, path)).status for path in PROBES] == [200, 200]
        assert [(await get(web, path)).status for path in ("/metrics", "/health", "/")] == [401, 401, 401]


async def test_an_application_answers_all_else() -> None:
    async def hello(request: Request) -> PlainTextResponse:
        return PlainTextResponse("hello")

    page = Starlette(routes=[Route("/", hello), Route("/api/state", hello)])
    async with WebServer(monitoring(Told(), page), "127.0.0.1:0") as web:
        assert [(await get(web, path)).body for path in ("/", "/api/state")] == [b"hello", b"hello"]
        assert (await get(web, "/metrics")).status == 200
        assert (await get(web, "/nothing")).status == 404


async def test_without_one_the_way_is_shown() -> None:
    async with WebServer(monitoring(Told()), "127.0.0.1:0") as web:
        assert (await get(web, "/")).body.split() == [b"/metrics", b"/health", b"/health/live", b"/health/ready"]
