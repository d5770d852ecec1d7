"""Detection of peers that have lost rows of their own, which we have, and of their recovery.

A peer that has lost its last rows assigns their LSNs to new rows, and other members skip the new rows as known: the
data differs from then on without an error. A vclock does not show which row an LSN identifies. So a loss is remembered
until the peer is seen with exactly the last row that it had lost. A peer that gets its rows back reaches that point
before it writes new rows; a peer that writes new rows is rarely seen at exactly that point. Pure; the state must
outlive the connection.
"""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from flowstone.errors import FlowstoneError
from flowstone.replication.vclock import VClock


class TailLost(FlowstoneError):
    """The peer has lost rows that it wrote itself and that we have, or has other rows in their place."""

    def __init__(self, message: str, *, hint: str, may_come_back: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.may_come_back = may_come_back
        """True if the peer may get the rows back, so that a retry can help."""


@dataclass(slots=True)
class _Loss:
    number: int
    """The id of the peer."""
    kept: int
    """Its last own LSN that was not lost."""
    last: int
    """Its last own LSN that was lost."""


class LostTails:
    """The known losses that are not repaired yet, by the UUID of the peer."""

    def __init__(self) -> None:
        self._losses: dict[UUID, _Loss] = {}

    def check(self, peer: str, uuid: UUID, number: int, theirs: VClock, ours: VClock) -> TailLost | None:
        """Return the error that prevents following the peer with id `number` at vclock `theirs`; None if it may be."""
        if not number:  # an anonymous replica writes no rows
            return None
        has = theirs.get(number)
        loss = self._losses.get(uuid)
        if loss is not None and loss.number != number:
            loss = None  # the member has a new id, so its LSNs start again
        if has < ours.get(number):
            kept, last = has, ours.get(number)
            if loss is not None:
                # The peer may have lost rows twice. All of them are in doubt until the last one is back.
                kept, last = min(kept, loss.kept), max(last, loss.last)
            self._losses[uuid] = _Loss(number, kept, last)
            return TailLost(
                f"{peer} has lost its rows {has + 1}…{last}: its vclock is {theirs}, ours {ours}",
                hint="let the peer receive the rows from a member that has them, or rejoin the peer",
                may_come_back=True,
            )
        # Accept exactly the last lost row: a peer past it may have written new rows under the lost LSNs.
        if loss is None or has == loss.last:
            self._losses.pop(uuid, None)
            return None
        return TailLost(
            f"{peer} had lost its rows {loss.kept + 1}…{loss.last} and has written new rows since, possibly under the"
            f" same LSNs: its vclock is {theirs}, ours {ours}",
            hint="compare the peer's data with ours; then rejoin the peer, or set `replication` again to follow it",
        )

    def acknowledged(self, number: int, vclock: VClock) -> None:
        """Record that the peer with this id, which follows us, has all rows up to `vclock`."""
        for uuid, loss in tuple(self._losses.items()):
            if loss.number == number and vclock.get(number) == loss.last:
                del self._losses[uuid]
