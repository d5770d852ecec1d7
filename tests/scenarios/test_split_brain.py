"""Contradictory histories stop replication and change nothing; those that only look contradictory converge."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import pack
from flowstone.iproto.row import decode_row, encode_header
from flowstone.replication.limbo.control_rows import Promote, decode_control
from tests.scenarios.middleman import Middleman
from tests.scenarios.queues import (
    NEVER,
    PATIENCE,
    PLAIN,
    SYNC,
    Pending,
    demote,
    last_lsn,
    owned_by,
    promote,
    queue,
    start_members,
    told,
)
from tests.scenarios.simulated_members import held, insert, reconfigure, snapshot, uris
from tests.simulation.cluster import all_follow_all, converge, downstream, follows, upstream, vclock
from tests.simulation.simulation import Crashed, Simulation, simulated
from tests.simulation.test_elections import election

QUORUM_TIMEOUT, ROLLED_BACK = 216, 217
OLD_TRANSACTION = "got an async transaction from an old term"
FOREIGN_OWNER = "got a request from a foreign synchro queue owner"
OBSOLETE_TERM = "got a PROMOTE/DEMOTE with an obsolete term"
PROCESSED = "got a request with lsn from an already processed range"
FUTURE = "got a request mentioning future lsn"
OUT_OF_RANGE = "got a request lsn out of queue range"


async def start_pair(sim: Simulation) -> None:
    """Start members; "a" owns the queue, the quorum is 1, and a promotion of "b" does not wait for decisions of "a"."""
    await start_members(sim, replication_synchro_quorum=1)
    await reconfigure(sim, "b", replication_synchro_timeout=0.1)
    await insert(sim, "a", 0, space=SYNC)
    await insert(sim, "a", 0, space=PLAIN)
    await converge(sim, "ab")


def data(sim: Simulation, name: str) -> list[dict[int, str]]:
    return [held(sim, name, SYNC), held(sim, name, PLAIN)]


async def part(sim: Simulation) -> None:
    await converge(sim, "ab")
    sim.cut("a", "b")


def split(sim: Simulation, name: str, of: str) -> str:
    """Return the split brain that a member has found; its report contains both histories."""
    found = upstream(sim, name, of)
    message: str = found.get("message", "")
    if found.get("status") != "stopped" or not message.startswith("Split-Brain discovered: "):
        return ""
    return message.removeprefix("Split-Brain discovered: ").partition("; ")[0]


async def meet_again(sim: Simulation, **reasons: str) -> None:
    """Each of the named members finds it, also on a retry, and no data changes."""
    before = [data(sim, name) for name in "ab"]
    sim.heal()
    for name, reason in reasons.items():
        peer = "b" if name == "a" else "a"
        await sim.until(lambda name=name, peer=peer: split(sim, name, peer))  # type: ignore[misc]
        assert split(sim, name, peer) == reason
        await reconfigure(sim, name, replication=[])
        await reconfigure(sim, name, replication=uris(sim, "a", "b"))
        await sim.until(lambda name=name, peer=peer: split(sim, name, peer))  # type: ignore[misc]
    assert [data(sim, name) for name in "ab"] == before
    await sim.restart("b", replication_sync_timeout=1)
    if "b" in reasons:
        await sim.until(lambda: split(sim, "b", "a"))
        assert data(sim, "b") == before[1]


async def become_one(sim: Simulation) -> None:
    sim.heal()
    await sim.until(lambda: all_follow_all(sim, "ab"))
    await converge(sim, "ab")
    assert queue(sim, "a")["owner"] == queue(sim, "b")["owner"]
    for name in "ab":
        await sim.restart(name)
    await sim.until(lambda: all_follow_all(sim, "ab"))
    await converge(sim, "ab")


async def wait_in_both(sim: Simulation) -> Pending:
    """Start a transaction of the owner that stays pending."""
    await reconfigure(sim, "a", replication_synchro_quorum=NEVER)
    return await Pending(sim, "a", 100).seen_by("a", "b")


async def confirm(sim: Simulation, pending: Pending) -> None:
    await reconfigure(sim, "a", replication_synchro_quorum=1)
    assert await pending.code() == 0


async def roll_back(sim: Simulation, pending: Pending) -> None:
    await reconfigure(sim, "a", replication_synchro_timeout=0.01)
    assert await pending.code() == QUORUM_TIMEOUT
    await reconfigure(sim, "a", replication_synchro_timeout=PATIENCE, replication_synchro_quorum=1)


# --- two owners that continued alone ---


@simulated(seeds=range(2))
async def test_asynchronous_write_in_an_old_term_is_a_split_brain(sim: Simulation) -> None:
    """K1: the deposed member sees no error in the other one, and follows it."""
    await start_pair(sim)
    await part(sim)
    await promote(sim, "b")
    await insert(sim, "a", 1, space=PLAIN)
    await meet_again(sim, b=OLD_TRANSACTION)
    await sim.until(lambda: follows(sim, "a", "b") and queue(sim, "a")["owner"] == 2)


@simulated()
async def test_confirm_in_an_old_term_of_rows_that_the_new_owner_lacks(sim: Simulation) -> None:
    """K2: rows written by the old owner alone are void to the new one, so its CONFIRM contradicts that."""
    await start_pair(sim)
    await part(sim)
    await promote(sim, "b")
    await insert(sim, "a", 1, space=SYNC)
    await meet_again(sim, a=PROCESSED, b=FOREIGN_OWNER)


@simulated()
async def test_confirm_in_an_old_term_of_rows_that_the_new_owner_confirmed(sim: Simulation) -> None:
    """K2: both owners have the same verdict."""
    await start_pair(sim)
    pending = await wait_in_both(sim)
    await part(sim)
    await promote(sim, "b")
    await confirm(sim, pending)
    await become_one(sim)
    assert held(sim, "a", SYNC) == held(sim, "b", SYNC) == {0: "a", 100: "a"}


@simulated()
async def test_rollback_in_an_old_term_of_rows_that_the_new_owner_confirmed(sim: Simulation) -> None:
    """K3: one owner has committed the rows that the other has rolled back."""
    await start_pair(sim)
    pending = await wait_in_both(sim)
    await part(sim)
    await promote(sim, "b")
    await roll_back(sim, pending)
    await meet_again(sim, a=FUTURE, b=FOREIGN_OWNER)


@simulated()
async def test_rollback_in_an_old_term_of_rows_that_the_new_owner_lacks(sim: Simulation) -> None:
    """K3: no member has the rows, as required."""
    await start_pair(sim)
    await part(sim)
    await promote(sim, "b")
    await reconfigure(sim, "a", replication_synchro_quorum=NEVER)
    await roll_back(sim, await Pending(sim, "a", 100).seen_by("a"))
    await become_one(sim)
    assert held(sim, "a", SYNC) == held(sim, "b", SYNC) == {0: "a"}


@simulated()
async def test_two_promotions_in_one_term(sim: Simulation) -> None:
    """K4."""
    await start_pair(sim)
    await demote(sim, "a")
    await part(sim)
    for name in "ab":
        await promote(sim, name)
    assert queue(sim, "a")["term"] == queue(sim, "b")["term"]
    await meet_again(sim, a=FOREIGN_OWNER, b=FOREIGN_OWNER)


@simulated()
async def test_promotion_and_demotion_in_one_term(sim: Simulation) -> None:
    """K4."""
    await start_pair(sim)
    await part(sim)
    await promote(sim, "b")
    await demote(sim, "a")
    assert queue(sim, "a")["term"] == queue(sim, "b")["term"]
    await meet_again(sim, a=FOREIGN_OWNER, b=FOREIGN_OWNER)


# --- promotions that contradict the queue ---


@simulated()
async def test_promotion_without_confirmed_rows(sim: Simulation) -> None:
    """K5: its LSN is below the rows that the old owner has confirmed alone."""
    await start_pair(sim)
    await part(sim)
    await insert(sim, "a", 1, space=SYNC)
    await promote(sim, "b")
    await meet_again(sim, a=PROCESSED)


@simulated()
async def test_promotion_with_rolled_back_rows(sim: Simulation) -> None:
    """K5: its LSN is above all rows of the old owner, and none is pending there."""
    await start_pair(sim)
    pending = await wait_in_both(sim)
    await part(sim)
    await roll_back(sim, pending)
    await promote(sim, "b")
    await meet_again(sim, a=FUTURE)


@simulated()
async def test_promotion_with_rolled_back_rows_while_others_are_pending(sim: Simulation) -> None:
    """K5: its LSN is outside the queue."""
    await start_pair(sim)
    pending = await wait_in_both(sim)
    await part(sim)
    await roll_back(sim, pending)
    await promote(sim, "b")
    await reconfigure(sim, "a", replication_synchro_quorum=NEVER)
    waiting = await Pending(sim, "a", 101).seen_by("a")
    sim.heal()
    await sim.until(lambda: split(sim, "a", "b"))
    assert split(sim, "a", "b") == OUT_OF_RANGE
    await sim.until(lambda: split(sim, "b", "a"))
    assert waiting.is_waiting
    assert held(sim, "a", SYNC) == {0: "a", 101: "a"}
    sim.kill("a")
    with pytest.raises(Crashed):
        await waiting.code()


CRAFTS: dict[str, Callable[[Promote], Promote]] = {
    "lsn - 1": lambda body: replace(body, lsn=body.lsn - 1),
    "lsn - 5": lambda body: replace(body, lsn=body.lsn - 5),
    "lsn + 1": lambda body: replace(body, lsn=body.lsn + 1),
    "another owner": lambda body: replace(body, owner_id=3),
    "no owner": lambda body: replace(body, owner_id=0),
    "same term": lambda body: replace(body, term=2),
}


@pytest.mark.parametrize(
    ("craft", "is_waiting", "reason"),
    [
        ("lsn - 1", False, PROCESSED),
        ("lsn - 5", True, PROCESSED),
        ("lsn + 1", False, FUTURE),
        ("lsn + 1", True, OUT_OF_RANGE),
        ("another owner", False, FOREIGN_OWNER),
        ("no owner", False, FOREIGN_OWNER),
        ("same term", True, OBSOLETE_TERM),
    ],
)
@simulated()
async def test_promotion_that_cannot_be_written_is_rejected_with_the_reason(
    sim: Simulation, craft: str, is_waiting: bool, reason: str
) -> None:
    """K5: the row is changed in flight; pending transactions stay pending, and the row is not logged."""
    await start_pair(sim)
    if is_waiting:
        pending = await wait_in_both(sim)

    def change(packet: bytes) -> bytes:
        row = decode_row(packet)
        if row.type != RequestType.RAFT_PROMOTE:
            return packet
        body = decode_control(row.type, row.body)
        assert isinstance(body, Promote)
        return encode_header(row) + CRAFTS[craft](body).encode()

    async with Middleman(sim, "b") as middle:
        middle.on_answer = change
        await reconfigure(sim, "a", replication=[middle.uri])
        await sim.until(lambda: follows(sim, "a", "b"))
        before = data(sim, "a"), vclock(sim, "a")
        await promote(sim, "b")
        await sim.until(lambda: split(sim, "a", "b"))
        assert split(sim, "a", "b") == reason
        assert (data(sim, "a"), vclock(sim, "a")) == before
        assert (queue(sim, "a")["owner"], queue(sim, "a")["len"]) == (1, int(is_waiting))
        assert not is_waiting or pending.is_waiting
        middle.on_answer = lambda packet: packet
        await reconfigure(sim, "a", replication=[middle.uri])
        await owned_by(sim, "b")
        assert not is_waiting or await pending.code() == 0
        await converge(sim, "ab")


# --- apparent contradictions ---


@simulated()
async def test_very_old_confirm_is_accepted(sim: Simulation) -> None:
    """K6: it is recognized after several owners, and after restarts from snapshots."""
    await start_members(sim, "abc", replication_synchro_quorum=1)
    for name in "bc":
        await reconfigure(sim, name, replication_synchro_timeout=0.1)
        sim.machine(name).options["replication_synchro_timeout"] = 0.1
    await reconfigure(sim, "a", replication_synchro_quorum=NEVER)
    pending = await Pending(sim, "a", 100).seen_by("b", "c")
    await converge(sim)
    sim.isolate("a")
    await confirm(sim, pending)
    for number in range(4):
        owner = "bc"[number % 2]
        await promote(sim, owner)
        await insert(sim, owner, number, space=SYNC)
        await converge(sim, "bc")
    for name in "bc":
        await snapshot(sim, name)
        await sim.restart(name, replication_connect_timeout=1)
    sim.heal()
    await sim.until(lambda: all_follow_all(sim), seconds=120)
    await converge(sim)
    assert held(sim, "a", SYNC) == {0: "b", 1: "c", 2: "b", 3: "c", 100: "a"}
    assert "nop" in "".join(told(sim, "b", 1, last_lsn(sim, "a") - 1)), "the row is skipped, not applied"


@simulated()
async def test_old_confirm_in_a_recent_packet(sim: Simulation) -> None:
    """K6: the owner repeats its verdict, and a true one about a former owner."""
    await start_pair(sim)
    await promote(sim, "b")
    await owned_by(sim, "b")
    said = told(sim, "b", 1, 0)
    assert any("confirm" in line for line in said)

    def repeat(packet: bytes) -> bytes:
        row = decode_row(packet)
        if row.type != RequestType.RAFT_CONFIRM:
            return packet
        body = pack({Key.REPLICA_ID.value: 1, Key.LSN.value: 2})
        return encode_header(replace(row, body=b"")) + body

    async with Middleman(sim, "b") as middle:
        middle.on_answer = repeat
        await reconfigure(sim, "a", replication=[middle.uri])
        await sim.until(lambda: follows(sim, "a", "b"))
        waiting = await Pending(sim, "b", 1).seen_by("a")
        assert await waiting.code() == 0
        await sim.until(lambda: vclock(sim, "a") == vclock(sim, "b"))
        assert follows(sim, "a", "b")
        assert queue(sim, "a")["len"] == 1, "the verdict does not concern pending transactions"


@simulated()
async def test_asynchronous_write_after_the_queue_was_released_is_accepted(sim: Simulation) -> None:
    """K7: the queue has no owner, so no write has an old term."""
    await start_members(sim, "abc")
    await demote(sim, "a")
    await owned_by(sim, "", "abc")
    sim.isolate("b")
    await insert(sim, "b", 1, space=PLAIN)
    await insert(sim, "c", 2, space=PLAIN)
    await promote(sim, "a")
    await demote(sim, "a")
    await insert(sim, "a", 3, space=PLAIN)
    sim.heal()
    await sim.until(lambda: all_follow_all(sim))
    await converge(sim)
    assert held(sim, "b", PLAIN) == {1: "b", 2: "c", 3: "a"}


async def set_schema_version(sim: Simulation, name: str, *version: int) -> None:
    client = await sim.client(name)
    body = {Key.SPACE_ID.value: 272, Key.TUPLE.value: ["version", *version]}
    await client.request(RequestType.REPLACE, pack(body))


@simulated()
async def test_data_of_an_old_schema_is_not_checked_before_its_upgrade(sim: Simulation) -> None:
    """K8: up to 2.10.1 two owners of one term are no reason to stop; after the upgrade they are."""
    await start_members(sim, owner="", replication_synchro_quorum=1)
    await set_schema_version(sim, "a", 2, 10, 1)
    await part(sim)
    for name in "ab":
        await promote(sim, name)
    sim.heal()
    await sim.until(lambda: all_follow_all(sim, "ab") and vclock(sim, "a") == vclock(sim, "b"))
    assert [queue(sim, name)["owner"] for name in "ab"] == [1, 2], "as in real servers, each keeps its own"
    await demote(sim, "a")
    await owned_by(sim, "")
    await set_schema_version(sim, "a", 2, 11, 1)
    await part(sim)
    for name in "ab":
        await promote(sim, name)
    sim.heal()
    for name, peer in ("ab", "ba"):
        await sim.until(lambda name=name, peer=peer: split(sim, name, peer))  # type: ignore[misc]
        assert split(sim, name, peer) == FOREIGN_OWNER


# --- rows are filtered by originator ---


@simulated()
async def test_rows_are_judged_by_their_originator(sim: Simulation) -> None:
    """K9: in a chain, the middle member owns nothing and relays the owner's rows."""
    await start_members(sim, "abc", replication_synchro_quorum=2)
    await reconfigure(sim, "c", replication=uris(sim, "b"))
    await reconfigure(sim, "a", replication=uris(sim, "a", "b"))
    await reconfigure(sim, "b", replication=uris(sim, "a", "b"))
    for number in range(3):
        await insert(sim, "a", number, space=SYNC)
        await insert(sim, "a", number, space=PLAIN)
    await sim.until(lambda: vclock(sim, "c") == vclock(sim, "a"))
    assert follows(sim, "c", "b")
    assert data(sim, "c") == data(sim, "a")
    assert queue(sim, "c")["owner"] == 1
    await promote(sim, "b")
    await insert(sim, "b", 10, space=SYNC)
    await sim.until(lambda: vclock(sim, "c") == vclock(sim, "b"))
    assert data(sim, "c") == data(sim, "b")


