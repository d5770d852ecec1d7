"""The rules by which an epoch becomes durable, driven by sessions that begin, end and abort.

Pure (`docs/spec/limestone.md#epoch-update`): no file, no network, no clock. `datastore.py` carries out what is due.

Theory of operation
-------------------

The application numbers its work by epochs, which never decrease. A session belongs to the epoch that is current when it
begins. An epoch is durable when a later epoch has begun and all sessions of this and of earlier epochs have ended. No
session can be added to a durable epoch.

Input: `switch` begins an epoch; `begin`, `finish` and `abort` report the sessions of the channels; `recorded` confirms
a record. The caller calls `finish` only when the session is durable on every side that counts. Output: a `Due`, which
names the epoch to record in the epoch file and on the replicas, and the epoch to report as durable to the application.

An epoch passes through these stages:

- current: sessions begin in it.
- closed: a later epoch is current, but sessions of this one, or of an earlier one, are open.
- due: all those sessions have ended. The largest due epoch is recorded, and covers all before it. One record is
  due at a time; the next follows when `recorded` confirms the first.
- durable: the record is written. An epoch in which no session has ended is never recorded; it becomes durable as soon
  as all earlier epochs are durable.

The original keeps only the last epoch of each channel, and reports epochs that no file contains when a channel is
already in a later epoch. Here, every epoch with an ended session is kept until it is recorded.

Invariants:

- `informed` never covers an epoch with an open session, or with an ended session that is not recorded.
- `durable` and `informed` never decrease.
- No session begins in an epoch up to `floor`: recovery has found that epoch durable.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Final, NamedTuple

from flowstone.limestone.errors import WrongTime
from flowstone.limestone.format.names import CHANNELS_MAX

EPOCH_MAX: Final = (1 << 64) - 1


class Due(NamedTuple):
    """The next actions: record epoch `record`; report `inform` and all epochs before it as durable. None: no action."""

    record: int | None = None
    inform: int | None = None


class EpochRules:
    """`last_epoch`: the epoch that recovery found; it is durable, and no session may begin in it.

    `is_pending`: replicas may lack it. It is due to be recorded again, and nothing is reported before.
    """

    def __init__(self, last_epoch: int = 0, *, is_pending: bool = False) -> None:
        self.switched = last_epoch
        """The epoch of sessions that begin now."""
        self.durable = last_epoch
        """The largest epoch that is recorded."""
        self.informed = last_epoch
        """The largest epoch reported as durable. It may be larger than the recorded one if it has no session."""
        self.floor = last_epoch
        """The largest epoch before this run; sessions have later ones."""
        self._recording: int | None = None
        self._working: list[int | None] = []
        self._finished: list[int] = [last_epoch] if is_pending and last_epoch else []
        """Epochs with an ended session that are not recorded, in order."""

    def add_channel(self) -> int:
        """Add a channel, and return its number."""
        if len(self._working) >= CHANNELS_MAX:
            raise WrongTime(f"too many log channels: the limit is {CHANNELS_MAX}", hint="reuse existing channels")
        self._working.append(None)
        return len(self._working) - 1

    def working(self, channel: int) -> int | None:
        """Return the epoch of the open session of a channel, or None."""
        return self._working[channel]

    def begin(self, channel: int) -> int:
        """Begin a session, and return its epoch."""
        if self._working[channel] is not None:
            raise WrongTime(f"log channel {channel} has an open session", hint="end or abort it first")
        if self.switched <= self.floor:
            raise WrongTime(
                f"cannot begin a session in epoch {self.switched}: it is already durable",
                hint=f"call switch_epoch with {self.floor + 1} or more first",
            )
        self._working[channel] = self.switched
        return self.switched

    def finish(self, channel: int) -> Due:
        """Note that the session of this channel has ended and is durable."""
        epoch = self._close(channel)
        place = bisect_left(self._finished, epoch)
        if self._finished[place : place + 1] != [epoch]:
            self._finished.insert(place, epoch)
        return self._update()

    def abort(self, channel: int) -> Due:
        """Note that the session of this channel was aborted and left nothing."""
        self._close(channel)
        return self._update()

    def switch(self, epoch: int) -> Due:
        """Begin an epoch: sessions that begin from now on belong to it. The current epoch again has no effect."""
        if not self.switched <= epoch <= EPOCH_MAX:
            raise WrongTime(
                f"cannot switch to epoch {epoch}: current epoch is {self.switched}", hint="epochs must not decrease"
            )
        self.switched = epoch
        return self._update()

    def recorded(self, epoch: int) -> Due:
        """Note that the epoch that was due is recorded everywhere that counts."""
        if epoch != self._recording:
            raise WrongTime(f"cannot record epoch {epoch}: epoch {self._recording} is due")
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
        # An epoch with a session that is not recorded yet delays the report of all later ones.
        reached = self._finished[0] - 1 if count else settled
        if reached > self.informed:
            inform = self.informed = reached
        return Due(record, inform)
