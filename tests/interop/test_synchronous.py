"""Synchronous replication with real servers 2.6, without elections: quorum, verdicts, rollback, a lost owner.

Each test runs in both roles. Stories are logs of members: "1+2 confirm 1+1" is the second row of member 1 since the
story began, and confirms its first.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import unpack
from tests.interop.cluster import QUICK, Cluster
from tests.interop.compare import assert_converged, assert_same_data, assert_same_log
from tests.interop.conftest import _CLUSTER
from tests.interop.member import Member, eventually, wait_ready
from tests.interop.synchronous import (
    BOTH_WAYS,
    FOREIGN_QUEUE,
    FOREVER,
    NOW,
    OWN,
    PATIENT,
    PLAIN,
    QUORUM_TIMEOUT,
    ROLLED_BACK,
    SYNC,
    THREE,
    Pairs,
    Story,
    UnderWay,
    assert_told,
    call,
    define,
    delete,
    insert,
    keys,
    replace,
    snapshot_keys,
    together,
    wait_acked,
    wait_anonymous_acked,
    wait_keys,
)
from tests.interop.versions import Binary, fits

EOF_MARKER = bytes.fromhex("d510aded")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pairs]:
    pairs = Pairs(tmp_path_factory.mktemp("pairs"))
    yield pairs
    broken = list(pairs.close())
    assert not broken, broken


@pytest.fixture(params=[("real", "ours"), ("ours", "real")], ids="-".join)
def pair(request: pytest.FixtureRequest, binary: Binary, pairs: Pairs) -> tuple[Member, Member]:
    """Yield a master and a replica, without data, with a quorum of two."""
    cluster, master, replica = pairs.get(binary, *request.param)
    request.node.stash[_CLUSTER] = cluster
    return master, replica


# --- quorum and timeout ---


@fits("2.6")
def test_replica_of_the_other_kind_completes_the_quorum(pair: tuple[Member, Member]) -> None:
    master, replica = pair
    story = Story(master)
    assert UnderWay(master, insert(SYNC, 1)).codes() == [0]
    steps = ["insert", SYNC, [2]], ["insert", PLAIN, [2]], ["insert", OWN, [2]]
    assert UnderWay(master, together(*steps)).codes() == [0]
    assert UnderWay(master, insert(PLAIN, 3)).codes() == [0]
    story.wait(7, replica)
    replica.pause()
    master.configure(replication_synchro_quorum=1)
    assert UnderWay(master, delete(SYNC, 1)).codes() == [0]
    replica.resume()
    wanted = [
        "1+1 insert",
        "1+2 confirm 1+1",
        "1+3 insert, 1+4 insert, 1+5 nop",
        "1+6 confirm 1+5",
        "1+7 insert",
        "1+8 delete",
        "1+9 confirm 1+8",
    ]
    story.wait(9, master, replica)
    assert_told(story, wanted, master, replica)
    assert keys(master) == keys(replica) == [2]
    assert_converged(master, replica)


@fits("2.6")
def test_timeout_rolls_back_on_both_sides(pair: tuple[Member, Member]) -> None:
    master, replica = pair
    master.configure(replication_synchro_quorum=3, replication_synchro_timeout=0.1)
    story = Story(master)
    (error,) = UnderWay(master, insert(SYNC, 1)).errors()
    assert error is not None
    text = "Quorum collection for a synchronous transaction is timed out"
    assert (error.code, error.message) == (QUORUM_TIMEOUT, text)
    steps = ["insert", SYNC, [1]], ["insert", PLAIN, [1]], ["insert", OWN, [1]]
    assert UnderWay(master, together(*steps)).codes() == [QUORUM_TIMEOUT]
    story.wait(6, master, replica)
    wanted = ["1+1 insert", "1+2 rollback 1+1", "1+3 insert, 1+4 insert, 1+5 nop", "1+6 rollback 1+5"]
    assert_told(story, wanted, master, replica)
    assert [keys(master, space) for space in (SYNC, PLAIN, OWN)] == [[], [], []]
    assert_converged(master, replica)
    master.configure(**PATIENT)
    assert UnderWay(master, insert(SYNC, 1, "anew")).codes() == [0]
    assert_converged(master, replica)


@fits("2.6")
def test_transactions_after_a_timeout_are_rolled_back_in_reverse_order(pair: tuple[Member, Member]) -> None:
    master, replica = pair
    assert UnderWay(master, insert(SYNC, 1, "old"), insert(PLAIN, 1, "old")).codes() == [0, 0]
    replica.catch_up(master)
    master.configure(replication_synchro_quorum=3)
    story = Story(master)
    commits = UnderWay(
        master,
        replace(SYNC, 1, "first"),
        replace(PLAIN, 1, "second"),
        insert(OWN, 1),
        delete(SYNC, 1),
        together(["insert", SYNC, [1, "third"]], ["delete", PLAIN, [1]]),
    )
    story.wait(5, master, replica)
    last = UnderWay(master, insert(PLAIN, 1, "fourth"))
    story.wait(6, master, replica)
    assert commits.is_waiting
    assert last.is_waiting
    # A reader that does not wait for the verdict sees rows that may be rolled back, on either side.
    for member in (master, replica):
        assert [unpack(raw) for raw in member.tuples(SYNC)] == [(1, "third")]
        assert [unpack(raw) for raw in member.tuples(PLAIN)] == [(1, "fourth")]
    master.configure(**NOW)
    first, *others = commits.errors() + last.errors()
    assert first is not None
    assert first.code == QUORUM_TIMEOUT
    for other in others:
        assert other is not None
        assert (other.code, other.message) == (
            ROLLED_BACK,
            "A rollback for a synchronous transaction is received",
        )
    story.wait(7, master, replica)
    wanted = ["1+1 replace", "1+2 replace", "1+3 delete", "1+4 insert, 1+5 delete", "1+6 insert", "1+7 rollback 1+1"]
    assert_told(story, wanted, master, replica)
    for member in (master, replica):
        assert [unpack(raw) for raw in member.tuples(SYNC)] == [(1, "old")]
        assert [unpack(raw) for raw in member.tuples(PLAIN)] == [(1, "old")]
    assert keys(master, OWN) == []
    assert_converged(master, replica)


@fits("2.6")
def test_asynchronous_transactions_are_pending_after_synchronous_ones(pair: tuple[Member, Member]) -> None:
    master, replica = pair
    master.configure(replication_synchro_quorum=3)
    story = Story(master)
    synchronous = UnderWay(master, insert(SYNC, 1))
    story.wait(1, replica)
    others = [UnderWay(master, insert(PLAIN, 1)), UnderWay(master, insert(OWN, 1))]
    story.wait(2, replica)
    wait_keys([1], master, space=OWN)
    # An ACK that reaches a real 2.6.0 while it writes a CONFIRM makes it write another one, and stops its queue.
    wait_acked(master, replica)
    assert all(one.is_waiting for one in (synchronous, *others))
    master.configure(replication_synchro_quorum=2)
    assert [one.codes() for one in (synchronous, *others)] == [[0], [0], [0]]
    story.wait(3, master, replica)
    assert_told(story, ["1+1 insert", "1+2 insert", "1+3 confirm 1+1"], master, replica)
    assert UnderWay(master, insert(PLAIN, 2)).codes() == [0]
    assert_converged(master, replica)


# --- changes of the quorum, many writers, a change of roles ---


@fits("2.6")
def test_changed_quorum_and_timeout_apply_to_pending_transactions(pair: tuple[Member, Member]) -> None:
    master, replica = pair
    story = Story(master)
    replica.pause()
    commit = UnderWay(master, insert(SYNC, 1))
    story.wait(1, master)
    master.configure(replication_synchro_quorum=3)
    replica.resume()
    story.wait(1, replica)
    wait_acked(master, replica)
    assert commit.is_waiting, "an ACK after the quorum was raised is not enough"
    master.configure(replication_synchro_quorum=2)
    assert commit.codes() == [0]
    story.wait(2, replica)
    replica.pause()
    commit = UnderWay(master, insert(SYNC, 2))
    story.wait(3, master)
    assert commit.is_waiting
    master.configure(replication_synchro_quorum=1)
    assert commit.codes() == [0]
    master.configure(replication_synchro_quorum=2)
    commit = UnderWay(master, insert(SYNC, 3))
    story.wait(5, master)
    master.configure(**NOW)
    assert commit.codes() == [QUORUM_TIMEOUT]
    replica.resume()
    story.wait(6, replica)
    wanted = [f"1+{first} insert" for first in (1, 3, 5)]
    verdicts = ["1+2 confirm 1+1", "1+4 confirm 1+3", "1+6 rollback 1+5"]
    told = [line for pair in zip(wanted, verdicts, strict=True) for line in pair]
    assert_told(story, told, master, replica)
    assert keys(master) == keys(replica) == [1, 2]


@fits("2.6")
def test_many_writers_commit_in_the_order_of_the_log(pair: tuple[Member, Member]) -> None:
    master, replica = pair
    story = Story(master)
    count = 150
    writers = [
        UnderWay(master, *(replace(SYNC, 0, writer, number) for number in range(count)), insert(SYNC, writer))
        for writer in (1, 2, 3)
    ]
    if master.kind == "flowstone":  # a real 2.6.0 forgets to answer some of them
        writers.append(UnderWay(master, *(insert(PLAIN, number) for number in range(count))))
    for writer in writers:
        assert set(writer.codes()) == {0}
    assert_converged(master, replica)
    assert_same_log(master, replica, origins=[1])
    values = [unpack(row.body) for row in story.rows(master) if row.type == RequestType.REPLACE]
    written = [value[Key.TUPLE] for value in values]
    for number in (1, 2, 3):
        assert [step for _, writer, step in written if writer == number] == list(range(count))
    assert unpack(master.tuples(SYNC)[0]) == unpack(replica.tuples(SYNC)[0]) == written[-1]
    told = [line.split() for line in story.of(master)]
    confirmed = [int(line[2].removeprefix("1+")) for line in told if line[1] == "confirm"]
    assert confirmed == sorted(set(confirmed)), "each confirms more than the one before"
    assert "rollback" not in {line[1] for line in told}


@fits("2.6")
def test_first_writer_to_an_empty_queue_becomes_its_owner(pair: tuple[Member, Member]) -> None:
    master, replica = pair
    master.configure(replication=[replica.uri])
    master.wait_follow(replica)
    story = Story(master)
    assert UnderWay(master, insert(SYNC, 1)).codes() == [0]
    replica.catch_up(master)
    assert UnderWay(replica, insert(SYNC, 2)).codes() == [0]
    master.catch_up(replica)
    told = ["1+1 insert", "1+2 confirm 1+1", "2+1 insert", "2+2 confirm 2+1"]
    assert_told(story, told, master, replica)

    master.configure(replication_synchro_quorum=3)
    commit = UnderWay(master, insert(SYNC, 3))
    story.wait(3, replica)
    for error in UnderWay(replica, insert(SYNC, 4), insert(PLAIN, 4)).errors():
        assert error is not None
        assert (error.code, error.message) == (
            FOREIGN_QUEUE,
            "Found uncommitted sync transactions from other instance with id 1",
        )
    assert keys(replica) == [1, 2, 3]
    master.configure(replication_synchro_quorum=2)
    assert commit.codes() == [0]
    replica.catch_up(master)
    assert UnderWay(replica, insert(SYNC, 4), insert(PLAIN, 4)).codes() == [0, 0]
    assert_converged(master, replica)
    assert [line for line in story.of(master) if line.startswith("2")][2:] == [
        "2+3 insert",
        "2+4 insert",
        "2+5 confirm 2+3",
    ]


# --- acknowledgements that count ---


@fits("2.6")
def test_repeated_ack_of_a_replica_counts_once(pair: tuple[Member, Member]) -> None:
    master, replica = pair
    for member in pair:
        member.configure(replication_timeout=QUICK["replication_timeout"])
    master.configure(replication_synchro_quorum=3)
    story = Story(master)
    commit = UnderWay(master, insert(SYNC, 1))
    story.wait(1, replica)
    idle = [0.0]
    """The longest intervals between two messages of the replica."""

    def several_heartbeats() -> bool:
        now = master.downstream(2).get("idle", 0.0)
        if now < idle[-1]:
            idle.append(0.0)
        idle[-1] = now
        return len(idle) > 4

    eventually("the replica repeats itself", several_heartbeats)
    assert commit.is_waiting
    master.configure(replication_synchro_quorum=2)
    assert commit.codes() == [0]
    assert_converged(master, replica)
    assert_told(story, ["1+1 insert", "1+2 confirm 1+1"], master, replica)


@fits("2.6")
@BOTH_WAYS
def test_anonymous_replicas_count_as_one(cluster: Cluster, master_kind: str, replica_kind: str) -> None:
    # No heartbeats at first: a real 2.6.0 counts a repeated older ACK if the other replica is ahead.
    quiet = PATIENT | {"replication_timeout": FOREVER}
    master: Member = getattr(cluster, master_kind)("master", **quiet)
    define(master)
    options = quiet | {"replication": [master.uri], "replication_anon": True, "read_only": True}
    replicas: list[Member] = [getattr(cluster, replica_kind)(name, start=False, **options) for name in ("one", "two")]
    for replica in replicas:
        replica.launch()
    wait_ready(*replicas)
    for replica in replicas:
        replica.wait_follow(master)
    story = Story(master)
    assert UnderWay(master, insert(SYNC, 1)).codes() == [0]
    story.wait(2, *replicas)
    wait_anonymous_acked(master, 2)  # a late ACK would count as another one
    master.configure(replication_synchro_quorum=3)
    commit = UnderWay(master, insert(SYNC, 2))
    story.wait(3, *replicas)
    wait_anonymous_acked(master, 2)
    for member in (master, *replicas):
        member.configure(replication_timeout=QUICK["replication_timeout"])
    # wakes the relay, which would otherwise wait forever for the next heartbeat
    behind = UnderWay(master, insert(OWN, 1))
    wait_keys([1], master, space=OWN)
    master.configure(replication_synchro_timeout=2 * QUICK["replication_timeout"])
    assert commit.codes() + behind.codes() == [QUORUM_TIMEOUT, ROLLED_BACK]
    story.wait(4, *replicas)
    told = ["1+1 insert", "1+2 confirm 1+1", "1+3 insert", "1+4 rollback 1+3"]
    assert_told(story, told, master, *replicas)
    assert_same_data(master, *replicas)


@fits("2.6")
def test_disconnected_client_does_not_cancel_its_commit(pair: tuple[Member, Member]) -> None:
    master, replica = pair
    master.configure(replication_synchro_quorum=3)
    story = Story(master)
    commits = UnderWay(master, insert(SYNC, 1), insert(PLAIN, 1))
    story.wait(2, replica)
    commits.abandon()
    behind = UnderWay(master, insert(SYNC, 2))
    story.wait(3, replica)
    wait_acked(master, replica)  # otherwise the first is confirmed alone
    assert behind.is_waiting
    master.configure(replication_synchro_quorum=2)
    assert behind.codes() == [0]
    story.wait(4, replica)
    assert_told(story, ["1+1 insert", "1+2 insert", "1+3 insert", "1+4 confirm 1+3"], master, replica)
    assert_converged(master, replica)
    assert keys(replica) == [1, 2]


# --- checkpoints and restarts of nodes ---


@fits("2.6")
def test_snapshot_waits_for_the_verdict_on_its_rows(pair: tuple[Member, Member]) -> None:
    master, replica = pair
    assert UnderWay(master, insert(SYNC, 1)).codes() == [0]
    replica.catch_up(master)
    master.configure(replication_synchro_quorum=3)
    files = [len(member.files("snap")) for member in (master, replica)]
    story = Story(master)
    commit = UnderWay(master, insert(SYNC, 2), insert(PLAIN, 2))
    story.wait(2, replica)
    snapshots = [UnderWay(member, call("box.snapshot")) for member in (master, replica)]
    # Later rows are not in the snapshot, whatever their outcome.
    _wait_begun(master, replica)
    later = UnderWay(master, insert(SYNC, 3))
    story.wait(3, replica)
    assert all(one.is_waiting for one in snapshots)
    assert [len(member.files("snap")) for member in (master, replica)] == files
    master.configure(replication_synchro_quorum=2)
    assert commit.codes() == [0, 0]
    assert later.codes() == [0]
    assert [one.codes() for one in snapshots] == [[0], [0]]
    for member in (master, replica):
        assert snapshot_keys(member) == [1, 2]
    replica.catch_up(master)
    _restart_nodes(master, replica)
    assert keys(master) == keys(replica) == [1, 2, 3]
    assert_converged(master, replica)


def _wait_begun(*members: Member) -> None:
    """Wait until the requested snapshots wait for verdicts."""

    def has_begun(member: Member) -> bool:
        # A real server closes its log before it waits. If everything is rolled back before that, it writes the snapshot
        # after all.
        is_closed = member.kind == "flowstone" or member.files("xlog")[-1].read_bytes().endswith(EOF_MARKER)
        return is_closed and member.gc()["checkpoint_is_in_progress"]

    for member in members:
        eventually(f"{member} has begun its snapshot", partial(has_begun, member))


@fits("2.6")
def test_snapshot_of_rolled_back_rows_is_not_written(pair: tuple[Member, Member]) -> None:
    master, replica = pair
    assert UnderWay(master, insert(SYNC, 1)).codes() == [0]
    replica.catch_up(master)
    files = [member.files("snap") for member in (master, replica)]
    master.configure(replication_synchro_quorum=3)
    story = Story(master)
    commit = UnderWay(master, insert(SYNC, 2))
    story.wait(1, replica)
    snapshots = [UnderWay(member, call("box.snapshot")) for member in (master, replica)]
    _wait_begun(master, replica)
    assert all(one.is_waiting for one in snapshots)
    master.configure(**NOW)
    assert commit.codes() == [QUORUM_TIMEOUT]
    (of_master,), (of_replica,) = (one.codes() for one in snapshots)
    assert of_master in (QUORUM_TIMEOUT, ROLLED_BACK)  # its own timeout may be shorter
    assert of_replica == ROLLED_BACK
    assert [member.files("snap") for member in (master, replica)] == files

    master.configure(replication_synchro_timeout=FOREVER)
    commit = UnderWay(master, insert(SYNC, 3))
    story.wait(3, replica)
    replica.configure(**NOW)
    assert UnderWay(replica, call("box.snapshot")).codes() == [QUORUM_TIMEOUT]
    assert keys(replica) == [1, 3]
    master.configure(replication_synchro_quorum=2)
    assert commit.codes() == [0]
    story.wait(4, replica)
    for member in (master, replica):
        member.snapshot()
        assert snapshot_keys(member) == [1, 3]


@fits("2.6")
def test_rolled_back_transaction_is_absent_after_a_restart(pair: tuple[Member, Member]) -> None:
    master, replica = pair
    assert UnderWay(master, insert(SYNC, 1, "old")).codes() == [0]
    master.configure(replication_synchro_quorum=3, **NOW)
    steps = ["replace", SYNC, [1, "newer"]], ["insert", PLAIN, [1]], ["insert", OWN, [1]]
    for request in (replace(SYNC, 1, "new"), together(*steps)):
        assert UnderWay(master, request).codes() == [QUORUM_TIMEOUT]
    replica.catch_up(master)
    _restart_nodes(master, replica)
    assert [unpack(raw) for raw in replica.tuples(SYNC)] == [(1, "old")]
    master.configure(**PATIENT)
    assert UnderWay(master, insert(SYNC, 2), insert(PLAIN, 2), insert(OWN, 2)).codes() == [0, 0, 0]
    assert_converged(master, replica)
    assert [keys(master, space) for space in (SYNC, PLAIN, OWN)] == [[1, 2], [2], [2]]


def _restart_nodes(master: Member, replica: Member) -> None:
    """Restart the nodes only: real servers 2.6.0 do not survive all tests here.

    During recovery they undo only the last row of a transaction, and for synchronous rows in their own snapshot they
    wait for a quorum that cannot be reached.
    """
    replica.configure(**QUICK)  # the replica reconnects soon
    for member in (master, replica):
        if member.kind == "flowstone":
            member.restart()
    replica.wait_follow(master)


# --- chains ---


@fits("2.6")
@THREE
def test_chain_relays_confirms_and_rollbacks_in_order(cluster: Cluster, kinds: tuple[str, ...]) -> None:
    first: Member = getattr(cluster, kinds[0])("first", **PATIENT)
    define(first)
    middle: Member = getattr(cluster, kinds[1])("middle", **PATIENT, replication=[first.uri])
    last: Member = getattr(cluster, kinds[2])("last", **PATIENT, replication=[middle.uri])
    last.wait_follow(middle)
    story = Story(first, middle, last)
    told: list[str] = []
    for number in range(1, 7):
        first.configure(replication_synchro_quorum=4, replication_synchro_timeout=FOREVER)
        commits = UnderWay(first, replace(SYNC, 1, number), insert(PLAIN, number))
        story.wait(3 * number - 1, last)
        assert unpack(last.tuples(SYNC)[0]) == (1, number)
        is_confirmed = number % 2
        if is_confirmed:
            first.configure(replication_synchro_quorum=2)
        else:
            first.configure(**NOW)
        assert commits.codes() == ([0, 0] if is_confirmed else [QUORUM_TIMEOUT, ROLLED_BACK])
        at = 3 * number
        verdict = "confirm" if is_confirmed else "rollback"
        told += [f"1+{at - 2} replace", f"1+{at - 1} insert", f"1+{at} {verdict} 1+{at - 2}"]
        story.wait(at, last)
        assert unpack(last.tuples(SYNC)[0]) == (1, number if is_confirmed else number - 1)
    assert_told(story, told, first, middle, last)
    assert_converged(middle, last)
    assert_same_data(first, middle, besides=["_cluster"])  # the middle member registered the last one
