"""The watchers find planted violations, and none in healthy sets."""

from __future__ import annotations

from dataclasses import dataclass, field
from unittest.mock import patch

import pytest

from flowstone.iproto import errors
from flowstone.iproto.errors import TarantoolError
from flowstone.node.upstream.node_sink import NodeSink
from flowstone.replication.applier.states import ApplierState
from flowstone.replication.vclock import VClock
from tests.simulation.cluster import NAMES, converge, start_set, upstream
from tests.simulation.disk import Loss
from tests.simulation.mutations import MUTATIONS
from tests.simulation.simulation import Simulation, simulated
from tests.simulation.test_elections import elect
from tests.simulation.watchers import LOOK_SECONDS, Chronicle, Sight, Watchers
from tests.simulation.workload import Writer, make_space

SIGHT = Sight(VClock({1: 5}), VClock({1: 3}), term=4, vote=1, is_leader=False, queue_term=3, queue_owner=2)


@dataclass(frozen=True)
class Options:
    wal_mode: str = "fsync"
    dialect: str = "2.11"


@dataclass
class Set:
    sim: Simulation
    members: list[str]
    anonymous: list[str] = field(default_factory=list)
    departed: list[str] = field(default_factory=list)
    plan: Options = field(default_factory=Options)


@pytest.mark.parametrize(
    ("later", "words"),
    [
        (SIGHT._replace(vclock=VClock({1: 4, 2: 9})), "went back from {1: 5} to {1: 4, 2: 9}"),
        (SIGHT._replace(confirmed=VClock({1: 2})), "had {1: 3} confirmed, and now {1: 2}"),
        (SIGHT._replace(term=3), "went back from term 4 to 3"),
        (SIGHT._replace(vote=2), "voted for 1 in term 4, and then for 2"),
        (SIGHT._replace(vote=0), "voted for 1 in term 4, and then for 0"),
        (SIGHT._replace(queue_term=2), "went back from term 3 of the queue to 2"),
        (SIGHT._replace(queue_owner=1), "a has 1 for the owner of the queue in term 3, others have 2"),
    ],
)
def test_revoked_state_is_reported(later: Sight, words: str) -> None:
    chronicle = Chronicle()
    chronicle.see("u", "a", SIGHT)
    chronicle.see("u", "a", later)
    assert len(chronicle.violations) == 1
    assert words in chronicle.violations[0]


def test_second_leader_of_a_term_is_reported() -> None:
    chronicle = Chronicle()
    chronicle.see("u", "a", SIGHT._replace(is_leader=True))
    chronicle.see("v", "b", SIGHT._replace(is_leader=True))
    assert chronicle.violations == ["b leads term 4, which u does"]


def test_growing_positions_and_terms_are_accepted() -> None:
    chronicle = Chronicle()
    chronicle.see("u", "a", SIGHT)
    chronicle.see("u", "a", Sight(VClock({1: 6}), VClock({1: 5}), 5, 2, True, 5, 1))
    chronicle.see("v", "b", SIGHT._replace(term=6, vote=2, is_leader=True))
    assert not chronicle.violations


@simulated(seeds=range(3))
async def test_written_rows_lost_in_a_power_loss_are_reported(sim: Simulation) -> None:
    await sim.start("a", wal_mode="write")
    watchers = Watchers(Set(sim, ["a"]))
    await make_space(sim, "a")
    await Writer(sim, 0).run("a", 20)
    sim.crash("a", Loss.UNSYNCED)
    await sim.restart("a")
    await sim.sleep(LOOK_SECONDS)
    await sim.sleep(LOOK_SECONDS)  # an idle node is looked at when something happens
    assert any("a went back from" in each for each in watchers.violations)


@simulated(seeds=range(3))
async def test_rows_lost_without_fsync_are_not_reported(sim: Simulation) -> None:
    await sim.start("a", wal_mode="write")
    watchers = Watchers(Set(sim, ["a"], plan=Options(wal_mode="write")))
    await make_space(sim, "a")
    await Writer(sim, 0).run("a", 20)
    sim.crash("a", Loss.UNSYNCED)
    await sim.restart("a")
    await sim.sleep(LOOK_SECONDS)
    await sim.sleep(LOOK_SECONDS)  # an idle node is looked at when something happens
    assert not watchers.violations


@simulated(seeds=range(3))
async def test_set_with_crashing_leaders_has_no_violations(sim: Simulation) -> None:
    watchers = Watchers(Set(sim, list(NAMES)))
    await start_set(sim, NAMES, election_mode="candidate", wal_mode="fsync", replication_timeout=0.5)
    for _ in range(3):
        leader = await elect(sim, NAMES)
        sim.crash(leader)
        await sim.sleep(10)
        await sim.restart(leader)
    assert not watchers.violations
    assert len(watchers.chronicle.leaders) > 2


