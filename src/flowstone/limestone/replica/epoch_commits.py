"""Sessions of a master that are open or being synced on a replica, and epochs that can be recorded.

Pure: events of the log channels of one master go in, the facts that a GROUP_COMMIT depends on come out. The original's
master sends a GROUP_COMMIT while sessions of that epoch are open, and waits for the answer before it ends them
(`docs/spec/limestone.md#stored-and-propagated`). With the answer it reports the epoch to its clients, so the record
must be on disk by then, as it is on the original's replica. The replica cannot wait for a session that has not ended;
it hides the session instead, so that it does not count before its end (`log_file_channel.py`).
"""

from __future__ import annotations


class EpochCommits:
    """Sessions by channel id. A channel has at most one open session, and any number that are being synced."""

    def __init__(self) -> None:
        self.lost: int | None = None
        """The smallest epoch of a session that began and never ended."""
        self._open: dict[int, int] = {}
        self._syncing: dict[int, list[int]] = {}

    @property
    def is_idle(self) -> bool:
        """True if no session is open or being synced."""
        return not self._open and not self._syncing

    def begun(self, channel: int, epoch: int) -> None:
        self._open[channel] = epoch

    def ended(self, channel: int) -> None:
        self._syncing.setdefault(channel, []).append(self._open.pop(channel))

    def synced(self, channel: int) -> None:
        """Note that all ended sessions of this channel are durable."""
        self._syncing.pop(channel, None)

    def dropped(self, channel: int) -> None:
        """Note that this channel is closed: its open and unsynced sessions are lost."""
        epochs = self._syncing.pop(channel, [])
        if channel in self._open:
            epochs.append(self._open.pop(channel))
        if epochs:
            self.lost = min(epochs) if self.lost is None else min(self.lost, *epochs)

    def is_syncing(self, epoch: int) -> bool:
        """True if a session of this epoch or an earlier one has ended and is not on disk yet."""
        return any(each <= epoch for epochs in self._syncing.values() for each in epochs)

    def has_lost(self, epoch: int) -> bool:
        """True if a session of this epoch or an earlier one will never be complete here."""
        return self.lost is not None and self.lost <= epoch
