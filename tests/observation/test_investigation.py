"""Every explained situation, created with nodes and servers of 2.6, and its findings."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import msgspec
import pytest

import flowstone
from flowstone.cli import run
from flowstone.iproto.msgpack import unpack
from flowstone.iproto.uri import parse_uri
from flowstone.observation import investigation
from flowstone.observation.explanation import explain
from flowstone.observation.findings.conflict import Conflict
from flowstone.observation.findings.finding import Finding, Kind, Severity
from flowstone.observation.investigation import CONFLICT_ROUNDS_MAX, Investigation
from flowstone.observation.replica_set import ReplicaSet, replica_sets
from flowstone.observation.survey import Survey
from flowstone.outside import production
from flowstone.outside.clock import SystemClock
from tests import real_tarantool
from tests.chaos.small_disk import SmallDisk, small_disk
from tests.interop import ledger
from tests.interop.cluster import Cluster
from tests.interop.ledger import LEDGER
from tests.interop.member import SECONDS, Member, eventually
from tests.interop.mesh import PLAIN, Mesh, Pending, keys, promote, queue
from tests.interop.mesh import write as write_synchronous
from tests.interop.proxy import Way
from tests.interop.test_split_brain import NEVER
from tests.observation import reports
from tests.observation.situations import (
    assert_well,
    explained,
    found,
    lose_rows,
    make,
    pair,
    status_is,
    wait_acknowledged,
    write,
    write_rows,
)
from tests.real_tarantool import free_port

CLUSTER, PRIVILEGES, REPLICATION_ROLE = 320, 312, 3
SPACE, INDEX = 280, 288
VSPACE_SEQUENCE: tuple[Any, ...] = (341, 1, "_vspace_sequence", "sysview", 0, {}, [])

BOTH_WAYS = pytest.mark.parametrize(("master_kind", "replica_kind"), [("real", "ours"), ("ours", "real")])
EITHER = pytest.mark.parametrize("kind", ["real", "ours"])


@BOTH_WAYS
def test_healthy_set_has_no_findings(cluster: Cluster, master_kind: str, replica_kind: str) -> None:
    master, replica = pair(cluster, master_kind, replica_kind)
    assert_well(master, replica)
    assert_well(replica)


@BOTH_WAYS
def test_duplicate_key_shows_the_incoming_row_and_the_existing_tuple(
    cluster: Cluster, master_kind: str, replica_kind: str
) -> None:
    master, replica = pair(cluster, master_kind, replica_kind)
    replica.wait_writable()
    replica.client.insert(LEDGER, 7, 1, "mine")
    master.client.insert(LEDGER, 6, 1, "fine")
    master.client.insert(LEDGER, 7, 1, "theirs")
    lsn = master.vclock()[1]
    finding = found(Kind.DUPLICATE_KEY, master, replica)
    assert (finding.severity, finding.member) == (Severity.STOPPED, replica.uuid)
    assert f"row 1:{lsn} " in finding.why
    assert 'INSERT [7, 1, "theirs"] in space' in finding.why
    assert "index 'pk'" in finding.why
    assert '[7, 1, "mine"]' in finding.why
    assert f"`flowstone call {finding.label} box.space.ledger:delete '[7, 1]'`" in finding.advice


@BOTH_WAYS
def test_row_written_after_the_query_of_the_follower_is_not_a_conflict(
    cluster: Cluster, master_kind: str, replica_kind: str
) -> None:
    """A server that has just applied a row shows the tuple before it counts the row."""
    master, replica = pair(cluster, master_kind, replica_kind)
    replica.wait_writable()
    replica.client.insert(LEDGER, 7, 1, "mine")
    for number, what in ((5, "fine"), (6, "fine"), (7, "theirs")):
        master.client.insert(LEDGER, number, 1, what)
    status_is(replica, 1, "stopped")

    def two_rows_ago(replica_set: ReplicaSet) -> ReplicaSet:
        lsn = master.vclock()[1] - 3
        members = tuple(
            msgspec.structs.replace(one, vclock=one.vclock | {1: lsn}) if one.uuid == replica.uuid else one
            for one in replica_set.members
        )
        return msgspec.structs.replace(replica_set, members=members)

    finding = found(Kind.DUPLICATE_KEY, master, replica, seen_as=two_rows_ago)
    assert f"row 1:{master.vclock()[1]} " in finding.why
    assert '[7, 1, "mine"]' in finding.why


def test_advice_on_a_duplicate_key_in_a_mesh_leaves_all_members_with_the_right_tuple(nodes: Cluster) -> None:
    """The conflict concerns two unique keys, in members that receive each other's deletes."""
    mesh = Mesh(nodes, ("ours", "ours", "ours"))
    one, two, three = mesh.members
    one.call("box.space.plain:create_index", "text", {"parts": [2, "string"]})
    mesh.wait_same(one)
    for tuples in (((7, "right"), (7, "wrong")), ((8, "same"), (9, "same"))):
        mesh.isolate(one)
        for member, fields in zip((one, two), tuples, strict=True):
            write_new(member, *fields)
        three.catch_up(two)  # the member has the tuple of `two` when that of `one` arrives
        mesh.rejoin(one)
        for follower, upstream in ((one, two), (two, one), (three, one)):
            status_is(follower, upstream.id, "stopped")
        finding = found(Kind.DUPLICATE_KEY, *mesh)
        assert ":delete" not in finding.advice
        assert "delete neither yet" in finding.advice
        stopped = [member for member in mesh if member.address in finding.advice.partition(" On ")[2]]
        assert stopped == mesh.members
        for member in stopped:
            member.configure(replication_skip_conflict=True)
            member.configure(replication=[])
            member.configure(replication=member.options["replication"])
        for member in mesh:
            member.wait_follow(*mesh.others(member))
        mesh.wait_same(*mesh)  # all conflicts have been skipped
        for member in stopped:
            member.configure(replication_skip_conflict=False)
        right, wrong = tuples
        with two.connect() as client:
            if right[0] != wrong[0]:
                client.delete(PLAIN, wrong[0])
            client.replace(PLAIN, *right)
        mesh.wait_same(*mesh)
    for member in mesh:
        assert list(map(unpack, member.tuples(PLAIN))) == [(7, "right"), (8, "same")]
    assert_well(*mesh)


