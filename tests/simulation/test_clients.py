"""Clients of a simulated set behave as documented, and record the right outcomes."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from flowstone.client.connection import ConnectionFailed
from flowstone.errors import RemoteProtocolError
from flowstone.iproto import errors
from tests.simulation.checkers import append, bank, register, set
from tests.simulation.clients import Clients, is_promised, outcome_of
from tests.simulation.cluster import converge
from tests.simulation.conversation import NotCommitted
from tests.simulation.history import History, Outcome
from tests.simulation.plan import ASYNCHRONOUS, SYNCHRONOUS, WITH_TRANSACTIONS, Plan, plan
from tests.simulation.replica_set import ReplicaSet
from tests.simulation.simulation import Simulation, simulated

MODES = [("2.11", "candidate"), ("2.11", "manual"), ("2.11", "off"), ("2.6", "off")]


def make_plan(dialect: str, election_mode: str) -> Plan:
    synchronous = [name for name in SYNCHRONOUS if dialect != "2.6" or name not in WITH_TRANSACTIONS]
    workloads = (*synchronous, *(ASYNCHRONOUS if election_mode == "off" else ()))
    return replace(
        plan(0),
        size=3,
        dialect=dialect,
        election_mode=election_mode,
        anonymous=0,
        workloads=workloads,
        wal_mode="fsync",
        synchro_timeout=5.0,  # two of them are waits of a manual promotion
    )


async def start(sim: Simulation, dialect: str, election_mode: str) -> Clients:
    replica_set = ReplicaSet(sim, make_plan(dialect, election_mode))
    await replica_set.form()
    clients = Clients(replica_set, History(lambda: sim.now), Random(f"{sim.seed}/clients"))
    await clients.prepare()
    return clients


def violations(history: History) -> list[str]:
    found = [problem for checker in (register, append, set, bank) for problem in checker.check(history)]
    return found + set.check(history, "notes")


@pytest.mark.parametrize(("dialect", "election_mode"), MODES)
@simulated(seeds=range(1))
async def test_healthy_set_answers_every_request(sim: Simulation, dialect: str, election_mode: str) -> None:
    clients = await start(sim, dialect, election_mode)
    history, end = clients.history, sim.now + 20
    await clients.run(lambda: sim.now > end)
    await converge(sim, clients.replica_set.names)
    await clients.final_reads()
    assert not clients.surprises
    for workload in clients.workloads:
        reads = [each for each in history.of(workload.name) if each.kind == "read"]
        others = [each for each in history.of(workload.name) if each.kind != "read"]
        assert all(each.is_ok for each in reads)
        assert sum(each.is_ok for each in others) > len(others) / 4, "only conflicts and the wrong member are expected"
        assert not any(each.outcome is Outcome.UNKNOWN for each in others)
    assert violations(history) == []


@pytest.mark.parametrize(("dialect", "election_mode"), MODES)
@simulated(seeds=range(1))
async def test_clients_continue_after_the_leader_crashes(sim: Simulation, dialect: str, election_mode: str) -> None:
    clients = await start(sim, dialect, election_mode)
    replica_set, end = clients.replica_set, sim.now + 25

    async def hurt() -> None:
        while sim.now < end:
            await sim.sleep(sim.random.uniform(0, 5))
            leader = replica_set.leader()
            if leader is not None:
                sim.crash(leader)
                await sim.sleep(sim.random.uniform(0, 5))
                await replica_set.restart(leader)

    def is_written_again() -> bool:
        newest = reversed(clients.history.operations[-20:])
        return hurting.done() and any(each.is_ok and each.kind != "read" for each in newest)

    hurting = sim.loop.create_task(hurt())
    await clients.run(lambda: is_written_again() or sim.now > end + 100)
    assert is_written_again()
    await converge(sim, replica_set.names)
    await clients.final_reads()
    assert not clients.surprises
    assert violations(clients.history) == []


def test_rejected_requests_have_failed_and_interrupted_ones_are_unknown() -> None:
    elected, fixed = make_plan("2.11", "candidate"), make_plan("2.6", "off")
    for each in (elected, fixed):
        assert outcome_of(errors.Readonly("no"), each) is Outcome.FAILED
        assert outcome_of(errors.TransactionConflict("no"), each) is Outcome.FAILED
        assert outcome_of(NotCommitted("lost"), each) is Outcome.FAILED
        assert outcome_of(errors.WalIo("no"), each) is Outcome.UNKNOWN
        assert outcome_of(ConnectionFailed("lost"), each) is Outcome.UNKNOWN
    for error in (errors.SyncQuorumTimeout("late"), errors.SyncRollback("late")):
        assert outcome_of(error, fixed) is Outcome.FAILED
        assert outcome_of(error, elected) is Outcome.UNKNOWN


def test_undocumented_errors_are_unexpected() -> None:
    assert is_promised(errors.Readonly("no"), is_read=False)
    assert is_promised(ConnectionFailed("lost"), is_read=False)
    assert is_promised(errors.System("timed out"), is_read=True)
    assert not is_promised(errors.System("timed out"), is_read=False)
    assert not is_promised(errors.Unknown("Internal error"), is_read=True)
    refused = NotCommitted("no")
    refused.__cause__ = errors.NoSuchSpace("no")
    assert not is_promised(refused, is_read=False)


def test_undecodable_answers_are_unexpected() -> None:
    garbage = RemoteProtocolError("a sent something that is no packet")
    assert not is_promised(garbage, is_read=False)
    assert not is_promised(garbage, is_read=True)
    refused = NotCommitted("no")
    refused.__cause__ = garbage
    assert not is_promised(refused, is_read=False)
    refused.__cause__ = ConnectionFailed("lost")
    assert is_promised(refused, is_read=False)
