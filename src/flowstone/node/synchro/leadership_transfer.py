"""Transfer of the leadership by a leader that is about to stop.

A set whose leader just disappears has no leader until its silence is noticed (4 × `replication_timeout`). A leader that
stops in order can do better, with the messages that members know anyway: it becomes read-only, waits until a quorum
has its last row, and resigns. The other candidates start an election at once, and the former leader stays until it has
voted and all members know its successor. All of this is bounded by `election_transfer_timeout`, and an error never
prevents the stop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from flowstone.errors import OutcomeUnknown
from flowstone.iproto import errors
from flowstone.node.instance import Instance
from flowstone.replication.raft.election import ElectionMode, ElectionState
from flowstone.replication.vclock import VClock

LOG = logging.getLogger("flowstone.node")


class Acknowledgements(Protocol):
    """The ACKs of the members that follow this instance; implemented by `Relays`."""

    on_ack: list[Callable[[int, VClock], None]]

    def count_having(self, vclock: VClock) -> int:
        """Return the number of connected members that have acknowledged all rows up to `vclock`."""
        ...


async def transfer_leadership(instance: Instance, members: Acknowledgements, timeout: float) -> None:
    """Let another candidate lead, if this instance leads and the others can elect one; return when all know it.

    Return after `timeout` seconds in any case. Then the set elects its leader as after a crash.
    """
    elections = instance.elections
    if timeout <= 0 or not _is_leader(instance):
        return
    wake: Callable[[int, VClock], None] = lambda replica_id, vclock: elections.wake()  # noqa: E731
    members.on_ack.append(wake)
    try:
        async with asyncio.timeout(timeout):
            if await _others_are_ready(instance, members):
                instance.is_stopping = True
                instance.settle_read_only()
                await _caught_up(instance, members)
                LOG.info("transferring leadership: a quorum has all rows up to %s", instance.vclock)
                elections.retire()
                # A member that lost the election, and then loses this member before it hears of the winner, would
                # start another election.
                await _until(instance, lambda: elections.raft.is_leader_known_to_all)
    except TimeoutError:
        elections.retire()
    finally:
        members.on_ack.remove(wake)
    if instance.is_stopping and elections.raft.leader not in (0, instance.id):
        LOG.info("leadership transferred to replica %d", elections.raft.leader)
    elif instance.is_stopping:
        LOG.warning("leadership not transferred within %g s (election_transfer_timeout)", timeout)


def _is_leader(instance: Instance) -> bool:
    """Return True if this instance leads as a candidate. With `election_mode=manual`, an operator decides who leads."""
    elections = instance.elections
    return elections.raft.state is ElectionState.LEADER and elections.mode is ElectionMode.CANDIDATE


async def _others_are_ready(instance: Instance, members: Acknowledgements) -> bool:
    """Return True if the connected members are a quorum without this one.

    If they follow us but we do not follow them all, as after the restart of a member, wait until we do, still writable.
    """
    quorum = instance.elections.raft.peers.quorum
    while not _others_are_quorum(instance):
        if members.count_having(VClock()) < quorum or not _is_leader(instance):
            return False
        await instance.elections.changed()
    return _is_leader(instance)


def _others_are_quorum(instance: Instance) -> bool:
    peers = instance.elections.raft.peers
    return len(peers.healthy) >= peers.quorum


async def _caught_up(instance: Instance, members: Acknowledgements) -> None:
    """Wait until all pending transactions are decided, and a quorum has all rows."""
    while not _is_caught_up(instance, members) and _others_are_quorum(instance):
        if not instance.queue.is_empty:
            # Whatever the verdicts are, clients get them; each is a row that the quorum must have, too.
            with suppress(errors.SyncRollback, errors.SyncQuorumTimeout, OutcomeUnknown):
                await instance.queue.settled()
        await instance.journal.drain()
        if not _is_caught_up(instance, members):
            await instance.elections.changed()


def _is_caught_up(instance: Instance, members: Acknowledgements) -> bool:
    if not instance.queue.is_empty or not instance.journal.is_idle:
        return False
    needed = max(instance.elections.raft.peers.quorum - 1, 1)
    return members.count_having(instance.vclock.without_zero()) >= needed


async def _until(instance: Instance, condition: Callable[[], bool]) -> None:
    """Wait until `condition` is true, or too few members are connected for an election."""
    while not condition() and _others_are_quorum(instance):
        await instance.elections.changed()