def write_new(member: Member, *fields: Any) -> None:
    with member.connect() as client:
        client.insert(PLAIN, *fields)


@BOTH_WAYS
def test_log_gap_is_reported_with_its_bounds(cluster: Cluster, master_kind: str, replica_kind: str) -> None:
    master = make(cluster, master_kind, "master", checkpoint_count=1)
    ledger.define(master)
    wire = cluster.proxy(master)
    replica = make(cluster, replica_kind, "replica", replication=[wire.uri])
    replica.wait_follow(master)
    replica.catch_up(master)
    stopped_at = replica.vclock()
    wire.cut()
    master.restart(**({"wal_cleanup_delay": 0} if master_kind == "ours" else {}))
    oldest = min(path.name for path in master.files("xlog"))
    for number in range(1, 4):
        write(master, range(number * 10, number * 10 + 5))
        master.snapshot()
    eventually("the old logs go", lambda: oldest not in [path.name for path in master.files("xlog")])
    write(master, [100])
    wire.mend()
    finding = found(Kind.LOG_GAP, master, replica)
    assert finding.member == replica.uuid
    have = "{" + ", ".join(f"{number}: {lsn}" for number, lsn in stopped_at.items()) + "}"
    assert f"up to {have}" in finding.why
    assert "rows in between" in finding.why
    assert "No other queried member" in finding.why


def test_split_brain_shows_both_histories_and_the_fork(nodes: Cluster) -> None:
    mesh = Mesh(nodes, ("ours", "ours"), replication_synchro_quorum=1, replication_synchro_timeout=60)
    owner, other = mesh.members
    other.configure(replication_synchro_timeout=0.1)
    promote(owner)
    mesh.wait_owner(owner)
    write_synchronous(owner, 0)
    mesh.wait_same(owner)
    eventually("both have its verdict", lambda: not any(queue(member)["len"] for member in mesh))
    mesh.wait_same(owner, other)
    both = owner.vclock()
    mesh.isolate(owner)
    promote(other)
    other.configure(replication_synchro_timeout=60)  # the next write may take time
    write_synchronous(owner, 1, "of the old owner")
    write_synchronous(other, 2, "of the new owner")
    finding = found(Kind.TWO_OWNERS, owner, other)
    assert "newer term" in finding.why
    mesh.rejoin(owner)
    finding = found(Kind.SPLIT_BRAIN, owner, other)
    assert finding.severity is Severity.STOPPED
    point = "{" + ", ".join(f"{number}: {lsn}" for number, lsn in both.items()) + "}"
    assert f"the same up to {point}" in finding.why
    assert f"1:{both[1] + 1} REPLACE synchronous" in finding.why
    told = "\n".join(finding.evidence)
    assert "PROMOTE" in told
    assert "of the old owner" in told
    assert "of the new owner" in told
    assert "replica 1 owns the queue since term" in told
    assert "replica 2 owns the queue since term" in told
    assert finding.why.count("two members have settled") == 1
    # Following the advice makes the set healthy.
    uuid = owner.uuid
    owner.stop()
    assert run(["rebootstrap", "--yes", "--force", str(owner.directory), other.address]) == 0
    owner.start(instance_uuid=uuid)
    owner.wait_follow(other)
    owner.catch_up(other)
    finding = found(Kind.SPLIT_BRAIN, owner, other)
    assert finding.member == other.uuid
    assert "the split brain is over" in finding.why
    assert finding.advice.startswith(f"set `replication` on {other.address} again")
    replication = other.options["replication"]
    other.configure(replication=[])
    other.configure(replication=replication)
    other.wait_follow(owner)
    assert_well(owner, other)


