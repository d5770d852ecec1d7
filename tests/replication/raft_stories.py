"""Elections as text, for transcripts.

A line `> …` is a command: `members 1 2 3 quorum 2` (all candidates, connected, 10 rows each), `mode 2 voter`, `fencing
1 strict`, `quorum 3 of 1 2 3 4`, `wait 4.5` (seconds; connected members send a heartbeat each second), `wait until 1
leads`, `cut 3` (from all), `cut 1 3`, `cut 1 to 3` (messages of 1 do not reach 3), `heal`, `crash 1`, `start 1`,
`promote 1`, `begin 1` (a term), `resign 1`, `at 1 {1: 10}` (its vclock), `ack 2 to 1 term 7`, `hold 1` (its disk),
`disk 1 once`, `disk 1` (go on), `info`. The reactions of members follow: the notes of the machine, then its writes,
broadcasts and requests.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from flowstone.errors import FlowstoneError
from flowstone.replication.limbo.control_rows import RaftState
from flowstone.replication.raft.election import ElectionMode, ElectionState, Fencing, Ready
from flowstone.replication.vclock import VClock
from tests.replication.raft_cluster import Checker, Member

HEARTBEAT = 1.0


class Story:
    """All members, the links between them, and the time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.members: dict[int, Member] = {}
        self.checker = Checker()
        self._quorum = 1
        self._registered: list[int] = []
        self._cuts: set[tuple[int, int]] = set()
        self._held: set[int] = set()
        self._sent: deque[tuple[int, int, RaftState]] = deque()
        self._promotions: dict[int, int] = {}
        self._leading: set[int] = set()
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
        self._quorum = int(quorum)
        self._registered = [int(word) for word in ids.split()]
        for member_id in self._registered:
            member = self.members[member_id] = Member(member_id, _constant(member_id / 10), self.checker)
            member.vclock = VClock({1: 10})
            member.config = replace(member.config, mode=ElectionMode.CANDIDATE)
            member.start(self.now, self._quorum, self._registered)
        self._connect()

    def _do_mode(self, rest: str) -> None:
        member_id, mode = rest.split()
        self.members[int(member_id)].set_mode(ElectionMode(mode), self.now)

    def _do_fencing(self, rest: str) -> None:
        member_id, fencing = rest.split()
        member = self.members[int(member_id)]
        member.configure(replace(member.config, fencing=Fencing(fencing)), self.now)
        self._told.append(f"{member_id} takes peers for gone after {member.raft.disconnect_timeout:g} s")

    def _do_quorum(self, rest: str) -> None:
        quorum, ids = rest.split(" of ")
        self._quorum, self._registered = int(quorum), [int(word) for word in ids.split()]
        for member in self._up():
            member.raft.set_quorum(self._quorum, self._registered, self.now)

    def _do_wait(self, rest: str) -> None:
        if found := re.fullmatch(r"until (\d+) leads", rest):
            leader, start = self.members[int(found[1])], self.now
            while leader.raft.state is not ElectionState.LEADER:
                assert self.now < start + 60.0, f"condition never held: {rest}"
                self._advance(start + 60.0)
            self._told.append(f"{self.now - start:.2f} s later")
            return
        end = self.now + float(rest)
        while self.now < end:
            self._advance(end)

    def _do_cut(self, rest: str) -> None:
        if found := re.fullmatch(r"(\d+) to (\d+)", rest):
            self._cuts.add((int(found[1]), int(found[2])))
        else:
            first, *others = (int(word) for word in rest.split())
            for other in others or self.members:
                self._cuts |= {(first, other), (other, first)}
        self._connect()

    def _do_heal(self, rest: str) -> None:
        self._cuts.clear()
        self._connect()

    def _do_crash(self, rest: str) -> None:
        self.members[int(rest)].crash()
        self._connect()

    def _do_start(self, rest: str) -> None:
        self.members[int(rest)].start(self.now, self._quorum, self._registered)
        self._connect()

    def _do_promote(self, rest: str) -> None:
        self._promotions[int(rest)] = self.members[int(rest)].raft.promote(self.now)

    def _do_begin(self, rest: str) -> None:
        self.members[int(rest)].raft.begin_term(self.now)

    def _do_resign(self, rest: str) -> None:
        self.members[int(rest)].raft.resign(self.now)

    def _do_at(self, rest: str) -> None:
        member_id, _, vclock = rest.partition(" ")
        self.members[int(member_id)].vclock = VClock.parse(vclock)

    def _do_ack(self, rest: str) -> None:
        source, target, term = (int(word) for word in re.findall(r"\d+", rest))
        self.members[target].raft.heard_term(source, term, self.now)

    def _do_hold(self, rest: str) -> None:
        self._held.add(int(rest))

    def _do_disk(self, rest: str) -> None:
        member_id = int(rest.split()[0])
        if "once" in rest:
            self.members[member_id].write_ends(self.now)
        else:
            self._held.discard(member_id)

    def _do_info(self, rest: str) -> None:
        for member in self._up():
            info = member.raft.info(self.now)
            idle = "" if info.leader_idle is None else f", leader_idle {info.leader_idle:.2f}"
            self._told.append(
                f"{member.id}: {info.state}, term {info.term}, vote {info.vote}, leader {info.leader}{idle}"
                f"{', read-only' if member.raft.is_read_only else ''}"
            )

    # --- network and time ---

    def _up(self) -> list[Member]:
        return [member for member in self.members.values() if member.is_up]

    def _is_open(self, source: int, target: int) -> bool:
        return (source, target) not in self._cuts and self.members[source].is_up and self.members[target].is_up

    def _connect(self) -> None:
        """Tell every member its connections; a new one shows the other's state."""
        for member in self._up():
            for peer_id in self.members:
                if peer_id == member.id:
                    continue
                upstream, downstream = self._is_open(peer_id, member.id), self._is_open(member.id, peer_id)
                was_up = peer_id in member.raft.peers._upstreams
                member.raft.connection(peer_id, upstream=upstream, downstream=downstream, now=self.now)
                if upstream and not was_up:
                    self._sent.append((peer_id, member.id, self.members[peer_id].raft.shown))
        self._settle()

    def _settle(self) -> None:
        """Run until no member has anything to do."""
        while True:
            for member in self._up():
                for ready in member.drain():
                    self._act(member, ready)
            written = next((member for member in self._up() if member.writing and member.id not in self._held), None)
            if written is not None:
                written.write_ends(self.now)
            elif self._sent:
                source, target, told = self._sent.popleft()
                if self._is_open(source, target):
                    self.members[target].raft.message(source, told, self.now)
            else:
                return self._look_at_promotions()

    def _act(self, member: Member, ready: Ready) -> None:
        self._told += [f"{member.id} {note}" for note in ready.notes]
        if ready.broadcast is not None:
            self._told.append(f"{member.id} shows {told_in_words(ready.broadcast)}")
            self._sent += [(member.id, peer_id, ready.broadcast) for peer_id in self.members if peer_id != member.id]
        if ready.write is not None:
            self._told.append(f"{member.id} writes {told_in_words(ready.write)}")
        if ready.fence and member.id in self._leading:
            self._told.append(f"{member.id} fences its queue")
        self._leading.discard(member.id)
        if member.raft.state is ElectionState.LEADER:
            self._leading.add(member.id)
        if ready.promote_term:
            self._told.append(f"{member.id} is to write PROMOTE of term {ready.promote_term}")

    def _look_at_promotions(self) -> None:
        for member_id, term in list(self._promotions.items()):
            try:
                if not self.members[member_id].raft.promoted(term):
                    continue
                self._told.append(f"the promotion of {member_id} is done")
            except FlowstoneError as error:
                self._told.append(f"the promotion of {member_id} fails: {error}")
            del self._promotions[member_id]

    def _advance(self, end: float) -> None:
        """Advance to the next moment at which an action is due."""
        beat = (int(self.now / HEARTBEAT + 1e-9) + 1) * HEARTBEAT
        deadlines = [member.raft.deadline for member in self._up() if member.raft.deadline is not None]
        self.now = min(beat, end, *deadlines)
        if self.now == beat:
            for source in self._up():
                for target in self._up():
                    if source is not target and self._is_open(source.id, target.id):
                        target.raft.heartbeat(source.id, self.now)
        for member in self._up():
            member.raft.tick(self.now)
        self._settle()


def told_in_words(state: RaftState) -> str:
    words = [f"term {state.term}"]
    if state.vote:
        words.append(f"vote {state.vote}")
    if state.state:
        words.append(ElectionState(state.state).name.lower())
    if state.leader_id:
        words.append(f"led by {state.leader_id}")
    if state.is_leader_seen:
        words.append("which it hears")
    if state.vclock is not None:
        words.append(str(state.vclock))
    return " ".join(words)


def _constant(number: float) -> Callable[[], float]:
    return lambda: number
