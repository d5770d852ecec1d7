"""Promises of an electing replica set as a whole, checked from outside: no single member could check them.

Confirmed rows are in the logs of a majority, and of the quorum configured at the deciding member. A new leader has
every row that was ever confirmed, and discards none of its own. Nodes at the same position have the same data. Rows
that a node reports as durable would survive a power loss now. The checks read the memory and disks of nodes, and do not
rely on what a node knows about others.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Final

from flowstone.box.box import Box
from flowstone.box.system import CLUSTER_ID, FIRST_USER_SPACE_ID
from flowstone.iproto.msgpack import unpack
from flowstone.node.instance import Instance
from flowstone.node.wal.journal import Journal
from flowstone.replication.limbo.control_rows import Demote, Promote, Rollback
from flowstone.replication.raft.election import ElectionState
from flowstone.replication.vclock import VClock, VClockBuilder
from tests.simulation.cluster import decided_members
from tests.simulation.disk import Loss
from tests.simulation.simulation import Simulation

CONTENTS_SECONDS: Final = 1.0
"""Interval of comparisons of all data, which are slow."""

SHOWN_MAX: Final = 3
"""Maximum number of reported violations of one kind; one causes others."""


class Consensus:
    """Call `look` periodically; violations are appended to `violations`."""

    def __init__(self, sim: Simulation, violations: list[str], *, is_durable: bool, counts_anonymous: bool) -> None:
        """`counts_anonymous`: all anonymous replicas together count as one more member, as in 2.6."""
        self._sim = sim
        self._violations = violations
        self._is_durable = is_durable
        self._counts_anonymous = counts_anonymous
        self._anonymous = VClockBuilder()
        """The rows that any anonymous replica ever acknowledged."""
        self._confirmed = VClockBuilder()
        """All rows that were ever seen confirmed."""
        self._written: dict[str, VClock] = {}
        """By name: the last seen vclock of the log of each node."""
        self._unseen: dict[str, None] = {}
        """Nodes that died while starting, and may have written and acknowledged rows before that."""
        self._terms: dict[int, None] = {}
        """Terms whose leaders were checked."""
        self._told: dict[str, int] = {}
        self._next_comparison = 0.0
        self._heard: dict[str, Journal] = {}
        """Nodes whose verdicts are checked when they are written."""
        self._members: list[str] = []
        self._ever: dict[str, None] = {}
        """All nodes that were ever members."""
        self._registered: dict[str, VClock] = {}
        """By UUID: the logs of the nodes that had it as a member, by committed rows."""
        self._positions: dict[str, VClock] = {}
        """By name: the position at which the members of each node were last read."""
        self._quorums: dict[str, int] = {}
        """The last seen quorum of each node; it may change during a decision."""
        sim.before_death.append(self._before_death)

    def look(self, members: list[str], anonymous: list[str]) -> None:
        ready = {name: self._sim.node(name)._instance for name in (*members, *anonymous) if self._sim.is_ready(name)}
        self._members = members
        self._ever |= dict.fromkeys(members)
        for name, instance in ready.items():
            self._written[name] = instance.journal.written_vclock
            self._unseen.pop(name, None)
            self._quorums[name] = instance.queue.limbo.quorum
            self._note_registered(name, instance)
            self._hear_anonymous(instance)
            if self._heard.get(name) is not instance.journal:
                self._heard[name] = instance.journal
                instance.journal.on_written.append(partial(self._verdict_written, name, instance))
            if self._is_durable:
                self._look_at_disk(name, instance)
        for name in members:
            if name in ready:
                self._look_at_verdicts(name, ready[name])
        for name in members:
            if name in ready:
                self._look_at_leader(name, ready[name])
        if self._sim.now >= self._next_comparison:
            self._next_comparison = self._sim.now + CONTENTS_SECONDS
            self._compare(ready)

    def _before_death(self, name: str, loss: Loss) -> None:
        if self._sim.is_ready(name):
            self._written[name] = self._sim.node(name)._instance.journal.written_vclock
        else:
            self._unseen[name] = None

    def _tell(self, kind: str, what: str) -> None:
        self._told[kind] = self._told.get(kind, 0) + 1
        if self._told[kind] <= SHOWN_MAX:
            self._violations.append(what)

    # --- confirmed rows are in the logs of a majority ---

    def _verdict_written(self, name: str, instance: Instance, rows: bytes, vclock: VClock) -> None:
        """Check a verdict when it is written: a quorum must have the rows that it confirms."""
        self._written[name] = vclock
        request = instance.queue.limbo._writing
        if request is None or request.origin_id != instance.id or isinstance(request.body, Rollback):
            return
        for member in self._members:
            if self._sim.is_ready(member):
                self._written[member] = self._sim.node(member)._instance.journal.written_vclock
        self._hear_anonymous(instance)
        quorum = min(instance.queue.limbo.quorum, self._quorums.get(name, 0))
        self._check_majority(name, instance, request.body.owner_id, request.body.lsn, quorum)
        self._check_transfer(name, instance, request.body, quorum)
        newest = instance.queue.limbo._queue.last_synchronous
        if isinstance(request.body, Promote | Demote) and newest is not None and newest.lsn > request.body.lsn:
            # It may have been confirmed and reported by another member.
            text = f"{name} takes the queue of {request.body.owner_id} over up to row {request.body.lsn}, and gives up"
            self._tell("takeover", f"{text} row {newest.lsn}, which it has")

    def _check_transfer(self, name: str, instance: Instance, body: object, quorum: int) -> None:
        """Check that a quorum has the rows that a transfer of the queue confirms."""
        limbo = instance.queue.limbo
        if not isinstance(body, Promote | Demote) or not body.owner_id or body.lsn <= limbo.confirmed_lsn:
            return
        known = len(limbo._acks.holders(body.owner_id, body.lsn) | {instance.id})
        if known < quorum:
            text = f"{name} takes the queue of {body.owner_id} over up to row {body.lsn},"
            self._tell("transfer", f"{text} which it knows {known} to have; {quorum} must")

    def _look_at_verdicts(self, name: str, instance: Instance) -> None:
        confirmed = instance.queue.limbo.confirmed_vclock
        if confirmed <= self._confirmed.vclock():
            return
        for owner_id, lsn in confirmed.to_mapping().items():
            self._check_majority(name, instance, owner_id, lsn)

    def _note_registered(self, name: str, instance: Instance) -> None:
        written = instance.journal.written_vclock
        if written != self._positions.get(name):
            self._positions[name] = written
            for uuid in decided_members(instance.box).values():
                self._registered[uuid] = self._registered.get(uuid, VClock()).merged(written)

    def _check_majority(self, name: str, instance: Instance, owner_id: int, lsn: int, quorum: int = 0) -> None:
        if not owner_id or lsn <= self._confirmed.get(owner_id):
            return
        self._confirmed.follow(owner_id, lsn)
        names = {self._sim.machine(name).uuid: name for name in self._ever}
        uuids = list(decided_members(instance.box).values())
        # A member that has just joined is not in `_cluster` here yet and cannot be inspected; it may have the row.
        strangers = sum(uuid not in names for uuid in uuids)
        # In 2.6 an operator sets the quorum, possibly after a member has joined; and no other member can lead there.
        if not self._counts_anonymous:
            known = [names[uuid] for uuid in uuids if uuid in names]
            # A member expelled since the row was written was counted then. That is safe: a node that knows of the
            # expulsion, and therefore needs a smaller quorum, has read this row before.
            gone = [uuid for uuid, had in self._registered.items() if uuid not in uuids and had.get(owner_id) >= lsn]
            before = [*known, *(names[uuid] for uuid in gone if uuid in names)]
            needed_before = (len(uuids) + len(gone)) // 2 + 1 - strangers
            if len(self._holders(before, owner_id, lsn)) < needed_before:
                self._check_holders(name, owner_id, lsn, known, len(uuids) // 2 + 1 - strangers)
        # The quorum may have been reached with members that have left since.
        self._check_holders(name, owner_id, lsn, self._ever, min(quorum, len(uuids)) - strangers)

    def _check_holders(self, name: str, owner_id: int, lsn: int, known: Iterable[str], needed: int) -> None:
        holders = self._holders(known, owner_id, lsn)
        is_followed = self._counts_anonymous and self._anonymous.get(owner_id) >= lsn
        if len(holders) + is_followed < needed:
            text = f"{name} has row {lsn} of {owner_id} confirmed, which only {', '.join(holders)} have; {needed} must"
            self._tell("verdict", text)

    def _holders(self, known: Iterable[str], owner_id: int, lsn: int) -> list[str]:
        return [name for name in known if self._may_have(name, owner_id, lsn)]

    def holders(self, owner_id: int, lsn: int) -> list[str]:
        """Return the members, present and former, that have a row or may have it."""
        for name in self._ever:
            if self._sim.is_ready(name):
                self._written[name] = self._sim.node(name)._instance.journal.written_vclock
        return self._holders(self._ever, owner_id, lsn)

    def _hear_anonymous(self, instance: Instance) -> None:
        """Record the ACKs of anonymous replicas, including listeners and archives, whose logs cannot be inspected."""
        if self._counts_anonymous and (acked := instance.queue.limbo._acks._vclocks.get(0)) is not None:
            for origin_id, lsn in acked:
                if lsn > self._anonymous.get(origin_id):
                    self._anonymous.follow(origin_id, lsn)

    def _may_have(self, name: str, owner_id: int, lsn: int) -> bool:
        """Return True for nodes that are starting: their writes cannot be seen."""
        is_starting = self._sim.is_running(name) and not self._sim.is_ready(name)
        return is_starting or name in self._unseen or self._written.get(name, VClock()).get(owner_id) >= lsn

    # --- a new leader has all confirmed rows ---

    def _look_at_leader(self, name: str, instance: Instance) -> None:
        raft = instance.elections.raft
        if raft.state is not ElectionState.LEADER or raft.term in self._terms:
            return
        self._terms[raft.term] = None
        confirmed, written = self._confirmed.vclock(), instance.journal.written_vclock
        if not confirmed <= written:
            self._tell("leader", f"{name} leads term {raft.term} at {written}, and {confirmed} was confirmed before")

    # --- nodes at one position have the same data ---

    def _compare(self, ready: dict[str, Instance]) -> None:
        places: dict[str, list[str]] = {}
        for name, instance in ready.items():
            if _is_at_rest(instance):
                places.setdefault(str(instance.vclock.without_zero()), []).append(name)
                self._look_at_indexes(name, instance.box)
        for position, (first, *others) in places.items():
            expected = _data(ready[first].box) if others else {}
            for name in others:
                for number, tuples in _data(ready[name].box).items():
                    if tuples != expected.get(number, []):
                        ours, theirs = _only(tuples, expected.get(number, [])), _only(expected.get(number, []), tuples)
                        text = f"{name} and {first} are at {position}, but in {number} only {name} has {ours}"
                        self._tell("data", f"{text}, only {first} {theirs}")

    def _look_at_indexes(self, name: str, box: Box) -> None:
        for number, space in box.spaces.items():
            for index in space.indexes.values() if number >= FIRST_USER_SPACE_ID and len(space.indexes) > 1 else ():
                found = [raw for _, raw in index.scan()]
                if sorted(found) != sorted(space.tuples()):
                    text = f"index {index.definition.name} of {number} on {name} has {[unpack(raw) for raw in found]}"
                    self._tell("index", f"{text}, and not what it indexes")

    # --- written rows are on disk ---

    def _look_at_disk(self, name: str, instance: Instance) -> None:
        journal, storage = instance.journal, self._sim.storage(name)
        writer = journal._writer
        if not journal.is_idle or writer is None or not writer.is_usable or storage.broken:
            return
        inode = storage.names.get(writer.path)
        # Remains of a failed write may come back; written rows must not vanish.
        if inode is not None and inode.unsynced and not inode.synced.startswith(inode.data):
            self._tell("disk", f"{name} takes for written what {writer.path} would lose with the power now")


def _is_at_rest(instance: Instance) -> bool:
    """Return True if all rows of the node are written and decided."""
    return instance.journal.is_idle and not instance.box.in_flight and not instance.queue.limbo


def _data(box: Box) -> dict[int, list[bytes]]:
    """Return the data that changes in a run: the tuples of clients and the members. The rest is compared at the end."""
    return {
        number: list(space.tuples())
        for number, space in box.spaces.items()
        if number == CLUSTER_ID or number >= FIRST_USER_SPACE_ID
    }


def _only(tuples: list[bytes], others: list[bytes]) -> list[object]:
    return [unpack(raw) for raw in tuples if raw not in others]
