"""Rotation of log files at the border between two epochs, so that their content can be compacted or backed up.

A rotation begins in some epoch. As soon as a later epoch begins, every channel without a session renames its file at
once, and every other channel when its session ends. The renamed files contain sessions up to the epoch of the border,
the new files only later sessions, and no channel has waited. The original renames files under open sessions, and loses
these sessions (`docs/spec/limestone.md#original-defects`).

Relies on channels to report when no session is open. The renames are durable when `finished` returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from flowstone.limestone.format import names
from flowstone.limestone.store.channel import AsyncLogChannel
from flowstone.outside import Outside


@dataclass(frozen=True)
class Rotated:
    """Files that were rotated. All sessions up to `epoch` are in files that no channel writes to."""

    names: tuple[str, ...]
    epoch: int


class Rotation:
    """One rotation of the files of a store. `border` is the epoch in which it began."""

    def __init__(self, outside: Outside, directory: str, channels: Sequence[AsyncLogChannel], border: int) -> None:
        self.border = border
        self._outside = outside
        self._directory = directory
        self._channels = channels
        self._left = len(channels)
        self._names: list[str] = []
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def has_work(self) -> bool:
        """Return True if any log file has content to rotate."""
        disk = self._outside.disk
        return any(disk.size(f"{self._directory}/{name}") for name in self._active())

    def switched(self) -> None:
        """Rotate: an epoch after the border has begun. The caller lets no session begin before this returns."""
        owned = [channel.name for channel in self._channels]
        for name in self._active():
            if name not in owned and self._outside.disk.size(f"{self._directory}/{name}"):
                # The file of a channel that an earlier process had.
                new = self._free_name(name)
                self._outside.disk.rename(f"{self._directory}/{name}", f"{self._directory}/{new}")
                self._names.append(new)
        for channel in self._channels:
            channel.when_closed(partial(self._put_aside, channel))
        if not self._channels:
            self._done.set_result(None)

    async def finished(self) -> Rotated:
        """Wait until every channel has rotated its file, durably."""
        await asyncio.shield(self._done)
        await self._outside.blocking(self._outside.disk.sync_directory, self._directory)
        return Rotated(tuple(self._names), self.border)

    def give_up(self, error: BaseException) -> None:
        """Fail the rotation with `error`."""
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
        """Return an unused name that ends in 0, as in the original."""
        milliseconds = int(self._outside.clock.wall() * 1000)
        while self._outside.disk.kind(f"{self._directory}/{names.rotated(name, milliseconds, 0)}") is not None:
            milliseconds += 1
        return names.rotated(name, milliseconds, 0)
