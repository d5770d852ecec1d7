"""Replica sets of elections, queues and logs as text, for transcripts: decisions of one member reach the others.

A line `> …` is a command: `members 1 2 3 quorum 2` (a new set: 1 is a candidate, the others vote, all are connected),
`mode 2 candidate`, `fencing 1 off`, `quorum 1 3` (of member 1 alone), `timeout 1 10` (replication_synchro_timeout),
`sync 1 a`, `async 1 b` (transactions of its clients), `promote 2`, `demote 1` (box.ctl of 2.11), `wait 4.5` (seconds;
connected members send a heartbeat each second), `wait until 1 owns the queue`, `cut 3` (from all), `cut 1 3`, `cut 1 to
3` (messages of 1 do not reach 3), `heal`, `hold 1` (its messages to all are delayed), `hold 1 to 3`, `release`,
`release 2 to 1`, `crash 1`, `start 1`, `info`, `logs`. The reactions follow in order: rows that members log,
transactions that are committed or undone, answers to clients, elections. Journals and links take no time.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from flowstone.errors import FlowstoneError
from flowstone.iproto.errors import TarantoolError
from flowstone.replication.limbo.control_rows import RaftState
from flowstone.replication.raft.election import Config, ElectionMode, Fencing, Ready
from tests.replication.cluster_member import Link, LogRow, Member

HEARTBEAT_SECONDS = 1.0
PATIENCE_SECONDS = 60.0
UNTOLD = ("receives ", "votes for ", "becomes candidate", "follows ", "ignores a message ")
"""Left out of stories: visible in rows and states anyway."""


class Wire:
    """`target` follows `source`: log rows from the target's position on, and the latest state."""

    def __init__(self, source: Member, target: Member) -> None:
        self.source, self.target = source, target
        self.is_open = False
        self.refusal: TarantoolError | None = None
        self.inbox: deque[LogRow | RaftState] = deque()
        self._position = 0

    @property
    def source_id(self) -> int:
        return self.source.id

    def open(self) -> None:
        self.is_open = True
        self.inbox.append(self.source.raft.shown)
        self._position = 0
        self.pump()

    def close(self) -> None:
        self.is_open = False
        self.inbox.clear()

    def pump(self) -> None:
        rows = self.source.log.rows
        self.inbox += [row for row in rows[self._position :] if row.origin_id not in (0, self.target.id)]
        self._position = len(rows)

    def deliver(self) -> bool:
        """Return False if there is nothing to deliver, or it must wait."""
        if not self.inbox or (isinstance(self.inbox[0], LogRow) and self.target.limbo.is_busy):
            return False
        received = self.inbox.popleft()
        if isinstance(received, LogRow):
            self.target.receive(received, self)
        else:
            self.target.raft.message(self.source.id, received, self.target.around.now)
        self.target.act()
        return True


