"""Peers that have lost rows of their own which we have, and whether they have them again.

A peer that forgets what it has written gives the same LSNs to other rows, which everybody else passes over as known:
the data of the two differ then, and nothing shows it. Vclocks do not tell whose rows are behind a number. So a loss is
kept in mind until the peer was seen with exactly the last row that it had lost: who gets rows back has no others before
that, while who writes others is rarely seen just there. Pure, and not to be forgotten when a connection ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from flowstone.errors import FlowstoneError
from flowstone.replication.vclock import VClock


class TailLost(FlowstoneError):
    """The peer does not have rows that it has written itself, and we have; or it has others in their place."""

    def __init__(self, message: str, *, hint: str, may_come_back: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.may_come_back = may_come_back
        """It may get them from somebody, so that asking again has a point."""


@dataclass(slots=True)
class _Loss:
    number: int
    """The id of the peer."""
    kept: int
    last: int


class LostTails:
    """What each peer, by its UUID, has lost and not got back yet, as far as we know."""

    def __init__(self) -> None:
        self._losses: dict[UUID, _Loss] = {}

    def check(self, peer: str, uuid: UUID, number: int, theirs: VClock, ours: VClock) -> TailLost | None:
        """What is wrong with following a peer with id `number` whose vclock is `theirs`; None: nothing."""
        if not number:  # who is anonymous writes nothing
            return None
        has = theirs.get(number)
        loss = self._losses.get(uuid)
        if loss is not None and loss.number != number:
            loss = None  # a member under a new id: its rows are counted anew
        if has < ours.get(number):
            kept, last = has, ours.get(number)
            if loss is not None:
                kept, last = min(kept, loss.kept), max(last, loss.last)
            self._losses[uuid] = _Loss(number, kept, last)
            return TailLost(
                f"{peer} has lost its rows {has + 1}…{last}: its vclock is {theirs}, ours {ours}",
                hint="it must get them back from an instance that has them, or join the set anew",
                may_come_back=True,
            )
        if loss is None or has == loss.last:
            self._losses.pop(uuid, None)
            return None
        return TailLost(
            f"{peer} had lost its rows {loss.kept + 1}…{loss.last} and has written others since, maybe in their place:"
            f" its vclock is {theirs}, ours {ours}",
            hint="compare its data with ours; then let it join anew, or set `replication` again to follow it as it is",
        )

    def acknowledged(self, number: int, vclock: VClock) -> None:
        """The peer with this id, as one that follows us, has written all of `vclock`."""
        for uuid, loss in tuple(self._losses.items()):
            if loss.number == number and vclock.get(number) == loss.last:
                del self._losses[uuid]
