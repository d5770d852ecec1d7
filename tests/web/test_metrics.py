"""Metrics of reports: Tarantool's names and labels, for a real server, nodes, and unreachable servers."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from prometheus_client.openmetrics import parser as openmetrics

from flowstone import Node
from flowstone.iproto.uri import parse_uri
from flowstone.node.statistics import Durations
from flowstone.observation.own_report import own_report
from flowstone.observation.query import Asking, ask_all
from flowstone.observation.report import (
    Election,
    Report,
    ReportedConsumer,
    ReportedDownstream,
    ReportedPeer,
    ReportedQueue,
    ReportedUpstream,
    Retention,
    Unreachable,
)
from flowstone.outside import production
from flowstone.web.metrics import Families, add_reports, encode
from tests.node.upstream.test_applier import until
from tests.places import ROOT
from tests.real_tarantool import free_port
from tests.web.exposition import Exposition, checked

SECONDS: Final = 60.0

TARANTOOL_NAMES: Final = {
    "tnt_info_lsn": {"alias"},
    "tnt_info_vclock": {"alias", "id"},
    "tnt_info_uptime": {"alias"},
    "tnt_read_only": {"alias"},
    "tnt_replication_lsn": {"alias", "id", "type"},
    "tnt_replication_lag": {"alias", "id", "stream"},
    "tnt_replication_status": {"alias", "id", "stream"},
    "tnt_synchro_queue_owner": {"alias"},
    "tnt_synchro_queue_term": {"alias"},
    "tnt_synchro_queue_len": {"alias"},
    "tnt_synchro_queue_busy": {"alias"},
    "tnt_election_state": {"alias"},
    "tnt_election_vote": {"alias"},
    "tnt_election_leader": {"alias"},
    "tnt_election_term": {"alias"},
    "tnt_election_leader_idle": {"alias"},
}
"""The replication metrics of `tarantool/metrics`, and their labels besides `alias`, which users add to all."""

OUR_QUEUE: Final = ("tnt_synchro_queue_size", "tnt_synchro_queue_age")
"""In `box.info`, but not exported by `tarantool/metrics`; named in its style."""

NOT_BEFORE_2_6_1: Final = ("tnt_synchro", "tnt_election")

REPORT: Final = Report(
    address="127.0.0.1:3301",
    package="Tarantool",
    version="3.2.0",
    id=1,
    uuid="11111111-1111-4111-8111-111111111111",
    replicaset_uuid="99999999-1111-4111-8111-111111111111",
    status="running",
    ro=False,
    lsn=100,
    vclock={1: 100, 2: 7},
    uptime=60.0,
    replication=(
        ReportedPeer(id=1, uuid="11111111-1111-4111-8111-111111111111", lsn=100),
        ReportedPeer(
            id=2,
            uuid="22222222-1111-4111-8111-111111111111",
            lsn=7,
            upstream=ReportedUpstream(status="follow", lag=0.5, idle=0.1),
            downstream=ReportedDownstream(status="follow", vclock={1: 90, 2: 7}, lag=0.25, idle=0.1),
        ),
        ReportedPeer(id=3, uuid="33333333-1111-4111-8111-111111111111", upstream=ReportedUpstream(status="stopped")),
    ),
    election=Election(state="leader", term=4, leader=1, vote=1, leader_idle=0.0),
    queue=ReportedQueue(
        len=2, owner=1, term=4, busy=True, age=1.5, size=300, confirm_lag=0.01, quorum=2, rollback_count=3
    ),
    gc=Retention(
        vclock={1: 5},
        checkpoints=({1: 5}, {1: 50}),
        consumers=(ReportedConsumer(name="replica 2", vclock={1: 90, 2: 7}, signature=97),),
    ),
)


def shown(*answers: Report | Unreachable) -> Exposition:
    families = Families()
    add_reports(families, answers)
    body, content_type = encode(families, "")
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    return checked(body.decode())


def test_report_metrics_equal_those_of_the_tarantool_module() -> None:
    found = shown(REPORT)
    assert found.value("tnt_info_lsn") == 100
    assert found.value("tnt_info_vclock", id="2") == 7
    assert found.value("tnt_info_uptime") == 60
    assert found.value("tnt_read_only") == 0
    assert found.value("tnt_replication_lag", id="2", stream="upstream") == 0.5
    assert found.value("tnt_replication_lag", id="2", stream="downstream") == 0.25
    assert found.value("tnt_replication_status", id="2", stream="upstream") == 1
    assert found.value("tnt_replication_status", id="3", stream="upstream") == 0
    assert found.value("tnt_replication_lsn", id="2", type="master") == 10
    assert found.value("tnt_election_state") == 2
    assert [found.value(f"tnt_synchro_queue_{name}") for name in "owner term len busy".split()] == [1, 4, 2, 1]
    assert [found.value(f"tnt_synchro_queue_{name}") for name in "size age confirm_lag".split()] == [300, 1.5, 0.01]
    assert found.labels("tnt_replication_lag")[0].keys() == {"alias", "id", "stream"}
    assert "1" not in [labels["id"] for labels in found.labels("tnt_replication_status")], "no instance follows itself"


def test_report_adds_metrics_that_tarantool_lacks() -> None:
    found = shown(REPORT)
    assert found.value("flowstone_replication_lag_rows", id="2", master="1") == 10
    assert found.value("flowstone_synchro_rollbacks_total") == 3
    assert found.value("flowstone_gc_consumer_lag_rows", consumer="replica 2") == 10
    assert found.value("flowstone_status", status="running") == 1
    assert found.value("flowstone_status", status="orphan") == 0
    assert found.value("flowstone_instance_info", version="3.2.0", package="Tarantool") == 1


def test_names_and_labels_equal_those_of_tarantool() -> None:
    found = shown(REPORT)
    for name, labels in TARANTOOL_NAMES.items():
        assert found.families[name].kind == "gauge"
        assert all(given.keys() == labels for given in found.labels(name)), name


def test_replica_exports_its_lsns_as_a_replica() -> None:
    found = shown(Report(**{**{name: getattr(REPORT, name) for name in REPORT.__struct_fields__}, "ro": True}))
    assert found.value("tnt_replication_lsn", id="1", type="replica") == 0
    assert {labels["type"] for labels in found.labels("tnt_replication_lsn")} == {"replica"}


def test_metrics_omit_values_that_a_server_does_not_report() -> None:
    bare = Report(address="a:1", package="Tarantool", version="2.6.0", id=1, uuid="u", status="running", ro=False)
    names = shown(bare).families
    assert not [name for name in names if name.startswith(NOT_BEFORE_2_6_1)]
    assert "tnt_replication_lag" not in names


def test_silent_server_is_down() -> None:
    found = shown(REPORT, Unreachable(address="127.0.0.1:3302", reason="Connection refused"))
    assert found.value("flowstone_server_up", alias="127.0.0.1:3301") == 1
    assert found.value("flowstone_server_up", alias="127.0.0.1:3302") == 0


def test_servers_with_equal_names_are_distinguished_by_address() -> None:
    def named(address: str) -> Report:
        return Report(
            address=address, package="T", version="3", id=1, uuid=address, status="running", ro=False, name="x"
        )

    found = shown(named("a:1"), named("b:1"), named("b:1"))
    assert [labels["alias"] for labels in found.labels("tnt_info_lsn")] == ["x", "b:1"]


def test_text_of_a_server_cannot_break_a_line() -> None:
    evil = 'x"} 1\n# HELP y z\ny 5\\'
    found = shown(Report(address=evil, package=evil, version=evil, id=1, uuid=evil, status=evil, ro=False))
    assert "y" not in found.families


@pytest.mark.parametrize("accept", ["application/openmetrics-text; version=x", "text/plain; version=x", "*/*", ","])
def test_any_accept_header_is_answered(accept: str) -> None:
    families = Families()
    families.gauge("one", "One", 1)
    assert b"one 1.0" in encode(families, accept)[0]


def test_openmetrics_is_sent_when_accepted() -> None:
    families = Families()
    add_reports(families, [REPORT])
    families.histogram("took_seconds", "Took", Durations((0.1, 1.0), (1, 0, 2), 7.5))
    body, content_type = encode(families, "application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    assert body.endswith(b"# EOF\n")
    parsed = openmetrics.text_string_to_metric_families(body.decode())  # type: ignore[no-untyped-call]
    names = {family.name for family in parsed}
    assert {"tnt_info_lsn", "flowstone_synchro_rollbacks", "took_seconds"} <= names


def test_histogram_buckets_are_cumulative() -> None:
    families = Families()
    families.histogram("took_seconds", "Took", Durations((0.1, 1.0), (1, 0, 2), 7.5), mode="x")
    found = checked(encode(families, "")[0].decode())
    assert [found.value("took_seconds_bucket", le=le) for le in ("0.1", "1.0", "+Inf")] == [1, 1, 3]
    assert (found.value("took_seconds_count"), found.value("took_seconds_sum")) == (3, 7.5)


@pytest.mark.real
async def test_real_server_and_its_replica_have_the_metrics_of_tarantool(tarantool: Any, tmp_path: Path) -> None:
    with (
        tarantool.serve(tmp_path / "master") as master,
        tarantool.serve(tmp_path / "replica", cfg=f"replication='{master.uri}'") as replica,
    ):
        servers = [Asking(production(), parse_uri(uri), timeout=SECONDS) for uri in (master.uri, replica.uri)]
        answers = await ask_all(servers)
        for server in servers:
            await server.close()
    found = shown(*answers)
    expected = {name for name in TARANTOOL_NAMES if not name.startswith(NOT_BEFORE_2_6_1)}
    assert expected - {"tnt_replication_lsn"} <= found.families.keys()
    assert found.value("tnt_replication_status", alias=replica.uri, id="1", stream="upstream") == 1
    assert found.value("tnt_replication_status", alias=master.uri, id="2", stream="downstream") == 1
    for name in expected & found.families.keys():
        assert all(given.keys() == TARANTOOL_NAMES[name] for given in found.labels(name)), name


def _has_settled(info: dict[str, Any], leader: int) -> bool:
    """Return True if the node knows the leader, and follows both others, which follow it."""
    peers = [peer for peer in info["replication"].values() if peer["id"] != info["id"]]
    sides = [(peer.get(side) or {}).get("status") for peer in peers for side in ("upstream", "downstream")]
    return bool(info["election"]["leader"] == leader) and sides == ["follow"] * 4


async def test_set_with_elections_has_all_metrics_of_tarantool(tmp_path: Path) -> None:
    ports = [free_port() for _ in range(3)]
    peers = [f"app:secret@127.0.0.1:{port}" for port in ports]
    options = {"replication": peers, "election_mode": "candidate", "user": ("app", "secret")}
    nodes = [Node(tmp_path / str(port), listen=f"127.0.0.1:{port}", **options) for port in ports]  # type: ignore[arg-type]
    await asyncio.gather(*(node.start() for node in nodes))
    try:
        await until(lambda: any(node.info()["election"]["state"] == "leader" for node in nodes), SECONDS)
        leader = next(node for node in nodes if node.info()["election"]["state"] == "leader")
        await leader.wait_rw(SECONDS)
        space = await leader.create_space("orders", is_sync=True)
        await space.create_index("pk")
        for key in range(5):
            await space.insert([key])
        followers = [node for node in nodes if node is not leader]
        await until(lambda: all(node.info()["signature"] == leader.info()["signature"] for node in nodes), SECONDS)
        await until(lambda: all(_has_settled(node.info(), leader.info()["id"]) for node in nodes), SECONDS)
        found = shown(await own_report(leader))
        seen = shown(await own_report(followers[0]))
        names = found.families.keys() | seen.families.keys()
        assert names >= {*TARANTOOL_NAMES, *OUR_QUEUE}
        assert found.value("tnt_election_state") == 2
        assert seen.value("tnt_election_leader") == leader.info()["id"]
        assert (
            sum(found.value("tnt_replication_status", id=str(n.info()["id"]), stream="downstream") for n in followers)
            == 2
        )
        everybody = shown(*[await own_report(node) for node in nodes])
        assert len(everybody.labels("flowstone_replication_lag_rows")) == 6, "all members follow each other"
    finally:
        await asyncio.gather(*(node.stop() for node in nodes))


def test_documentation_lists_exactly_the_existing_metrics() -> None:
    root = ROOT
    text = (root / "docs" / "reference" / "metrics.md").read_text()
    tables = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    documented = set(re.findall(r"`((?:tnt|flowstone)_[a-z_]+)`", tables))
    sources = "".join(path.read_text() for path in (root / "src" / "flowstone" / "web").glob("*metrics.py"))
    written = set(re.findall(r'"((?:tnt|flowstone)_[a-z_]+)"', sources))
    assert documented == written


def test_alert_rules_use_existing_metrics() -> None:
    text = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    rules = text.partition("groups:")[2].partition("```")[0]
    documented = set(re.findall(r"`((?:tnt|flowstone)_[a-z_]+)`", text))
    used = {name.removesuffix("_bucket") for name in re.findall(r"(?:tnt|flowstone)_[a-z_]+", rules)}
    assert used <= documented
    assert len(yaml.safe_load("groups:" + rules)["groups"][0]["rules"]) > 10
