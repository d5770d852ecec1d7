"""`box.ctl.promote()` and `box.ctl.demote()`, called by clients: every mode and role, one at a time or concurrently;
and the order of their effects on others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from flowstone.iproto.constants import RequestType
from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.row import decode_row
from flowstone.replication.limbo.control_rows import Promote, RaftState, decode_control
from tests.scenarios.middleman import Middleman
from tests.scenarios.queues import NEVER, PLAIN, SYNC, Pending, number_of, owned_by, promote, queue, start_members
from tests.scenarios.simulated_members import held, insert, reconfigure
from tests.simulation.cluster import all_follow_all, converge, follows
from tests.simulation.simulation import Simulation, simulated
from tests.simulation.test_elections import call, elect, election, leaders

UNSUPPORTED, SYSTEM = 5, 115
INTERFERING_PROMOTE, ELECTION_DISABLED, NOT_LEADER = 223, 224, 226
NO_QUORUM, OLD_TERM, INTERFERING_ELECTIONS = 242, 245, 246
ELECTING = pytest.mark.parametrize("mode", ["manual", "candidate"])


async def outcome(work: Awaitable[object]) -> int:
    """Return 0, or the code of the error."""
    try:
        await work
    except TarantoolError as error:
        return error.code
    return 0


async def ask(sim: Simulation, name: str, what: str) -> int:
    """A client's call of `box.ctl.promote` or `demote`."""
    return await outcome(call(await sim.client(name), f"box.ctl.{what}"))


def asking(sim: Simulation, name: str, what: str) -> asyncio.Future[int]:
    return asyncio.ensure_future(ask(sim, name, what))


def shown(sim: Simulation, name: str) -> tuple[int, int, int]:
    """Return the term, the owner of the queue, and the term of the queue."""
    found = queue(sim, name)
    return election(sim, name)["term"], found["owner"], found["term"]


async def set_modes(sim: Simulation, **modes: str) -> None:
    for name, mode in modes.items():
        await reconfigure(sim, name, election_mode=mode)


# --- manual calls ---


@ELECTING
@simulated(seeds=range(2))
async def test_promotion_wins_in_a_new_term_and_the_previous_leader_steps_down(sim: Simulation, mode: str) -> None:
    """J1: with a living leader, and without one; committed rows are kept, and the new leader writes."""
    await start_members(sim, "abc", owner="", election_timeout=1000)
    await set_modes(sim, a=mode, b=mode, c=mode)
    assert await ask(sim, "a", "promote") == 0
    assert await elect(sim) == "a"
    for number, name in enumerate("bcab"):
        await converge(sim)
        term = election(sim, name)["term"]
        (before,) = leaders(sim)
        assert await ask(sim, name, "promote") == 0
        assert election(sim, name)["term"] == term + 1
        assert await elect(sim) == name
        assert (election(sim, before)["state"], sim.node(before).info()["ro_reason"]) == ("follower", "election")
        await insert(sim, name, number, space=SYNC)
    await converge(sim)
    term = election(sim, "c")["term"]
    if mode == "manual":
        sim.kill("b")
        await sim.sleep(20)
        assert leaders(sim) == []
        assert await ask(sim, "c", "promote") == 0
        assert await elect(sim) == "c"
        assert election(sim, "c")["term"] == term + 1
        assert held(sim, "c", SYNC) == dict(enumerate("bcab"))


# --- each combination of mode, role and call ---


@simulated()
async def test_promote_and_demote_with_elections_off(sim: Simulation) -> None:
    """J3: a promotion claims the queue, a demotion releases one's own; redundant calls change nothing."""
    await start_members(sim, "abc", owner="")
    assert await ask(sim, "a", "demote") == 0
    assert shown(sim, "a") == (1, 0, 0)
    for name, term in (("a", 2), ("a", 2), ("b", 3), ("a", 4)):
        assert await ask(sim, name, "promote") == 0
        await owned_by(sim, name, "abc")
        assert shown(sim, "c") == (term, number_of(sim, name), term)
    assert await ask(sim, "b", "demote") == 0
    assert shown(sim, "b") == (4, 1, 4), "the owner in the newest term must be checked"
    assert await ask(sim, "a", "demote") == 0
    await owned_by(sim, "", "abc")
    assert shown(sim, "b") == (5, 0, 5)
    assert {election(sim, name)["state"] for name in "abc"} == {"follower"}
    assert {election(sim, name)["leader"] for name in "abc"} == {0}


