"""Real servers and nodes are queried; a failure to answer is an answer, too."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

import flowstone
from flowstone.iproto.constants import Key
from flowstone.iproto.errors import Loading, NoSuchProc
from flowstone.iproto.greeting import decode_greeting
from flowstone.iproto.msgpack import pack, unpack
from flowstone.iproto.row import Row
from flowstone.iproto.uri import parse_uri
from flowstone.observation.explanation import explain
from flowstone.observation.findings.finding import Kind
from flowstone.observation.query import DISK_USAGE, Asking, ask_all
from flowstone.observation.replica_set import replica_sets
from flowstone.observation.report import Report, ReportedDisk, Unreachable
from flowstone.outside import production
from tests.interop.cluster import Cluster
from tests.interop.member import REPLICATOR, SECONDS, Member, eventually
from tests.interop.versions import fits
from tests.node.fake_server import answering, greeting, peer, refusal
from tests.node.hanging_disk import HangingDisk
from tests.real_tarantool import free_port
from tests.simulation.simulation import Simulation, simulated

GREETS = str(decode_greeting(greeting()).uuid)
"""UUID that every server of `fake_server` greets with."""


def asking(member: Member, *, login: str = "") -> Asking:
    return asking_at(f"{login}{member.address}")


def asking_at(uri: str) -> Asking:
    """Query with a long timeout: a busy machine may answer slowly."""
    return Asking(production(), parse_uri(uri), timeout=SECONDS)


async def once(server: Asking) -> Report | Unreachable:
    (answer,) = await all_once(server)
    return answer


async def all_once(*servers: Asking) -> list[Report | Unreachable]:
    try:
        return await ask_all(servers)
    finally:
        for server in servers:
            await server.close()


@fits("2.6")
async def test_real_server_reports_everything_its_version_has(cluster: Cluster) -> None:
    member = cluster.real("a", wal_mode="fsync")
    report = await once(asking(member))
    assert isinstance(report, Report)
    assert (report.address, report.uuid, report.id) == (member.address, member.uuid, 1)
    assert (report.package, report.version[:4], report.status, report.ro) == ("Tarantool", "2.6.", "running", False)
    assert report.vclock == member.vclock()
    assert (report.election, report.queue) == (None, None)
    assert report.gc is not None
    assert (len(report.gc.checkpoints), report.gc.consumers) == (1, ())
    assert report.cfg is not None
    assert report.cfg["wal_mode"] == "fsync"


def _has_followers(master: Member, replica: Member) -> bool:
    """Return the replica, and an anonymous one."""
    is_followed = master.downstream(replica).get("status") == "follow" and replica.upstream(master)
    return bool(is_followed and master.info()["replication_anon"]["count"] == 1)


@fits("2.6")
async def test_master_reports_its_replicas_including_an_anonymous_one(cluster: Cluster) -> None:
    master = cluster.real("master")
    replica = cluster.ours("replica", replication=[master.uri])
    anonymous = cluster.real("anonymous", replication=[master.uri], replication_anon=True, read_only=True)
    eventually("all follow", lambda: _has_followers(master, replica))
    told, own, nameless = await all_once(*map(asking, (master, replica, anonymous)))
    assert isinstance(told, Report)
    assert isinstance(own, Report)
    assert isinstance(nameless, Report)
    assert [peer.uuid for peer in told.replication] == [master.uuid, replica.uuid]
    assert [peer.uuid for peer in told.anonymous] == [anonymous.uuid]
    assert own.replication[0].upstream is not None
    assert own.replication[0].upstream.peer == f"{REPLICATOR[0]}@{master.address}"
    assert told.gc is not None
    assert [consumer.replica_uuid for consumer in told.gc.consumers] == [replica.uuid]
    assert (nameless.id, nameless.why_read_only) == (0, "config")


@simulated(seeds=range(2))
async def test_a_node_shows_elections_and_queue_in_dialect_2_11_only(sim: Simulation) -> None:
    newer = await sim.start("newer", election_mode="manual")
    await sim.on("newer", newer.promote())
    await sim.start("older", dialect="2.6")
    found, without = await all_once(*(Asking(sim.outside, parse_uri(sim.uri(name))) for name in ("newer", "older")))
    assert isinstance(found, Report)
    assert found.is_flowstone
    assert found.election is not None
    assert (found.election.state, found.election.leader) == ("leader", 1)
    assert found.queue is not None
    assert (found.queue.owner, found.queue.len, found.queue.quorum) == (1, 0, 1)
    assert found.cfg is not None
    assert found.cfg["election_mode"] == "manual"
    assert isinstance(without, Report)
    assert (without.election, without.queue) == (None, None)


@fits("2.6")
async def test_error_for_missing_rights_names_the_right(cluster: Cluster) -> None:
    for member in (cluster.real("real"), cluster.ours("ours")):
        found = await once(asking(member, login="replicator:secret@"))
        assert isinstance(found, Unreachable)
        assert found.is_denied
        assert "denied" in found.reason
        assert found.hint is not None
        assert "box.schema.user.grant('replicator', 'execute', 'function', 'box.info')" in found.hint


async def test_hint_without_credentials_asks_for_a_user_and_no_guest_rights(tmp_path: Path) -> None:
    async with flowstone.Node(tmp_path, listen="127.0.0.1:0") as node:
        found = await once(asking_at(str(node.address)))
    assert isinstance(found, Unreachable)
    assert "denied for user 'guest'" in found.reason
    assert found.hint is not None
    assert found.hint.startswith("no user was given: set TT_CLI_USERNAME and TT_CLI_PASSWORD, or")


@fits("2.6")
async def test_query_with_box_info_only_reports_what_it_shows(cluster: Cluster) -> None:
    for member in (cluster.real("real"), cluster.ours("ours")):
        member.call("box.schema.user.create", "viewer", {"password": "secret"})
        for _ in range(2):
            member.call("box.schema.func.create", "box.info", {"if_not_exists": True})
        member.call("box.schema.user.grant", "viewer", "execute", "function", "box.info")
        report = await once(asking(member, login="viewer:secret@"))
        assert isinstance(report, Report)
        assert report.vclock == member.vclock()
        assert (report.gc, report.anonymous, report.cfg) == (None, (), None)


@pytest.mark.parametrize("body", [{}, {Key.DATA: 5}, {Key.DATA: ()}, {Key.DATA: ("x",)}, {Key.DATA: ((1, 2),)}])
async def test_query_rejects_a_server_with_unexpected_answers(body: dict[int, Any]) -> None:
    async with peer(answering(lambda request: (0, pack(body)), (2, 6, 0))) as address:
        found = await once(asking_at(address))
    assert isinstance(found, Unreachable)
    assert found.reason == f"unexpected answer from {address}: box.info is not a table"


@fits("2.6")
@pytest.mark.parametrize("login", ["nobody:secret@", "replicator:wrong@"])
async def test_wrong_login_is_reported_without_the_password(cluster: Cluster, login: str) -> None:
    for member in (cluster.real("real"), cluster.ours("ours")):
        found = await once(asking(member, login=login))
        assert isinstance(found, Unreachable)
        assert found.is_denied
        assert found.hint == "check user and password in the URI"
        assert "wrong" not in repr(found)
        assert "secret" not in repr(found)


async def test_refused_connection_is_reported() -> None:
    port = free_port()
    found = await once(asking_at(f"127.0.0.1:{port}"))
    reason = f"cannot connect to 127.0.0.1:{port}: connection refused"
    assert found == Unreachable(address=f"127.0.0.1:{port}", reason=reason)


async def test_query_times_out_when_the_server_stays_silent() -> None:
    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with peer(listen) as address:
        found = await once(Asking(production(), parse_uri(address), timeout=0.2))
    assert isinstance(found, Unreachable)
    assert "did not answer within 0.2 s" in found.reason
    assert address in found.reason
    assert found.hint is not None
    assert "its process may hang" in found.hint


async def test_node_with_a_hanging_disk_is_reported_with_a_finding_about_its_disk(tmp_path: Path) -> None:
    disk = HangingDisk()
    outside, user = replace(production(), disk=disk), ("app", "secret")
    async with flowstone.Node(tmp_path, listen="127.0.0.1:0", user=user, outside=outside) as node:
        server = Asking(production(), parse_uri(f"app:secret@{node.address}"))
        with disk.hanging():
            found = await once(server)
    assert isinstance(found, Report)
    assert found.disk == ReportedDisk(failure="the disk does not answer")
    (finding,) = explain(replica_sets([found]))
    assert (finding.kind, finding.why) == (Kind.LOG_FAILING, "the disk does not answer")


async def test_report_is_complete_without_an_answer_about_the_disk() -> None:
    """The node sets no time limit itself; the connection stays usable."""
    silent = asyncio.Event()

    async def before(request: Row) -> None:
        if unpack(request.body).get(Key.FUNCTION_NAME) == DISK_USAGE:
            await silent.wait()

    info = {"package": "Flowstone", "version": "2.11.9", "uuid": "u", "status": "running"}
    answer = pack({Key.DATA: (info,)})
    async with peer(answering(lambda request: (0, answer), (2, 11, 0), before)) as address:
        found = await once(Asking(production(), parse_uri(address), timeout=1.0))
        silent.set()
    assert isinstance(found, Report)
    assert (found.status, found.disk) == ("running", ReportedDisk(failure="the disk does not answer"))


async def test_server_that_is_loading_and_rejects_the_login_is_known_by_its_greeting() -> None:
    loading = refusal(Loading.code, "Instance bootstrap hasn't finished yet")
    async with peer(answering(lambda request: loading, (2, 6, 0))) as address:
        server = Asking(production(), parse_uri(f"app:secret@{address}"))
        found = await once(server)
        assert isinstance(found, Unreachable)
        assert (found.reason, found.uuid) == ("Instance bootstrap hasn't finished yet", GREETS)
    gone = await once(server)
    assert isinstance(gone, Unreachable)
    assert "refused" in gone.reason
    assert gone.uuid == GREETS
    assert (await once(Asking(production(), parse_uri(address)))) == msgspec.structs.replace(gone, uuid=None)


@simulated(seeds=range(2))
async def test_unreachable_server_is_queried_again_on_a_new_connection(sim: Simulation) -> None:
    await sim.start("a")
    server = Asking(sim.outside, parse_uri(sim.uri("a")))
    assert isinstance(await server.ask(), Report)
    sim.kill("a")
    assert isinstance(await server.ask(), Unreachable)
    await sim.restart("a")
    assert isinstance(await server.ask(), Report)
    await server.close()


@fits("2.6")
async def test_connection_is_reused_for_further_queries(cluster: Cluster) -> None:
    member = cluster.real("a")
    server = asking(member)
    assert await server.evaluate("return ...", 5) == 5
    assert await server.get(320, 0, [1]) == (1, member.uuid)
    with pytest.raises(NoSuchProc):
        await server.call("no_such_function")
    await server.close()
