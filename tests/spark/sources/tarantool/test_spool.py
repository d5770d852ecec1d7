"""Spools of real servers: settled rows are available immediately, survive a loss of the server, and come from any
member.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flowstone.archive.refusals import ArchiveRefused, RowsMissing, UpstreamLostTail
from flowstone.errors import FlowstoneError
from flowstone.iproto.uri import parse_uri
from flowstone.node.upstream import members as upstream_members
from flowstone.replication.vclock import VClock
from flowstone.spark.sources.tarantool import spool as spool_module
from flowstone.spark.sources.tarantool.spool import Beginning, Spool, SpoolCannotFollow, SpoolLocked, facts_of
from tests import served_node
from tests.interop.versions import ANY, parameters
from tests.node.archived_server import RealServer
from tests.spark.spooled_servers import collect_logs, keys, members, names, pair, reach, until

real = [pytest.mark.real, pytest.mark.usefixtures("tarantool")]
pytestmark = real

Open = Callable[..., Spool]
_BEGINNINGS: tuple[Beginning, ...] = ("snapshot", "latest")
CFG = "checkpoint_count=1, replication_timeout=0.2"


@pytest.fixture(params=parameters(ANY))
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RealServer]:
    with RealServer(tmp_path / "master", binary=request.param.path, cfg=CFG) as running:
        yield running


@pytest.fixture(params=parameters("<3.3"))
def forgetful_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RealServer]:
    """Run a server that keeps no logs for anonymous replicas."""
    with RealServer(tmp_path / "master", binary=request.param.path, cfg=CFG) as running:
        yield running


@pytest.fixture
def open_spool(tmp_path: Path) -> Iterator[Open]:
    """Open the spool of the test, and close it at its end."""
    opened: list[Spool] = []

    def opening(*servers: RealServer, **how: Any) -> Spool:
        how = {"begin": "snapshot", "replication_timeout": 0.2, **how}
        opened.append(Spool.open(members(*servers), str(tmp_path / "spool"), **how))
        return opened[-1]

    yield opening
    for spool in opened:
        spool.close()


def test_user_without_the_replication_role_gets_the_grant_as_a_hint(server: RealServer) -> None:
    server.eval("box.schema.user.create('limited', {password = 'pass'})")
    uri = parse_uri(f"limited:pass@{members(server)[0].address}")
    advice = "'limited' lacks the role replication: box.schema.user.grant('limited', 'replication')"
    with pytest.raises(
        SpoolCannotFollow, match=r"rejects replication to user 'limited': Read access to space"
    ) as caught:
        facts_of([uri])
    assert caught.value.hint == advice


def test_spool_begins_with_a_snapshot_and_follows(server: RealServer, open_spool: Open, tmp_path: Path) -> None:
    server.eval("fill(1, 100)")
    spool = open_spool(server)
    start = VClock(server.vclock())
    assert [snapshot.vclock for snapshot in spool.index.snapshots] == [start]
    assert spool.index.settled == start == spool.target()
    server.eval("fill(101, 105)")
    assert spool.wait(5)
    reach(spool, server.vclock())
    assert keys(spool.index, start) == [101, 102, 103, 104, 105]
    assert spool.lag is not None
    assert spool.lag < 5
    spool.wait(0)
    assert not spool.wait(0)
    spool.close()
    spool = open_spool(server, begin=start)
    assert keys(spool.index, start) == [101, 102, 103, 104, 105]
    assert len(names(tmp_path / "spool")) == 2


def test_lost_spool_is_filled_again_from_the_server(server: RealServer, open_spool: Open, tmp_path: Path) -> None:
    spool = open_spool(server)
    server.eval("fill(1, 10)")
    reach(spool, server.vclock())
    middle = spool.index.settled
    definitions = facts_of(members(server)).definitions
    spool.close()
    shutil.rmtree(tmp_path / "spool")
    server.eval("fill(11, 20) box.space.t:drop()")
    spool = open_spool(server, begin=middle, definitions=definitions)
    reach(spool, server.vclock())
    assert spool.index.snapshots == ()
    assert spool.index.schema_at(middle).schema.get("t") is not None
    assert spool.index.schema_at(spool.index.settled).schema.get("t") is None


def test_spool_that_begins_after_the_wanted_position_is_restarted_there(server: RealServer, open_spool: Open) -> None:
    start = VClock(server.vclock())
    server.eval("fill(1, 10)")
    open_spool(server).close()
    spool = open_spool(server, begin=start)
    reach(spool, server.vclock())
    assert keys(spool.index, start) == list(range(1, 11))


def test_latest_begins_at_the_servers_position(server: RealServer, open_spool: Open) -> None:
    server.eval("fill(1, 10)")
    spool = open_spool(server, begin="latest")
    start = VClock(server.vclock())
    assert spool.index.earliest == spool.index.settled == start
    server.eval("fill(11, 12)")
    reach(spool, server.vclock())
    assert keys(spool.index, start) == [11, 12]
    spool.close()
    server.eval("fill(13, 13)")
    again = open_spool(server, begin="latest", is_anew=True)
    assert again.index.earliest == VClock(server.vclock())


def test_committed_rows_are_dropped_and_a_new_reader_gets_a_new_snapshot(
    server: RealServer, open_spool: Open, tmp_path: Path
) -> None:
    spool = open_spool(server, wal_max_size=1000)
    for number in range(6):
        server.eval("fill(...)", number * 100, number * 100 + 99)
        reach(spool, server.vclock())
    before = names(tmp_path / "spool")
    position = spool.index.settled
    spool.collect(position)
    after = names(tmp_path / "spool")
    assert len(after) < len(before)
    assert not any(name.endswith(".snap") for name in after)
    assert spool.index.schema_at(position).schema.get("t") is not None
    spool.close()
    spool = open_spool(server)
    assert [snapshot.vclock for snapshot in spool.index.snapshots] == [position]


def test_rows_that_the_server_no_longer_has_are_named(forgetful_server: RealServer, open_spool: Open) -> None:
    spool = open_spool(forgetful_server)
    lsn = forgetful_server.vclock()[1]
    spool.close()
    forgetful_server.eval("fill(1, 10)")
    collect_logs(forgetful_server)
    with pytest.raises(RowsMissing) as caught:
        reach(open_spool(forgetful_server, begin=VClock({1: lsn})), forgetful_server.vclock())
    (missing,) = caught.value.missing
    assert missing[:2] == (1, lsn + 1)
    assert missing[2] >= lsn + 10
    assert f"no longer has LSN {lsn + 1} to {missing[2]} of replica 1" in str(caught.value)
    assert "failOnDataLoss=false" in str(caught.value)


def test_missing_rows_are_replaced_by_a_new_snapshot_if_allowed(forgetful_server: RealServer, open_spool: Open) -> None:
    spool = open_spool(forgetful_server)
    start = spool.index.settled
    spool.close()
    forgetful_server.eval("fill(1, 10)")
    collect_logs(forgetful_server)
    spool = open_spool(forgetful_server, begin=start, fail_on_data_loss=False)
    reach(spool, forgetful_server.vclock())
    gap = spool.index.first_gap(start, spool.index.settled)
    assert gap is not None
    assert VClock(gap.after) == start
    assert spool.index.snapshots[-1].vclock == VClock(gap.until)


@pytest.mark.parametrize("allowed", [False, True])
def test_refill_from_collected_logs_is_a_gap(forgetful_server: RealServer, open_spool: Open, allowed: bool) -> None:
    start = VClock(forgetful_server.vclock())
    forgetful_server.eval("fill(1, 10)")
    collect_logs(forgetful_server)
    if not allowed:
        with pytest.raises(RowsMissing, match="no longer has LSN"):
            open_spool(forgetful_server, begin=start)
        return
    spool = open_spool(forgetful_server, begin=start, fail_on_data_loss=False)
    reach(spool, forgetful_server.vclock())
    gap = spool.index.first_gap(start, spool.index.settled)
    assert gap is not None
    assert VClock(gap.after) == start


def test_server_keeps_its_logs_for_a_registered_spool(server: RealServer, open_spool: Open) -> None:
    spool = open_spool(server, register=True)
    start = spool.index.settled
    spool.close()
    server.eval("fill(1, 10)")
    server.eval("for i = 1, 3 do box.space.t:replace{i, 'again'} box.snapshot() end")
    spool = open_spool(server, register=True, begin=start)
    reach(spool, server.vclock())
    assert keys(spool.index, start) == [*range(1, 11), 1, 2, 3]
    assert server.eval("return box.space._cluster:len()") == [2]


def test_server_that_lost_its_tail_ends_the_spool_with_the_lost_rows(
    server: RealServer, open_spool: Open, tmp_path: Path
) -> None:
    spool = open_spool(server)
    lsn = server.vclock()[1]
    server.stop()
    shutil.copytree(server.directory, tmp_path / "old")
    server.start()
    server.eval("fill(1, 10)")
    reach(spool, server.vclock())
    server.kill()
    shutil.rmtree(server.directory)
    shutil.copytree(tmp_path / "old", server.directory)
    server.start()
    with pytest.raises(UpstreamLostTail, match=f"LSN {lsn + 1} to {lsn + 10} of replica 1"):
        reach(spool, {1: lsn + 100})


def test_only_one_process_writes_to_a_spool(
    server: RealServer, open_spool: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool_module, "LOCK_SECONDS", 0.5)
    open_spool(server)
    with pytest.raises(SpoolLocked, match="is in use by another process"):
        open_spool(server)


def test_wrong_password_or_address_fails_the_opening(server: RealServer, tmp_path: Path) -> None:
    wrong = [parse_uri(f"replicator:wrong@{server.address}")]
    for begin in _BEGINNINGS:
        with pytest.raises(ArchiveRefused, match="check the user and the password"):
            Spool.open(wrong, str(tmp_path / "spool"), begin=begin)
        away = [parse_uri("127.0.0.1:1")]
        with pytest.raises(FlowstoneError, match="cannot connect to"):
            Spool.open(away, str(tmp_path / "spool"), begin=begin, replication_timeout=0.1)


# --- several members ---


@pytest.fixture(params=parameters(ANY))
def servers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[RealServer, RealServer]]:
    with pair(tmp_path, request.param.path) as both:
        yield both


def cut_off(server: RealServer) -> None:
    """Cut the server off from all its upstreams."""
    server.eval("box.cfg{replication = {}}")


def test_another_member_is_followed_when_one_dies(servers: tuple[RealServer, RealServer], open_spool: Open) -> None:
    a, b = servers
    spool = open_spool(a, b)
    start = spool.index.settled
    a.eval("fill(1, 10)")
    reach(spool, a.vclock())
    until(lambda: a.vclock() == b.vclock())
    a.kill()
    b.eval("fill(11, 20)")
    reach(spool, b.vclock())
    assert keys(spool.index, start) == list(range(1, 21))


def test_lagging_member_is_waited_for(servers: tuple[RealServer, RealServer], open_spool: Open) -> None:
    a, b = servers
    cut_off(b)
    spool = open_spool(a, b)
    start = spool.index.settled
    a.eval("fill(1, 10)")
    reach(spool, a.vclock())
    a.kill()
    until(lambda: spool.lag is None)
    a.start()
    a.eval("fill(11, 20)")
    reach(spool, a.vclock())
    assert keys(spool.index, start) == list(range(1, 21))
    b.eval("box.cfg{replication = ...}", [a.address])
    until(lambda: a.vclock() == b.vclock())
    a.kill()
    b.eval("fill(21, 22)")
    reach(spool, b.vclock())
    assert keys(spool.index, start) == list(range(1, 23))


def test_rows_that_no_member_has_in_time_are_lost(
    servers: tuple[RealServer, RealServer], open_spool: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream_members, "LAG_SECONDS", 1.0)
    a, b = servers
    cut_off(b)
    lsn = b.vclock()[1]
    spool = open_spool(a, b)
    a.eval("fill(1, 10)")
    reach(spool, a.vclock())
    a.kill()
    with pytest.raises(UpstreamLostTail, match=f"LSN {lsn + 1} to {lsn + 10} of replica 1"):
        reach(spool, {1: lsn + 100})


def test_unsettled_rows_are_dropped_for_the_log_of_another_member(
    servers: tuple[RealServer, RealServer], open_spool: Open
) -> None:
    a, b = servers
    a.eval("claim()")
    until(lambda: a.vclock() == b.vclock())
    cut_off(b)
    spool = open_spool(a, b)
    start = spool.index.settled
    a.eval("fill(1, 3)")
    until(lambda: VClock(a.vclock()) <= spool.position)
    b.eval("box.cfg{replication = ...}", [a.address])
    until(lambda: a.vclock() == b.vclock())
    cut_off(b)
    a.eval(
        "box.cfg{replication_synchro_quorum = 3}"
        " require('fiber').create(function() box.space.s:replace{77} end) require('fiber').sleep(0.1)"
    )
    until(lambda: spool.position.get(1) > b.vclock()[1])
    assert spool.index.settled == VClock(b.vclock())
    a.kill()
    b.eval("box.cfg{replication_synchro_quorum = 1} claim() fill(11, 13)")
    reach(spool, b.vclock())
    assert keys(spool.index, start) == [1, 2, 3, 11, 12, 13]
    assert keys(spool.index, start, "s") == []


# --- a node of ours ---


async def test_spool_follows_a_flowstone_node(tmp_path: Path) -> None:
    with served_node.serve(tmp_path / "node") as node:
        async with await served_node.connect(node) as connection:
            await served_node.create_space(connection, 512, "t", [("id", "unsigned")])
            spool = Spool.open([node.uri], str(tmp_path / "spool"), begin="snapshot")
            start = spool.index.settled
            for number in range(10):
                await served_node.insert(connection, 512, (number,))
        try:
            until(lambda: spool.index.settled.get(1) >= start.get(1) + 10)
            assert keys(spool.index, start) == list(range(10))
        finally:
            spool.close()
