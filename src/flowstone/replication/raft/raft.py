"""The election machine of one member, with the rules of Tarantool 2.11. Theory of operation: `election.py`.

`Raft` is pure: it sends nothing, reads no clock and generates no random numbers. It relies on its owner for three
things: rows with term and vote reach the disk in order and synced, `written` is called only then, and the vclock passed
in includes every row logged before them. It knows when PROMOTE is due, but not the queue that PROMOTE takes over.

Where 2.11.9 can elect two leaders in a term, or none at all, this machine differs; a comment marks each place. 3.8
differs in three points: with mode off it votes, has an election quorum of 1, and is promoted by an election; a
promotion fails after `election_timeout`; and switching fencing off does not resume a fenced queue (nor does it here).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from flowstone.errors import LocalProtocolError
from flowstone.iproto import errors
from flowstone.replication.limbo.control_rows import RaftState
from flowstone.replication.raft.election import (
    TRANSITIONS,
    Config,
    ElectionInfo,
    ElectionMode,
    ElectionPeers,
    ElectionState,
    Fencing,
    Ready,
    Votes,
    Wait,
    check,
)
from flowstone.replication.vclock import Order, VClock

MAX_SHIFT: Final = 0.1
"""Each wait for the end of an election is longer than the timeout by a random fraction of it, at most this one."""


class Raft:
    """One member. After each event, call `ready()` until it is false; call `tick` at `deadline`.

    `now` is monotonic time in seconds; `random` returns numbers in [0, 1). `term` and `vote` were recovered from the
    log or the snapshot. An anonymous instance has the id 0 and only keeps up with terms.
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
        # `_term` and `_vote` are on disk and may be shown; decisions use the volatile ones, which may be ahead.
        self._term = self._volatile_term = term
        self._vote = self._volatile_vote = vote
        self._state = ElectionState.FOLLOWER
        self._leader = 0
        self._leader_last_seen = now
        self._votes = Votes()
        if vote:
            self._votes.add(instance_id, vote)
        self._witnesses: set[int] = set()
        """The members, including this one, that report hearing the leader of this term."""
        self._candidate_vclock: VClock | None = None
        self._is_cfg_candidate = False
        """True if this instance may start elections. `_is_candidate` is also true for a term begun by `promote`."""
        self._is_candidate = False
        self._is_writing = False
        """Term or vote are not on disk yet: until they are, the machine is a follower without a timer."""
        self._in_flight: RaftState | None = None
        self._deadline: float | None = None
        self._wait: Wait | None = None
        self._peers = ElectionPeers(instance_id)
        self._is_fencing_paused = False
        self._was_written = self._has_news = self._is_changed = self._must_fence = False
        self._promote_term = 0
        self._notes: list[str] = []

    # --- Properties ---------------------------------------------------------------------------------------------------

    @property
    def state(self) -> ElectionState:
        return self._state

    @property
    def leader(self) -> int:
        """The leader of this term; 0 if there is none or it is unknown."""
        return self._leader

    @property
    def term(self) -> int:
        """The term on disk, which ACKs carry."""
        return self._term

    @property
    def volatile_term(self) -> int:
        """The newest known term. While the term of the queue is lower, no verdict on the queue may be written."""
        return self._volatile_term

    @property
    def is_leader_known_to_all(self) -> bool:
        """True if all connected members report hearing the leader of this term, whom this member knows, too."""
        return self._leader != 0 and self._peers.healthy - {self._leader} <= self._witnesses

    @property
    def is_read_only(self) -> bool:
        return self._is_enabled and self._state is not ElectionState.LEADER

    @property
    def deadline(self) -> float | None:
        """When `tick` is due."""
        return self._deadline

    @property
    def peers(self) -> ElectionPeers:
        """The members as this machine counts them; read only."""
        return self._peers

    @property
    def disconnect_timeout(self) -> float:
        """Seconds after which a silent peer counts as disconnected; see `Fencing`."""
        is_strict = self._state is ElectionState.LEADER and self._config.fencing is Fencing.STRICT
        return self._config.death_timeout / 2 if is_strict else self._config.death_timeout

    @property
    def persisted(self) -> RaftState:
        """The term and vote for a snapshot."""
        return RaftState(term=self._term, vote=self._vote)

    @property
    def shown(self) -> RaftState:
        """The state to send to a replica that has just subscribed: without a term that is not on disk."""
        is_current = self._term == self._volatile_term
        return RaftState(
            term=self._term,
            vote=self._vote,
            state=self._state,
            vclock=self._vclock().without_zero() if self._state is ElectionState.CANDIDATE else None,
            leader_id=self._leader if is_current else 0,
            # As 3.8. With elections off, 2.11 has no timer and reports a dead leader as seen forever.
            is_leader_seen=is_current and self._is_enabled and self._is_leader_seen,
        )

    def info(self, now: float) -> ElectionInfo:
        idle = 0.0 if self._state is ElectionState.LEADER else now - self._leader_last_seen
        return ElectionInfo(
            state=self._state.name.lower(),
            term=self._volatile_term,
            vote=self._volatile_vote,
            leader=self._leader,
            leader_idle=idle if self._is_enabled else None,
        )

    def promoted(self, term: int) -> bool:
        """Return True if this member leads, False while the promotion started in `term` is open; else raise why."""
        # A leader starts no election, whatever others report.
        if self._state is ElectionState.LEADER:
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
        if self._config.mode is ElectionMode.MANUAL:
            raise errors.Timeout("timed out")
        raise errors.ElectionDisabled("Elections were turned off")

    @property
    def _is_enabled(self) -> bool:
        return self._config.mode is not ElectionMode.OFF

    @property
    def _is_leader_seen(self) -> bool:
        return self._id in self._witnesses

    # --- Events -------------------------------------------------------------------------------------------------------

    def message(self, source_id: int, told: RaftState, now: float) -> None:
        """Handle a RAFT row of the member `source_id`: its whole state, and a sign of life."""
        check(self._id, source_id, told)
        self.heartbeat(source_id, now)
        if told.term < self._volatile_term:
            self._note(f"ignores a message from {source_id}: its term {told.term} is outdated")
            return
        # Terms of others count even while elections are off: they freeze the queue until the PROMOTE of the new leader.
        if told.term > self._volatile_term:
            self._new_term(told.term, f"received from {source_id}")
        self._report(source_id, told.is_leader_seen)
        # The report may have started the next term, for which the rest of the message is outdated. 2.11.9 continues
        # and counts the old vote in the new term, which can elect two leaders.
        if told.term < self._volatile_term:
            return
        if told.vote:
            self._heard_vote(source_id, told)
        if told.state == ElectionState.LEADER:
            self._heard_leader(source_id)
        elif source_id == self._leader:
            self._leader_resigned()

    def heard_term(self, source_id: int, term: int, now: float) -> None:
        """Handle a term that came without a state: in an ACK."""
        self._now = now
        if term > self._volatile_term:
            self._new_term(term, f"received from {source_id}")

    def heartbeat(self, source_id: int, now: float) -> None:
        """Handle a sign of life: a row with LSN 0 of `source_id`, or any row of a member before 2.11."""
        self._now = now
        if not self._is_enabled or self._state is ElectionState.LEADER or not source_id or source_id != self._leader:
            return
        self._see_leader()
        # No timer runs while term or vote are being written; `_go_on` starts it.
        if not self._is_writing:
            self._wait_for(Wait.LEADER_DEATH)

    def connection(self, peer_id: int, *, upstream: bool, downstream: bool, now: float) -> None:
        """Record how `peer_id` is connected: we follow it (`upstream`), it follows us (`downstream`)."""
        self._now = now
        before = self._peers.healthy_count
        is_lost = self._peers.connect(peer_id, upstream=upstream, downstream=downstream)
        # Health first: a withdrawn report must not start an election without enough peers.
        if self._peers.healthy_count != before:
            self._health_changed()
        # 2.11.9 keeps the report if the other direction was lost before, which prevents all further elections.
        if is_lost:
            self._report(peer_id, False)

    def tick(self, now: float) -> None:
        """Handle the passing of time; no effect before `deadline`."""
        self._now = now
        if self._deadline is None or now < self._deadline:
            return
        assert self._wait is not None
        assert not self._is_writing, "no timer runs while something is being written"
        self._note(f"timed out waiting for {self._wait.value}")
        self._stop_timer()
        # Whatever the wait was for, this member no longer hears a leader, and must not keep others from an election.
        self._witnesses.discard(self._id)
        self._restore()
        self._show()
        self._stand_unless_leader_is_seen()

    def written(self, term: int, vote: int, now: float) -> None:
        """Record that the `write` of `ready` is on disk, and with it all rows logged before."""
        self._now = now
        if self._in_flight is None or (self._in_flight.term, self._in_flight.vote) != (term, vote):
            raise LocalProtocolError(f"unexpected write completion: term {term}, vote {vote}")
        self._in_flight = None
        self._term, self._vote = term, vote
        self._was_written = True
        self._show()
        # A vote for another member needs a second write: the term first, then the vote (see `_next_write`).
        if self._is_on_disk or self._is_vote_revoked():
            self._go_on()

    def promote(self, now: float) -> int:
        """Run for election, as `box.ctl.promote()`; return the term, for `promoted`."""
        self._now = now
        if not self._is_enabled:
            raise LocalProtocolError("elections are off", hint="begin a term and write PROMOTE in it")
        if self._config.mode is ElectionMode.VOTER:
            raise errors.Unsupported("election_mode='voter' does not support manual elections")
        if self._state is not ElectionState.LEADER:
            self._new_term(self._volatile_term + 1, "promotion requested")
            # After `_new_term`, which returns to the configured role: a promotion makes even a voter in mode `manual`
            # run once.
            self._start_candidate()
            self._vote_for(self._id, self._vclock())
        return self._volatile_term

    def begin_term(self, now: float) -> int:
        """Start a term with elections off. PROMOTE or DEMOTE may follow when it is on disk and still the newest."""
        self._now = now
        self._new_term(self._volatile_term + 1, "started locally")
        return self._volatile_term

    def resign(self, now: float) -> None:
        """Give up leadership: `box.ctl.demote()`, or the log failed. No effect unless this member leads."""
        self._now = now
        if self._state is not ElectionState.LEADER:
            return
        self._must_fence = True
        self._note("resigns")
        self._stop_candidate()
        self._restore()

    def register(self, instance_id: int) -> None:
        """Set the id of an instance that was anonymous."""
        if self._id:
            raise LocalProtocolError(f"cannot register as {instance_id}: this instance already has id {self._id}")
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
        # A running wait is adjusted, not restarted: repeated calls of `box.cfg` would postpone an election forever.
        if self._deadline is not None and self._wait in stretch:
            self._deadline = max(now, self._deadline + stretch[self._wait])
        if config.mode is not old.mode:
            self._mode_changed(old.mode)
        if config.fencing is not old.fencing:
            self._health_changed()

    def set_quorum(self, synchro_quorum: int, members: Collection[int], now: float) -> None:
        """Set the value of `replication_synchro_quorum` and the ids in `_cluster`."""
        self._now = now
        before = self._peers.quorum
        self._votes.forget(gone := self._peers.replace(synchro_quorum, members))
        # A join can raise the quorum, even a constant one (see `ElectionPeers.quorum`), before the new member is
        # connected.
        if before < self._peers.quorum > self._peers.healthy_count:
            self._is_fencing_paused = True
        # The votes received so far may be enough for a smaller quorum.
        if self._state is ElectionState.CANDIDATE and self._has_won:
            self._lead()
        else:
            self._check_split_vote()
        self._health_changed()
        for peer_id in gone:
            self._report(peer_id, False)

    def ready(self) -> Ready:
        """Return what has to be done now; each task is returned once."""
        broadcast = None
        # A step that changes and writes the state broadcasts once, after the write, as real servers do.
        # Only what is on disk may be shown (docs/spec/synchro.md#raft-state-machine), so news waits for a pending
        # write.
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
        """Record whether `source_id` hears the leader: while a member does, no election starts (pre-vote)."""
        if self._state is ElectionState.LEADER:
            return
        if is_leader_seen:
            self._witnesses.add(source_id)
        # The last witness may have been what prevented an election.
        elif source_id in self._witnesses:
            self._witnesses.discard(source_id)
            self._stand_unless_leader_is_seen()

    def _heard_vote(self, source_id: int, told: RaftState) -> None:
        """Handle the vote of another member: for itself, which requests our vote, or for any other member."""
        # Votes count from any message, not only from answers: all members broadcast theirs
        # (docs/spec/synchro.md#votes).
        if self._votes.add(source_id, told.vote):
            self._check_split_vote()
        if self._state is ElectionState.CANDIDATE:
            if told.vote == self._id and self._has_won:
                self._lead()
            return
        is_asked = told.state == ElectionState.CANDIDATE and self._is_enabled
        # The volatile vote: a vote that is being written is promised already.
        if not is_asked or self._leader or self._volatile_vote:
            return
        assert told.vclock is not None
        if self._may_vote_for(told.vclock):
            self._vote_for(source_id, told.vclock)
        else:
            self._note(f"rejects candidate {source_id}: its vclock is {told.vclock}, ours is {self._vclock()}")

    def _heard_leader(self, source_id: int) -> None:
        if self._leader == source_id:
            return
        if self._leader:
            self._note(f"ignores leader {source_id}: term {self._volatile_term} is led by {self._leader}")
            return
        self._note(f"follows leader {source_id}")
        self._leader = source_id
        self._become(ElectionState.FOLLOWER)
        self._see_leader()
        # A member that ran only because of `promote` has lost.
        self._restore()
        if self._is_enabled and not self._is_writing:
            self._wait_for(Wait.LEADER_DEATH)
        self._show()

    def _leader_resigned(self) -> None:
        self._note(f"sees leader {self._leader} resign")
        self._leader = 0
        self._witnesses.discard(self._id)
        self._stop_timer()
        self._show()
        # The resignation came from the leader itself, so reports of other members that hear it do not matter.
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
        self._note(f"enters term {term}: {why}")
        # `leader_idle` counts from the loss of the leadership.
        if self._leader == self._id:
            self._leader_last_seen = self._now
        self._volatile_term = term
        self._volatile_vote = self._leader = self._promote_term = 0
        self._candidate_vclock = None
        self._become(ElectionState.FOLLOWER)
        self._votes.clear()
        self._witnesses.clear()
        # The leader of the new term may decide about the queue; our verdicts could contradict it.
        self._must_fence = True
        # A promotion is valid for one term only.
        self._restore()
        self._pause_and_write()
        self._show()

    def _vote_for(self, candidate_id: int, vclock: VClock) -> None:
        # One vote per term makes two leaders of one term impossible.
        assert not self._volatile_vote
        assert self._state is ElectionState.FOLLOWER
        self._note(f"votes for {candidate_id}")
        self._volatile_vote = candidate_id
        self._candidate_vclock = vclock
        self._votes.add(self._id, candidate_id)
        self._pause_and_write()

    def _start_election(self) -> None:
        self._new_term(self._volatile_term + 1, "starts an election")
        self._vote_for(self._id, self._vclock())

    def _stand_unless_leader_is_seen(self) -> None:
        # Pre-vote: a member that only lost its own connection to the leader must not depose it by a new term
        # (docs/spec/synchro.md#election-timers).
        if self._is_cfg_candidate and not self._witnesses:
            self._start_election()

    def _pause_and_write(self) -> None:
        self._is_writing = True
        self._stop_timer()

    def _next_write(self) -> RaftState:
        """Return the next write. A vote for another member is written after the term: then the vclock includes all
        rows that were queued, and the candidate's vclock is compared with it again."""
        is_vote_due = self._volatile_vote == self._id or self._volatile_term == self._term
        return RaftState(term=self._volatile_term, vote=self._volatile_vote if is_vote_due else 0)

    def _is_vote_revoked(self) -> bool:
        """Revoke a vote that is not written yet if the candidate lacks rows written since; return True if revoked."""
        if self._volatile_term != self._term or self._volatile_vote == self._id:
            return False
        assert self._candidate_vclock is not None
        if self._may_vote_for(self._candidate_vclock):
            return False
        vclocks = f"its vclock is {self._candidate_vclock}, ours is {self._vclock()}"
        self._note(f"rejects candidate {self._volatile_vote}: {vclocks}")
        self._votes.revoke(self._id)
        self._volatile_vote = 0
        self._candidate_vclock = None
        return True

    def _go_on(self) -> None:
        """Continue now that term and vote are on disk."""
        self._is_writing = False
        # The leader of this term appeared while its term was being written.
        if self._is_leader_seen:
            if self._is_enabled:
                self._wait_for(Wait.LEADER_DEATH)
        elif not self._is_candidate:
            return
        elif self._vote == self._id:
            self._stand()
        # Voted for another candidate, which may fail: run after a timeout.
        elif self._vote:
            self._wait_for(Wait.ELECTION_END)
        else:
            self._vote_for(self._id, self._vclock())

    def _stand(self) -> None:
        # The own vote, which is on disk, is the quorum.
        if self._peers.quorum == 1:
            self._lead()
            return
        self._note(f"becomes candidate: needs {self._peers.quorum} votes")
        self._become(ElectionState.CANDIDATE)
        self._wait_for(Wait.ELECTION_END)
        self._show()

    def _lead(self) -> None:
        assert not self._is_writing
        self._note(f"becomes leader: has a quorum of {self._peers.quorum}")
        self._become(ElectionState.LEADER)
        self._leader = self._id
        self._promote_term = self._term
        self._stop_timer()
        self._show()

    # --- Candidates and modes -----------------------------------------------------------------------------------------

    def _restore(self) -> None:
        """Return to the role that the configuration sets, after a promotion."""
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
        # A restarted member first waits for a leader to show up: an election at once would depose it.
        if not self._is_writing and not self._witnesses:
            self._wait_for(Wait.LEADER_FOUND)

    def _stop_candidate(self) -> None:
        if not self._is_candidate:
            return
        self._is_candidate = False
        # With a leader the timer keeps running: voters report its death, too, so that candidates may run.
        if not self._is_leader_seen:
            self._stop_timer()
        self._step_down()

    def _become(self, state: ElectionState) -> None:
        assert state is self._state or state in TRANSITIONS[self._state], (
            f"invalid transition: {self._state!r} to {state!r}"
        )
        self._state = state

    def _step_down(self) -> None:
        if self._state is ElectionState.LEADER:
            self._leader_last_seen = self._now
            self._leader = self._promote_term = 0
        self._become(ElectionState.FOLLOWER)
        self._show()

    def _mode_changed(self, old: ElectionMode) -> None:
        mode = self._config.mode
        if mode is ElectionMode.MANUAL and self._state is not ElectionState.FOLLOWER:
            # An election that is under way or won continues.
            self._is_cfg_candidate = False
        else:
            self._cfg_candidate(mode is ElectionMode.CANDIDATE and self._peers.has_healthy_quorum)
        if mode is ElectionMode.OFF:
            self._stop_timer()
            self._step_down()
        elif old is ElectionMode.OFF:
            self._start()

    def _start(self) -> None:
        """Start taking part. A restarted member waits for the leader to appear before it starts an election."""
        if self._is_leader_seen and not self._is_writing:
            self._wait_for(Wait.LEADER_DEATH)
        # Broadcast: other members may be in an older term and must learn ours.
        self._show()

    def _health_changed(self) -> None:
        is_healthy = self._peers.has_healthy_quorum
        # Reached once, so the paused fencing is active again (docs/spec/synchro.md#fencing).
        if is_healthy:
            self._is_fencing_paused = False
        mode = self._config.mode
        if mode in (ElectionMode.MANUAL, ElectionMode.CANDIDATE) and not is_healthy:
            self._fence()
        if mode is not ElectionMode.CANDIDATE:
            return
        if not is_healthy and self._state is not ElectionState.FOLLOWER:
            self._is_cfg_candidate = False  # from the next term on
        else:
            self._cfg_candidate(is_healthy)

    def _fence(self) -> None:
        if self._state is not ElectionState.LEADER or self._config.fencing is Fencing.OFF or self._is_fencing_paused:
            return
        self._note(f"resigns: quorum lost ({self._peers.healthy_count} connected, {self._peers.quorum} required)")
        self._must_fence = True
        self._stop_candidate()

    # --- Time and news ------------------------------------------------------------------------------------------------

    def _wait_for(self, wait: Wait) -> None:
        timeout = self._config.death_timeout
        if wait is Wait.ELECTION_END:
            timeout = self._config.election_timeout + self._random_shift()
        self._wait, self._deadline = wait, self._now + timeout
        # The deciding vote may have arrived before this member began to wait.
        self._check_split_vote()

    def _stop_timer(self) -> None:
        self._wait = self._deadline = None

    def _random_shift(self) -> float:
        return self._config.election_timeout * MAX_SHIFT * self._random()

    def _check_split_vote(self) -> None:
        """Shorten the wait if no candidate can win this term; the random part keeps candidates from colliding again."""
        if self._wait is not Wait.ELECTION_END or self._deadline is None:
            return
        if not self._votes.is_split(self._peers.quorum, self._peers.member_count):
            return
        self._note(f"detects a split vote: {self._votes}")
        self._wait, self._deadline = Wait.SPLIT_VOTE, min(self._deadline, self._now + self._random_shift())

    def _show(self) -> None:
        self._has_news = self._is_changed = True

    def _note(self, line: str) -> None:
        self._notes.append(line)
