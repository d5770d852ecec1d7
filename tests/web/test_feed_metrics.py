"""Metrics of a dashboard: every watched server, its tails, and lakes."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from flowstone.iproto.uri import parse_uri
from flowstone.observation.survey import Survey
from flowstone.outside import production
from flowstone.spark.lake import Lake, LakeProgress
from flowstone.web.dashboard import dashboard
from flowstone.web.feed import Feed
from flowstone.web.server import WebServer
from tests.node.upstream_server import Upstream
from tests.real_tarantool import free_port
from tests.spark.lake_rows_given import ORDERS, UUID, at
from tests.web.http_client import get


async def test_servers_tails_tables_and_findings_are_exported(tmp_path: Path) -> None:
    lake = Lake.open(str(tmp_path / "lake"), engine="deltalake")
    lake.create(ORDERS, UUID, at(5))
    lake.save(LakeProgress(UUID, at(5), stamp=1))
    upstream, outside, silent = Upstream(tmp_path / "node", dialect="2.11"), production(), f"127.0.0.1:{free_port()}"
    await upstream.start()
    feed = Feed(outside, Survey(outside, [parse_uri(upstream.uri), parse_uri(silent)]), lakes=[lake.path])
    await feed.start()
    try:
        async with WebServer(dashboard(feed), "127.0.0.1:0") as web:
            text = (await get(web, "/metrics")).body.decode()
            health = (await get(web, "/health")).json()
    finally:
        await feed.stop()
        await upstream.stop()
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["flowstone_server_up", ("alias", upstream.address)] == 1
    assert samples["flowstone_server_up", ("alias", silent)] == 0
    assert samples["flowstone_findings", ("severity", "stopped")] >= 1
    assert samples["flowstone_lake_table_rows", ("lake", lake.path), ("table", "orders")] == 0
    assert samples["flowstone_dashboard_listeners",] == 0
    assert any(name == "flowstone_tail_following" for name, *_ in samples)
    assert "secret" not in text
    assert health["status"] == "ok"
