"""Raft and limbo together in place of each recorded server of 2.11 and 3.8: the same log, row for row.

They go through the recorded terms, votes, leaders and owners, are checked at each row, and end in the state of the
server's own last snapshot. Scenarios: 05-election (of two), 06-contested-election (of three; see
tests/conversations/record_elections.py), 01-join-subscribe (elections off).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import unpack_body
from flowstone.iproto.row import Row
from flowstone.outside.disk import SystemDisk
from flowstone.replication.limbo.control_rows import Confirm, Demote, Promote, RaftState, Rollback, decode_control
from flowstone.replication.raft.election import ElectionMode, ElectionState
from flowstone.replication.vclock import VClock
from flowstone.xlog.reader import LogFile
from flowstone.xlog.transactions import CONTROL_TYPES, LogTransaction
from tests.conversations import recording
from tests.replication.recorded_seat import IDS, Event, Seat, Shown, global_rows, recorded_events, state_of, written
from tests.replication.test_recorded_logs import rows_of, transactions_of

VERSIONS = ("2.11", "3.8")
JOIN, ELECTION, CONTEST = "01-join-subscribe", "05-election", "06-contested-election"

PROMOTED = {(ELECTION, 1, 4)}
"""Scenario, instance and term of elections started by box.ctl.promote()."""

QUORUMS = {
    ("2.11", JOIN, 1, (1, 107)): 3,
    ("2.11", JOIN, 1, (1, 109)): 2,
    ("3.8", JOIN, 1, (1, 109)): 3,
    ("3.8", JOIN, 1, (1, 111)): 2,
    **{
        (version, CONTEST, *row): quorum
        for version in VERSIONS
        for row, quorum in {(1, (1, 15)): 3, (2, (2, 2)): 4, (2, (2, 4)): 2}.items()
    },
}
"""`replication_synchro_quorum` that was set on an instance before it logged the row with this origin and LSN."""

VOTERS = {(CONTEST, 2, (1, 15)), (CONTEST, 3, (2, 2))}
"""Instances that were voters, and became candidates before they logged this row."""

TRANSFERS: dict[int, type[Promote | Demote]] = {
    RequestType.RAFT_PROMOTE: Promote,
    RequestType.RAFT_DEMOTE: Demote,
}

RESTARTED = {(CONTEST, 1)}
"""Killed in the first of its connections with each peer, and restarted for the second."""

LEADERS = {
    (ELECTION, "2.11"): [(2, 1), (3, 2), (4, 1)],
    (ELECTION, "3.8"): [(2, 1), (3, 2), (4, 1)],
    (CONTEST, "2.11"): [(2, 1), (3, 2), (4, 1), (5, 3)],
    (CONTEST, "3.8"): [(2, 1), (3, 2), (4, 3), (5, 2)],
}
"""Term and leader, as recorded. Each of them took over the queue."""

UNDONE = {(CONTEST, "a"): {"too late"}, (CONTEST, "b"): {"too late", "to nobody"}, (CONTEST, "c"): {"too late"}}
"""Transactions in an instance's queue that were rolled back."""

SEATS = [
    (version, scenario, node)
    for version in VERSIONS
    for scenario, nodes in ((ELECTION, "ab"), (CONTEST, "abc"))
    for node in nodes
]


class Recording:
    """The files of one instance: its initial snapshot, its log, and its last snapshot."""

    def __init__(self, version: str, scenario: str, node: str) -> None:
        directory = recording.scenario(version, scenario) / "files" / node
        first, *_, self.last = sorted(directory.glob("*.snap"))
        self.first = first
        logs = sorted(path for path in directory.glob("*.xlog") if first.stem <= path.stem)
        transactions = [transaction for path in logs for transaction in transactions_of(path)]
        self.global_ = [transaction for transaction in transactions if not transaction.is_local]
        self.raft = [state_of(row) for each in transactions for row in each.rows if row.type == RequestType.RAFT]


