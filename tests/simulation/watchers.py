"""Invariants at every moment of a run: nothing that a node has told others is ever revoked.

`Watchers` inspects the memory of all nodes, at most every `LOOK_SECONDS` and when one dies, and passes it to the
`Chronicle`, which knows the rules but no node: positions only grow, terms and votes are never revoked, and a term has
one leader. `endings.py` checks the same in the logs at the end. Appliers must not stop for good, except for reasons for
which real servers stop, too: an operator who restarts them would hide that.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

from flowstone import Node
from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from flowstone.iproto.constants import RaftKey
from flowstone.replication.applier.states import ApplierState
from flowstone.replication.raft.election import ElectionState
from flowstone.replication.vclock import VClock
from flowstone.xlog.errors import XlogError
from tests.simulation.consensus import Consensus
from tests.simulation.disk import Loss
from tests.simulation.disk_reports import DiskReports
from tests.simulation.expelled import Expelled, running
from tests.simulation.logs import RAFT, NodeLog, first_vclock, read_log, unpacked
from tests.simulation.loop import Life
from tests.simulation.member_promises import MemberPromises
from tests.simulation.simulation import Simulation

LOOK_SECONDS: Final = 0.02

ACKS_SECONDS: Final = 0.05
"""Less often, because there are as many ACKs as pairs of nodes."""


MISSING: Final = "Missing .xlog file"


class Options(Protocol):
    """The part of a plan that matters here."""

    @property
    def wal_mode(self) -> str: ...
    @property
    def dialect(self) -> str: ...


class Watched(Protocol):
    """The part of a replica set that is inspected here and in `endings.py`."""

    @property
    def sim(self) -> Simulation: ...
    @property
    def plan(self) -> Options: ...
    @property
    def members(self) -> list[str]: ...
    @property
    def anonymous(self) -> list[str]: ...
    @property
    def departed(self) -> list[str]: ...


class Sight(NamedTuple):
    """The state of a node at one moment that it may have told others: all of it is in its log."""

    vclock: VClock
    confirmed: VClock
    term: int
    vote: int
    is_leader: bool
    queue_term: int
    queue_owner: int


class Chronicle:
    """Everything that was ever seen, by UUID; `violations` lists contradictions."""

    def __init__(self) -> None:
        self.violations: list[str] = []
        self.leaders: dict[int, str] = {}
        """The leader of each term."""
        self._owners: dict[int, int] = {}
        """The owner of the queue in each of its terms; 0 if there was none."""
        self._last: dict[str, Sight] = {}

    def see(self, uuid: str, name: str, sight: Sight) -> None:
        last = self._last.get(uuid)
        if sight == last:
            return
        self._last[uuid] = sight
        if last is not None:
            self._compare(name, last, sight)
        if sight.is_leader and self.leaders.setdefault(sight.term, uuid) != uuid:
            self.violations.append(f"{name} leads term {sight.term}, which {self.leaders[sight.term]} does")
        if sight.queue_term and self._owners.setdefault(sight.queue_term, sight.queue_owner) != sight.queue_owner:
            self.violations.append(
                f"{name} has {sight.queue_owner} for the owner of the queue in term {sight.queue_term},"
                f" others have {self._owners[sight.queue_term]}"
            )

    def lost_unsynced(self, uuid: str) -> None:
        """The instance may have lost written rows, but neither its term nor its vote."""
        last = self._last.get(uuid)
        if last is not None:
            self._last[uuid] = last._replace(vclock=VClock(), confirmed=VClock(), queue_term=0)

    def lost_confirmed(self, uuid: str) -> None:
        """The instance need not remember confirmed positions."""
        last = self._last.get(uuid)
        if last is not None:
            self._last[uuid] = last._replace(confirmed=VClock())

    def _compare(self, name: str, last: Sight, sight: Sight) -> None:
        if sight.vclock is not last.vclock and not last.vclock <= sight.vclock:
            self.violations.append(f"{name} went back from {last.vclock} to {sight.vclock}")
        if sight.confirmed is not last.confirmed and not last.confirmed <= sight.confirmed:
            self.violations.append(f"{name} had {last.confirmed} confirmed, and now {sight.confirmed}")
        if sight.term < last.term:
            self.violations.append(f"{name} went back from term {last.term} to {sight.term}")
        if sight.term == last.term and last.vote not in (0, sight.vote):
            self.violations.append(f"{name} voted for {last.vote} in term {last.term}, and then for {sight.vote}")
        if sight.queue_term < last.queue_term:
            self.violations.append(f"{name} went back from term {last.queue_term} of the queue to {sight.queue_term}")


class Watchers:
    """Inspects nodes from its creation on; violations are in `violations`."""

    def __init__(self, replica_set: Watched) -> None:
        self._set = replica_set
        self._sim = replica_set.sim
        self._next_look = 0.0
        self._next_look_at_acks = 0.0
        self._lives: dict[str, Life | None] = {}
        self._judged: dict[FlowstoneError, None] = {}
        self.chronicle = Chronicle()
        self.consensus = Consensus(
            self._sim,
            self.chronicle.violations,
            is_durable=replica_set.plan.wal_mode == "fsync",
            counts_anonymous=self._is_2_6,
        )
        self._expelled = Expelled(replica_set, self.chronicle.violations)
        self.promises = MemberPromises(
            self._sim,
            self.chronicle.violations,
            is_durable=replica_set.plan.wal_mode == "fsync",
            holders=self.consensus.holders,
        )
        self.disk_reports = DiskReports(self._sim, self.chronicle.violations)
        self._sim.loop.before_jump.append(self._look)
        self._sim.before_death.append(self._before_death)

    @property
    def violations(self) -> list[str]:
        return self.chronicle.violations

    @property
    def _is_2_6(self) -> bool:
        return self._set.plan.dialect == "2.6"

    def _look(self) -> None:
        now = self._sim.loop.time()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        for name in (*self._set.members, *self._set.anonymous, *running(self._set)):
            self._look_at(name)
        self._expelled.look()
        self.consensus.look(self._set.members, self._set.anonymous)
        self.promises.look(self._set.members)
        self.disk_reports.look([*self._set.members, *self._set.anonymous])
        if now >= self._next_look_at_acks:
            self._next_look_at_acks = now + ACKS_SECONDS
            self._look_at_acks()
            for name in (*self._set.members, *self._set.anonymous):
                self._look_at_appliers(name)

    def _look_at_acks(self) -> None:
        """Check that no node acknowledged rows that it has not written."""
        nodes = [(name, self._sim.node(name)) for name in self._set.members if self._sim.is_ready(name)]
        written = {node._instance.uuid.int: (name, node._instance.journal.written_vclock) for name, node in nodes}
        for name, node in nodes:
            for relay in node._parts.relays._followers:
                if (found := written.get(relay.replica.uuid.int)) is None:
                    continue
                if not relay.acked.vclock <= found[1]:
                    self.chronicle.violations.append(
                        f"{found[0]} has acknowledged {relay.acked.vclock} to {name}, and written {found[1]}"
                    )

    def _look_at_appliers(self, name: str) -> None:
        if not self._sim.is_ready(name):
            return
        for applier in self._sim.node(name)._parts.replication._appliers.values():
            error = applier.error
            if applier.state is not ApplierState.STOPPED or error is None or error in self._judged:
                continue
            self._judged[error] = None
            if not self._may_stop(name, applier.uri.host, error):
                self.chronicle.violations.append(f"{name} does not follow {applier.uri.host} any more: {error}")

    def _may_stop(self, name: str, peer: str, error: FlowstoneError) -> bool:
        """Return True if an applier may stop: rows could not be written; in 2.6, some arrived while others were
        pending, or the peer lacks rows that later versions keep requesting."""
        if peer in self._set.departed:
            return True
        if isinstance(error, errors.WalIo) or not self._is_2_6:
            return isinstance(error, errors.WalIo)
        if MISSING in error.message:
            # It keeps a log for members once it had it; it never had rows from before it joined.
            return name in self._set.anonymous or str(first_vclock(peer, self._sim.storage(peer))) in error.message
        return isinstance(error, errors.UncommittedForeignSyncTxns)

    def _look_at(self, name: str) -> None:
        if not self._sim.is_ready(name):
            return
        machine = self._sim.machine(name)
        if self._lives.get(name) is not machine.life:
            self._lives[name] = machine.life
            if self._is_2_6:  # whose snapshots do not include it
                self.chronicle.lost_confirmed(machine.uuid)
        self.chronicle.see(machine.uuid, name, sight(self._sim.node(name)))

    def _before_death(self, name: str, loss: Loss) -> None:
        if name not in (*self._set.members, *self._set.anonymous, *self._set.departed):
            return
        self._look_at(name)
        if name not in self._set.departed:
            self._look_at_appliers(name)
        if self._set.plan.wal_mode != "fsync":
            self._check_vote(name)
            if loss is not Loss.NOTHING:
                self.chronicle.lost_unsynced(self._sim.machine(name).uuid)

    def _check_vote(self, name: str) -> None:
        """Check the vote in the log.

        Terms and votes are synced even if logs are not: no power loss happens there, but one might.
        """
        if not self._sim.is_ready(name):
            return
        raft = self._sim.node(name)._instance.elections.raft
        try:
            left = voted(read_log(name, self._sim.storage(name).as_synced()))
        except XlogError:
            return  # it could not start with that log, and so would not vote
        if left != (raft.term, raft._vote):
            self.chronicle.violations.append(
                f"{name} has voted for {raft._vote} in term {raft.term},"
                f" and would have for {left[1]} in {left[0]} if it lost its power now"
            )


def voted(log: NodeLog) -> tuple[int, int]:
    """Return term and vote as recovery finds them."""
    rows = (*log.snapshot, *(row for record in log.records for row in record.rows))
    states = [unpacked(row.body) for row in rows if row.type == RAFT]
    return (states[-1][RaftKey.TERM], states[-1].get(RaftKey.VOTE, 0)) if states else (1, 0)


def sight(node: Node) -> Sight:
    # Without `info()`, which would take most of the run.
    instance = node._instance
    raft, limbo = instance.elections.raft, instance.queue.limbo
    return Sight(
        instance.journal.written_vclock,
        limbo.confirmed_vclock,
        raft.term,
        raft._vote,
        raft.state is ElectionState.LEADER,
        limbo.term,
        limbo.owner_id,
    )
