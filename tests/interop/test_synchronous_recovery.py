"""Synchronous replication with real servers 2.6 whose members join, leave and restart: snapshots, joins, lost owners.

Stories are as in `test_synchronous.py`.
"""

from __future__ import annotations

from flowstone.iproto.msgpack import unpack
from tests.interop.cluster import Cluster, not_for_stand_ins
from tests.interop.compare import assert_converged
from tests.interop.member import Member, eventually
from tests.interop.synchronous import (
    BOTH_WAYS,
    FOREVER,
    NOW,
    PATIENT,
    PLAIN,
    QUORUM_TIMEOUT,
    ROLLED_BACK,
    SYNC,
    THREE,
    Story,
    UnderWay,
    assert_told,
    call,
    define,
    insert,
    keys,
    make_pair,
    replace,
    snapshot_keys,
    together,
    wait_acked,
)
from tests.interop.versions import fits

CLUSTER = 320


@fits("2.6")
@BOTH_WAYS
def test_join_waits_for_a_verdict_and_restarts_after_a_rollback(
    cluster: Cluster, master_kind: str, replica_kind: str
) -> None:
    master, joining = _join_while_one_waits(cluster, master_kind, replica_kind)
    master.configure(**NOW)
    joining.wait_ready()
    joining.wait_follow(master)
    assert joining.id == 2
    assert keys(joining) == snapshot_keys(joining) == []
    assert_converged(master, joining)


@fits("2.6")
@not_for_stand_ins  # a real 2.6 that joins does not understand a CONFIRM from a real 2.6
@BOTH_WAYS
def test_join_waits_for_a_verdict_and_contains_confirmed_rows(
    cluster: Cluster, master_kind: str, replica_kind: str
) -> None:
    master, joining = _join_while_one_waits(cluster, master_kind, replica_kind)
    master.configure(replication_synchro_quorum=1)
    joining.wait_ready()
    joining.wait_follow(master)
    assert joining.id == 2
    assert keys(joining) == snapshot_keys(joining) == [1]
    assert_converged(master, joining)


def _join_while_one_waits(cluster: Cluster, master_kind: str, replica_kind: str) -> tuple[Member, Member]:
    master: Member = getattr(cluster, master_kind)("master", **PATIENT)
    define(master)
    story = Story(master)
    UnderWay(master, insert(SYNC, 1))
    story.wait(1, master)
    joining: Member = getattr(cluster, replica_kind)("joining", start=False, **PATIENT, replication=[master.uri])
    joining.launch()
    master.wait_log("joining replica")
    assert len(master.tuples(CLUSTER)) == 1
    assert not joining.files("snap")
    return master, joining


# --- restarts, and a lost owner ---


@fits("2.6")
@BOTH_WAYS
def test_killed_replica_still_has_its_pending_transactions(
    cluster: Cluster, master_kind: str, replica_kind: str
) -> None:
    master, replica = make_pair(cluster, master_kind, replica_kind)
    assert UnderWay(master, insert(SYNC, 1, "old")).codes() == [0]
    master.configure(replication_synchro_quorum=3)
    story = Story(master)
    commits = UnderWay(master, replace(SYNC, 1, "new"), insert(PLAIN, 1))
    story.wait(2, replica)
    replica.kill()
    replica.start()
    replica.wait_follow(master)
    assert unpack(replica.tuples(SYNC)[0]) == (1, "new")
    master.configure(**NOW)
    assert commits.codes() == [QUORUM_TIMEOUT, ROLLED_BACK]
    story.wait(3, replica)
    assert unpack(replica.tuples(SYNC)[0]) == (1, "old")
    master.configure(replication_synchro_timeout=FOREVER)
    commits = UnderWay(master, replace(SYNC, 1, "newer"), insert(PLAIN, 2))
    story.wait(5, replica)
    wait_acked(master, replica)
    replica.kill()
    later = UnderWay(master, insert(SYNC, 2))
    story.wait(6, master)
    master.configure(replication_synchro_quorum=2)
    if master_kind == "real":
        assert commits.codes() == [0, 0]  # the replica has acknowledged them
    else:
        assert commits.is_waiting  # a node counts a member only while it is connected: its data may be lost
    assert later.is_waiting
    replica.start()
    assert later.codes() == [0]
    assert master_kind == "real" or commits.codes() == [0, 0]
    assert_converged(master, replica)
    assert unpack(replica.tuples(SYNC)[0]) == (1, "newer")
    # The first acknowledgement after the restart covers the replica's rows, or the new row, too.
    one_by_one, together = ["1+7 confirm 1+4", "1+8 confirm 1+6"], ["1+6 insert", "1+7 confirm 1+6"]
    assert story.of(master)[-2:] in ([one_by_one] if master_kind == "real" else [one_by_one, together])
    assert story.of(master) == story.of(replica)
    replica.snapshot()
    assert snapshot_keys(replica) == [1, 2]


@fits("2.6")
@not_for_stand_ins  # a real 2.6.0 crashes when it commits recovered transactions
def test_killed_node_decides_its_queue_with_a_real_replica(cluster: Cluster) -> None:
    master, replica = make_pair(cluster, "ours", "real")
    assert UnderWay(master, insert(SYNC, 1)).codes() == [0]
    master.configure(replication_synchro_quorum=3)
    story = Story(master)
    commits = UnderWay(master, insert(SYNC, 2), insert(PLAIN, 2), insert(SYNC, 3))
    story.wait(3, master, replica)
    master.kill()
    commits.abandon()
    master.start(replication_synchro_quorum=3)
    replica.wait_follow(master)
    assert keys(master) == [1, 2, 3]
    assert story.of(master) == ["1+1 insert", "1+2 insert", "1+3 insert"]
    master.configure(replication_synchro_quorum=2)
    story.wait(4, master, replica)
    assert_told(story, ["1+1 insert", "1+2 insert", "1+3 insert", "1+4 confirm 1+3"], master, replica)
    assert UnderWay(master, insert(SYNC, 4)).codes() == [0]
    assert_converged(master, replica)


