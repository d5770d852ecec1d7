"""Promises of one member to the others, checked when they take effect.

A vote goes only to a candidate with all rows that the voter had at the start of the term. Only members'
acknowledgements count. A client learns of a verdict by PROMOTE only when a quorum has that row. Rows that a starting
node finds in its log are on disk before it reports them. Reads memory and disks of nodes, as `consensus.py` does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import dropwhile
from typing import Final

from flowstone.box.system import CLUSTER_ID
from flowstone.iproto.constants import RaftKey
from flowstone.iproto.msgpack import unpack
from flowstone.iproto.row import Row
from flowstone.node.instance import Instance
from flowstone.node.wal.journal import Journal
from flowstone.replication.limbo.control_rows import RaftState
from flowstone.replication.row_stream import slab_of_rows
from flowstone.replication.vclock import VClock
from flowstone.xlog.errors import XlogError
from tests.simulation.cluster import decided_members
from tests.simulation.logs import RAFT, read_now, unpacked
from tests.simulation.simulation import Simulation

SHOWN_MAX: Final = 3
"""Maximum number of reported violations of one kind; one causes others."""

ACKS_SECONDS: Final = 0.25
"""Interval of the checks of counted acknowledgements."""

STRANGE_SECONDS: Final = 1.0
"""Time within which a node that knows of an expulsion must forget the member's acknowledgements."""