@simulated()
async def test_demote_with_elections_off_releases_an_outdated_queue_of_another_member(sim: Simulation) -> None:
    """J3: the term has advanced, so its owner no longer decides."""
    await start_members(sim, "abc")
    await set_modes(sim, c="manual")
    assert await ask(sim, "c", "promote") == SYSTEM, "no member votes, and the call times out"
    await set_modes(sim, c="off")
    await sim.until(lambda: election(sim, "a")["term"] == 3)
    assert shown(sim, "b") == (3, 1, 2)
    assert await ask(sim, "b", "demote") == 0
    assert await owned_by(sim, "", "abc") == 4


@simulated()
async def test_demote_with_elections_off_is_rejected_while_another_member_leads(sim: Simulation) -> None:
    """J3: error 226 as long as the leader is known. A promotion claims the queue, and the leader steps down."""
    await start_members(sim, "abc", owner="")
    await set_modes(sim, a="manual", b="manual")
    assert await ask(sim, "a", "promote") == 0
    await sim.until(lambda: election(sim, "c")["leader"] == 1 and queue(sim, "c")["owner"] == 1)
    assert await ask(sim, "c", "demote") == NOT_LEADER
    assert shown(sim, "c") == (2, 1, 2)
    assert await ask(sim, "c", "promote") == 0
    assert await owned_by(sim, "c", "abc") == 3
    await sim.until(lambda: leaders(sim) == [])


@simulated()
async def test_voter_and_anonymous_replica_are_not_promoted_and_do_not_block_a_promotion(sim: Simulation) -> None:
    """J3: error 5 for both; demoting a voter has no effect, and demoting an anonymous replica is rejected, too."""
    await start_members(sim)
    await sim.start("c", replication=[sim.uri("a")], replication_anon=True, read_only=True)
    for mode in ("off", "voter"):
        await set_modes(sim, b=mode)
        assert [await ask(sim, "c", what) for what in ("promote", "demote")] == [UNSUPPORTED, UNSUPPORTED]
    assert [await ask(sim, "b", what) for what in ("promote", "demote")] == [UNSUPPORTED, 0]
    assert shown(sim, "b") == shown(sim, "a") == (2, 1, 2)


@ELECTING
@simulated()
async def test_promote_and_demote_of_elected_leaders_and_followers(sim: Simulation, mode: str) -> None:
    """J3: promoting a leader and demoting a follower has no effect; a demoted leader resigns and keeps a
    frozen queue.
    """
    await start_members(sim, "abc", owner="")
    await set_modes(sim, a=mode, b="voter", c="voter")
    assert await ask(sim, "a", "demote") == 0
    await asyncio.sleep(0.1 if mode == "candidate" else 30)
    assert await ask(sim, "a", "promote") == 0
    assert await elect(sim) == "a"
    before = shown(sim, "a")
    assert [await ask(sim, name, what) for name, what in (("a", "promote"), ("b", "demote"))] == [0, 0]
    assert shown(sim, "a") == before
    assert await ask(sim, "a", "demote") == 0
    info = sim.node("a").info()
    assert (info["ro"], info["ro_reason"], info["synchro"]["queue"]["owner"]) == (True, "election", 1)
    if mode == "manual":
        await sim.sleep(30)
        assert leaders(sim) == []
        assert await ask(sim, "a", "promote") == 0
    assert await elect(sim) == "a"
    assert shown(sim, "a") == (before[0] + 1, 1, before[0] + 1)
    await insert(sim, "a", 1, space=SYNC)