@EITHER
def test_server_of_another_set_is_reported_with_both_uuids(cluster: Cluster, kind: str) -> None:
    other_kind = "ours" if kind == "real" else "real"
    mine, other = make(cluster, kind, "mine"), make(cluster, other_kind, "other")
    mine.configure(replication_connect_timeout=1)
    mine.configure(replication_connect_quorum=0)
    mine.configure(replication=[other.uri])
    finding = found(Kind.WRONG_CLUSTER, mine)
    assert (finding.severity, finding.member) == (Severity.STOPPED, mine.uuid)
    for member in (mine, other):
        info = member.info()
        assert info["cluster"]["uuid"] in finding.why


@BOTH_WAYS
def test_missing_privilege_is_reported_with_the_grant(cluster: Cluster, master_kind: str, replica_kind: str) -> None:
    master, replica = pair(cluster, master_kind, replica_kind)
    revoke(master)
    wire = master.uri
    replica.configure(replication=[])
    replica.configure(replication_connect_quorum=0)
    replica.configure(replication_connect_timeout=0.5)
    replica.configure(replication=[wire])
    finding = found(Kind.NO_RIGHTS, master, replica)
    assert finding.member == replica.uuid
    assert "'replicator'" in finding.why
    assert "`flowstone call URI box.schema.user.grant replicator replication`" in finding.advice


def revoke(master: Member) -> None:
    """Revoke the role from the replicating user."""
    for raw in master.tuples(PRIVILEGES):
        _, grantee, kind, number, *_ = unpack(raw)
        if (kind, number) == ("role", REPLICATION_ROLE):
            master.client.delete(PRIVILEGES, grantee, kind, number)


@BOTH_WAYS
def test_wrong_password_is_reported(cluster: Cluster, master_kind: str, replica_kind: str) -> None:
    master, replica = pair(cluster, master_kind, replica_kind)
    replica.configure(replication=[])
    replica.configure(replication_connect_quorum=0)
    replica.configure(replication_connect_timeout=0.5)
    replica.configure(replication=[f"replicator:wrong@{master.address}"])
    finding = found(Kind.WRONG_PASSWORD, master, replica)
    assert finding.member == replica.uuid
    assert "wrong" not in str(finding).replace("wrong_password", "")


@EITHER
def test_rejected_login_is_distinguished_from_a_dead_server(cluster: Cluster, kind: str) -> None:
    member = make(cluster, kind, "one")
    finding = found(Kind.WRONG_PASSWORD, f"replicator:nonsense@{member.address}")
    assert finding.severity is Severity.WARNING
    assert "nonsense" not in str(finding)
    finding = found(Kind.NO_RIGHTS, f"replicator:secret@{member.address}")
    assert finding.severity is Severity.WARNING


def test_lost_quorum_lists_missing_members_and_the_age_of_the_queue(nodes: Cluster) -> None:
    mesh = Mesh(nodes, ("ours", "ours", "ours"), direct=True, replication_synchro_quorum=2)
    owner, *others = mesh.members
    owner.configure(replication_synchro_timeout=60)
    promote(owner)
    mesh.wait_owner(owner)
    for other in others:
        other.stop()
    pending = Pending(owner, 1).wait_on(owner)
    finding = found(Kind.QUORUM_LOST, owner)
    assert (finding.severity, finding.member) == (Severity.STOPPED, owner.uuid)
    assert "1 transaction is pending" in finding.what
    assert "the quorum is 2" in finding.why
    assert all(other.address in finding.why for other in others)
    owner.configure(replication_synchro_quorum=1)
    assert pending.outcome() == 0
    assert Kind.QUORUM_LOST not in [one.kind for one in explained(owner)]


