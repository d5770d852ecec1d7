"""The endings find planted violations, and none in healthy sets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import msgpack
import pytest

from flowstone.box.system import CLUSTER_ID
from flowstone.iproto.constants import RaftKey
from flowstone.iproto.row import Row
from flowstone.xlog.errors import DamagedLog
from tests.served_node import create_space
from tests.simulation import test_elections
from tests.simulation.cluster import NAMES, all_follow_all, converge, downstream, follows, start_set, vclock
from tests.simulation.disk import Loss
from tests.simulation.endings import (
    check_equal,
    check_idle,
    check_liveness,
    check_logs,
    check_replay,
    check_reports,
    check_terms,
    names,
    not_following,
    stop_and_compare,
)
from tests.simulation.final_history import FinalHistory
from tests.simulation.logs import (
    CONFIRM,
    NOP,
    PROMOTE,
    RAFT,
    ROLLBACK,
    NodeLog,
    Record,
    decide,
    read_all,
    read_log,
    without_lost_verdicts,
)
from tests.simulation.membership_faults import ids_of_real_masters
from tests.simulation.simulation import Simulation, simulated
from tests.simulation.test_elections import elect
from tests.simulation.test_logs import SYNC, put, record, verdict
from tests.simulation.test_watchers import Set
from tests.simulation.workload import FIELDS, SPACE, SPACE_ID, Writer, make_space


@dataclass
class LedSet(Set):
    def leader(self) -> str | None:
        return self.members[0] if self.sim.is_ready(self.members[0]) else None


async def form(sim: Simulation) -> LedSet:
    """Form a set of three members and an anonymous replica, with some rows."""
    await start_set(sim, replication_timeout=0.5)
    await sim.until(lambda: all_follow_all(sim))
    await sim.on("a", sim.node("a").promote())
    await make_space(sim, "a")
    await Writer(sim, 0).run("a", 20)
    replication = [sim.uri(name) for name in NAMES]
    await sim.start("x", replication=replication, replication_anon=True, read_only=True, replication_timeout=0.5)
    await converge(sim, (*NAMES, "x"))
    return LedSet(sim, list(NAMES), ["x"])


@simulated(seeds=range(2))
async def test_healthy_set_has_no_violations(sim: Simulation) -> None:
    replica_set = await form(sim)
    assert await check_liveness(replica_set, seconds=5) == []
    assert await check_idle(replica_set, seconds=5) == []
    assert check_equal(replica_set) == []
    assert await check_reports(replica_set, seconds=5) == []
    assert (await stop_and_compare(replica_set)).violations == []


@simulated()
async def test_node_that_does_not_follow_is_reported(sim: Simulation) -> None:
    replica_set = await form(sim)
    sim.isolate("x")
    await sim.sleep(10)
    (found,) = await check_liveness(replica_set, seconds=5)
    assert found.startswith("not within 5 s after all faults: all nodes follow each other")
    assert found.endswith("not all is followed by x")


@simulated()
async def test_member_that_follows_nobody_is_reported(sim: Simulation) -> None:
    replica_set = await form(sim)
    await sim.on("c", sim.node("c").reconfigure(replication=[]))
    await Writer(sim, 1).run("a", 20)
    (found,) = [text for text in await check_reports(replica_set, seconds=5) if "not_following" in text]
    assert "follows no other member, and lacks 20 rows" in found


@simulated()
async def test_orphan_is_a_false_alarm_unless_it_lists_an_expelled_member(sim: Simulation) -> None:
    replica_set = await form(sim)
    sim.node("b")._parts.replication.set_orphan(True)
    (found,) = [text for text in await check_reports(replica_set, seconds=1) if "orphan" in text]
    assert "b:3301 is an orphan" in found
    sim.machine("b").options["replication"] = [sim.uri(name) for name in (*NAMES, "gone")]
    replica_set.departed.append("gone")
    assert await check_reports(replica_set, seconds=1) == []


async def lose_power_for_a_moment(sim: Simulation) -> LedSet:
    """Let a 2.6 master restart and accept writes before its replica notices the outage."""
    options: dict[str, Any] = {"replication_synchro_quorum": 2, "replication_connect_quorum": 2}
    options |= {"replication_synchro_timeout": 1.0, "replication_timeout": 1.5}
    await start_set(sim, dialect="2.6", wal_mode="fsync", **options)
    await sim.until(lambda: all_follow_all(sim))
    client = await sim.client("a")
    await create_space(client, SPACE_ID, SPACE, FIELDS, options={"is_sync": True})
    await Writer(sim, 0).run("a", 5)
    # A replica that sends nothing is not told that the connection is unknown.
    await sim.until(lambda: all(downstream(sim, "a", name)["vclock"] == vclock(sim, "a") for name in ("b", "c")))
    sim.crash("a", Loss.UNSYNCED)
    await sim.restart("a")
    return LedSet(sim, list(NAMES))


@simulated(seeds=range(3))
async def test_replica_on_a_dead_connection_does_not_follow_yet(sim: Simulation) -> None:
    replica_set = await lose_power_for_a_moment(sim)
    assert [name for name in NAMES if follows(sim, name, "a")] == ["b", "c"], "the outage was noticed"
    assert {"b", "c"} <= set(not_following(replica_set))
    assert await check_liveness(replica_set, seconds=10) == []


@simulated()
async def test_replica_that_never_notices_a_dead_connection_is_reported(sim: Simulation) -> None:
    with patch("flowstone.node.synchro.elections.Elections.disconnect_timeout", 3600.0):
        replica_set = await lose_power_for_a_moment(sim)
        (found,) = await check_liveness(replica_set, seconds=10)
    assert found.startswith("not within 10 s after all faults: all nodes follow each other")
    assert found.endswith("not all is followed by b, c")


@simulated()
async def test_rejected_write_is_reported(sim: Simulation) -> None:
    replica_set = await form(sim)
    await sim.on("a", sim.node("a").reconfigure(read_only=True))
    (found,) = await check_liveness(replica_set, seconds=5)
    assert f"a does not take a write to space {SPACE_ID}" in found


@simulated()
async def test_leaked_read_view_is_reported(sim: Simulation) -> None:
    replica_set = await form(sim)
    view = sim.node("b").box.open_view()
    assert await check_idle(replica_set, seconds=5) == ["b has 1 views with nothing to do"]
    view.close()


@simulated()
async def test_different_tuples_are_reported(sim: Simulation) -> None:
    replica_set = await form(sim)
    spaces = sim.node("x").box.spaces
    space = spaces.pop(SPACE_ID)
    (found,) = check_equal(replica_set)
    assert found.startswith(f"space {SPACE_ID}: x has 0 tuples")
    spaces[SPACE_ID] = space


@simulated()
async def test_space_missing_in_memory_is_reported(sim: Simulation) -> None:
    replica_set = await form(sim)
    boxes = {name: sim.node(name).box for name in names(replica_set)}
    logs = [read_log(name, sim.storage(name)) for name in boxes]
    space = boxes["b"].spaces.pop(SPACE_ID)
    (found,) = check_replay(logs, boxes)
    assert found.startswith(f"space {SPACE_ID} of b had 0 tuples, its directory gives")
    boxes["b"].spaces[SPACE_ID] = space


@simulated()
async def test_removed_logs_are_checked(sim: Simulation) -> None:
    replica_set = await form(sim)
    for _ in range(4):
        await Writer(sim, 1).run("a", 5)
        await converge(sim, (*NAMES, "x"))
        await sim.on("a", sim.node("a").snapshot())
    removed = [inode for path, inode in sim.storage("a").removed.items() if path.endswith(".xlog")]
    assert removed
    removed[-1].rot(len(removed[-1].data) // 2, 0)
    with pytest.raises(DamagedLog):
        await stop_and_compare(replica_set)


@simulated()
async def test_directory_that_lacks_a_row_is_found(sim: Simulation) -> None:
    replica_set = await form(sim)
    boxes = {name: sim.node(name).box for name in names(replica_set)}
    logs = [read_log(name, sim.storage(name)) for name in boxes]
    assert check_replay(logs, boxes) == []
    last = next(each for each in reversed(logs[1].records) if each.rows[0].replica_id)
    logs[1].records.remove(last)
    (found,) = check_replay(logs, boxes)
    assert found.startswith(f"space {SPACE_ID} of b had")


def log(name: str, *records: Record, start: dict[int, int] | None = None, replica_id: int = 0) -> NodeLog:
    decide(list(records), None)
    return NodeLog(name, [], start or {}, list(records), replica_id)


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        ([put(1, 1)], [put(1, 2)], "row (1, 1) of a is"),
        ([put(1)], [record(Row(NOP, 1, lsn=1, tsn=1))], "is a fact in the log of a, and nothing in that of b"),
        (
            [put(1, flags=SYNC), verdict(CONFIRM, 2, 1)],
            [put(1, flags=SYNC), verdict(PROMOTE, 1, 0, term=2, replica_id=2)],
            "(1, 1) is kept by the log of a, rolled back by b's",
        ),
        ([put(1, flags=SYNC)], [], "no verdict on (1, 1) in the log of a"),
    ],
)
def test_contradictory_logs_are_reported(ours: list[Record], theirs: list[Record], words: str) -> None:
    found = check_logs([log("a", *ours), log("b", *theirs)])
    assert len(found) == 1
    assert words in found[0]


def test_former_member_may_lack_a_verdict_but_not_have_a_different_one() -> None:
    ours = log("a", put(1, flags=SYNC), verdict(CONFIRM, 2, 1))
    assert check_logs([ours], [log("b", put(1, flags=SYNC))]) == []
    (found,) = check_logs([ours], [log("b", put(1, flags=SYNC), verdict(ROLLBACK, 2, 1, replica_id=2))])
    assert found == "(1, 1) is kept by the log of a, rolled back by b's"


def test_check_logs_accepts_a_verdict_that_a_node_missed_before_it_joined_again() -> None:
    later = put(5)
    later.is_behind_gap = True
    rejoined = log("y", put(1, flags=SYNC), later)
    assert check_logs([log("a", put(1, flags=SYNC), verdict(CONFIRM, 2, 1), put(5)), rejoined]) == []


OLD_LEADER = log("a", put(1, flags=SYNC), verdict(CONFIRM, 2, 1), start={0: 1}, replica_id=1)
HEIR_ROW = verdict(PROMOTE, 2, 0, owner=2, term=3)
ROLLED_BACK = put(1, flags=SYNC), verdict(PROMOTE, 1, 0, term=2, replica_id=2)


def heir(*records: Record, replica_id: int = 1) -> NodeLog:
    """Return the log of the member that got the id of the expelled leader; it starts after the leader's first row."""
    return log("n", *records, start={1: 1, 2: 1}, replica_id=replica_id)