@fits("2.6")
@THREE
def test_queue_of_a_lost_owner_is_confirmed_by_the_member_that_clears_it(
    cluster: Cluster, kinds: tuple[str, ...]
) -> None:
    owner, heir, third = _lose_the_owner(cluster, kinds, quorum=2)
    story = Story(third)
    heir.configure(replication_synchro_timeout=0.05)
    assert UnderWay(heir, call("box.ctl.clear_synchro_queue")).codes() == [0]
    heir.configure(replication_synchro_timeout=FOREVER)
    assert UnderWay(heir, insert(SYNC, 4)).codes() == [0]
    story.wait(3, heir, third, origin=2)
    assert_told(story, ["2+1 confirm 1+0", "2+2 insert", "2+3 confirm 2+2"], heir, third)
    assert keys(heir) == keys(third) == [1, 2, 3, 4]
    owner.start(replication=[heir.uri])
    assert_converged(owner, heir, third)
    assert keys(owner) == [1, 2, 3, 4]


@fits("2.6")
def test_transactions_of_a_lost_owner_without_a_quorum_are_rolled_back(cluster: Cluster) -> None:
    owner, heir, third = _lose_the_owner(cluster, ("real", "ours", "real"), quorum=3)
    story = Story(third)
    heir.configure(replication_synchro_timeout=0.05)
    assert UnderWay(heir, call("box.ctl.clear_synchro_queue")).codes() == [0]
    heir.configure(replication_synchro_timeout=FOREVER, replication_synchro_quorum=2)
    assert UnderWay(heir, insert(SYNC, 4)).codes() == [0]
    story.wait(3, heir, third, origin=2)
    assert_told(story, ["2+1 rollback 1+-3", "2+2 insert", "2+3 confirm 2+2"], heir, third)
    assert keys(heir) == keys(third) == [4]
    assert keys(heir, PLAIN) == keys(third, PLAIN) == []
    owner.start(replication=[heir.uri])
    assert_converged(owner, heir, third)


@fits("2.6")
@not_for_stand_ins  # a real 2.6.0 crashes when it commits recovered transactions
def test_returning_owner_decides_nothing_before_it_hears_from_the_new_owner(cluster: Cluster) -> None:
    owner, heir, third = _lose_the_owner(cluster, ("ours", "real", "real"), quorum=4)
    heir.configure(replication_synchro_timeout=0.05)
    assert UnderWay(heir, call("box.ctl.clear_synchro_queue")).codes() == [0]
    assert keys(heir) == []
    wire = cluster.proxy(heir)
    wire.hold()
    owner.launch(replication=[wire.uri], replication_connect_timeout=0.5)
    for member in (heir, third):  # both acknowledge the rows in its log, which is a quorum
        member.wait_follow(owner)
    wait_acked(owner, heir)
    wait_acked(owner, third)
    assert keys(owner) == [1, 2, 3]
    wire.release()
    owner.wait_ready()
    assert_converged(owner, heir, third)
    assert keys(owner) == []


def _lose_the_owner(cluster: Cluster, kinds: tuple[str, ...], *, quorum: int) -> tuple[Member, Member, Member]:
    """Three transactions of four rows are pending; the two remaining members have them. `quorum` is the new owner's."""
    owner: Member = getattr(cluster, kinds[0])("owner", **PATIENT)
    define(owner)
    options = PATIENT | {"replication_synchro_quorum": quorum}
    heir: Member = getattr(cluster, kinds[1])("heir", **options, replication=[owner.uri])
    third: Member = getattr(cluster, kinds[2])("third", **PATIENT, replication=[owner.uri])
    heir.catch_up(owner)
    third.configure(replication=[owner.uri, heir.uri])
    third.wait_follow(owner, heir)
    owner.configure(replication_synchro_quorum=4)
    story = Story(owner)
    both = together(["insert", SYNC, [2]], ["insert", SYNC, [3]])
    commits = UnderWay(owner, insert(SYNC, 1), insert(PLAIN, 1), both)
    story.wait(4, owner, heir, third)
    wait_acked(heir, third)
    owner.kill()
    commits.abandon()
    return owner, heir, third


@fits("2.6")
@BOTH_WAYS
def test_verdict_from_another_owner_stops_a_replica(cluster: Cluster, master_kind: str, replica_kind: str) -> None:
    master, replica = make_pair(cluster, master_kind, replica_kind)
    master.configure(replication_synchro_quorum=3)
    story = Story(master)
    commit = UnderWay(master, insert(SYNC, 1))
    story.wait(1, replica)
    replica.configure(replication_synchro_timeout=0.05, replication_synchro_quorum=1)
    replica.call("box.ctl.clear_synchro_queue")
    replica.configure(replication_synchro_timeout=FOREVER)
    assert UnderWay(replica, insert(SYNC, 2)).codes() == [0]
    master.configure(**NOW)
    assert commit.codes() == [QUORUM_TIMEOUT]
    eventually("the replica stops", lambda: replica.upstream(1).get("status") == "stopped")
    text = "CONFIRM message arrived for an unknown master id 1, expected 2"
    assert replica.upstream(1)["message"].startswith(text)
    assert story.of(replica) == ["1+1 insert", "2+1 confirm 1+1", "2+2 insert", "2+3 confirm 2+2"]