@BOTH_WAYS
def test_lost_quorum_of_2_6_is_detected_by_its_option(cluster: Cluster, master_kind: str, replica_kind: str) -> None:
    master, replica = pair(cluster, master_kind, replica_kind, replication_synchro_quorum=2)
    assert_well(master, replica)
    replica.stop()
    finding = found(Kind.QUORUM_LOST, master)
    assert "the quorum is 2, but only 1 member is available" in finding.why


@pytest.fixture
def disk(cluster: Cluster, tmp_path: Path) -> Iterator[SmallDisk]:
    log = tmp_path / "replica" / "member.log"
    made = small_disk(tmp_path / "disk", lambda: cluster.members[-1].pid, log)
    yield made
    cluster.members[-1].kill()
    made.close()


@BOTH_WAYS
def test_full_disk_is_reported_with_the_members_that_it_stops(
    cluster: Cluster, disk: SmallDisk, master_kind: str, replica_kind: str
) -> None:
    master = make(cluster, master_kind, "master")
    ledger.define(master)
    place = str(disk.directory)
    more = {"vinyl_dir": place} if replica_kind == "real" else {}
    replica = make(cluster, replica_kind, "replica", replication=[master.uri], wal_dir=place, memtx_dir=place, **more)
    replica.wait_follow(master)
    write(master, range(1000))
    replica.catch_up(master)
    assert disk.fill()
    for number in range(80):  # a real server buffers a megabyte of its log, and compresses the rest
        master.client.replace(LEDGER, number, 2, secrets.token_hex(25_000))
    finding = found(Kind.DISK_FULL, master, replica)
    assert (finding.severity, finding.member) == (Severity.STOPPED, replica.uuid)
    assert "free space" in finding.advice
    if replica_kind == "ours":  # a real server sends nothing at all
        told = "\n".join(finding.evidence)
        assert "cannot write at byte" in told
        assert "No space left" in told or "File too large" in told
    disk.empty()


@EITHER
def test_orphan_names_its_missing_upstreams(cluster: Cluster, kind: str) -> None:
    master, replica = pair(cluster, "ours" if kind == "real" else "real", kind)
    master.stop()
    replica.restart(replication_connect_timeout=0.5)
    finding = found(Kind.ORPHAN, replica)
    assert (finding.severity, finding.member) == (Severity.STOPPED, replica.uuid)
    eventually("whom it waits for is named", lambda: master.address in str(explained(replica)))


@BOTH_WAYS
def test_dead_master_is_one_finding(cluster: Cluster, master_kind: str, replica_kind: str) -> None:
    master, replica = pair(cluster, master_kind, replica_kind)
    uuid = master.uuid
    master.kill()
    status_is(replica, 1, "disconnected", "connect")
    finding = found(Kind.UNREACHABLE, replica, master)
    assert (finding.severity, finding.member) == (Severity.STOPPED, uuid)
    assert [one.kind for one in explained(replica, master)].count(Kind.UNREACHABLE) == 1


@BOTH_WAYS
def test_investigation_measures_how_fast_a_lagging_member_catches_up(
    cluster: Cluster, master_kind: str, replica_kind: str
) -> None:
    master = make(cluster, master_kind, "master", replication_timeout=10)
    ledger.define(master)
    wire = cluster.proxy(master)
    replica = make(cluster, replica_kind, "replica", replication=[wire.uri], replication_timeout=10)
    replica.wait_follow(master)
    wire.clog(2_000)
    write(master, range(2000))
    finding = found(Kind.BEHIND, master, replica)
    assert (finding.severity, finding.member) == (Severity.BEHIND, replica.uuid)
    assert "rows/s while" in finding.why
    assert "rows left: " in finding.why
    wire.heal()


def test_slow_member_is_reported_once_for_all_its_upstreams(nodes: Cluster) -> None:
    mesh = Mesh(nodes, ("ours", "ours", "ours"), replication_timeout=10)
    master, quick, slow = mesh.members
    wires = [mesh.wire(slow, other) for other in mesh.others(slow)]
    for wire in wires:
        wire.clog(2_000)
    write_rows(master, PLAIN, [(number, "x" * 100) for number in range(2000)])
    quick.catch_up(master)
    found(Kind.BEHIND, *mesh)
    behind = [one.member for one in explained(*mesh) if one.kind is Kind.BEHIND]
    assert behind == [slow.uuid]
    for wire in wires:
        wire.heal()


@EITHER
def test_logs_kept_for_a_dead_member_are_a_warning_with_the_member_to_expel(cluster: Cluster, kind: str) -> None:
    master, replica = pair(cluster, kind, "ours" if kind == "real" else "real")
    number = replica.id
    wait_acknowledged(master, replica)  # rows that it has not received are kept
    replica.stop()
    master.snapshot()
    write(master, range(50))
    finding = found(Kind.RETENTION, master)
    assert (finding.severity, finding.member) == (Severity.WARNING, master.uuid)
    assert "50 rows" in finding.why
    assert f"`flowstone expel {master.address} {number}`" in finding.advice