def witness(*records: Record) -> NodeLog:
    return log("b", *records, replica_id=2)


def test_lsn_of_a_verdict_lost_with_a_former_member_may_be_reused_by_the_next_owner_of_its_id() -> None:
    follower = witness(put(1, flags=SYNC), verdict(PROMOTE, 1, 1, term=2, replica_id=2), HEIR_ROW)
    logs = [follower, heir(HEIR_ROW)]
    (found,) = check_logs(logs, [OLD_LEADER])
    assert found.startswith("row (1, 2) of b is (31, ")
    assert check_logs(logs, without_lost_verdicts([OLD_LEADER], [*logs, OLD_LEADER])) == []
    departed = [OLD_LEADER, heir(HEIR_ROW)]
    assert check_logs([], without_lost_verdicts(departed, departed)) == []


@pytest.mark.parametrize(
    ("logs", "departed", "words"),
    [
        ([witness(HEIR_ROW)], [OLD_LEADER], "row (1, 2) of b is (31, "),  # no other instance had id 1
        ([heir(HEIR_ROW, replica_id=3)], [OLD_LEADER], "row (1, 2) of n is (31, "),
        ([heir(), witness(HEIR_ROW)], [OLD_LEADER], "row (1, 2) of b is (31, "),  # `n` wrote nothing
        ([heir(HEIR_ROW)], [OLD_LEADER, witness(OLD_LEADER.records[1])], "row (1, 2) of n is (31, "),  # b had it, too
        ([heir(HEIR_ROW), witness(*ROLLED_BACK)], [OLD_LEADER], "(1, 1) is rolled back by the log of b, kept by a's"),
        ([heir(put(2, 2))], [log("a", put(2, 3), replica_id=1)], "row (1, 2) of n is ("),  # the row is not a verdict
        # the next owner of the id is a former member itself
        ([witness(verdict(CONFIRM, 2, 1))], [OLD_LEADER, heir(HEIR_ROW)], "row (1, 2) of b is (40, "),
    ],
)
def test_reused_lsn_of_a_row_that_was_not_lost_is_reported(
    logs: list[NodeLog], departed: list[NodeLog], words: str
) -> None:
    (found,) = check_logs(logs, without_lost_verdicts(departed, [*logs, *departed]))
    assert found.startswith(words)