@ELECTING
@simulated()
async def test_promotion_without_a_quorum_of_peers_is_an_error(sim: Simulation, mode: str) -> None:
    """J3: error 242 if too few peers are connected."""
    await start_members(sim, "abc")
    await converge(sim)
    await set_modes(sim, a="voter", b="voter", c=mode)
    if mode == "candidate":
        assert await elect(sim) == "c"
    sim.isolate("c")
    await sim.until(lambda: election(sim, "c")["state"] == "follower" and not follows(sim, "c", "a"))
    assert await ask(sim, "c", "promote") == NO_QUORUM


@simulated()
async def test_mode_change_ends_a_promotion(sim: Simulation) -> None:
    """J3: error 224 if elections are switched off or the member becomes a voter during the call."""
    await start_members(sim, "abc", election_timeout=1000)
    for mode in ("off", "voter"):
        await set_modes(sim, c="manual")
        promoting = asking(sim, "c", "promote")
        await sim.until(lambda: election(sim, "c")["state"] == "candidate")
        await sim.sleep(10)
        assert not promoting.done(), "the others have elections off, and do not vote"
        await set_modes(sim, c=mode)
        assert await promoting == ELECTION_DISABLED


# --- concurrent calls ---


@simulated()
async def test_one_promotion_or_demotion_at_a_time(sim: Simulation) -> None:
    """J3: error 5 for the second call on the same instance; the first continues."""
    await start_members(sim, replication_synchro_quorum=NEVER)
    pending = await Pending(sim, "a", 1).seen_by("b")
    await reconfigure(sim, "b", replication_synchro_quorum=2)
    promoting = asking(sim, "b", "promote")
    await sim.sleep(1)
    assert [await ask(sim, "b", what) for what in ("promote", "demote")] == [UNSUPPORTED, UNSUPPORTED]
    assert not promoting.done(), "the call waits for verdicts of the owner"
    await reconfigure(sim, "a", replication_synchro_quorum=2)
    assert (await pending.code(), await promoting) == (0, 0)
    assert await owned_by(sim, "b") == 3


@pytest.mark.parametrize("what", ["promote", "demote"])
@simulated()
async def test_promotion_fails_when_the_queue_changes_its_owner_meanwhile(sim: Simulation, what: str) -> None:
    """J3: error 223, whether the owner of the queue demotes itself or another member claims it."""
    await start_members(sim, "abc", replication_synchro_quorum=NEVER)
    pending = await Pending(sim, "a", 1).seen_by("b", "c")
    await reconfigure(sim, "b", replication_synchro_quorum=2, replication_synchro_timeout=0.1)
    first = asking(sim, "a" if what == "demote" else "c", what)
    await sim.sleep(1)
    assert not first.done()
    await promote(sim, "b")
    assert await first == INTERFERING_PROMOTE
    assert await pending.code() == 0
    assert await owned_by(sim, "b", "abc") == election(sim, "b")["term"]
    assert held(sim, "a", SYNC) == {1: "a"}


@simulated()
async def test_promotion_fails_when_a_newer_term_starts_while_it_waits_for_its_quorum(sim: Simulation) -> None:
    """J3: error 246 for the first call; without interference, it times out."""
    await start_members(sim, "abc", replication_synchro_quorum=NEVER)
    pending = await Pending(sim, "a", 1).seen_by("b", "c")
    await reconfigure(sim, "b", replication_synchro_timeout=10)
    await reconfigure(sim, "c", replication_synchro_timeout=1)
    first = asking(sim, "b", "promote")
    await sim.until(lambda: election(sim, "b")["term"] == 3)
    assert not first.done()
    second = asking(sim, "c", "promote")
    await sim.until(lambda: election(sim, "b")["term"] == 4)
    assert await first == INTERFERING_ELECTIONS
    assert await second == SYSTEM
    assert {queue(sim, name)["owner"] for name in "abc"} == {1}
    await reconfigure(sim, "c", replication_synchro_quorum=2)
    assert await ask(sim, "c", "promote") == 0
    assert await pending.code() == 0


