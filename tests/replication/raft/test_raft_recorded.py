"""An election between two real servers of 2.11 and 3.8: our machine in place of each shows the same states.

In `05-election` instance 1 wins term 2, resigns, 2 wins term 3, and 1 is promoted and wins term 4.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

import pytest

from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.row import decode_row
from flowstone.replication.limbo.control_rows import RaftState, decode_control
from flowstone.replication.raft.election import Config, ElectionMode, ElectionState
from flowstone.replication.raft.raft import Raft
from flowstone.replication.vclock import VClock
from tests.conversations import recording
from tests.vectors import recorded

VERSIONS = ("2.11", "3.8")
STREAMS = {1: "to-a-01", 2: "to-b-03"}
"""The connection on which each instance sends to the other."""

IN_TERM_2, IN_TERM_3, IN_TERM_4 = VClock({1: 6}), VClock({1: 11}), VClock({1: 11, 2: 3})
"""The vclock of both at each election."""


def told_by(version: str, instance_id: int) -> list[RaftState]:
    """Return the election states that the instance sent after SUBSCRIBE."""
    packets = recording.load(version, "05-election", STREAMS[instance_id]).answers
    rows = [decode_row(packet.payload) for packet in packets if packet.type == RequestType.RAFT]
    told = [decode_control(row.type, row.body or b"") for row in rows]
    states = [state for state in told if isinstance(state, RaftState)]
    assert len(states) == len(told)
    return [state for state in states if state.state]


def without_repetitions(states: Iterable[RaftState]) -> list[RaftState]:
    """A state is sent again whenever a replica subscribes."""
    return [state for state, _ in groupby(states)]


class Player:
    """Our machine in place of one instance, with a disk without latency."""

    def __init__(self, instance_id: int, mode: ElectionMode) -> None:
        self.vclock = IN_TERM_2
        self.raft = Raft(instance_id, vclock=lambda: self.vclock, random=lambda: 0.0, now=0.0)
        self.shown: list[RaftState] = []
        self.written: list[RaftState] = []
        self.leaders: list[tuple[int, int]] = []
        self.raft.set_quorum(2, [1, 2], 0.0)
        for peer_id in {1, 2} - {instance_id}:
            self.raft.connection(peer_id, upstream=True, downstream=True, now=0.0)
        self.raft.configure(Config(mode=mode), 0.0)
        self.settle()

    def settle(self) -> None:
        while ready := self.raft.ready():
            if ready.broadcast is not None:
                self.shown.append(ready.broadcast)
            if ready.write is not None:
                self.written.append(ready.write)
                self.raft.written(ready.write.term, ready.write.vote, 4.0)
            if self.raft.leader and (self.raft.term, self.raft.leader) not in self.leaders:
                self.leaders.append((self.raft.term, self.raft.leader))

    def hear(self, source_id: int, states: Iterable[RaftState]) -> None:
        for state in states:
            self.raft.message(source_id, state, 4.0)
            self.settle()


@pytest.mark.parametrize("version", VERSIONS)
def test_machine_broadcasts_the_states_of_the_first_instance(version: str) -> None:
    heard = {term: list(states) for term, states in groupby(told_by(version, 2), key=lambda state: state.term)}
    player = Player(1, ElectionMode.CANDIDATE)
    player.hear(2, heard[1])
    player.raft.tick(4.0)
    player.settle()
    player.hear(2, heard[2])
    assert player.raft.state is ElectionState.LEADER
    player.vclock = IN_TERM_3
    player.raft.resign(4.0)
    player.settle()
    player.hear(2, heard[3])
    player.vclock = IN_TERM_4
    player.raft.promote(4.0)
    player.settle()
    player.hear(2, heard[4])
    assert without_repetitions(player.shown) == without_repetitions(told_by(version, 1))
    assert player.leaders == [(2, 1), (3, 2), (4, 1)]
    assert player.written == written_by(version, "a")


@pytest.mark.parametrize("version", VERSIONS)
def test_machine_broadcasts_the_states_of_the_second_instance(version: str) -> None:
    player = Player(2, ElectionMode.CANDIDATE)
    for state in told_by(version, 1):
        if state.term == 2 and player.raft.leader and state.state == ElectionState.FOLLOWER:
            player.vclock = IN_TERM_3
        elif state.term == 4:
            player.vclock = IN_TERM_4
        player.hear(1, [state])
    assert without_repetitions(player.shown) == without_repetitions(told_by(version, 2))
    assert player.leaders == [(2, 1), (3, 2), (4, 1)]
    assert player.written == written_by(version, "b")


def written_by(version: str, node: str) -> list[RaftState]:
    """Return term and vote as the instance logged them, in order."""
    states = []
    for path in recorded.files():
        if f"tarantool-{version}/05-election/files/{node}/" not in path.as_posix() or path.suffix != ".xlog":
            continue
        for entry in recorded.listing(path):
            if entry.get("header", {}).get(str(Key.REQUEST_TYPE.value)) == RequestType.RAFT:
                row = decode_row(bytes.fromhex(entry["row"]))
                state = decode_control(row.type, row.body or b"")
                assert isinstance(state, RaftState)
                states.append(state)
    return states
