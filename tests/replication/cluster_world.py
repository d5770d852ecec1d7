"""Members on a network with faults, in virtual time, from a seed.

Every member follows every other: a connection carries rows in the sender's log order, from the follower's initial
position on, RAFT rows of which only the latest counts, and heartbeats; ACKs go back. Data in flight is lost with the
connection. There is no order between connections. The faults and their frequency are defined here, too.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter

from flowstone.errors import FlowstoneError
from flowstone.iproto.errors import TarantoolError
from flowstone.replication.limbo.control_rows import Demote, Promote, RaftState
from flowstone.replication.raft.election import Config, ElectionMode, Fencing, Ready
from flowstone.replication.vclock import VClock
from tests.replication.cluster_checker import ClusterChecker
from tests.replication.cluster_member import Disk, Link, LogRow, Member

HEARTBEAT_S = 0.25
CONFIG = Config(election_timeout=0.5, death_timeout=0.6)
MODES = (ElectionMode.CANDIDATE,) * 4 + (ElectionMode.MANUAL, ElectionMode.VOTER)
SYNCHRO_TIMEOUT_S = 0.6
WRITE_S = 0.06
KEYS = 3
BATCH = 4


_deadline = attrgetter("deadline")


class Connection:
    """A connection on which `target` follows `source`."""

    def __init__(self, world: World, source: Member, target: Member) -> None:
        self.world = world
        self.source, self.target = source, target
        self.is_open = False
        self.refused: TarantoolError | None = None
        self.number = 0
        self._reset()

    def _reset(self) -> None:
        self.inbox: deque[LogRow | RaftState | None] = deque()
        self._position = 0
        self._start = VClock()
        self._sent_term = 0
        self._latest: RaftState | None = None
        self._said = VClock(), 0
        self._is_raft_due = self._is_ack_due = self._is_pump_due = False
        self.pause_s = 0.15 if self.world.chance(0.3) else 0.0
        self._arrives_at = self._ack_arrives_at = 0.0

    @property
    def source_id(self) -> int:
        return self.source.id

    def open(self) -> None:
        self._reset()
        self.number += 1
        self.is_open = True
        self._start = self.target.vclock.vclock()
        self.show(self.source.raft.shown)
        self.pump()

    def close(self) -> None:
        self.number += 1
        self.is_open = False
        self._reset()

    # --- from source to target ---

    def show(self, state: RaftState) -> None:
        """Send a state late; if there is a newer one by then, send that."""
        self._latest = state
        if not self._is_raft_due:
            self._is_raft_due = True
            self._later(self.world.lag() / 2, self._send_raft)

    def _send_raft(self) -> None:
        assert self._latest is not None
        self._is_raft_due = False
        self._sent_term = self._latest.term
        self._send([self._latest] * (2 if self.world.chance(0.1) else 1))
        self.pump()

    def beat(self) -> None:
        if self.is_open and not self.world.chance(0.05):
            self._send([None])
            self.acknowledge()

    def pump(self) -> None:
        """Act as the relay: send rows that the target lacked, a few together, none before its term was shown.

        A slow one delays rows, but not RAFT states.
        """
        if self._is_pump_due:
            return
        rows = self.source.log.rows
        batch: list[LogRow | RaftState | None] = []
        while self._position < len(rows) and len(batch) < BATCH:
            row = rows[self._position]
            if isinstance(row.body, Promote | Demote) and row.body.term > self._sent_term:
                break
            self._position += 1
            if row.origin_id not in (0, self.target.id) and row.lsn > self._start.get(row.origin_id):
                batch.append(row)
        if batch:
            self._send(batch)
            self._is_pump_due = True
            self._later(self.world.pause(self.pause_s), self._pump_again)

    def _pump_again(self) -> None:
        self._is_pump_due = False
        self.pump()

    def _send(self, messages: list[LogRow | RaftState | None]) -> None:
        self._arrives_at = max(self._arrives_at, self.world.now + self.world.lag())
        self._later(self._arrives_at - self.world.now, lambda: self._arrive(messages))

    def _arrive(self, messages: list[LogRow | RaftState | None]) -> None:
        self.inbox.extend(messages)
        self.world.apply(self.target)

    # --- from target to source ---

    def acknowledge(self) -> None:
        """Acknowledge the target's position, unless it was just acknowledged."""
        said = self.target.vclock.vclock(), self.target.raft.term
        if self.is_open and not self._is_ack_due and said != self._said:
            self._is_ack_due = True
            self._later(self.world.lag() / 2, self._send_ack)

    def _send_ack(self) -> None:
        self._is_ack_due = False
        vclock, term = self._said = self.target.vclock.vclock(), self.target.raft.term
        self._ack_arrives_at = max(self._ack_arrives_at, self.world.now + self.world.lag() / 2)
        self._later(self._ack_arrives_at - self.world.now, lambda: self._ack_arrives(vclock, term))

    def _ack_arrives(self, vclock: VClock, term: int) -> None:
        self.source.hear_ack(self.target.id, vclock.without_zero(), term)
        self.world.stepped(self.source)

    def _later(self, delay: float, action: Callable[[], None]) -> None:
        number = self.number
        self.world.later(delay, lambda: action() if number == self.number else None)


