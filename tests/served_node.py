"""`flowstone serve` as a process, for tests and benchmarks: start, wait until ready, kill, restart.

Its log is `node.log`, next to its data. The first super user is `USER`; `grant_guest` gives guests all privileges, like
the fixture of the real server.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowstone.client.connection import Connection
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import pack
from flowstone.iproto.uri import Uri, parse_uri
from flowstone.outside import production
from tests.real_tarantool import free_port
from tests.warm_process import WarmProcess

USER, PASSWORD = "first", "secret"
START_SECONDS = 180
"""A busy machine may take this long to start a node."""

STOP_SECONDS = 30

SPACE, INDEX, PRIVILEGE = 280, 288, 312
GUEST_IS_SUPER = (1, 0, "role", 31, 4)


@dataclass
class ServedNode:
    """A running node: its `port`, the `directory` of its files, and its `process`."""

    port: int
    directory: Path
    process: subprocess.Popen[bytes] | WarmProcess

    @property
    def uri(self) -> Uri:
        return parse_uri(f"{USER}:{PASSWORD}@127.0.0.1:{self.port}")

    def log(self) -> str:
        return (self.directory / "node.log").read_text(errors="replace")

    def kill(self) -> None:
        """Kill the process, as a crash does."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """Stop the process as an operator does; return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def resident_bytes(self) -> int:
        return resident_bytes(self.process.pid)


def resident_bytes(pid: int) -> int:
    """Return the memory in use by a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(pid)


COMMAND = (sys.executable, "-m", "flowstone.cli")
"""An interpreter of its own, for those who measure a node. Without a command, a node is forked (`warm_process.py`)."""


def launch(directory: Path, *options: str, dialect: str = "2.6", command: Sequence[str] | None = None) -> ServedNode:
    """Start a node in a new directory, or in that of an earlier node."""
    directory.mkdir(parents=True, exist_ok=True)
    port = free_port()
    arguments = ["serve", f"--listen=127.0.0.1:{port}", f"--work-dir={directory}", f"--dialect={dialect}"]
    arguments += [f"--user={USER}:{PASSWORD}", *options]
    with (directory / "node.log").open("wb") as log:
        if command is None:
            return ServedNode(port, directory, WarmProcess(["flowstone.cli", *arguments], stdout=log))
        return ServedNode(
            port, directory, subprocess.Popen([*command, *arguments], stdout=log, stderr=subprocess.STDOUT)
        )


def start(directory: Path, *options: str, dialect: str = "2.6", command: Sequence[str] | None = None) -> ServedNode:
    """Start a node, and wait until it is ready."""
    node = launch(directory, *options, dialect=dialect, command=command)
    deadline = time.monotonic() + START_SECONDS
    while "ready" not in node.log().splitlines():
        if node.process.poll() is not None:
            raise RuntimeError(f"flowstone serve exited with {node.process.returncode}:\n{node.log()[-4000:]}")
        if time.monotonic() > deadline:
            node.kill()
            raise RuntimeError(f"flowstone serve was not ready within {START_SECONDS} s:\n{node.log()[-4000:]}")
        time.sleep(0.01)
    return node


@contextmanager
def serve(
    directory: Path, *options: str, dialect: str = "2.6", command: Sequence[str] | None = None
) -> Iterator[ServedNode]:
    node = start(directory, *options, dialect=dialect, command=command)
    try:
        yield node
    finally:
        node.stop()


async def connect(node: ServedNode) -> Connection:
    """Connect as the first super user."""
    return await Connection.open(production(), node.uri)


async def insert(connection: Connection, space_id: int, row: tuple[Any, ...]) -> None:
    await connection.request(RequestType.INSERT, pack({Key.SPACE_ID.value: space_id, Key.TUPLE.value: row}))


async def create_space(
    connection: Connection,
    space_id: int,
    name: str,
    fields: Sequence[tuple[str, str]],
    *indexes: tuple[str, bool, Sequence[tuple[int, str]]],
    options: dict[str, Any] | None = None,
) -> None:
    """Create a space with a format; each index is given by its name, whether it is unique, and its parts."""
    format = tuple({"name": field, "type": type} for field, type in fields)
    await insert(connection, SPACE, (space_id, 1, name, "memtx", 0, options or {}, format))
    for number, (index, unique, parts) in enumerate(indexes or [("pk", True, [(0, fields[0][1])])]):
        await insert(connection, INDEX, (space_id, number, index, "tree", {"unique": unique}, tuple(parts)))


async def grant_guest(connection: Connection) -> None:
    """Give guests all privileges."""
    await insert(connection, PRIVILEGE, GUEST_IS_SUPER)