@simulated(seeds=range(3))
async def test_confirm_lost_with_an_expelled_leader_is_no_violation(sim: Simulation) -> None:
    """The leader is isolated right after its answer and expelled; its replacement gets its id, as from a real master,
    and leads."""
    options: dict[str, Any] = {"election_mode": "candidate", "election_fencing_mode": "off", "replication_timeout": 0.5}
    await start_set(sim, **options)
    old = await elect(sim)
    await test_elections.make_space(sim, old)
    await converge(sim)
    await test_elections.write(sim, old, 1)
    sim.isolate(old, is_quiet=True)
    others = [name for name in NAMES if name != old]
    leader = await elect(sim, others)
    number = sim.node(old).info()["id"]
    assert vclock(sim, leader)[number] == vclock(sim, old)[number] - 1
    sim.kill(old)
    sim.heal()
    await sim.on(leader, sim.node(leader).space(CLUSTER_ID).delete(number))
    replica_set = LedSet(sim, [*others, "d"], departed=[old])
    replication = [sim.uri(name) for name in replica_set.members]
    with ids_of_real_masters():
        await sim.start("d", replication=replication, **options)
    assert sim.node("d").info()["id"] == number
    for name in others:
        await sim.on(name, sim.node(name).reconfigure(replication=replication, election_mode="voter"))
    assert await elect(sim, replica_set.members) == "d"
    await test_elections.write(sim, "d", 2)
    await converge(sim, replica_set.members)
    left = await stop_and_compare(replica_set)
    assert left.violations == []
    assert FinalHistory(left.logs, left.departed).conflicts == []


