"""When an epoch is durable: what sessions begin, end and are taken back, what that makes due.

Pure (reference: datastore and log channel contract, update). Events in, `Due` out: which epoch to record in the epoch
file and on the replicas, and of which one to inform who waits. One record is due at a time; the next one comes when the
first is said to be `recorded`. Whoever calls tells of a session's end only when every side that counts has it on disk.

An epoch is durable when a later one has been switched to and every session of it, and of older ones, has ended. Only
epochs in which a session has ended are recorded; of others one is informed all the same. Unlike the original we keep
every epoch in which a session has ended, not the last one of each channel: it informs of epochs that no file has when
a channel is already further.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Final, NamedTuple

from flowstone.limestone.errors import WrongTime
from flowstone.limestone.names import CHANNELS_MAX

EPOCH_MAX: Final = (1 << 64) - 1


class Due(NamedTuple):
    """What is to be done now: record this epoch, tell that this one and all before it are durable; None for nothing."""

    record: int | None = None
    inform: int | None = None


class EpochRules:
    """`last_epoch`: what recovery has found; it is durable, and no session may be of it.

    `is_pending`: replicas may not have it. So it is due to be recorded once more, and nothing is told before.
    """

    def __init__(self, last_epoch: int = 0, *, is_pending: bool = False) -> None:
        self.switched = last_epoch
        """The epoch of sessions that begin now."""
        self.durable = last_epoch
        """The largest epoch that is recorded."""
        self.informed = last_epoch
        """The largest epoch that was said to be durable. With no session in it, it may be beyond the recorded one."""
        self.floor = last_epoch
        """The largest epoch that was there before: sessions are of later ones."""
        self._recording: int | None = None
        self._working: list[int | None] = []
        self._finished: list[int] = [last_epoch] if is_pending and last_epoch else []
        """Epochs that have a session and are not recorded, in order."""

    def add_channel(self) -> int:
        """The number of a new channel."""
        if len(self._working) >= CHANNELS_MAX:
            raise WrongTime(f"there are {CHANNELS_MAX} log channels already", hint="use the ones that there are")
        self._working.append(None)
        return len(self._working) - 1

    def working(self, channel: int) -> int | None:
        """The epoch of the session that is open on a channel."""
        return self._working[channel]

    def begin(self, channel: int) -> int:
        """The epoch of the session that begins."""
        if self._working[channel] is not None:
            raise WrongTime(f"log channel {channel} has an open session", hint="end or abort it first")
        if self.switched <= self.floor:
            raise WrongTime(
                f"no session can begin in epoch {self.switched}: it is durable already",
                hint=f"call switch_epoch with {self.floor + 1} or more first",
            )
        self._working[channel] = self.switched
        return self.switched

    def finish(self, channel: int) -> Due:
        """The session of this channel is on disk, wherever that counts."""
        epoch = self._close(channel)
        place = bisect_left(self._finished, epoch)
        if self._finished[place : place + 1] != [epoch]:
            self._finished.insert(place, epoch)
        return self._update()

    def abort(self, channel: int) -> Due:
        """Nothing of the session of this channel is left anywhere."""
        self._close(channel)
        return self._update()

    def switch(self, epoch: int) -> Due:
        """Sessions that begin from now on are of this epoch. The current one again changes nothing."""
        if not self.switched <= epoch <= EPOCH_MAX:
            raise WrongTime(
                f"cannot switch to epoch {epoch}: the current one is {self.switched}", hint="epochs only ever grow"
            )
        self.switched = epoch
        return self._update()

    def recorded(self, epoch: int) -> Due:
        """What was due to be recorded is, wherever that counts."""
        if epoch != self._recording:
            raise WrongTime(f"epoch {epoch} was not due to be recorded, but {self._recording}")
        self._recording = None
        self.durable = epoch
        del self._finished[: bisect_right(self._finished, epoch)]
        return self._update()

    def _close(self, channel: int) -> int:
        epoch = self._working[channel]
        if epoch is None:
            raise WrongTime(f"log channel {channel} has no open session", hint="begin one first")
        self._working[channel] = None
        return epoch

    def _update(self) -> Due:
        settled = min(self.switched, *(epoch for epoch in self._working if epoch is not None), EPOCH_MAX) - 1
        record = inform = None
        count = bisect_right(self._finished, settled)
        if count and self._recording is None:
            record = self._recording = self._finished[count - 1]
        # What has a session and is not recorded yet holds up all behind it.
        reached = self._finished[0] - 1 if count else settled
        if reached > self.informed:
            inform = self.informed = reached
        return Due(record, inform)
