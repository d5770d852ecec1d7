"""Putting log files aside at the border between two epochs, so that what they hold can be compacted or backed up.

A rotation begins in some epoch. When a later one has been switched to, every channel without a session puts its file
aside at once, and every other one when its session ends. So the files that were put aside hold sessions up to the epoch
of the border, the new ones later sessions only, and nobody has waited. The original renames files under open sessions,
and loses them (reference: online compaction loses data).

Relies on channels to say when no session is open. Durable when `finished` has returned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from flowstone.limestone import names
from flowstone.limestone.channel import AsyncLogChannel
from flowstone.outside import Outside


@dataclass(frozen=True)
class Rotated:
    """Files that were put aside; all sessions up to `epoch` are in files that no channel writes to."""

    names: tuple[str, ...]
    epoch: int


class Rotation:
    """One rotation of a store's files. `border` is the epoch that it began in."""

    def __init__(self, outside: Outside, directory: str, channels: Sequence[AsyncLogChannel], border: int) -> None:
        self.border = border
        self._outside = outside
        self._directory = directory
        self._channels = channels
        self._left = len(channels)
        self._names: list[str] = []
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def has_work(self) -> bool:
        """Whether there is anything in any log file that could be put aside."""
        disk = self._outside.disk
        return any(disk.size(f"{self._directory}/{name}") for name in self._active())

    def switched(self) -> None:
        """An epoch behind the border has begun. Whoever calls lets no session begin before this returns."""
        owned = [channel.name for channel in self._channels]
        for name in self._active():
            if name not in owned and self._outside.disk.size(f"{self._directory}/{name}"):
                # Of a channel that a process before us had.
                new = self._free_name(name)
                self._outside.disk.rename(f"{self._directory}/{name}", f"{self._directory}/{new}")
                self._names.append(new)
        for channel in self._channels:
            channel.when_closed(partial(self._put_aside, channel))
        if not self._channels:
            self._done.set_result(None)

    async def finished(self) -> Rotated:
        """Wait until every channel has put its file aside, durably."""
        await asyncio.shield(self._done)
        await self._outside.blocking(self._outside.disk.sync_directory, self._directory)
        return Rotated(tuple(self._names), self.border)

    def give_up(self, error: BaseException) -> None:
        """It will never be finished."""
        if not self._done.done():
            self._done.set_exception(error)
            self._done.exception()

    def _put_aside(self, channel: AsyncLogChannel) -> None:
        name = channel.put_aside(self._free_name(channel.name))
        if name is not None:
            self._names.append(name)
        self._left -= 1
        if not self._left and not self._done.done():
            self._done.set_result(None)

    def _active(self) -> list[str]:
        disk = self._outside.disk
        found = (name for name in disk.list_directory(self._directory) if names.is_pwal(name))
        return [
            name for name in found if not names.is_detached(name) and disk.kind(f"{self._directory}/{name}") == "file"
        ]

    def _free_name(self, name: str) -> str:
        """With 0 at its end, as the original has it."""
        milliseconds = int(self._outside.clock.wall() * 1000)
        while self._outside.disk.kind(f"{self._directory}/{names.rotated(name, milliseconds, 0)}") is not None:
            milliseconds += 1
        return names.rotated(name, milliseconds, 0)
