"""When a replica may write the record of an epoch: not before every session of it that has begun is on disk.

Pure: what the channels of one master do goes in, what is to be done about a GROUP_COMMIT comes out. A real master in
its default order sends it while a session of that epoch is open, and waits for the answer before it ends the session
(reference: STORED and PROPAGATED): then it is answered at once, and the record is written when the session has ended.
"""

from __future__ import annotations

from enum import Enum


class Decision(Enum):
    RECORD = "record"
    """All that has begun is on disk: write the record, then answer."""

    WAIT = "wait"
    """Some session has ended and is being synced: ask again when that is done."""

    DEFER = "defer"
    """Some session may be waiting for the answer to this: answer, and record when it has ended."""

    REFUSE = "refuse"
    """Some session will never end: the epoch is not whole here."""


class Commits:
    """Channels by their ids. A channel has at most one open session, and any number that are being synced."""

    def __init__(self) -> None:
        self.lost: int | None = None
        """The smallest epoch of a session that began and never ended."""
        self._open: dict[int, int] = {}
        self._syncing: dict[int, list[int]] = {}
        self._deferred: int | None = None

    @property
    def is_idle(self) -> bool:
        """No session is on its way."""
        return not self._open and not self._syncing

    def begun(self, channel: int, epoch: int) -> None:
        self._open[channel] = epoch

    def ended(self, channel: int) -> None:
        self._syncing.setdefault(channel, []).append(self._open.pop(channel))

    def synced(self, channel: int) -> None:
        """All of this channel that have ended are on disk."""
        self._syncing.pop(channel, None)

    def dropped(self, channel: int) -> None:
        """Nothing more will come of this channel, nor be written of what has come."""
        epochs = self._syncing.pop(channel, [])
        if channel in self._open:
            epochs.append(self._open.pop(channel))
        if epochs:
            self.lost = min(epochs) if self.lost is None else min(self.lost, *epochs)
        if self.lost is not None and self._deferred is not None and self._deferred >= self.lost:
            self._deferred = None

    def decide(self, epoch: int) -> Decision:
        if self.lost is not None and epoch >= self.lost:
            return Decision.REFUSE
        if any(each <= epoch for epochs in self._syncing.values() for each in epochs):
            return Decision.WAIT
        if any(each <= epoch for each in self._open.values()):
            return Decision.DEFER
        return Decision.RECORD

    def defer(self, epoch: int) -> None:
        self._deferred = epoch if self._deferred is None else max(self._deferred, epoch)

    def due(self) -> int | None:
        """The epoch that was deferred and can be recorded now; it is asked for once."""
        if self._deferred is None or self.decide(self._deferred) is not Decision.RECORD:
            return None
        epoch, self._deferred = self._deferred, None
        return epoch