def test_queue_of_a_dead_owner_is_abandoned(nodes: Cluster) -> None:
    mesh = Mesh(nodes, ("ours", "ours"), direct=True, replication_synchro_quorum=2)
    owner, other = mesh.members
    owner.configure(replication_synchro_timeout=60, replication_synchro_quorum=NEVER)
    promote(owner)
    mesh.wait_owner(owner)
    Pending(owner, 1).wait_on(owner, other)
    owner.kill()
    finding = found(Kind.QUEUE_ABANDONED, other, owner)
    assert (finding.severity, finding.member) == (Severity.STOPPED, other.uuid)
    assert queue(other)["len"] == 1


def test_promotion_of_an_abandoned_queue_is_advised_for_the_member_with_the_most_rows(nodes: Cluster) -> None:
    mesh = Mesh(nodes, ("ours",) * 3, replication_synchro_quorum=2)
    owner, lagging, ahead = mesh.members
    for member in mesh:
        member.configure(replication_synchro_timeout=60)
    owner.configure(replication_synchro_quorum=NEVER)
    promote(owner)
    mesh.wait_owner(owner)
    first = [Pending(owner, number) for number in (1, 2, 3)]
    eventually("all wait", lambda: [queue(member)["len"] for member in mesh] == [3, 3, 3])
    mesh.isolate(lagging)
    owner.configure(replication_synchro_quorum=2)
    assert [one.outcome() for one in first] == [0, 0, 0]
    eventually("the verdict comes", lambda: queue(ahead)["len"] == 0)
    owner.configure(replication_synchro_quorum=NEVER)
    Pending(owner, 4).wait_on(owner, ahead)
    owner.kill()
    finding = found(Kind.QUEUE_ABANDONED, lagging, ahead)
    assert finding.member == ahead.uuid
    assert f"promote the member with the most rows: `flowstone promote {ahead.address}`" in finding.advice
    mesh.rejoin(lagging)
    lagging.wait_follow(ahead)
    lagging.catch_up(ahead)
    wait_acknowledged(ahead, lagging)  # this server is the quorum, so the wait is as short
    ahead.configure(replication_synchro_timeout=0.1)  # a promotion waits this long for the old owner
    assert run(["promote", "--yes", ahead.address]) == 0
    mesh.wait_owner(ahead, ahead, lagging)
    eventually("both decide alike", lambda: keys(ahead) == keys(lagging) == [1, 2, 3, 4])


def test_never_reached_server_in_replication_is_named(cluster: Cluster) -> None:
    member = make(cluster, "real", "one", replication_connect_timeout=0.5, replication_connect_quorum=0)
    place = f"127.0.0.1:{free_port()}"
    member.configure(replication=[f"replicator:secret@{place}"])
    finding = found(Kind.UNREACHABLE, member)
    assert place in finding.what
    assert "secret" not in str(finding)


@BOTH_WAYS
def test_expelled_member_is_reported_as_unknown(cluster: Cluster, master_kind: str, replica_kind: str) -> None:
    master, replica = pair(cluster, master_kind, replica_kind)
    number = replica.id
    replica.configure(replication=[])
    eventually("it is let go", lambda: master.downstream(number).get("status") != "follow")
    master.client.delete(CLUSTER, number)
    replica.configure(replication_connect_quorum=0, replication_connect_timeout=0.5)
    replica.configure(replication=[master.uri])
    finding = found(Kind.NOT_REGISTERED, replica, master)
    assert (finding.severity, finding.member) == (Severity.STOPPED, replica.uuid)
    assert f"flowstone rebootstrap DIR {master.address}" in finding.advice


@BOTH_WAYS
def test_running_expelled_member_is_named_by_its_configured_followers(
    cluster: Cluster, master_kind: str, replica_kind: str
) -> None:
    master, replica = pair(cluster, master_kind, replica_kind)
    number = replica.id
    master.configure(replication_connect_quorum=0)
    master.configure(replication=[replica.uri])
    master.wait_follow(replica)
    replica.configure(replication=[])
    eventually("it is let go", lambda: master.downstream(number).get("status") != "follow")
    master.client.delete(CLUSTER, number)
    for asked in ((master,), (master, replica)):
        finding = found(Kind.NOT_REGISTERED, *asked)
        assert (finding.severity, finding.member) == (Severity.STOPPED, master.uuid)
        assert f" lists {replica.address}, which is not a member" in finding.what
        assert "it was expelled" in finding.why
        assert f"`flowstone rebootstrap DIR {master.address}`" in finding.advice
        assert not [one for one in explained(*asked) if one.kind is Kind.WRONG_CLUSTER]