def state_in(snapshot: Path) -> tuple[VClock, RaftState, Promote]:
    with LogFile.open(SystemDisk(), str(snapshot)) as log:
        vclock = VClock(log.meta.vclock)
    bodies = [decode_control(row.type, row.body) for row in rows_of(snapshot) if row.type in CONTROL_TYPES]
    raft, promote = bodies
    assert isinstance(raft, RaftState)
    assert isinstance(promote, Promote)
    return vclock, raft, promote


def tuples_in(rows: Iterable[Row]) -> set[tuple[int, Any]]:
    """Return the tuples written by users, by space."""
    bodies = [unpack_body(row.body) for row in rows if row.type == RequestType.INSERT]
    return {(body[Key.SPACE_ID], body[Key.TUPLE]) for body in bodies if body[Key.SPACE_ID] >= 512}


class Play:
    """One instance's role, driven by its log: each row of its own results from its input or a client's request."""

    def __init__(self, version: str, scenario: str, node: str, seat: Seat) -> None:
        self.version, self.scenario = version, scenario
        self.seat = seat
        self.recorded = Recording(version, scenario, node)
        heard, self.shown = recorded_events(version, scenario, seat.id)
        self._events: list[Event | Shown] = sorted([*heard, *self.shown], key=lambda event: event.at)
        self._leading = 0
        self._is_second_life = False
        seat.start(*state_in(self.recorded.first))

    def run(self) -> None:
        count = 0
        for transaction in self.recorded.global_:
            rows = [written(row) for row in global_rows(transaction)]
            count += len(rows)
            self._configure(transaction.rows[0])
            while len(self.seat.rows) < count:
                self._go_on(transaction)
            assert self.seat.rows[count - len(rows) : count] == rows
            check_state(self.seat, transaction.rows[-1])
        while self._events:
            self._next_event()
        assert len(self.seat.rows) == count

    def _configure(self, row: Row) -> None:
        before = self.seat.id, (row.replica_id, row.lsn)
        self.seat.limbo.configure(quorum=QUORUMS.get((self.version, self.scenario, *before)))
        if (self.scenario, *before) in VOTERS:
            self.seat.set_mode(ElectionMode.CANDIDATE)

    def _go_on(self, transaction: LogTransaction) -> None:
        """Take one step towards writing the transaction."""
        row = transaction.rows[0]
        is_own = transaction.replica_id == self.seat.id
        if is_own and row.type == RequestType.RAFT_ROLLBACK:
            self.seat.time_out()
        elif is_own and self.scenario == JOIN and row.type in TRANSFERS:
            self._transfer(row)
        elif is_own and row.type not in CONTROL_TYPES and not self.seat.limbo.is_read_only:
            self.seat.submit(transaction)
        else:
            self._next_event()

    def _transfer(self, row: Row) -> None:
        """Run `box.ctl.promote()` or `demote()` with elections off.

        Servers 3.8 then elect themselves, with one vote.
        """
        if row.type == RequestType.RAFT_PROMOTE and self.version == "3.8":
            self.seat.promote()
        else:
            self.seat.transfer(TRANSFERS[row.type], self.seat.begin_term())

    def _next_event(self) -> None:
        event = self._events.pop(0)
        self._live_again(event)
        if isinstance(event, Event):
            self.seat.hear(event)
        else:
            self._has_shown(event)

    def _live_again(self, event: Event | Shown) -> None:
        is_second = (self.scenario, self.seat.id) in RESTARTED and not event.connection.endswith("-01")
        if is_second and not self._is_second_life:
            self._is_second_life = True
            self.seat.restart(event.at)

    def _has_shown(self, event: Shown) -> None:
        """Apply spontaneous actions of the instance, which are only known from its broadcasts."""
        state = event.state
        is_ours = state.vote == self.seat.id
        if is_ours and state.state != ElectionState.FOLLOWER:
            if (self.scenario, self.seat.id, state.term) in PROMOTED and self.seat.raft.volatile_term < state.term:
                self.seat.promote()
            self.seat.stand(event.at, state.term)
        is_leading = self.seat.raft.state is ElectionState.LEADER and self.seat.raft.term == state.term
        if is_ours and is_leading and state.state == ElectionState.LEADER:
            self._leading = state.term
        elif is_ours and is_leading and state.state == ElectionState.FOLLOWER and self._leading == state.term:
            self.seat.resign()


