"""Processor time of a master per further replica that receives live rows.

As a program it is the master: a node whose log receives rows as fast as possible, bypassing the box, so that the cost
of relaying is not It answers each line of its input with the elapsed seconds. `costs` drives it, with subscribers that
discard their input.
"""

from __future__ import annotations

import asyncio
import socket
import statistics
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import flowstone
from flowstone.box.dialect import Dialect
from flowstone.iproto.constants import Key
from flowstone.iproto.msgpack import pack
from flowstone.iproto.row import Row
from flowstone.replication.messages import Subscribe, encode_subscribe
from flowstone.replication.vclock import VClock
from tests.interop.client import Client

ROWS_PER_WRITE = 1000
WRITES = 400
ROWS = ROWS_PER_WRITE * WRITES
USER, PASSWORD = "first", "secret"
BODY = pack({Key.SPACE_ID.value: 512, Key.TUPLE.value: (100_000, "customer 100000", 700_000, True, 0.5)})


def costs(directory: Path, rounds: int) -> list[float]:
    """Return the seconds per row of the first, second and third replica: differences of medians."""
    command = [sys.executable, "-m", "bench.fan_out", str(directory)]
    taken: list[list[float]] = [[], [], [], []]
    with ExitStack() as stack:
        pipe = subprocess.PIPE
        master = stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
        stack.callback(master.terminate)
        assert master.stdin is not None
        assert master.stdout is not None
        port = int(master.stdout.readline())

        def relay() -> float:
            assert master.stdin is not None
            assert master.stdout is not None
            master.stdin.write("go\n")
            master.stdin.flush()
            return float(master.stdout.readline())

        relay()
        for _ in range(rounds):
            with ExitStack() as subscribers:
                for count, times in enumerate(taken):
                    if count:
                        subscribers.callback(subscribe(port).close)
                    times.append(relay())
    none, *some = (statistics.median(times) / ROWS for times in taken)
    return [after - before for before, after in pairwise([none, *some])]


def subscribe(port: int) -> socket.socket:
    """A replica that discards its input."""
    client = Client(port, USER, PASSWORD)
    info = client.call("box.info")
    replicaset_uuid, vclock = UUID(info["cluster"]["uuid"]), VClock({1: info["lsn"]})
    request = Subscribe(replicaset_uuid, uuid4(), vclock, Dialect.V2_6.version_id, is_anonymous=True)
    connection = client.detach()
    connection.sendall(encode_subscribe(request, is_2_6=True))
    connection.settimeout(None)
    threading.Thread(target=_read_away, args=(connection,), daemon=True).start()
    return connection


def _read_away(connection: socket.socket) -> None:
    buffer = bytearray(1 << 20)
    with suppress(OSError):
        while connection.recv_into(buffer):
            pass


async def serve(directory: str) -> None:
    options: dict[str, Any] = {"dialect": "2.6", "replication_timeout": 1000, "wal_max_size": 10**12}
    async with flowstone.Node(directory, listen="127.0.0.1:0", user=(USER, PASSWORD), **options) as node:
        print(str(node.address).rpartition(":")[2], flush=True)
        loop = asyncio.get_running_loop()
        while await loop.run_in_executor(None, sys.stdin.readline):
            print(await write(node), flush=True)


async def write(node: flowstone.Node) -> float:
    journal = node._instance.journal
    batches = []
    lsn = journal.next_lsn(1)
    for first in range(lsn, lsn + ROWS, ROWS_PER_WRITE):
        rows = (Row(3, 1, 0, number, 1.8e9, number, body=BODY) for number in range(first, first + ROWS_PER_WRITE))
        batches.append(b"".join(row.encode() for row in rows))
    started = time.process_time()
    for batch in batches:
        journal.submit(batch, ROWS_PER_WRITE, lambda error: None)
        journal.flush()
        await asyncio.sleep(0.002)  # the subscribers read, which must not count
    await asyncio.sleep(0.1)
    return time.process_time() - started


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