@EITHER
def test_lost_replica_known_only_to_its_master_is_not_a_lost_master(cluster: Cluster, kind: str) -> None:
    master, replica = pair(cluster, kind, "ours" if kind == "real" else "real")
    number = replica.id
    replica.kill()
    eventually("it is noticed", lambda: master.downstream(number).get("status") == "stopped")
    finding = found(Kind.UNREACHABLE, master)
    assert finding.member == replica_uuid(master, number)
    assert f"its connection to {master.address} ended" in finding.why
    assert f"check whether {finding.label} runs" in finding.advice
    assert f"`flowstone expel {master.address} {number}`" in finding.advice


def replica_uuid(member: Member, number: int) -> str:
    uuid: str = member.replication()[number]["uuid"]
    return uuid


def test_hanging_leader_is_one_finding(nodes: Cluster) -> None:
    """Its former followers report only a timeout, and retry by themselves."""
    mesh = Mesh(nodes, ("ours",) * 3, direct=True)
    mesh.set_modes("candidate")
    leader = mesh.wait_leader()
    others, uuid = mesh.others(leader), leader.uuid
    leader.pause()
    mesh.wait_leader(*others, besides=leader)
    for other in others:
        other.wait_log(f"{leader.address} sent nothing for")

    def look() -> Finding | None:
        told = [one for one in explained(*others, seconds=3.0) if uuid in (one.member, one.peer)]
        return told[0] if [one.kind for one in told] == [Kind.UNREACHABLE] else None

    finding: Finding = eventually("it is one finding", look)
    assert finding.member == uuid
    assert "its process may hang" in finding.advice
    leader.resume()


@BOTH_WAYS
def test_space_on_one_side_only_is_a_schema_mismatch(cluster: Cluster, master_kind: str, replica_kind: str) -> None:
    master, replica = pair(cluster, master_kind, replica_kind)
    replica.wait_writable()
    replica.call("box.space.ledger:drop")
    write(master, [1])
    finding = found(Kind.SCHEMA_MISMATCH, master, replica)
    assert finding.member == replica.uuid
    assert "does not exist" in finding.why


def test_rows_lost_by_a_master_are_reported(cluster: Cluster) -> None:
    master, replica = pair(cluster, "real", "ours")
    lose_rows(cluster, master, replica, 3)
    kept, lost = master.vclock()[1], replica.vclock()[1]
    assert lost == kept + 3
    finding = found(Kind.LOST_ROWS, master, replica)
    assert finding.member == replica.uuid
    assert f"lost its rows {kept + 1}…{lost}" in finding.why


@EITHER
def test_advice_on_lost_rows_restores_them_when_no_rows_were_written_since(cluster: Cluster, kind: str) -> None:
    master, replica = pair(cluster, kind, "ours")
    lose_rows(cluster, master, replica, 3)
    finding = found(Kind.LOST_ROWS, master, replica)
    assert finding.advice.startswith(f"send no writes to {master.address} from now on")
    assert f"add {replica.address} to its `replication` and restart it" in finding.advice
    master.restart(replication=[replica.uri])
    master.catch_up(replica)
    replica.wait_follow(master)
    assert master.tuples(LEDGER) == replica.tuples(LEDGER)
    assert_well(master, replica)


@EITHER
def test_advice_on_lost_rows_makes_both_equal_when_their_lsns_were_reused(cluster: Cluster, kind: str) -> None:
    master, replica = pair(cluster, kind, "ours")
    uuid = master.uuid
    lose_rows(cluster, master, replica, 3, [100])
    finding = found(Kind.LOST_ROWS, master, replica)
    assert "reuse the LSNs of lost rows, and more rows are lost than named here" in finding.why
    assert f"`flowstone rebootstrap DIR {replica.address}`" in finding.advice
    master.stop()
    options = ["--yes", str(master.directory), replica.address]
    assert run(["rebootstrap", *options]) == 1
    assert run(["rebootstrap", "--force", *options]) == 0
    master.start(instance_uuid=uuid, replication=[replica.uri])
    master.catch_up(replica)
    replica.wait_follow(master)
    assert master.tuples(LEDGER) == replica.tuples(LEDGER)
    master.wait_writable()
    write(master, [100])
    replica.catch_up(master)
    assert master.tuples(LEDGER) == replica.tuples(LEDGER)
    assert_well(master, replica)


