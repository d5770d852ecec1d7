"""Runs in the limbo: many transactions as one entry have the same outcomes as single ones, wherever verdicts split
them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.box.dialect import Dialect
from flowstone.iproto import errors
from flowstone.replication.limbo.actions import Action, Commit, Undo, Write
from flowstone.replication.limbo.control_rows import Confirm, Rollback
from flowstone.replication.limbo.limbo import Limbo
from flowstone.replication.limbo.queue import EntryState, LimboEntry
from flowstone.replication.limbo.split_brain import SettlingRequest
from flowstone.replication.vclock import VClock

OWNER, REPLICA, TIMEOUT = 1, 2, 5.0


class Labels:
    """A run of transactions that consist of their LSNs."""

    def __init__(self, lsns: list[int]) -> None:
        self.lsns = lsns

    def take_first(self, count: int) -> Labels:
        taken, self.lsns = self.lsns[:count], self.lsns[count:]
        return Labels(taken)

    def take_last(self, count: int) -> Labels:
        taken, self.lsns = self.lsns[-count:], self.lsns[:-count]
        return Labels(taken)


class Machine:
    """A limbo that gets transactions in runs or one by one, and their outcomes in order."""

    def __init__(self, *, instance_id: int = OWNER, is_divided: bool) -> None:
        self.limbo: Limbo[Labels] = Limbo(instance_id=instance_id, dialect=Dialect.V2_6, quorum=2, timeout=TIMEOUT)
        self.is_divided = is_divided
        self.lsn = 0
        self.outcomes: list[tuple[int, str]] = []
        self.verdicts: list[Any] = []
        self.entries: list[LimboEntry[Labels]] = []

    def put(self, count: int, now: float) -> None:
        """Write this number of transactions."""
        lsns = list(range(self.lsn + 1, self.lsn + count + 1))
        self.lsn += count
        for run in [[lsn] for lsn in lsns] if self.is_divided else [lsns]:
            labels, total = Labels(run), len(run)
            if self.limbo.instance_id == OWNER:
                entry = self.limbo.submit(labels, is_synchronous=True, count=total, size=total)
            else:
                entry = self.limbo.receive(
                    labels, origin_id=OWNER, lsn=run[-1], is_synchronous=True, count=total, size=total
                )
            assert entry is not None
            self.entries.append(entry)
            self._do(self.limbo.written(entry, run[-1], now))

    def ack(self, lsn: int) -> None:
        self._do(self.limbo.ack(REPLICA, VClock({OWNER: lsn})))

    def tick(self, now: float) -> None:
        self._do(self.limbo.tick(now))

    def hear(self, verdict: Confirm | Rollback) -> None:
        self._do(self.limbo.request(SettlingRequest(OWNER, verdict)))

    def _do(self, actions: list[Action[Labels]]) -> None:
        for action in actions:
            match action:
                case Commit(entries):
                    self.outcomes += [(lsn, "committed") for entry in entries for lsn in entry.transaction.lsns]
                    assert all(entry.state is EntryState.COMMITTED for entry in entries)
                case Undo(entry, error):
                    self.outcomes += [(lsn, type(error).__name__) for lsn in reversed(entry.transaction.lsns)]
                    assert entry.state is EntryState.UNDONE
                case Write(request):
                    self.verdicts.append(request.body)
                    if request.origin_id == self.limbo.instance_id:
                        self.lsn += 1
                    self._do(self.limbo.request_written(request))

    def looks(self) -> tuple[Any, ...]:
        limbo = self.limbo
        waiting = [lsn for entry in limbo.pending for lsn in entry.transaction.lsns]
        first = limbo.history
        return len(limbo), limbo.size, limbo.rollback_count, limbo.confirmed_lsn, waiting, first, limbo.deadline


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(1, 9)),
        st.tuples(st.just("verdict"), st.integers(0, 12)),
        st.tuples(st.just("time"), st.sampled_from((1, 4, 6))),
    ),
    max_size=30,
)


@given(STEPS)
def test_owner_decides_runs_like_single_transactions(steps: list[tuple[str, int]]) -> None:
    runs, singles = Machine(is_divided=False), Machine(is_divided=True)
    now = 0.0
    for what, number in steps:
        if what == "time":
            now += number
        for machine in (runs, singles):
            if what == "put":
                machine.put(number, now)
            elif what == "verdict":
                machine.ack(max(0, machine.lsn - number))
            else:
                machine.tick(now)
        assert runs.outcomes == singles.outcomes
        assert runs.verdicts == singles.verdicts
        assert runs.looks() == singles.looks()


@given(STEPS, st.data())
def test_follower_splits_runs_at_verdicts(steps: list[tuple[str, int]], data: st.DataObject) -> None:
    runs, singles = (Machine(instance_id=REPLICA, is_divided=each) for each in (False, True))
    decided = 0
    for what, number in steps:
        verdict: Confirm | Rollback | None = None
        if what != "put":
            if decided == runs.lsn:
                continue
            lsn = data.draw(st.integers(decided + 1, runs.lsn))
            verdict = Confirm(OWNER, lsn) if what == "verdict" else Rollback(OWNER, lsn)
            decided = lsn if what == "verdict" else runs.lsn
        for machine in (runs, singles):
            if verdict is None:
                machine.put(number, 0.0)
            else:
                machine.hear(verdict)
        assert runs.outcomes == singles.outcomes
        assert runs.looks() == singles.looks()


def test_waiter_for_a_run_is_notified_with_its_last_part() -> None:
    machine = Machine(instance_id=REPLICA, is_divided=False)
    machine.put(5, 0.0)
    newest = machine.limbo.newest
    assert newest is not None
    states = []
    for verdict in (Confirm(OWNER, 3), Rollback(OWNER, 5)):
        machine.hear(verdict)
        states.append(newest.state)
    assert states == [EntryState.WAITING, EntryState.UNDONE]
    assert [entry.transaction.lsns for entry in machine.limbo.pending] == [[4]]


def test_timeout_concerns_only_the_first_transaction_of_a_run() -> None:
    machine = Machine(is_divided=False)
    machine.put(3, 0.0)
    machine.tick(TIMEOUT)
    names = errors.SyncQuorumTimeout.__name__, errors.SyncRollback.__name__
    assert machine.outcomes == [(3, names[1]), (2, names[1]), (1, names[0])]


@pytest.mark.parametrize("acked", [0, 2])
def test_queue_of_a_dead_owner_can_be_cleared_within_a_run(acked: int) -> None:
    machine = Machine(instance_id=REPLICA, is_divided=False)
    machine.limbo.configure(quorum=2)
    machine.put(4, 0.0)
    machine._do(machine.limbo.ack(3, VClock({OWNER: acked})))
    machine._do(machine.limbo.clear_synchro_queue(0.0))
    machine.tick(2 * TIMEOUT)
    expected = [Confirm(OWNER, 2), Rollback(OWNER, 3)] if acked else [Rollback(OWNER, 1)]
    assert machine.verdicts == expected
    assert not machine.limbo