class Story:
    """All members, the links between them, and the time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.members: dict[int, Member] = {}
        self._wires: dict[tuple[int, int], Wire] = {}
        self._cuts: set[tuple[int, int]] = set()
        self._held: set[tuple[int, int]] = set()
        self._due: deque[Callable[[], None]] = deque()
        self._promotions: dict[int, int] = {}
        self._names: list[str] = []
        self._clients: dict[str, int] = {}
        self._told: list[str] = []

    def tell(self, line: str) -> list[str]:
        self._told = []
        command, _, rest = line.partition(" ")
        try:
            getattr(self, f"_do_{command}")(rest)
            self._settle()
        except FlowstoneError as error:
            self._told.append(f"fails: {error}")
        return self._told

    # --- commands ---

    def _do_members(self, rest: str) -> None:
        ids, quorum = rest.split(" quorum ")
        for member_id in map(int, ids.split()):
            config = Config(mode=ElectionMode.VOTER if self.members else ElectionMode.CANDIDATE)
            member = self.members[member_id] = Member(member_id, [int(word) for word in ids.split()], self, config)
            member.quorum = int(quorum)
            member.start()
        self._wires = {
            (source.id, target.id): Wire(source, target)
            for source in self.members.values()
            for target in self.members.values()
            if source is not target
        }
        self._connect()

    def _do_mode(self, rest: str) -> None:
        member_id, mode = rest.split()
        member = self.members[int(member_id)]
        member.configure(replace(member.config, mode=ElectionMode(mode)))

    def _do_fencing(self, rest: str) -> None:
        member_id, fencing = rest.split()
        member = self.members[int(member_id)]
        member.configure(replace(member.config, fencing=Fencing(fencing)))

    def _do_quorum(self, rest: str) -> None:
        member_id, quorum = map(int, rest.split())
        self.members[member_id].set_quorum(quorum)

    def _do_timeout(self, rest: str) -> None:
        member_id, timeout = rest.split()
        member = self.members[int(member_id)]
        member.timeout = float(timeout)
        member._do(member.limbo.configure(timeout=member.timeout))

    def _do_sync(self, rest: str) -> None:
        self._submit(rest, is_synchronous=True)

    def _do_async(self, rest: str) -> None:
        self._submit(rest, is_synchronous=False)

    def _submit(self, rest: str, *, is_synchronous: bool) -> None:
        member_id, name = rest.split()
        member = self.members[int(member_id)]
        if not member.is_writable:
            self._told.append(f"{member_id} answers {name}: it is read-only")
            return
        self._names.append(name)
        self._clients[name] = member.life
        member.write(name, len(self._names), is_synchronous=is_synchronous)

    def _do_promote(self, rest: str) -> None:
        member = self.members[int(rest)]
        if member.config.mode is not ElectionMode.OFF:
            member.raft.promote(self.now)
            return
        term = member.raft.begin_term(self.now)
        member.act()
        self._settle()
        member._do(member.limbo.promote(term, self.now))

    def _do_demote(self, rest: str) -> None:
        member = self.members[int(rest)]
        if member.config.mode is not ElectionMode.OFF:
            member.raft.resign(self.now)
            return
        term = member.raft.begin_term(self.now)
        member.act()
        self._settle()
        member._do(member.limbo.demote(term, self.now))

    def _do_wait(self, rest: str) -> None:
        if found := re.fullmatch(r"until (\d+) owns the queue", rest):
            limbo, start = self.members[int(found[1])].limbo, self.now
            while not limbo.is_owner or limbo.is_read_only:
                assert self.now < start + PATIENCE_SECONDS, f"condition never held: {rest}"
                self._advance(start + PATIENCE_SECONDS)
            self._told.append(f"{self.now - start:.2f} s later")
            return
        end = self.now + float(rest)
        while self.now < end:
            self._advance(end)

    def _do_cut(self, rest: str) -> None:
        if found := re.fullmatch(r"(\d+) to (\d+)", rest):
            self._cuts.add((int(found[1]), int(found[2])))
        else:
            first, *others = map(int, rest.split())
            for other in others or self.members:
                self._cuts |= {(first, other), (other, first)}
        self._connect()

    def _do_heal(self, rest: str) -> None:
        self._cuts.clear()
        self._connect()

    def _do_hold(self, rest: str) -> None:
        source, *targets = (int(word) for word in rest.split(" to "))
        self._held |= {(source, target) for target in targets or self.members}

    def _do_release(self, rest: str) -> None:
        released = {(int(source), int(target)) for source, target in re.findall(r"(\d+) to (\d+)", rest)}
        self._held -= released or set(self._held)
        self._settle()
        self._acknowledge_all(list(self._wires.values()))

    def _do_crash(self, rest: str) -> None:
        self.members[int(rest)].crash(0)
        self._connect()

    def _do_start(self, rest: str) -> None:
        member = self.members[int(rest)]
        member.start()
        # Recovered rows are not news.
        self._told = [f"recovers as {_state(member)}"]
        self._connect()

    def _do_info(self, rest: str) -> None:
        self._told += [_state(member) for member in self._up()]

    def _do_logs(self, rest: str) -> None:
        for member in self._up():
            rows = (str(row) for row in member.log.rows if row.raft is None)
            self._told.append(f"{member.id}: {', '.join(rows)}")

    # --- network and time ---

    def _up(self) -> list[Member]:
        return [member for member in self.members.values() if member.is_up]

    def _is_possible(self, wire: Wire) -> bool:
        ends_up = wire.source.is_up and wire.target.is_up
        return ends_up and (wire.source.id, wire.target.id) not in self._cuts and wire.refusal is None

    def _connect(self) -> None:
        """Update the links and notify both ends: losses first, then new connections."""
        lost = [wire for wire in self._wires.values() if wire.is_open and not self._is_possible(wire)]
        found = [wire for wire in self._wires.values() if not wire.is_open and self._is_possible(wire)]
        for wire in lost:
            wire.close()
        for wire in found:
            wire.open()
        for wire in [*lost, *found]:
            for member, peer in ((wire.source, wire.target), (wire.target, wire.source)):
                if member.is_up:
                    ways = self._wires[peer.id, member.id].is_open, self._wires[member.id, peer.id].is_open
                    member.raft.connection(peer.id, upstream=ways[0], downstream=ways[1], now=self.now)
                    member.act()
        self._settle()
        self._acknowledge_all(found)

    def _acknowledge_all(self, wires: list[Wire]) -> None:
        for wire in wires:
            self.acknowledge(wire)
        self._settle()

    def _settle(self) -> None:
        """Run until no member has anything to do. Members' own actions come before deliveries."""
        while True:
            for member in self._up():
                member.act()
            if self._due:
                self._due.popleft()()
            elif not any(wire.deliver() for wire in self._wires.values() if self._is_heard(wire)):
                return

    def _is_heard(self, wire: Wire) -> bool:
        return wire.is_open and (wire.source.id, wire.target.id) not in self._held

    def _advance(self, end: float) -> None:
        """Advance to the next moment at which an action is due."""
        beat = (int(self.now / HEARTBEAT_SECONDS + 1e-9) + 1) * HEARTBEAT_SECONDS
        self.now = min(beat, end, *(max(self.now, member.deadline) for member in self._up()))
        if self.now == beat:
            for wire in self._wires.values():
                if self._is_heard(wire):
                    wire.target.raft.heartbeat(wire.source.id, self.now)
        for member in self._up():
            member.tick()
        self._settle()

    def acknowledge(self, wire: Wire) -> None:
        """Acknowledge the target's position to the source, on the link in the opposite direction."""
        source, target = wire.source, wire.target
        if wire.is_open and (target.id, source.id) not in self._cuts | self._held:
            source.hear_ack(target.id, target.vclock.vclock(), target.raft.term)
            source.act()

    # --- requests of members (Around) ---

    def later(self, delay: float, action: Callable[[], None]) -> None:
        assert not delay, "nothing takes time here"
        self._due.append(action)

    def journal_delay(self, member: Member) -> float:
        return 0.0

    def random(self) -> float:
        return 0.0

    def say(self, member: Member, what: str) -> None:
        if not what.startswith(UNTOLD):
            self._told.append(f"{member.id} {what.replace('has written', 'logs')}")

    def logged(self, member: Member, *, is_acknowledged: bool) -> None:
        for wire in self._wires.values():
            if wire.source is member and wire.is_open:
                wire.pump()
            if wire.target is member and is_acknowledged:
                self.acknowledge(wire)

    def show(self, member: Member, state: RaftState) -> None:
        for wire in self._wires.values():
            if wire.source is member and wire.is_open:
                wire.inbox.append(state)

    def wrote(self, member: Member, row: LogRow) -> None:
        """Do nothing: stories need no notice of writes."""

    def refuse(self, member: Member, link: Link, row: LogRow, error: TarantoolError) -> None:
        self._told.append(f"{member.id} stops following {link.source_id} at {row}: {error.message}")
        self._told += [f"  {part}" for part in (error.hint or "").split("; ")[:2]]
        self._wires[link.source_id, member.id].refusal = error
        self._due.append(self._connect)

    def looked_at(self, member: Member, ready: Ready) -> None:
        """Do nothing: models check this, stories only report."""

    def decided(self, member: Member, name: str, term: int, *, kept: bool) -> None:
        """A transaction that is void before it was executed here appears as a NOP in the log."""
        if kept or any(row.name == name for row in member.log.rows):
            self._told.append(f"{member.id} {'commits' if kept else 'undoes'} {name}")

    def answered(self, member: Member, name: str, error: TarantoolError | None) -> None:
        """Ignore answers to clients of a dead process."""
        if self._clients[name] == member.life:
            self._told.append(f"{member.id} answers {name}: {'done' if error is None else error.message}")


def _state(member: Member) -> str:
    raft, limbo = member.raft, member.limbo
    leader = {0: "no leader", member.id: "leads"}.get(raft.leader, f"follows {raft.leader}")
    owner = {0: "nobody owns the queue", member.id: "owns the queue"}.get(
        limbo.owner_id, f"{limbo.owner_id} owns the queue"
    )
    parts = [f"{member.id}: term {raft.term}, {leader}", f"{owner} since term {limbo.term}"]
    if limbo.pending:
        parts.append("waiting " + " ".join(entry.transaction.name for entry in limbo.pending))
    parts.append("has " + (" ".join(name for name in member.data.values() if name) or "nothing"))
    if not member.is_writable:
        parts.append("read-only")
    return "; ".join(parts)


def replay(text: str) -> str:
    """Return the story with the members' current reactions under every line that starts with `> `."""
    story, lines = Story(), list[str]()
    for line in text.splitlines():
        if line.startswith("  "):
            continue
        lines.append(line)
        if line.startswith("> members "):
            story = Story()
        if line.startswith("> "):
            lines += [f"  {answer}" for answer in story.tell(line[2:])]
    return "\n".join(lines) + "\n"