@simulated(seeds=range(5))
async def test_concurrent_promotions_of_all_members(sim: Simulation) -> None:
    """J3: at most one call per term succeeds, the others return an error, and all members agree in the end."""
    await start_members(sim, "abc", owner="", election_timeout=2)
    await set_modes(sim, a="manual", b="manual", c="manual")
    codes = await asyncio.gather(*(ask(sim, name, "promote") for name in "abc"))
    assert set(codes) <= {0, INTERFERING_PROMOTE, OLD_TERM, SYSTEM}
    await sim.sleep(10)
    found = leaders(sim)
    assert len(found) <= 1
    if not found:
        assert 0 not in codes
        assert await ask(sim, "b", "promote") == 0
    leader = await elect(sim)
    await insert(sim, leader, 1, space=SYNC)
    await converge(sim)


# --- effects on others ---


class Ear:
    """Return terms of RAFT rows and of PROMOTE rows, in order of arrival."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int]] = []

    def __call__(self, packet: bytes) -> bytes:
        row = decode_row(packet)
        if row.type in (RequestType.RAFT, RequestType.RAFT_PROMOTE):
            body: Any = decode_control(row.type, row.body)
            assert isinstance(body, RaftState | Promote)
            self.heard.append(("RAFT" if isinstance(body, RaftState) else "PROMOTE", body.term))
        return packet

    @property
    def promoted(self) -> list[int]:
        return [term for what, term in self.heard if what == "PROMOTE"]

    def check(self) -> None:
        highest = 0
        for what, term in self.heard:
            assert what == "RAFT" or term <= highest, f"a PROMOTE of term {term} before that term: {self.heard}"
            highest = max(highest, term)


@pytest.mark.parametrize("is_slow", [False, True], ids=["", "slow disk"])
@pytest.mark.parametrize("is_told", [True, False], ids=["", "by the promotion alone"])
@simulated()
async def test_term_arrives_before_the_promotion_in_it(sim: Simulation, is_told: bool, is_slow: bool) -> None:
    """J6: from the promoted member, from a relaying one, informed or not, and by one that was down."""
    await start_members(sim, "abc", owner="")
    near, far = Ear(), Ear()

    def pass_on(packet: bytes) -> bytes | None:
        near(packet)
        return packet if is_told or decode_row(packet).type != RequestType.RAFT else None

    async with Middleman(sim, "a") as first, Middleman(sim, "b") as second:
        first.on_answer, second.on_answer = pass_on, far
        for name, peers in (("a", []), ("b", [first.uri]), ("c", [second.uri])):
            await reconfigure(sim, name, replication=peers)
        await sim.until(lambda: follows(sim, "b", "a") and follows(sim, "c", "b"))
        if is_slow:
            # A term must be on disk before it is sent, a PROMOTE only in the log.
            for name in "ab":
                sim.machine(name).blocking_seconds = (0.5, 0.6)
        for number in range(3):
            await sim.on("a", sim.node("a").promote())
            await insert(sim, "a", number, space=PLAIN)
            await sim.on("a", sim.node("a").demote())
        await converge(sim, "abc")
        second.cut()
        await sim.on("a", sim.node("a").promote())
        await sim.until(lambda: far.promoted[-1:] == [8])
        assert near.promoted == [2, 4, 6, 8]
        assert sorted(set(far.promoted)) == [2, 4, 6, 8]
        near.check()
        far.check()
        await converge(sim, "abc")
        assert {election(sim, name)["term"] for name in "abc"} == {8}


@simulated()
async def test_members_know_the_term_before_the_queue_changes_its_owner(sim: Simulation) -> None:
    """J6: no member shows a queue of a term that it does not know yet."""
    await start_members(sim, "abc", owner="")
    seen: list[tuple[int, int]] = []

    def look() -> bool:
        seen.extend((election(sim, name)["term"], queue(sim, name)["term"]) for name in "abc")
        return all(queue(sim, name)["owner"] == 2 for name in "abc")

    promoting = asking(sim, "b", "promote")
    await sim.until(look)
    assert await promoting == 0
    assert all(queue_term <= term for term, queue_term in seen)
    assert all_follow_all(sim)
