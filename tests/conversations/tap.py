"""A tap on loopback: it passes bytes between a replica and its upstream, keeps them, and can hold them back.

One tap stands before one server for one replica, so `b-to-a-03` is the third connection that b made to a. All taps of a
recording share a clock. What is held is what the server says: then its replica hears nothing, and its rows are lost
with the connection, as on a wire that is cut in one direction.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

READ_SIZE = 65536


@dataclass
class Tapped:
    """What went over one connection."""

    reads: list[dict[str, object]] = field(default_factory=list)
    sides: dict[str, bytes] = field(default_factory=lambda: {"c2s": b"", "s2c": b""})

    def note(self, side: str, data: bytes, at: float) -> None:
        self.reads.append({"d": side, "t": round(at, 6), "off": len(self.sides[side]), "len": len(data)})
        self.sides[side] += data

    def keep(self, directory: Path, name: str) -> None:
        for side, data in self.sides.items():
            (directory / f"{name}.{side}.bin").write_bytes(data)
        (directory / f"{name}.idx").write_text("".join(f"{json.dumps(read)}\n" for read in self.reads))


class Tap:
    """Listens on `port`, passes on to `server_port`. `clock` tells the seconds since the recording began."""

    def __init__(self, name: str, port: int, server_port: int, clock: Callable[[], float]) -> None:
        self.name = name
        self.port = port
        self.tapped: list[Tapped] = []
        self._server_port = server_port
        self._clock = clock
        self._passing: set[asyncio.Task[None]] = set()
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)

    def hold(self) -> None:
        self._is_open.clear()

    def release(self) -> None:
        self._is_open.set()

    def cut(self) -> None:
        """Ends what is connected; what is held is lost."""
        for task in self._passing:
            task.cancel()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()

    def keep(self, directory: Path, is_kept: Callable[[bytes], bool]) -> None:
        """Writes the recordings of connections over which the replica said what `is_kept` looks for."""
        kept = [tapped for tapped in self.tapped if is_kept(tapped.sides["c2s"])]
        for number, tapped in enumerate(kept, 1):
            tapped.keep(directory, f"{self.name}-{number:02}")

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        except OSError:
            writer.close()
            return
        tapped = Tapped()
        self.tapped.append(tapped)
        sides = (
            asyncio.create_task(self._pass_on(tapped, "c2s", reader, server_writer)),
            asyncio.create_task(self._pass_on(tapped, "s2c", server_reader, writer)),
        )
        self._passing.update(sides)
        await asyncio.wait(sides, return_when=asyncio.FIRST_COMPLETED)
        for task in sides:
            task.cancel()
        await asyncio.gather(*sides, return_exceptions=True)
        self._passing.difference_update(sides)
        for end in (writer, server_writer):
            end.close()

    async def _pass_on(
        self, tapped: Tapped, side: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Only what was passed on is kept: the rest was never heard."""
        with suppress(ConnectionError):
            while data := await reader.read(READ_SIZE):
                if side == "s2c":
                    await self._is_open.wait()
                tapped.note(side, data, self._clock())
                writer.write(data)
                await writer.drain()
        tapped.note(side, b"", self._clock())