def test_late_verdict_may_be_a_nop_in_other_logs() -> None:
    ours = [put(1, flags=SYNC), verdict(ROLLBACK, 2, 1)]
    theirs = [record(Row(NOP, 1, lsn=1, tsn=1)), record(Row(NOP, 1, lsn=2, tsn=2))]
    assert check_logs([log("a", *ours), log("b", *theirs)]) == []


def test_transaction_split_differently_is_found() -> None:
    one, two = put(1).rows[0], put(2).rows[0]
    together = record(
        Row(one.type, 1, lsn=1, tsn=1, flags=0, body=one.body), Row(two.type, 1, lsn=2, tsn=1, body=two.body)
    )
    assert len(check_logs([log("a", together), log("b", put(1), put(2))])) == 2


def test_rolled_back_row_may_be_a_nop_in_other_logs() -> None:
    ours = log("a", put(1, flags=SYNC), verdict(ROLLBACK, 2, 1))
    theirs = log("b", record(Row(NOP, 1, lsn=1, tsn=1)), verdict(ROLLBACK, 2, 1))
    assert check_logs([ours, theirs]) == []


def raft(term: int, vote: int) -> Record:
    return record(Row(RAFT, lsn=1, tsn=1, body=msgpack.packb({RaftKey.TERM.value: term, RaftKey.VOTE.value: vote})))


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        ([raft(2, 1), raft(1, 1)], [], "by its log a went back from term 2 to 1"),
        ([raft(2, 1), raft(2, 3)], [], "by its log a voted for 1 and 3 in term 2"),
        (
            [verdict(PROMOTE, 1, 0, term=2)],
            [verdict(PROMOTE, 1, 0, term=2, replica_id=2)],
            "by the log of b 2 took term 2 of 1",
        ),
    ],
)
def test_contradictory_terms_are_reported(ours: list[Record], theirs: list[Record], words: str) -> None:
    assert check_terms([log("a", *ours), log("b", *theirs)]) == [words]


@simulated()
async def test_log_of_a_former_member_is_read_up_to_the_first_damage(sim: Simulation) -> None:
    await form(sim)
    sim.kill("b")
    storage = sim.storage("b")
    whole = read_all("b", storage).records
    newest = max(path for path in storage.names if path.endswith(".xlog"))
    storage.find(newest).rot(len(storage.find(newest).data) // 2, 0)
    with pytest.raises(DamagedLog):
        read_all("b", storage)
    found = read_all("b", storage, has_departed=True).records
    assert 0 < len(found) < len(whole)
    assert [each.rows for each in found] == [each.rows for each in whole[: len(found)]]
