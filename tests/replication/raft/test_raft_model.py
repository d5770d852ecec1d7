"""Elections under random schedules: despite losses, delays, duplicates and kills, no term has two leaders.

A schedule is generated from its number alone, so a failure can be repeated by that number. For ten seconds of virtual
time the network drops, duplicates, delays and reorders; members crash and lose writes in flight, restart one by one or
together, are isolated in one or both directions, promoted, told to resign and reconfigured. Then all faults stop, and
the set must find a leader that all members follow, and keep it.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from flowstone.errors import FlowstoneError
from flowstone.replication.limbo.control_rows import RaftState
from flowstone.replication.raft.election import Config, ElectionMode, ElectionState, Fencing
from flowstone.replication.vclock import VClock
from tests.conftest import FULL
from tests.replication.raft_cluster import Checker, Member

SCHEDULES = 10_000 if FULL else 200
CHAOS_S, CALM_S, STABLE_S = 10.0, 6.0, 2.0
HEARTBEAT_S = 0.25
CONFIG = Config(election_timeout=1.0, death_timeout=4 * HEARTBEAT_S)
MODES = (ElectionMode.CANDIDATE,) * 4 + (ElectionMode.MANUAL, ElectionMode.VOTER, ElectionMode.OFF)


class World:
    """Members on a network and disks with faults, in virtual time."""

    def __init__(self, seed: int, size: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.is_calm = False
        self.ids = list(range(1, size + 1))
        self.majority = size // 2 + 1
        self.checker = Checker()
        self.members = {member_id: Member(member_id, self.random.random, self.checker) for member_id in self.ids}
        self._cuts: set[tuple[int, int]] = set()
        self._lives = dict.fromkeys(self.ids, 0)
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    # --- time ---

    def later(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self.now + delay, next(self._numbers), action))

    def run_until(self, end: float) -> None:
        while True:
            due = min((deadline, member_id) for member_id, deadline in self._deadlines())
            if self._agenda[0][0] <= due[0]:
                if self._agenda[0][0] > end:
                    return
                self.now, _, action = heapq.heappop(self._agenda)
                action()
            elif due[0] > end:
                return
            else:
                self.now = max(self.now, due[0])
                self.members[due[1]].raft.tick(self.now)
                self.act(self.members[due[1]])

    def _deadlines(self) -> list[tuple[int, float]]:
        return [(0, float("inf"))] + [
            (member.id, member.raft.deadline)
            for member in self.members.values()
            if member.is_up and member.raft.deadline is not None
        ]

    # --- network and disk ---

    def is_open(self, source: int, target: int) -> bool:
        return (source, target) not in self._cuts and self.members[source].is_up and self.members[target].is_up

    def send(self, source: int, target: int, deliver: Callable[[Member], None]) -> None:
        """Schedule a delivery, which survives a broken connection; the chaos may lose or duplicate it."""
        if not self.is_open(source, target):
            return
        copies = 1 if self.is_calm else self.random.choice((0, 1, 1, 1, 1, 1, 1, 2))
        for _ in range(copies):
            self.later(0.01 if self.is_calm else self.random.expovariate(30), lambda: self._deliver(target, deliver))

    def _deliver(self, target: int, deliver: Callable[[Member], None]) -> None:
        member = self.members[target]
        if member.is_up:
            deliver(member)
            self.act(member)

    def act(self, member: Member) -> None:
        for ready in member.drain():
            if ready.write is not None:
                self._write(member, self._lives[member.id])
            if ready.broadcast is not None:
                for peer_id in self.ids:
                    self._show(member, peer_id, ready.broadcast)

    def _write(self, member: Member, life: int) -> None:
        delay = 0.001 if self.is_calm else self.random.expovariate(30)
        self.later(delay, lambda: self._write_ends(member, life))

    def _show(self, member: Member, peer_id: int, shown: RaftState) -> None:
        if peer_id != member.id:
            self.send(member.id, peer_id, lambda peer: peer.raft.message(member.id, shown, self.now))

    def _write_ends(self, member: Member, life: int) -> None:
        if self._lives[member.id] == life:
            member.write_ends(self.now)
            self.act(member)

    def beat(self) -> None:
        """Send heartbeats, ACKs with terms, and rows: a leader writes one, and all members relay theirs."""
        for member, peer_id in itertools.product(self.members.values(), self.ids):
            if not member.is_up or peer_id == member.id:
                continue
            if member.raft.state is ElectionState.LEADER:
                member.vclock = member.vclock.advanced(member.id, member.vclock.get(member.id) + 1)
            self._send_signs(member, peer_id)
        self.later(HEARTBEAT_S, self.beat)

    def _send_signs(self, member: Member, peer_id: int) -> None:
        vclock, term = member.vclock, member.raft.term

        def hear(peer: Member) -> None:
            peer.vclock = peer.vclock.merged(vclock)
            peer.raft.heartbeat(member.id, self.now)
            peer.raft.heard_term(member.id, term, self.now)

        self.send(member.id, peer_id, hear)

    def connect(self) -> None:
        """Tell all members their connections; a new connection shows the current state."""
        for member, peer in itertools.permutations(self.members.values(), 2):
            if not member.is_up:
                continue
            upstream, downstream = self.is_open(peer.id, member.id), self.is_open(member.id, peer.id)
            was_followed = peer.id in member.raft.peers._upstreams
            member.raft.connection(peer.id, upstream=upstream, downstream=downstream, now=self.now)
            self.act(member)
            if upstream and not was_followed:
                self._show(peer, member.id, peer.raft.shown)

    def reconnect(self) -> None:
        """Reconnect all, as after a total outage: lost messages do not matter then."""
        self._cuts = set(itertools.permutations(self.ids, 2))
        self.connect()
        self._cuts.clear()
        self.connect()

    # --- faults ---

    def start(self, member: Member) -> None:
        member.start(self.now, self.majority, self.ids)
        self.act(member)

    def crash(self, member: Member) -> None:
        self._lives[member.id] += 1
        member.crash(is_written=self.random.random() < 0.5)

    def disturb(self) -> None:
        if self.is_calm:
            return
        down = [member for member in self.members.values() if not member.is_up]
        member = down[0] if down and self.random.random() < 0.5 else self.members[self.random.choice(self.ids)]
        disturbance = self.random.choice((self._kill, self._cut, self._heal, self._heal, self._command, self._command))
        if member.is_up:
            disturbance(member)
        else:
            self.start(member)
        self.connect()
        self.later(self.random.expovariate(2), self.disturb)

    def _kill(self, member: Member) -> None:
        if self.random.random() < 0.1:
            for victim in self.members.values():
                self.crash(victim)
            for victim in self.members.values():
                self.start(victim)
        else:
            self.crash(member)

    def _cut(self, member: Member) -> None:
        peer_id = self.random.choice(self.ids)
        self._cuts.add((member.id, peer_id))
        if self.random.random() < 0.7:
            self._cuts.add((peer_id, member.id))

    def _heal(self, member: Member) -> None:
        self._cuts = {(source, target) for source, target in self._cuts if member.id not in (source, target)}

    def _command(self, member: Member) -> None:
        match self.random.randrange(5):
            case 0:
                try:
                    member.raft.promote(self.now)
                except FlowstoneError:
                    member.raft.begin_term(self.now)
            case 1:
                member.raft.resign(self.now)
            case 2:
                member.set_mode(self.random.choice(MODES), self.now)
            case 3:
                member.configure(replace(member.config, fencing=self.random.choice(list(Fencing))), self.now)
            case _:
                quorum = self.random.randint(self.majority, len(self.ids))
                member.raft.set_quorum(quorum, self.ids, self.now)
        self.act(member)

    def calm_down(self) -> None:
        self.is_calm = True
        for member in self.members.values():
            member.config = replace(member.config, mode=ElectionMode.CANDIDATE)
            if not member.is_up:
                self.start(member)
            member.raft.set_quorum(self.majority, self.ids, self.now)
            member.configure(member.config, self.now)
            self.act(member)
        self.reconnect()


def play(seed: int, size: int) -> None:
    world = World(seed, size)
    for member in world.members.values():
        member.config = replace(CONFIG, mode=world.random.choice(MODES))
        member.vclock = VClock({1: world.random.randint(1, 3)})
        world.start(member)
    world.connect()
    world.later(0.5, world.beat)
    world.later(1.0, world.disturb)
    world.run_until(CHAOS_S)
    world.calm_down()
    world.run_until(CHAOS_S + CALM_S)
    terms = {member.raft.term for member in world.members.values()}
    assert len(terms) == 1, f"members are in different terms: {sorted(terms)}"
    (term,) = terms
    leader_id = world.checker.leaders.get(term)
    assert leader_id is not None, f"term {term} has no leader"
    world.run_until(world.now + STABLE_S)
    assert {(member.raft.term, member.raft.leader) for member in world.members.values()} == {(term, leader_id)}


@pytest.mark.parametrize("size", [3, 5])
def test_random_schedules_have_one_leader_per_term_and_end_with_a_leader(size: int) -> None:
    for seed in range(SCHEDULES // 2):
        try:
            play(seed, size)
        except AssertionError as error:
            raise AssertionError(f"schedule {seed} of {size} members: {error}") from error
