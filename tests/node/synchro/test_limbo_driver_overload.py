"""Timeouts of a node that wakes up late, after a suspension or under constant overload, and must still decide."""

from __future__ import annotations

from typing import Any

import pytest

from flowstone.box.dialect import Dialect
from flowstone.box.engine import statements
from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from flowstone.iproto.msgpack import pack
from flowstone.node.synchro.limbo_driver import EXTENSIONS_MAX, LimboDriver
from tests.node.applied_rows import SYNC, Replica, settled
from tests.standing_clock import StandingClock

TIMEOUT = 5.0


class LateAlarm:
    """An alarm with a given delay."""

    def __init__(self, clock: StandingClock, queue: LimboDriver) -> None:
        self._clock = clock
        self._queue = queue
        self._deadline: float | None = None
        self.late = 0.0

    def set(self, deadline: float | None) -> None:
        self._deadline = deadline

    def cancel(self) -> None:
        self._deadline = None

    def ring(self, late: float) -> None:
        assert self._deadline is not None
        self._clock.now = self._deadline + late
        self.late = late
        self._queue._tick()


async def waiting(monkeypatch: pytest.MonkeyPatch) -> tuple[Replica, LateAlarm, list[FlowstoneError | None]]:
    """Return an owner of the queue with a transaction that no replica acknowledges, and its client's result."""
    replica, clock = Replica(dialect=Dialect.V2_11), StandingClock()
    queue = replica.commits.queue
    queue.see_term(2)
    await queue.promote(2)
    queue.configure(quorum=2, timeout=TIMEOUT)
    alarm: Any = LateAlarm(clock, queue)
    monkeypatch.setattr(queue, "_clock", clock)
    monkeypatch.setattr(queue, "_alarm", alarm)
    told: list[FlowstoneError | None] = []
    transaction = replica.box.begin()
    statements.replace(transaction, replica.box.space(SYNC), pack([1]))
    replica.commits.submit(transaction, told.append)
    replica.journal.flush()
    await settled(replica)
    return replica, alarm, told


async def test_timeout_starts_anew_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    replica, alarm, told = await waiting(monkeypatch)
    alarm.ring(late=7.0)
    await settled(replica)
    assert told == []
    alarm.ring(late=0.0)
    await settled(replica)
    assert [type(each) for each in told] == [errors.SyncQuorumTimeout]


async def test_timeout_ends_under_lasting_overload(monkeypatch: pytest.MonkeyPatch) -> None:
    replica, alarm, told = await waiting(monkeypatch)
    for _ in range(EXTENSIONS_MAX + 1):
        assert told == []
        alarm.ring(late=1.5)
        await settled(replica)
    assert [type(each) for each in told] == [errors.SyncQuorumTimeout]