def test_two_synchronous_writers_of_2_6_are_distinguished(cluster: Cluster) -> None:
    mesh = Mesh(cluster, ("real", "ours"), replication_synchro_quorum=1, replication_synchro_timeout=60)
    real, ours = mesh.members
    write_synchronous(real, 0)
    mesh.wait_same(real)
    both = real.vclock()
    mesh.isolate(real)
    write_synchronous(real, 1, "of the real one")
    mesh.configure(ours, replication_synchro_quorum=NEVER)
    Pending(ours, 2, "of ours")
    eventually("it is written", lambda: ours.vclock().get(2, 0) > both.get(2, 0))
    mesh.wire(ours, real).mend()  # one way: the other server, with an empty queue, would accept our row
    finding = found(Kind.FOREIGN_QUEUE, real, ours)
    assert finding.severity is Severity.STOPPED
    told = "\n".join(finding.evidence)
    assert "of the real one" in told
    assert "of ours" in told


def test_set_without_a_candidate_is_reported_as_leaderless(nodes: Cluster) -> None:
    mesh = Mesh(nodes, ("ours", "ours"), direct=True)
    mesh.set_modes("voter")
    finding = found(Kind.NO_LEADER, *mesh)
    assert (finding.severity, finding.replicaset) == (Severity.STOPPED, mesh.members[0].info()["cluster"]["uuid"])
    assert "`election_mode` is `candidate` on none of them" in finding.why
    (leader,) = [member for member in mesh if f"`election_mode` to candidate on {member.address}" in finding.advice]
    mesh.configure(leader, election_mode="candidate")
    assert mesh.wait_leader() is leader


@EITHER
def test_read_only_set_is_reported_with_the_reason(cluster: Cluster, kind: str) -> None:
    member = make(cluster, kind, "one")
    assert_well(member)
    member.configure(read_only=True)
    finding = found(Kind.READ_ONLY, member)
    assert "`read_only` is set on every member" in finding.why


def test_stalled_queue_with_a_quorum_is_reported_as_lag(nodes: Cluster) -> None:
    mesh = Mesh(
        nodes, ("ours", "ours"), replication_synchro_quorum=2, replication_synchro_timeout=60, replication_timeout=10
    )
    owner, other = mesh.members
    promote(owner)
    mesh.wait_owner(owner)
    wire = mesh.wire(other, owner)
    wire.hold(Way.THERE)
    pending = Pending(owner, 1).wait_on(owner)
    finding = found(Kind.QUEUE_WAITS, owner, other)
    assert (finding.severity, finding.member) == (Severity.BEHIND, owner.uuid)
    assert "1 transaction is pending" in finding.what
    wire.release()
    assert pending.outcome() == 0


class _Late(SystemClock):
    """A slow clock; less than the limit at which a real server does not start (`replication_sync_lag`)."""

    @staticmethod
    def wall() -> float:
        return time.time() - 6.0


TIME = "has a timestamp 6."


def test_clock_skew_is_distinguished_from_lag(tmp_path: Path) -> None:
    """A real server follows a node in this process, whose clock can be replaced."""

    async def look() -> Finding:
        late = dataclasses.replace(production(), clock=_Late())
        user = ("admin", "secret")
        async with flowstone.Node(
            tmp_path / "late", listen="127.0.0.1:0", user=user, dialect="2.6", replication_timeout=0.2, outside=late
        ) as node:
            uri = f"admin:secret@{node.address}"
            serving = real_tarantool.serve(tmp_path / "real", cfg=f"replication = '{uri}', replication_timeout = 0.2")
            server = await asyncio.to_thread(serving.__enter__)
            try:
                uris = [parse_uri(f"admin:secret@{server.uri}"), parse_uri(uri)]
                survey = Survey(production(), uris, timeout=SECONDS)
                deadline = time.monotonic() + SECONDS
                findings: tuple[Finding, ...] = ()
                while time.monotonic() < deadline:
                    # A late heartbeat carries an older time, and a lost link returns.
                    findings = explain(await survey.look())
                    # The node has no upstreams and may lack a row of the server, which is found, too.
                    if told := [finding for finding in findings if TIME in finding.why]:
                        return told[0]
                    await asyncio.sleep(0.05)
                raise AssertionError(f"clocks that differ were not found: {findings}")
            finally:
                await survey.close()
                await asyncio.to_thread(serving.__exit__, None, None, None)

    finding = asyncio.run(look())
    assert (finding.kind, finding.severity) == (Kind.CLOCK_SKEW, Severity.WARNING)
    assert TIME in finding.why


