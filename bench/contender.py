"""Servers under load: a node and the real server, each with one connection of the load and with many.

Both serve the same table on loopback with `wal_mode=write`. The real server is the newest one of FLOWSTONE_TARANTOOL,
or the one on PATH; the node presents the dialect that fits it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from bench.load import EVERYTHING, SPACE_ID, Connections, Requests, pings
from flowstone.client.connection import Connection
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import pack
from flowstone.iproto.uri import parse_uri
from flowstone.outside import production
from tests import real_tarantool, served_node
from tests.interop.versions import Binary, binaries

MANY, IN_FLIGHT = 50, 20
"""Connections, and requests in flight on each of them, of a load of many clients."""

FIELDS = (("id", "unsigned"), ("name", "string"), ("email", "string"), ("amount", "double"), ("age", "unsigned"))
CFG: Final = "wal_mode='write', memtx_memory=4*1024^3, wal_max_size=8*1024^3, net_msg_max=100000"

Index = tuple[str, bool, Sequence[tuple[int, str]]]
PLAIN: Final[tuple[Index, ...]] = (("pk", True, [(0, "unsigned")]),)
"""Indexes of the simplest table: name, whether it is unique, and parts."""


@dataclass(frozen=True)
class Contender:
    """A server under load: its process, one connection to it, and many."""

    port: int
    pid: int
    one: Connections
    many: Connections

    def rate_of_one(self, requests: Requests) -> float:
        return self.one.run(requests, EVERYTHING).rate

    def rate_of_many(self, requests: Requests) -> float:
        return self.many.run(requests, IN_FLIGHT).rate

    def median_wait(self, requests: Requests) -> float:
        return float(np.median(self.one.run(requests, 1, keep_pauses=True).pauses))

    def waits_during(self, action: Callable[[Contender], object], requests: Requests) -> NDArray[np.float64]:
        """Return the waiting times of a client with one request in flight, until the action ends."""
        with ThreadPoolExecutor(1) as pool:
            busy = pool.submit(action, self)
            waits = []
            while not busy.done():
                waits.append(self.one.run(requests, 1, keep_pauses=True).pauses)
            busy.result()
        return np.concatenate(waits)

    def longest_wait_during(self, action: Callable[[Contender], object], requests: Requests) -> float:
        return float(self.waits_during(action, requests).max())

    def make_snapshot(self) -> None:
        async def call() -> None:
            async with await Connection.open(production(), parse_uri(f"127.0.0.1:{self.port}")) as connection:
                body = {Key.FUNCTION_NAME.value: "box.snapshot"} | {Key.TUPLE.value: ()}
                await connection.request(RequestType.CALL, pack(body))

        asyncio.run(call())


def peer() -> Binary:
    """Return the newest of the real servers."""
    return max(binaries(), key=lambda binary: binary.version)


@contextmanager
def served(
    directory: Path, indexes: Sequence[Index] = PLAIN, *, command: Sequence[str] = served_node.COMMAND
) -> Iterator[Contender]:
    """A node that serves the table."""

    async def set_up(node: served_node.ServedNode) -> None:
        async with await served_node.connect(node) as connection:
            await served_node.create_space(connection, SPACE_ID, "people", FIELDS, *indexes)
            await served_node.grant_guest(connection)

    options = ("--wal-mode=write", f"--wal-max-size={8 << 30}", "--net-msg-max=100000")
    with served_node.serve(directory, *options, dialect=peer().dialect, command=command) as node:
        asyncio.run(set_up(node))
        with _contender(node.port, node.process.pid) as contender:
            yield contender


@contextmanager
def real(directory: Path, indexes: Sequence[Index] = PLAIN, *, cfg: str = "") -> Iterator[Contender]:
    """A real server that serves the table; `cfg` adds options to those of all servers."""
    with (
        real_tarantool.serve(directory, setup=table_lua(indexes), cfg=CFG + cfg, binary=peer().path) as server,
        _contender(server.port, server.process.pid) as contender,
    ):
        yield contender


def table_lua(indexes: Sequence[Index] = PLAIN) -> str:
    """Return Lua that creates the table."""
    fields = ", ".join(f"{{'{name}', '{type}'}}" for name, type in FIELDS)
    lines = [f"local space = box.schema.space.create('people', {{id={SPACE_ID}, format={{{fields}}}}})"]
    for name, is_unique, parts in indexes:
        listed = ", ".join(f"{{{field + 1}, '{type}'}}" for field, type in parts)
        lines.append(f"space:create_index('{name}', {{unique={str(is_unique).lower()}, parts={{{listed}}}}})")
    return "\n".join(lines)


@contextmanager
def _contender(port: int, pid: int) -> Iterator[Contender]:
    with Connections(port, 1) as one, Connections(port, MANY) as many:
        one.run(pings(10), 1)  # the driver is compiled by now
        yield Contender(port, pid, one, many)
