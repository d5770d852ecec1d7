"""A tap on loopback: it relays and records bytes between a replica and its upstream, and can hold them.

Each tap serves one replica of one server, so `b-to-a-03` is the third connection from b to a. All taps of a recording
share a clock. Only the server's bytes are held: its replica receives nothing, and rows are lost with the connection, as
on a link that is cut in one direction.
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
    """The bytes of one connection."""

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
    """Listens on `port`, relays to `server_port`. `clock` returns the seconds since the start of the recording."""

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
        """Close all connections; held bytes are lost."""
        for task in self._passing:
            task.cancel()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()

    def keep(self, directory: Path, is_kept: Callable[[bytes], bool]) -> None:
        """Write the recordings of connections on which the replica sent bytes that match `is_kept`."""
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
        """Relay one direction. Only relayed bytes are recorded: the others never arrived."""
        with suppress(ConnectionError):
            while data := await reader.read(READ_SIZE):
                if side == "s2c":
                    await self._is_open.wait()
                tapped.note(side, data, self._clock())
                writer.write(data)
                await writer.drain()
        tapped.note(side, b"", self._clock())