@simulated()
async def test_rows_of_a_former_owner_keep_their_old_term_through_any_relay(sim: Simulation) -> None:
    """K9: neither the relaying member nor its own rows are rejected."""
    await start_members(sim, "abc", replication_synchro_quorum=1)
    await reconfigure(sim, "c", replication_synchro_timeout=0.1)
    await converge(sim)
    sim.isolate("c")
    await insert(sim, "a", 1, space=PLAIN)
    await sim.until(lambda: held(sim, "b", PLAIN) == {1: "a"})
    await promote(sim, "c")
    sim.cut("a", "c")
    sim.heal("b", "c")
    await sim.until(lambda: split(sim, "c", "b"))
    assert split(sim, "c", "b") == OLD_TRANSACTION
    assert held(sim, "c", PLAIN) == {}


# --- concurrent rows of two owners ---


async def slow_down(sim: Simulation, name: str, seconds: float) -> None:
    sim.machine(name).blocking_seconds = (seconds, seconds)


@simulated(seeds=range(2))
async def test_rows_of_both_owners_reach_a_slow_node_together(sim: Simulation) -> None:
    """K10: rows of the old owner become NOPs on the slow node, rows of the new one are kept, in order."""
    await start_members(sim, "abc", replication_synchro_quorum=1, wal_mode="fsync")
    await reconfigure(sim, "b", replication_synchro_timeout=0.1)
    await converge(sim)
    sim.cut("a", "b")
    await reconfigure(sim, "a", replication_synchro_quorum=NEVER)
    old = last_lsn(sim, "a")
    await slow_down(sim, "c", 2)
    promoting = asyncio.ensure_future(promote(sim, "b"))
    await sim.until(lambda: queue(sim, "c")["busy"])
    await promoting
    void = Pending(sim, "a", 3)
    await insert(sim, "b", 1, 2, space=SYNC)
    await insert(sim, "b", 4, space=PLAIN)
    await slow_down(sim, "c", 0.001)
    await sim.until(lambda: held(sim, "c", PLAIN) == {4: "b"} and vclock(sim, "c")[1] == old + 1)
    assert held(sim, "c", SYNC) == {1: "b", 2: "b"}
    assert told(sim, "c", 1, old) == ["+1 nop"]
    sim.heal()
    assert await void.code() == ROLLED_BACK
    await converge(sim)
    assert held(sim, "a", SYNC) == {1: "b", 2: "b"}