class MemberPromises:
    """Call `look` periodically; violations are appended to `violations`. `holders` names the nodes that have a row."""

    def __init__(
        self,
        sim: Simulation,
        violations: list[str],
        *,
        is_durable: bool,
        holders: Callable[[int, int], list[str]],
    ) -> None:
        self._sim = sim
        self._violations = violations
        self._is_durable = is_durable
        self._holders = holders
        self._journals: dict[str, Journal] = {}
        """Journals whose writes are checked."""
        self._written: dict[str, VClock] = {}
        """By name: the position after the last checked write."""
        self._begun: dict[str, tuple[int, VClock]] = {}
        """By name: the newest term, and the log position before it."""
        self._strangers: dict[str, tuple[float, set[int]]] = {}
        """By name: the non-members whose acknowledgements it counts, and since when."""
        self._next_look_at_acks = 0.0
        self._told: dict[str, int] = {}

    def look(self, names: list[str]) -> None:
        is_due = self._sim.now >= self._next_look_at_acks
        if is_due:
            self._next_look_at_acks = self._sim.now + ACKS_SECONDS
        for name in names:
            if not self._sim.is_ready(name):
                continue
            instance = self._sim.node(name)._instance
            if self._journals.get(name) is not instance.journal:
                self._journals[name] = instance.journal
                self._written[name] = instance.journal.written_vclock
                self._begun.pop(name, None)
                instance.journal.on_written.append(partial(self._wrote, name, instance))
                self._look_at_vote_before(name, instance)
                if self._is_durable:
                    self._look_at_recovered(name, instance)
            if is_due:
                self._look_at_acks(name, instance)

    def _tell(self, kind: str, what: str) -> None:
        self._told[kind] = self._told.get(kind, 0) + 1
        if self._told[kind] <= SHOWN_MAX:
            self._violations.append(what)

    # --- votes ---

    def _wrote(self, name: str, instance: Instance, rows: bytes, vclock: VClock) -> None:
        """Called after each successful write, before its waiters are notified."""
        state = instance.elections.raft._in_flight
        if state is not None:
            self._look_at_vote(name, instance, rows)
        self._written[name] = vclock
        if instance.queue.limbo._writing is not None:
            self._sim.loop.call_soon(self._look_at_answers, name, instance)

    def _look_at_vote(self, name: str, instance: Instance, rows: bytes) -> None:
        state = instance.elections.raft._in_flight
        assert state is not None
        position = self._position_at_raft_row(name, rows)
        if position is not None:  # otherwise a later write has the vote
            self._check_vote(name, instance, state, position)

    def _look_at_vote_before(self, name: str, instance: Instance) -> None:
        """Check a vote cast during the start of a node, when writes are not observed."""
        raft = instance.elections.raft
        if raft._is_on_disk and raft._in_flight is None:
            self._check_vote(name, instance, raft.persisted, instance.journal.written_vclock)

    def _check_vote(self, name: str, instance: Instance, state: RaftState, position: VClock) -> None:
        """Check a vote. `position`: of the row with this term and vote, or a later one."""
        candidate = instance.elections.raft._candidate_vclock
        is_for_another = state.vote not in (0, instance.id) and candidate is not None
        if self._begun.get(name, (0, VClock()))[0] != state.term:
            if is_for_another:  # its term was written earlier, unobserved
                position = self._before_term(name, state.term, position)
            self._begun[name] = state.term, position
        if not is_for_another:
            return
        assert candidate is not None
        had = self._begun[name][1]
        if not had.without_zero() <= candidate:
            text = f"{name} votes for {state.vote} in term {state.term}, a candidate at {candidate},"
            self._tell("vote", f"{text} and had {had.without_zero()} when that term began")

    def _before_term(self, name: str, term: int, position: VClock) -> VClock:
        """Return the log position at the start of `term`: before its row, or at a snapshot with it; at `position` if
        later.

        A voter need not count rows that it wrote after that: its ACKs of them carry the term, and a leader that learns
        of a newer term confirms nothing. Real servers do not count them either: `raft_worker_handle_io` in 3.8.0 waits
        for rows on their way to disk only if the term itself is not on disk (seed 1004230).
        """
        try:
            log = read_now(name, self._sim.storage(name))
        except XlogError:
            return position
        lsns = position.to_mapping()
        if any(_is_of_term(row, term) for row in log.snapshot):
            lsns = {number: min(lsn, log.snapshot_vclock.get(number, 0)) for number, lsn in lsns.items()}
        rows = [row for record in log.records for row in record.rows]
        for row in dropwhile(lambda row: not _is_of_term(row, term), rows):
            lsns[row.replica_id] = min(row.lsn - 1, lsns.get(row.replica_id, 0))
        return VClock(lsns)

    def _position_at_raft_row(self, name: str, rows: bytes) -> VClock | None:
        """Return the log position before its RAFT row; None if there is none among `rows`."""
        lsns = self._written[name].to_mapping()
        for row in slab_of_rows(rows, name).rows():
            if row.type == RAFT:
                return VClock(lsns)
            lsns[row.replica_id] = row.lsn
        return None

    # --- answers decided by a PROMOTE ---

    def _look_at_answers(self, name: str, instance: Instance) -> None:
        """Check that clients get outcomes decided by another's PROMOTE or DEMOTE only when a quorum has that row."""
        queue = instance.queue
        limbo = queue.limbo
        for unproven in limbo._unproven:
            answered = [
                entry
                for entry in unproven.entries
                if entry.transaction.is_promised and entry.is_synchronous and entry not in queue._unproven
            ]
            holders = self._holders(unproven.origin_id, unproven.lsn)
            needed = min(limbo.quorum, limbo._member_count or limbo.quorum)
            if answered and len(holders) < needed:
                text = f"{name} has answered clients by the PROMOTE {unproven.origin_id}:{unproven.lsn}"
                self._tell("answer", f"{text}, which only {', '.join(holders)} have; {needed} must")

    # --- acknowledgements ---

    def _look_at_acks(self, name: str, instance: Instance) -> None:
        acked = instance.queue.limbo._acks._vclocks.keys() - {0}
        known = {unpack(raw)[0] for raw in instance.box.spaces[CLUSTER_ID].tuples()}
        if acked <= known:  # the usual case
            self._strangers.pop(name, None)
            return
        strangers = acked - decided_members(instance.box).keys()
        since, before = self._strangers.get(name, (self._sim.now, strangers))
        strangers &= before
        self._strangers[name] = since, strangers
        if strangers and self._sim.now - since > STRANGE_SECONDS:
            text = f"{name} counts acknowledgements of {sorted(strangers)}, whom it does not have for members"
            self._tell("ack", text)

    # --- rows found at the start ---

    def _look_at_recovered(self, name: str, instance: Instance) -> None:
        """Check that recovered rows are durable: others rely on them from now on."""
        storage = self._sim.storage(name)
        logs = [path for path in storage.names if path.endswith(".xlog")]
        if not logs or storage.broken:
            return
        inode = storage.names[max(logs)]
        writer = instance.journal._writer
        is_written_to = writer is not None and writer.path == max(logs) and not instance.journal.is_idle
        if not is_written_to and inode.unsynced and not inode.synced.startswith(inode.data):
            self._tell(
                "recovered", f"{name} has started with rows of {max(logs)} that it would lose with the power now"
            )


def _is_of_term(row: Row, term: int) -> bool:
    return row.type == RAFT and unpacked(row.body)[RaftKey.TERM] == term