def check_state(seat: Seat, row: Row) -> None:
    """Check the state after each row, by the content of the row."""
    body = decode_control(row.type, row.body) if row.type in CONTROL_TYPES else None
    limbo = seat.limbo
    match body:
        case Promote(owner_id, lsn, term) | Demote(owner_id, lsn, term):
            assert (limbo.term, limbo.promote_terms[row.replica_id]) == (term, term)
            assert limbo.owner_id == (row.replica_id if isinstance(body, Promote) else 0)
            assert limbo.confirmed_vclock.get(owner_id) == lsn
            assert not limbo.pending
            assert seat.raft.volatile_term >= term
        case Confirm(owner_id, lsn):
            assert (limbo.owner_id, limbo.confirmed_lsn) == (owner_id, lsn)
            assert all(entry.lsn > lsn for entry in limbo.pending)
        case Rollback(owner_id, lsn):
            assert limbo.owner_id == owner_id
            assert all(entry.lsn < lsn for entry in limbo.pending)
            assert limbo.confirmed_lsn < lsn


def is_part_in_order(part: list[RaftState], whole: list[RaftState]) -> bool:
    """A relay sends the newest state only, so some states are never sent."""
    rest = iter(whole)
    return all(any(state == told for told in rest) for state in part)


def check_outcome(play: Play) -> None:
    """Check that the machines match the server's last snapshot, and have broadcast the same states."""
    seat = play.seat
    assert seat.raft_rows == play.recorded.raft
    vclock, raft, queue = state_in(play.recorded.last)
    assert seat.raft.persisted.encode() == raft.encode()
    assert seat.limbo.checkpoint().encode() == queue.encode()
    assert vclock.without_zero() <= seat.vclock().without_zero()
    told = sorted(play.shown, key=lambda shown: shown.connection)
    for connection, each in groupby(told, lambda shown: shown.connection):
        states = [state for state, _ in groupby(shown.state for shown in each)]
        assert is_part_in_order(states, seat.shown), connection


@pytest.mark.parametrize(("version", "scenario", "node"), SEATS)
def test_machines_write_the_log_of_a_recorded_server(version: str, scenario: str, node: str) -> None:
    nodes = [each for each in IDS if (recording.scenario(version, scenario) / "files" / each).exists()]
    members = [IDS[each] for each in nodes]
    is_voter = (scenario, IDS[node]) in {(scenario, instance_id) for scenario, instance_id, _ in VOTERS}
    mode = ElectionMode.VOTER if is_voter else ElectionMode.CANDIDATE
    play = Play(version, scenario, node, Seat(IDS[node], members, quorum=2, mode=mode))
    play.run()
    seat, leaders = play.seat, LEADERS[scenario, version]
    check_outcome(play)
    assert tuples_in(row for each in seat.committed for row in each.rows) == tuples_in(rows_of(play.recorded.last))
    assert seat.leaders == leaders
    assert seat.owners == leaders
    undone = {row[1][1] for row in tuples_in(row for each in seat.undone for row in each.rows)}
    assert undone == UNDONE.get((scenario, node), set())


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("node", "instance_id"), [("master", 1), ("replica", 2)])
def test_machines_write_the_log_of_a_recorded_server_without_elections(
    version: str, node: str, instance_id: int
) -> None:
    """The master promotes itself in term 2, demotes itself in 3, and is owner again in 4."""
    seat = Seat(instance_id, [1, 2], quorum=2, mode=ElectionMode.OFF)
    if (version, node) == ("3.8", "master"):
        seat = Seat(instance_id, [1], quorum=2, mode=ElectionMode.MANUAL)
    play = Play(version, JOIN, node, seat)
    play.run()
    check_outcome(play)
    assert seat.owners == [(2, 1), (3, 0), (4, 1)]