@simulated(seeds=range(2))
async def test_rows_of_the_old_owner_arrive_during_the_write_of_our_promotion(sim: Simulation) -> None:
    """K10: they wait for it, and are then void."""
    await start_pair(sim)
    await sim.restart("b", wal_mode="fsync", replication_synchro_timeout=0.1)
    await sim.until(lambda: all_follow_all(sim, "ab"))
    await part(sim)
    old = last_lsn(sim, "a")
    await reconfigure(sim, "a", replication_synchro_quorum=NEVER)
    void = await Pending(sim, "a", 3).seen_by("a")
    await slow_down(sim, "b", 3)
    promoting = asyncio.ensure_future(promote(sim, "b"))
    await sim.until(lambda: election(sim, "b")["term"] == 3 and queue(sim, "b")["busy"])
    sim.heal()
    await sim.until(lambda: downstream(sim, "a", "b").get("status") == "follow")
    await sim.sleep(1)
    assert queue(sim, "b")["busy"], "the row has arrived meanwhile"
    await slow_down(sim, "b", 0.001)
    await promoting
    assert await void.code() == ROLLED_BACK
    await converge(sim, "ab")
    assert held(sim, "a", SYNC) == held(sim, "b", SYNC) == {0: "a"}
    assert told(sim, "b", 1, old) == ["+1 nop"]
    await insert(sim, "b", 5, space=SYNC)
