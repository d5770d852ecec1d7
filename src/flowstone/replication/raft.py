"""Elections: who may lead in which term, as Tarantool 2.11 decides it with its Raft.

`Raft` is one member's part as a pure machine: events in (what peers say, time, what is on disk), and `ready()` says
what to write, show and do. It rests on three things that its owner does: rows of term and vote reach the disk in
order and synced, `written` is called only then, and the vclock it is handed counts every row logged before them.
It sends nothing, reads no clock and draws no numbers; it knows nothing of the queue that a new leader takes over
(PROMOTE), only when that is due.

Where 2.11.9 can elect two leaders in a term or none at all we differ, each time said at the place. Servers 3.8 differ
in: mode off (votes, has an election quorum of 1, and is promoted by an election), a promotion that gives up after
`election_timeout`, and switching fencing off, which no longer lets a fenced queue go on (nor does it here).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from flowstone.errors import LocalProtocolError
from flowstone.iproto import errors
from flowstone.replication.election import Config, ElectionInfo, Fencing, Mode, Peers, Ready, State, Votes, Wait, check
from flowstone.replication.synchro import RaftState
from flowstone.replication.vclock import Order, VClock

MAX_SHIFT: Final = 0.1
"""The election timeout is longer by a random part of itself, at most this."""


class Raft:
    """One member. After any event, `ready()` until it is falsy, and `tick` when `deadline` has come.

    `now` is monotonic, in seconds, and never goes back; `random` gives numbers from 0 up to 1. `term` and `vote` are
    what the log and the snapshot say. An anonymous instance has the id 0 and only follows terms.
    """

    def __init__(
        self,
        instance_id: int,
        *,
        vclock: Callable[[], VClock],
        random: Callable[[], float],
        now: float,
        term: int = 1,
        vote: int = 0,
    ) -> None:
        self._id = instance_id
        self._vclock = vclock
        self._random = random
        self._now = now
        self._config = Config()
        # On disk, and so fit to be shown; decisions are made by the volatile ones, which may be ahead.
        self._term = self._volatile_term = term
        self._vote = self._volatile_vote = vote
        self._state = State.FOLLOWER
        self._leader = 0
        self._leader_last_seen = now
        self._votes = Votes()
        if vote:
            self._votes.add(instance_id, vote)
        self._witnesses: set[int] = set()
        """Who hears the leader of this term, ourselves among them."""
        self._candidate_vclock: VClock | None = None
        self._is_cfg_candidate = False
        """May start elections. `_is_candidate` takes part in this term's, maybe only because it was promoted."""
        self._is_candidate = False
        self._is_writing = False
        """Something is not on disk: the machine is a follower without a timer until it is."""
        self._in_flight: RaftState | None = None
        self._deadline: float | None = None
        self._wait: Wait | None = None
        self._peers = Peers(instance_id)
        self._is_fencing_paused = False
        self._was_written = self._has_news = self._is_changed = self._must_fence = False
        self._promote_term = 0
        self._notes: list[str] = []

    # --- What it knows ------------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        return self._state

    @property
    def leader(self) -> int:
        """The leader of this term, 0 where there is none or nobody said so."""
        return self._leader

    @property
    def term(self) -> int:
        """The term on disk: the one for ACKs."""
        return self._term

    @property
    def volatile_term(self) -> int:
        """The newest term heard of. While the queue's term is below it, nobody's queue may be decided upon."""
        return self._volatile_term

    @property
    def is_read_only(self) -> bool:
        return self._is_enabled and self._state is not State.LEADER

    @property
    def deadline(self) -> float | None:
        """When `tick` is due."""
        return self._deadline

    @property
    def peers(self) -> Peers:
        """The members as it counts them; not to be changed by others."""
        return self._peers

    @property
    def disconnect_timeout(self) -> float:
        """When a silent peer counts as gone: with strict fencing a leader resigns before others elect another."""
        is_strict = self._state is State.LEADER and self._config.fencing is Fencing.STRICT
        return self._config.death_timeout / 2 if is_strict else self._config.death_timeout

    @property
    def persisted(self) -> RaftState:
        """What a snapshot keeps."""
        return RaftState(term=self._term, vote=self._vote)

    @property
    def shown(self) -> RaftState:
        """What a new replica is told right after it subscribed: nothing of a term that is not on disk."""
        is_current = self._term == self._volatile_term
        return RaftState(
            term=self._term,
            vote=self._vote,
            state=self._state,
            vclock=self._vclock().without_zero() if self._state is State.CANDIDATE else None,
            leader_id=self._leader if is_current else 0,
            # As 3.8: a member of 2.11 with elections off has no timer and reports a dead leader for ever.
            is_leader_seen=is_current and self._is_enabled and self._is_leader_seen,
        )

    def info(self, now: float) -> ElectionInfo:
        idle = 0.0 if self._state is State.LEADER else now - self._leader_last_seen
        return ElectionInfo(
            state=self._state.name.lower(),
            term=self._volatile_term,
            vote=self._volatile_vote,
            leader=self._leader,
            leader_idle=idle if self._is_enabled else None,
        )

    def promoted(self, term: int) -> bool:
        """How the promotion that `promote` began in `term` went: False while it is open, an error where it failed."""
        if self._state is State.LEADER:
            return True
        if term == self._volatile_term and self._is_candidate and not self._leader:
            return False
        if self._leader:
            raise errors.InterferingPromote(f"Instance with replica id {self._leader} was promoted first")
        if not self._peers.has_healthy_quorum:
            counts = f"{self._peers.healthy_count} out of minimal required {self._peers.quorum}"
            raise errors.NoElectionQuorum(f"Not enough peers connected to start elections: {counts}")
        if term < self._volatile_term:
            raise errors.OldTerm(f"The term is outdated: old - {term}, new - {self._volatile_term}")
        if self._config.mode is Mode.MANUAL:
            raise errors.Timeout("timed out")
        raise errors.ElectionDisabled("Elections were turned off")

    @property
    def _is_enabled(self) -> bool:
        return self._config.mode is not Mode.OFF

    @property
    def _is_leader_seen(self) -> bool:
        return self._id in self._witnesses

    # --- What happens to it -------------------------------------------------------------------------------------------

    def message(self, source_id: int, told: RaftState, now: float) -> None:
        """A RAFT row of the member `source_id`: its whole state, and a sign of life."""
        check(self._id, source_id, told)
        self.heartbeat(source_id, now)
        if told.term < self._volatile_term:
            self._note(f"{source_id} is still in term {told.term}: ignored")
            return
        if told.term > self._volatile_term:
            self._new_term(told.term, f"heard from {source_id}")
        self._report(source_id, told.is_leader_seen)
        # The report may have begun the next term, in which the rest of the message counts for nothing. 2.11.9 goes on
        # and takes an old vote for a new one: enough for two leaders in a term.
        if told.term < self._volatile_term:
            return
        if told.vote:
            self._heard_vote(source_id, told)
        if told.state == State.LEADER:
            self._heard_leader(source_id)
        elif source_id == self._leader:
            self._leader_resigned()

    def heard_term(self, source_id: int, term: int, now: float) -> None:
        """A term that came without a state: in an ACK."""
        self._now = now
        if term > self._volatile_term:
            self._new_term(term, f"heard from {source_id}")

    def heartbeat(self, source_id: int, now: float) -> None:
        """A row with LSN 0 of `source_id`; from a member before 2.11, any row."""
        self._now = now
        if not self._is_enabled or self._state is State.LEADER or not source_id or source_id != self._leader:
            return
        self._see_leader()
        if not self._is_writing:
            self._wait_for(Wait.LEADER_DEATH)

    def connection(self, peer_id: int, *, upstream: bool, downstream: bool, now: float) -> None:
        """How `peer_id` is connected: we follow it (`upstream`), it follows us (`downstream`)."""
        self._now = now
        before = self._peers.healthy_count
        is_lost = self._peers.connect(peer_id, upstream=upstream, downstream=downstream)
        # Health first: a report that goes must not start an election that there are too few peers for.
        if self._peers.healthy_count != before:
            self._health_changed()
        # 2.11.9 keeps the report if the other direction was lost before, and nobody stands for election any more.
        if is_lost:
            self._report(peer_id, False)

    def tick(self, now: float) -> None:
        """Time has passed; without effect before `deadline`."""
        self._now = now
        if self._deadline is None or now < self._deadline:
            return
        assert self._wait is not None
        assert not self._is_writing, "no timer runs while something is being written"
        self._note(f"has waited for {self._wait.value}")
        self._stop_timer()
        self._witnesses.discard(self._id)
        self._restore()
        self._show()
        self._stand_unless_leader_is_seen()

    def written(self, term: int, vote: int, now: float) -> None:
        """The `write` that `ready` gave is on disk, and with it all that was logged before."""
        self._now = now
        if self._in_flight is None or (self._in_flight.term, self._in_flight.vote) != (term, vote):
            raise LocalProtocolError(f"term {term} and vote {vote} were not asked to be written")
        self._in_flight = None
        self._term, self._vote = term, vote
        self._was_written = True
        self._show()
        if self._is_on_disk or self._is_vote_revoked():
            self._go_on()

    def promote(self, now: float) -> int:
        """`box.ctl.promote()`: the term in which it stands for election; see `promoted`."""
        self._now = now
        if not self._is_enabled:
            raise LocalProtocolError("elections are off", hint="begin a term and write PROMOTE in it")
        if self._config.mode is Mode.VOTER:
            raise errors.Unsupported("election_mode='voter' does not support manual elections")
        if self._state is not State.LEADER:
            self._new_term(self._volatile_term + 1, "promoted")
            self._start_candidate()
            self._vote_for(self._id, self._vclock())
        return self._volatile_term

    def begin_term(self, now: float) -> int:
        """With elections off: once the term is on disk, and while it is the newest, PROMOTE or DEMOTE may follow."""
        self._now = now
        self._new_term(self._volatile_term + 1, "begun here")
        return self._volatile_term

    def resign(self, now: float) -> None:
        """`box.ctl.demote()`, or the log failed: others may lead. Who is not the leader has nothing to resign."""
        self._now = now
        if self._state is not State.LEADER:
            return
        self._must_fence = True
        self._note("resigns")
        self._stop_candidate()
        self._restore()

    def register(self, instance_id: int) -> None:
        """An anonymous instance has got its id."""
        if self._id:
            raise LocalProtocolError(f"instance {self._id} cannot become {instance_id}")
        self._id = self._peers.instance_id = instance_id
        if self._volatile_vote:
            self._votes.add(instance_id, self._volatile_vote)

    def configure(self, config: Config, now: float) -> None:
        self._now = now
        old, self._config = self._config, config
        stretch = {
            Wait.ELECTION_END: config.election_timeout - old.election_timeout,
            Wait.LEADER_DEATH: config.death_timeout - old.death_timeout,
            Wait.LEADER_FOUND: config.death_timeout - old.death_timeout,
        }
        if self._deadline is not None and self._wait in stretch:
            self._deadline = max(now, self._deadline + stretch[self._wait])
        if config.mode is not old.mode:
            self._mode_changed(old.mode)
        if config.fencing is not old.fencing:
            self._health_changed()

    def set_quorum(self, synchro_quorum: int, members: Collection[int], now: float) -> None:
        """`replication_synchro_quorum`, evaluated, and the ids in `_cluster`."""
        self._now = now
        before = self._peers.quorum
        self._votes.forget(gone := self._peers.replace(synchro_quorum, members))
        # Whoever joins makes a quorum grow that is a number, too, up to that number.
        if before < self._peers.quorum > self._peers.healthy_count:
            self._is_fencing_paused = True
        if self._state is State.CANDIDATE and self._has_won:
            self._lead()
        else:
            self._check_split_vote()
        self._health_changed()
        for peer_id in gone:
            self._report(peer_id, False)

    def ready(self) -> Ready:
        """What is to be done now. Each thing is said once."""
        broadcast = None
        # News of one step go out with what it has written, as one row: real servers write first, then show.
        if self._has_news and self._in_flight is None and (self._was_written or not self._is_writing):
            broadcast = self.shown
            self._has_news = False
        self._was_written = False
        write = None
        if self._is_writing and self._in_flight is None:
            write = self._in_flight = self._next_write()
        ready = Ready(write, broadcast, self._promote_term, self._must_fence, self._is_changed, tuple(self._notes))
        self._promote_term = 0
        self._must_fence = self._is_changed = False
        self._notes.clear()
        return ready

    # --- Messages -----------------------------------------------------------------------------------------------------

    def _report(self, source_id: int, is_leader_seen: bool) -> None:
        """Pre-vote: nobody stands for election while anybody hears the leader."""
        if self._state is State.LEADER:
            return
        if is_leader_seen:
            self._witnesses.add(source_id)
        elif source_id in self._witnesses:
            self._witnesses.discard(source_id)
            self._stand_unless_leader_is_seen()

    def _heard_vote(self, source_id: int, told: RaftState) -> None:
        """Somebody votes for itself and asks for ours, or has voted for somebody."""
        if self._votes.add(source_id, told.vote):
            self._check_split_vote()
        if self._state is State.CANDIDATE:
            if told.vote == self._id and self._has_won:
                self._lead()
            return
        is_asked = told.state == State.CANDIDATE and self._is_enabled
        if not is_asked or self._leader or self._volatile_vote:
            return
        assert told.vclock is not None
        if self._may_vote_for(told.vclock):
            self._vote_for(source_id, told.vclock)
        else:
            self._note(f"no vote for {source_id}: it is at {told.vclock}, we are at {self._vclock()}")

    def _heard_leader(self, source_id: int) -> None:
        if self._leader == source_id:
            return
        if self._leader:
            self._note(f"{source_id} says it leads term {self._volatile_term}, which {self._leader} does: ignored")
            return
        self._note(f"follows {source_id}")
        self._leader = source_id
        self._state = State.FOLLOWER
        self._see_leader()
        # Whoever stood only because it was promoted has lost.
        self._restore()
        if self._is_enabled and not self._is_writing:
            self._wait_for(Wait.LEADER_DEATH)
        self._show()

    def _leader_resigned(self) -> None:
        self._note(f"{self._leader} has resigned")
        self._leader = 0
        self._witnesses.discard(self._id)
        self._stop_timer()
        self._show()
        # It told us itself: whether others still hear it does not matter.
        if self._is_cfg_candidate:
            self._start_election()

    def _see_leader(self) -> None:
        self._leader_last_seen = self._now
        if not self._is_leader_seen:
            self._witnesses.add(self._id)
            self._show()

    # --- Terms and votes ----------------------------------------------------------------------------------------------

    @property
    def _is_on_disk(self) -> bool:
        return (self._volatile_term, self._volatile_vote) == (self._term, self._vote)

    @property
    def _has_won(self) -> bool:
        return self._votes.count(self._id) >= self._peers.quorum

    def _may_vote_for(self, vclock: VClock) -> bool:
        return vclock.compare(self._vclock(), ignore_zero=True) in (Order.EQUAL, Order.AFTER)

    def _new_term(self, term: int, why: str) -> None:
        self._note(f"term {term}, {why}")
        if self._leader == self._id:
            self._leader_last_seen = self._now
        self._volatile_term = term
        self._volatile_vote = self._leader = self._promote_term = 0
        self._candidate_vclock = None
        self._state = State.FOLLOWER
        self._votes.clear()
        self._witnesses.clear()
        self._must_fence = True
        # A promotion is for one term.
        self._restore()
        self._pause_and_write()
        self._show()

    def _vote_for(self, candidate_id: int, vclock: VClock) -> None:
        assert not self._volatile_vote
        assert self._state is State.FOLLOWER
        self._note(f"votes for {candidate_id}")
        self._volatile_vote = candidate_id
        self._candidate_vclock = vclock
        self._votes.add(self._id, candidate_id)
        self._pause_and_write()

    def _start_election(self) -> None:
        self._new_term(self._volatile_term + 1, "stands for election")
        self._vote_for(self._id, self._vclock())

    def _stand_unless_leader_is_seen(self) -> None:
        if self._is_cfg_candidate and not self._witnesses:
            self._start_election()

    def _pause_and_write(self) -> None:
        self._is_writing = True
        self._stop_timer()

    def _next_write(self) -> RaftState:
        """A vote for another waits until the term is on disk: then all rows that were queued before are in the
        vclock, which the candidate's is compared with once more."""
        is_vote_due = self._volatile_vote == self._id or self._volatile_term == self._term
        return RaftState(term=self._volatile_term, vote=self._volatile_vote if is_vote_due else 0)

    def _is_vote_revoked(self) -> bool:
        """The term is on disk, the vote is not, and it is no longer for who is at least as far as we are."""
        if self._volatile_term != self._term or self._volatile_vote == self._id:
            return False
        assert self._candidate_vclock is not None
        if self._may_vote_for(self._candidate_vclock):
            return False
        self._note(f"no vote for {self._volatile_vote}: it is at {self._candidate_vclock}, we are at {self._vclock()}")
        self._votes.revoke(self._id)
        self._volatile_vote = 0
        self._candidate_vclock = None
        return True

    def _go_on(self) -> None:
        """All is on disk."""
        self._is_writing = False
        if self._is_leader_seen:
            if self._is_enabled:
                self._wait_for(Wait.LEADER_DEATH)
        elif not self._is_candidate:
            return
        elif self._vote == self._id:
            self._stand()
        elif self._vote:
            self._wait_for(Wait.ELECTION_END)
        else:
            self._vote_for(self._id, self._vclock())

    def _stand(self) -> None:
        if self._peers.quorum == 1:
            self._lead()
            return
        self._note(f"is a candidate, needs {self._peers.quorum} votes")
        self._state = State.CANDIDATE
        self._wait_for(Wait.ELECTION_END)
        self._show()

    def _lead(self) -> None:
        assert not self._is_writing
        self._note(f"leads, by a quorum of {self._peers.quorum}")
        self._state = State.LEADER
        self._leader = self._id
        self._promote_term = self._term
        self._stop_timer()
        self._show()

    # --- Candidates and modes -----------------------------------------------------------------------------------------

    def _restore(self) -> None:
        """Back to what the configuration says, after a promotion."""
        if self._is_cfg_candidate and self._is_enabled:
            self._start_candidate()
        else:
            self._stop_candidate()

    def _cfg_candidate(self, is_candidate: bool) -> None:
        self._is_cfg_candidate = is_candidate
        self._restore()

    def _start_candidate(self) -> None:
        if self._is_candidate:
            return
        self._is_candidate = True
        if not self._is_writing and not self._witnesses:
            self._wait_for(Wait.LEADER_FOUND)

    def _stop_candidate(self) -> None:
        if not self._is_candidate:
            return
        self._is_candidate = False
        if not self._is_leader_seen:
            self._stop_timer()
        self._step_down()

    def _step_down(self) -> None:
        if self._state is State.LEADER:
            self._leader_last_seen = self._now
            self._leader = self._promote_term = 0
        self._state = State.FOLLOWER
        self._show()

    def _mode_changed(self, old: Mode) -> None:
        mode = self._config.mode
        if mode is Mode.MANUAL and self._state is not State.FOLLOWER:
            # The election that has begun, or been won, goes on.
            self._is_cfg_candidate = False
        else:
            self._cfg_candidate(mode is Mode.CANDIDATE and self._peers.has_healthy_quorum)
        if mode is Mode.OFF:
            self._stop_timer()
            self._step_down()
        elif old is Mode.OFF:
            self._start()

    def _start(self) -> None:
        """Elections are on. Whoever restarts waits for the leader to show up before it disturbs anybody."""
        if self._is_leader_seen and not self._is_writing:
            self._wait_for(Wait.LEADER_DEATH)
        # Others may be in an older term, and would hear nothing of ours from us.
        self._show()

    def _health_changed(self) -> None:
        is_healthy = self._peers.has_healthy_quorum
        if is_healthy:
            self._is_fencing_paused = False
        mode = self._config.mode
        if mode in (Mode.MANUAL, Mode.CANDIDATE) and not is_healthy:
            self._fence()
        if mode is not Mode.CANDIDATE:
            return
        if not is_healthy and self._state is not State.FOLLOWER:
            self._is_cfg_candidate = False  # for the next term; this one goes on
        else:
            self._cfg_candidate(is_healthy)

    def _fence(self) -> None:
        if self._state is not State.LEADER or self._config.fencing is Fencing.OFF or self._is_fencing_paused:
            return
        self._note(f"resigns: {self._peers.healthy_count} of us are connected, {self._peers.quorum} are needed")
        self._must_fence = True
        self._stop_candidate()

    # --- Time and news ------------------------------------------------------------------------------------------------

    def _wait_for(self, wait: Wait) -> None:
        timeout = self._config.death_timeout
        if wait is Wait.ELECTION_END:
            timeout = self._config.election_timeout + self._random_shift()
        self._wait, self._deadline = wait, self._now + timeout
        self._check_split_vote()

    def _stop_timer(self) -> None:
        self._wait = self._deadline = None

    def _random_shift(self) -> float:
        return self._config.election_timeout * MAX_SHIFT * self._random()

    def _check_split_vote(self) -> None:
        """When nobody can win this term, the next one need not wait: only for as long as keeps us from colliding."""
        if self._wait is not Wait.ELECTION_END or self._deadline is None:
            return
        if not self._votes.is_split(self._peers.quorum, self._peers.member_count):
            return
        self._note(f"the vote is split: {self._votes}")
        self._wait, self._deadline = Wait.SPLIT_VOTE, min(self._deadline, self._now + self._random_shift())

    def _show(self) -> None:
        self._has_news = self._is_changed = True

    def _note(self, line: str) -> None:
        self._notes.append(line)