@BOTH_WAYS
def test_running_copy_of_a_data_directory_is_reported(cluster: Cluster, master_kind: str, replica_kind: str) -> None:
    master, replica = pair(cluster, master_kind, replica_kind)
    replica.stop()
    copy = make(cluster, replica_kind, "copy", start=False, replication=[master.uri])
    shutil.copytree(replica.directory, copy.directory, ignore=shutil.ignore_patterns("*.log"), dirs_exist_ok=True)
    replica.start()
    replica.wait_follow(master)
    copy.start(replication_connect_quorum=0)
    assert copy.uuid == replica.uuid
    finding = found(Kind.COPIED_INSTANCE, copy)
    assert (finding.severity, finding.member) == (Severity.STOPPED, copy.uuid)
    assert f"{master.address} already has a connection from an instance with the UUID of {copy.address}" in finding.why
    for both in ((replica, copy), (copy, replica)):
        (finding,) = [one for one in explained(master, *both) if one.kind is Kind.COPIED_INSTANCE]
        assert finding.what == f"two processes run as one member: {both[0].address} and {both[1].address}"
        assert "stop one of the two processes" in finding.advice


@EITHER
def test_server_of_another_set_at_the_address_of_a_master_is_reported_with_both_sets(
    cluster: Cluster, kind: str
) -> None:
    master, replica = pair(cluster, kind, "real")
    mine = master.info()["cluster"]["uuid"]
    master.stop()
    other = make(cluster, kind, "other", start=False)
    other.port = master.port
    other.start()
    finding = found(Kind.WRONG_CLUSTER, replica)
    assert (finding.severity, finding.member) == (Severity.STOPPED, replica.uuid)
    assert mine in finding.why
    assert other.info()["cluster"]["uuid"] in finding.why


@BOTH_WAYS
def test_starting_master_is_not_an_error(cluster: Cluster, master_kind: str, replica_kind: str) -> None:
    """It already listens, and waits for a missing member of its `replication`."""
    master, replica = pair(cluster, master_kind, replica_kind)
    master.stop()
    nobody = f"replicator:secret@127.0.0.1:{free_port()}"
    master.launch(replication=[nobody], replication_connect_timeout=SECONDS)
    finding = found(Kind.STARTING, replica)
    assert finding.severity is Severity.WARNING
    assert "wait" in finding.advice


def test_schema_too_new_for_a_member_is_a_version_mismatch(cluster: Cluster) -> None:
    """`box.schema.upgrade()` of a newer release writes such rows; some member still runs an older release."""
    master, replica = pair(cluster, "ours", "real")
    master.client.insert(SPACE, *VSPACE_SEQUENCE)
    master.client.insert(INDEX, VSPACE_SEQUENCE[0], 0, "primary", "tree", {"unique": True}, [[0, "unsigned"]])
    finding = found(Kind.VERSION_MISMATCH, master, replica)
    assert (finding.severity, finding.member) == (Severity.STOPPED, replica.uuid)
    assert "unknown space for system view" in finding.why
    assert "Upgrade" in finding.advice


async def test_follower_that_keeps_receiving_rows_is_polled_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = 5

    async def conflict(*_: object) -> Conflict:
        nonlocal taken
        taken += 1
        assert taken < 100
        return Conflict(1, taken, "INSERT [1]", "[1]", "")

    async def position(_: object) -> dict[int, int]:
        return {1: taken}

    monkeypatch.setattr(investigation, "read_section", AsyncMock())
    monkeypatch.setattr(investigation, "find_conflict", conflict)
    monkeypatch.setattr(investigation, "_position", position)
    told = {"status": "stopped", "message": "Duplicate key exists in unique index 'pk' in space 'ledger'"}
    (one,) = replica_sets(reports.pair({1: 99}, {1: 5}, told))
    (finding,) = explain([one])
    survey = Survey(production(), [parse_uri(reports.address(number)) for number in (1, 2)])
    deeper = await Investigation(production(), survey).duplicate_key(one, finding)
    assert taken == 5 + CONFLICT_ROUNDS_MAX
    assert (deeper.why, deeper.advice) == (finding.why, finding.advice)
    assert "keeps applying rows" in deeper.evidence[-1]


def test_unknown_error_is_reported_with_the_message_of_the_server(cluster: Cluster) -> None:
    master, replica = pair(cluster, "ours", "real")
    replica.call("interop.refuse", "ledger", "the fuse has blown")
    write(master, [1])
    finding = found(Kind.REPLICATION_STOPPED, master, replica)
    assert (finding.severity, finding.member) == (Severity.STOPPED, replica.uuid)
    assert "the fuse has blown" in finding.why
    assert "see the log of" in finding.advice