@simulated()
async def test_acknowledgement_before_the_write_is_found(sim: Simulation) -> None:
    watchers = Watchers(Set(sim, list(NAMES)))
    await start_set(sim, NAMES, wal_mode="fsync", replication_timeout=0.5)
    await make_space(sim, "a")
    sim.machine("b").blocking_seconds = (0.1, 0.2)
    with MUTATIONS["ack_before_the_write"]():
        await Writer(sim, 0).run("a", 20)
        await converge(sim)
    assert watchers.violations
    assert all(" has acknowledged " in each for each in watchers.violations)


STOPS = pytest.mark.parametrize(
    ("error", "dialect", "is_right"),
    [
        (errors.TupleFound("there is such a key"), "2.11", False),
        (errors.WalIo("Failed to write to disk"), "2.11", True),
        (errors.UncommittedForeignSyncTxns("of 1"), "2.11", False),
        (errors.UncommittedForeignSyncTxns("of 1"), "2.6", True),
        (errors.ProcLua("Missing .xlog file between LSN 1 {1: 1} and 2 {1: 2}"), "2.6", False),
    ],
)


@STOPS
@simulated()
async def test_stopped_applier_needs_a_valid_reason(
    sim: Simulation, error: TarantoolError, dialect: str, is_right: bool
) -> None:
    watchers = Watchers(Set(sim, ["a", "b"], plan=Options(dialect=dialect)))
    await start_set(sim, "ab", dialect=dialect, wal_mode="fsync")
    with patch.object(NodeSink, "apply", side_effect=error):
        await make_space(sim, "a")
        await sim.until(lambda: upstream(sim, "b", "a").get("status") == "stopped")
    await sim.sleep(1)
    assert [each for each in watchers.violations if "b does not follow a any more" in each] == watchers.violations
    assert len(watchers.violations) == (0 if is_right else 1)


@simulated()
async def test_stopped_applier_of_a_killed_node_is_reported_once(sim: Simulation) -> None:
    watchers = Watchers(Set(sim, ["a", "b"]))
    await start_set(sim, "ab", wal_mode="fsync")
    with patch.object(NodeSink, "apply", side_effect=errors.TupleFound("there is such a key")):
        await make_space(sim, "a")
        await sim.until(lambda: upstream(sim, "b", "a").get("status") == "stopped")
    sim.kill("b")
    assert len(watchers.violations) == 1
    await sim.restart("b")
    await sim.sleep(1)
    assert len(watchers.violations) == 1


@simulated(seeds=range(3))
async def test_unsynced_vote_is_found_with_unsynced_logs(sim: Simulation) -> None:
    watchers = Watchers(Set(sim, list(NAMES), plan=Options(wal_mode="write")))
    with MUTATIONS["skip_the_fsync_of_a_vote_in_mode_write"]():
        await start_set(sim, NAMES, election_mode="candidate", wal_mode="write", replication_timeout=0.5)
        leader = await elect(sim, NAMES)
        sim.kill(leader)
    assert [each for each in watchers.violations if "if it lost its power now" in each] == watchers.violations
    assert watchers.violations


@simulated(seeds=range(3))
async def test_synced_vote_is_accepted_with_unsynced_logs(sim: Simulation) -> None:
    watchers = Watchers(Set(sim, list(NAMES), plan=Options(wal_mode="write")))
    await start_set(sim, NAMES, election_mode="candidate", wal_mode="write", replication_timeout=0.5)
    for _ in range(3):
        leader = await elect(sim, NAMES)
        sim.kill(leader)
        await sim.sleep(10)
        await sim.restart(leader)
    assert not watchers.violations


@pytest.mark.parametrize("is_anonymous", [False, True])
@simulated()
async def test_peer_of_2_6_may_lack_rows_from_before_it_joined(sim: Simulation, is_anonymous: bool) -> None:
    members, anonymous = (["a", "c"], ["b"]) if is_anonymous else (["a", "b", "c"], [])
    watchers = Watchers(Set(sim, members, anonymous, plan=Options(dialect="2.6")))
    options = {"dialect": "2.6", "wal_mode": "fsync", "replication_connect_timeout": 3}
    await sim.start("a", **options)
    reader = {"replication_anon": True, "read_only": True} if is_anonymous else {}
    await sim.start("b", replication=[sim.uri("a")], **reader, **options)
    sim.cut("a", "b")
    await make_space(sim, "a")
    await sim.start("c", replication=[sim.uri("a")], **options)
    await sim.on("b", sim.node("b").reconfigure(replication=[sim.uri("c")]))
    (applier,) = sim.node("b")._parts.replication._appliers.values()
    await sim.until(lambda: applier.state is ApplierState.STOPPED)
    await sim.sleep(1)
    assert "Missing .xlog file" in str(applier.error)
    assert not watchers.violations