class World:
    """`flavour` bits: 1, asynchronous transactions may bypass the queue; 2, synchronous ones may time out."""

    def __init__(self, seed: int, size: int, *, is_told: bool = False) -> None:
        self.rng = random.Random(seed * 8 + size)
        self.now = 0.0
        self.is_calm = False
        self.has_clients = True
        self.story: deque[str] | None = deque(maxlen=300) if is_told else None
        self.has_asynchronous, self.has_timeouts = bool(seed & 1), bool(seed & 2)
        self.ids = list(range(1, size + 1))
        self.majority = size // 2 + 1
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._cuts: set[tuple[int, int]] = set()
        self._slow: set[Member] = set()
        self.members = {each: Member(each, self.ids, self, CONFIG) for each in self.ids}
        self.checker = ClusterChecker(self.members)
        self.connections = {
            (source, target): Connection(self, self.members[source], self.members[target])
            for source, target in itertools.permutations(self.ids, 2)
        }
        self._disturbances = (self._kill, self._cut, self._heal, self._slow_down, self._promote, self._command)
        links = self.connections.values()
        self._outgoing = {each: [link for link in links if link.source.id == each] for each in self.ids}
        self._incoming = {each: [link for link in links if link.target.id == each] for each in self.ids}
        for member in self.members.values():
            member.config = replace(CONFIG, mode=self.rng.choice(MODES))
            member.timeout = SYNCHRO_TIMEOUT_S if self.has_timeouts else 1000.0
            self.start(member)
        self.connect()
        self.later(0.5, self.beat)
        self.later(1.0, self.write)
        self.later(1.0, self.disturb)

    # --- time and randomness ---

    def later(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self.now + delay, next(self._numbers), action))

    def run_until(self, end: float) -> None:
        while True:
            member = min(self.members.values(), key=_deadline)
            due = member.deadline
            if self._agenda[0][0] <= due:
                if self._agenda[0][0] > end:
                    return
                self.now, _, action = heapq.heappop(self._agenda)
                action()
            elif due > end:
                return
            else:
                self.now = max(self.now, due)
                member.tick()
                self.stepped(member)

    def random(self) -> float:
        return self.rng.random()

    def chance(self, probability: float) -> bool:
        return not self.is_calm and self.rng.random() < probability

    def lag(self) -> float:
        if self.is_calm:
            return 0.004
        return self.rng.expovariate(4 if self.rng.random() < 0.05 else 50)

    def journal_delay(self, member: Member) -> float:
        if self.is_calm:
            return 0.001
        return self.rng.expovariate(12 if member in self._slow else 200)

    def pause(self, mean_s: float) -> float:
        return self.rng.expovariate(1 / mean_s) if mean_s and not self.is_calm else 0.001

    # --- requests of members ---

    def say(self, member: Member, what: str) -> None:
        if self.story is not None:
            self.story.append(f"{self.now:7.3f} {member.id}: {what}")

    def logged(self, member: Member, *, is_acknowledged: bool) -> None:
        for connection in self._outgoing[member.id]:
            if connection.is_open:
                connection.pump()
        for connection in self._incoming[member.id] if is_acknowledged else ():
            connection.acknowledge()
        self.stepped(member)

    def show(self, member: Member, state: RaftState) -> None:
        for connection in self._outgoing[member.id]:
            if connection.is_open:
                connection.show(state)

    def wrote(self, member: Member, row: LogRow) -> None:
        self.checker.written(member, row)

    def refuse(self, member: Member, link: Link, row: LogRow, error: TarantoolError) -> None:
        self.say(member, f"refuses {row} of {link.source_id}: {error}")
        self.checker.refused(member, self.members[link.source_id], row, error)
        connection = self.connections[link.source_id, member.id]
        connection.refused = error
        self.later(0.0, self.connect)

    def looked_at(self, member: Member, ready: Ready) -> None:
        self.checker.look(member, ready)
        if ready.promote_term:
            self._haunt(member)

    def decided(self, member: Member, name: str, term: int, *, kept: bool) -> None:
        self.say(member, f"{'keeps' if kept else 'drops'} {name}")
        self.checker.decided(member, name, term, kept=kept)

    def answered(self, member: Member, name: str, error: TarantoolError | None) -> None:
        self.say(member, f"answers {name}: {'done' if error is None else error.message}")
        self.checker.answered(member, name, error)

    def stepped(self, member: Member) -> None:
        if member.is_up:
            member.end_checkpoint()
            self.apply(member)

    def apply(self, member: Member) -> None:
        """Apply received rows, unless the limbo is busy."""
        for connection in self._incoming[member.id]:
            while connection.inbox and connection.refused is None:
                message = connection.inbox[0]
                if isinstance(message, LogRow) and not member.has(message) and member.limbo.is_busy:
                    break
                connection.inbox.popleft()
                if isinstance(message, LogRow):
                    member.receive(message, connection)
                elif message is None:
                    member.raft.heartbeat(connection.source_id, self.now)
                else:
                    member.raft.message(connection.source_id, message, self.now)
                member.act()

    # --- faults ---

    def beat(self) -> None:
        for connection in self.connections.values():
            connection.beat()
        self.later(HEARTBEAT_S, self.beat)

    def start(self, member: Member) -> None:
        member.start()
        self.say(member, f"has started at {member.vclock.vclock()} in term {member.raft.term}")

    def connect(self) -> None:
        """Open and close connections according to machines and links."""
        for (source, target), connection in self.connections.items():
            is_open = (
                (source, target) not in self._cuts
                and self.members[source].is_up
                and self.members[target].is_up
                and connection.refused is None
            )
            if connection.is_open and not is_open:
                connection.close()
            elif is_open and not connection.is_open:
                connection.open()
        for member, peer_id in itertools.product(self.members.values(), self.ids):
            if member.is_up and peer_id != member.id:
                upstream, downstream = self.connections[peer_id, member.id], self.connections[member.id, peer_id]
                member.raft.connection(peer_id, upstream=upstream.is_open, downstream=downstream.is_open, now=self.now)
                member.act()

    def write(self) -> None:
        """Let clients write to any member that accepts writes."""
        for member in self.members.values() if self.has_clients else ():
            is_synchronous = self.rng.random() < 0.7
            if not member.is_writable or not (is_synchronous or self.has_asynchronous or member.limbo.pending):
                continue
            name = f"{'sync' if is_synchronous else 'async'}-{next(self._numbers)}"
            if is_synchronous:
                self.checker.synchronous.add(name)
            self.say(member, f"is asked for {name}")
            member.write(name, self.rng.randrange(KEYS), is_synchronous=is_synchronous)
            self.stepped(member)
        self.later(0.3 if self.is_calm else self.rng.expovariate(1 / WRITE_S), self.write)

    def disturb(self) -> None:
        if self.is_calm:
            return
        down = [member for member in self.members.values() if not member.is_up]
        if down and self.rng.random() < 0.6:
            self.start(self.rng.choice(down))
        else:
            self._disturb(self.members[self.rng.choice(self.ids)], self.rng.choice(self._disturbances))
        self.connect()
        self.later(self.rng.expovariate(5), self.disturb)

    def _disturb(self, member: Member, disturbance: Callable[[Member], None]) -> None:
        if member.is_up and not self.is_calm:
            disturbance(member)
            self.connect()

    def _haunt(self, leader: Member) -> None:
        """Hit a new leader while it takes over, more often than by chance."""
        if self.chance(0.4):
            disturbance = self.rng.choice((self._kill, self._cut, self._cut))
            self.later(self.rng.expovariate(40), lambda: self._disturb(leader, disturbance))

    def _kill(self, member: Member) -> None:
        everybody = self.rng.random() < 0.15
        for victim in self.members.values() if everybody else (member,):
            self.say(victim, "is killed")
            victim.crash(self.rng.randint(0, len(victim.journal)))
        self.connect()
        for victim in self.members.values() if everybody else ():
            self.start(victim)

    def _cut(self, member: Member) -> None:
        """Cut one link, one direction of one, or all of a member's."""
        others = self.ids if self.rng.random() < 0.4 else [self.rng.choice(self.ids)]
        cuts = {(member.id, other) for other in others}
        if self.rng.random() < 0.8:
            cuts |= {(other, member.id) for other in others}
        self.say(member, f"is cut off from {others}")
        self._cuts |= cuts

    def _heal(self, member: Member) -> None:
        self._cuts = {cut for cut in self._cuts if member.id not in cut} if self.rng.random() < 0.7 else set()

    def _slow_down(self, member: Member) -> None:
        """Slow down one disk until another is slow, and delay rows to another member."""
        self._slow = {member}
        for connection in self._incoming[self.rng.choice(self.ids)]:
            connection.pause_s = 0.4

    def _promote(self, member: Member) -> None:
        """Promote any member, or the one with the fewest rows."""
        if self.rng.random() < 0.5:
            running = [each for each in self.members.values() if each.is_up]
            member = min(running, key=lambda each: each.vclock.vclock().without_zero().signature)
        try:
            member.raft.promote(self.now)
        except FlowstoneError as error:
            self.say(member, f"cannot be promoted: {error}")
        member.act()
        self.stepped(member)

    def _command(self, member: Member) -> None:
        match self.rng.randrange(6):
            case 0 | 1:
                member.raft.resign(self.now)
            case 2:
                member.configure(replace(member.config, mode=self.rng.choice(MODES)))
            case 3:
                member.configure(replace(member.config, fencing=self.rng.choice(list(Fencing))))
            case 4:
                member.start_checkpoint()
            case 5:
                # Any two majorities have a member in common; other quorums are not safe.
                member.set_quorum(self.rng.randint(self.majority, len(self.ids)))
            case _:
                member.set_quorum(self.rng.choice(("N / 2 + 1", "N", "math.max(N / 2 + 1, N - 1)")))
        member.act()
        self.stepped(member)

    # --- the end ---

    def calm_down(self) -> None:
        """Repair everything, and slow the clients down."""
        self.is_calm = True
        self._cuts.clear()
        for member in self.members.values():
            if not member.is_up:
                self.start(member)
            member.set_quorum("N / 2 + 1")
            member.configure(replace(member.config, mode=ElectionMode.CANDIDATE))
        for connection in self.connections.values():
            if connection.is_open:
                connection.close()
        self.connect()

    def follows(self) -> dict[tuple[int, int], bool]:
        return {(target, source): each.refused is None for (source, target), each in self.connections.items()}

    def rebootstrap(self, donor: Member) -> list[int]:
        """Do what ER_SPLIT_BRAIN tells the operator: members with another history than the donor's are rebuilt from
        it."""
        follows = self.follows()
        outcasts = [each for each in self.ids if each != donor.id]
        outcasts = [each for each in outcasts if not (follows[donor.id, each] and follows[each, donor.id])]
        for member_id in outcasts:
            member = self.members[member_id]
            self.say(member, f"is made anew from {donor.id}")
            raft = LogRow(0, 1, raft=member.disk)
            member.crash(0)
            member.log = Disk([raft, *(row for row in donor.log.rows if row.origin_id)])
            member.fates = dict(donor.fates)
            for (source, target), connection in self.connections.items():
                if member_id in (source, target):
                    connection.refused = None
        if outcasts:
            self.checker.made_anew(donor)
        self.connect()
        for member_id in outcasts:
            self.start(self.members[member_id])
        self.connect()
        return outcasts
