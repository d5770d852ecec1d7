"""A master without a server: an instance with its logs and relays, recording connections, and a manual clock.

A replica's messages are passed in as requests; its packets are read back one by one.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

from flowstone.box.access import ADMIN
from flowstone.box.ddl import functions as ddl
from flowstone.box.dialect import Dialect
from flowstone.box.engine import statements
from flowstone.iproto.constants import TYPE_ERROR, RequestType
from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.msgpack import pack
from flowstone.iproto.packet import decode_response, split
from flowstone.iproto.requests import decode_request
from flowstone.iproto.row import Row, decode_row
from flowstone.node.downstream.relays import Relays
from flowstone.node.instance import Instance
from flowstone.node.wal.gc import GarbageCollector
from flowstone.outside import Receiver, production
from flowstone.replication.messages import (
    Ack,
    Join,
    Register,
    Subscribe,
    encode_ack,
    encode_fetch_snapshot,
    encode_join,
    encode_register,
    encode_subscribe,
)
from flowstone.replication.vclock import VClock
from tests.node.instances import REPLICASET_UUID, make_instance

REPLICA = UUID("33333333-3333-4333-8333-333333333333")
VERSION_2_6 = 2 << 16 | 6 << 8
VERSION_2_11 = 2 << 16 | 11 << 8 | 9


class HandClock:
    """A clock that advances by `advance`."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1_700_000_000.0 + self.now

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.append((self.now + seconds, woken))
        await woken

    async def advance(self, seconds: float) -> None:
        """Advance the time; wake sleepers in order of their deadlines."""
        end = self.now + seconds
        await settle()
        while due := [sleeper for sleeper in self._sleepers if sleeper[0] <= end]:
            first = min(due, key=lambda sleeper: sleeper[0])
            self._sleepers.remove(first)
            self.now = max(self.now, first[0])
            if not first[1].done():
                first[1].set_result(None)
            await settle()
        self.now = end


async def settle() -> None:
    """Run all callbacks that are ready."""
    for _ in range(20):
        await asyncio.sleep(0)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  any state of the two ends is waited for
            await asyncio.sleep(0.001)


class Connection:
    """A replica's connection as in `relay_stream.Link`.

    With `room`, the peer stops reading after this number of bytes.
    """

    peer = "127.0.0.1:5000"

    def __init__(self, *, user: int = ADMIN, room: int | None = None) -> None:
        self.user = user
        self.room = room
        self.sent = bytearray()
        self.is_busy = False
        self.is_held = False
        self.is_closed = False
        self.receiver: Receiver | None = None

    def write(self, data: bytes) -> None:
        if self.is_closed:
            return
        self.sent += data
        if self.room is not None and len(self.sent) > self.room and self.receiver is not None:
            self.receiver.congested()

    async def flushed(self) -> None:
        await asyncio.sleep(0)

    def read(self) -> None:
        """Let the peer read again."""
        self.room = None
        assert self.receiver is not None
        self.receiver.drained()

    def hold(self) -> None:
        self.is_held = True

    def release(self) -> None:
        self.is_held = False

    def hand_over(self, receiver: Receiver) -> bytes:
        self.receiver = receiver
        return b""

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True

    def take(self) -> list[Row]:
        """Return the packets sent since the last call; raise a sent error."""
        packets, end = split(self.sent)
        del self.sent[:end]
        rows = []
        for packet in packets:
            if decode_response(packet).type >= TYPE_ERROR:
                raise decode_response(packet).error()
            rows.append(decode_row(packet))
        return rows

    def refusal(self) -> TarantoolError:
        """Return the error that was sent last."""
        packets, _ = split(self.sent)
        return decode_response(packets[-1]).error()


class Master:
    """An instance with the space `numbers` (512), and its replicas."""

    def __init__(self, directory: Path, dialect: Dialect = Dialect.V2_6, **options: Any) -> None:
        self.clock = HandClock()
        self.outside = dataclasses.replace(production(), clock=self.clock)
        self.instance: Instance = make_instance(directory, dialect, outside=self.outside, **options)
        self.is_2_6 = dialect is Dialect.V2_6
        self.collector = GarbageCollector(self.outside, str(directory), str(directory))
        self.relays = Relays(self.instance, self.collector)

    async def create_space(self) -> None:
        await self.write(lambda txn: ddl.create_space(txn, "numbers"))
        await self.write(lambda txn: ddl.create_index(txn, "numbers", "pk"))

    async def write(self, work: Callable[[Any], object]) -> None:
        transaction = self.instance.box.begin()
        work(transaction)
        await self.instance.commits.commit(transaction)

    async def put(self, *numbers: int) -> None:
        """Write one transaction."""
        space = self.instance.box.space("numbers")

        def work(transaction: Any) -> None:
            for number in numbers:
                statements.replace(transaction, space, pack((number,)))

        await self.write(work)

    async def serve(self, packet: bytes, connection: Connection | None = None) -> Connection:
        """Serve a request to its end; raise rejections."""
        connection = connection or Connection()
        ((payload,), _) = split(packet)
        request = decode_request(payload, is_2_6=self.is_2_6)
        await self.relays.serve(request, connection)
        return connection

    async def join(self, uuid: UUID = REPLICA, *, sync: int = 0, version: int = 0, **kwargs: Any) -> Connection:
        packet = encode_join(Join(uuid, version), sync, is_2_6=self.is_2_6)
        return await self.serve(packet, **kwargs)

    async def fetch(self, fetch: Any, *, sync: int = 0) -> Connection:
        return await self.serve(encode_fetch_snapshot(fetch, sync, is_2_6=self.is_2_6))

    async def register(self, uuid: UUID = REPLICA, vclock: VClock | None = None) -> Connection:
        return await self.serve(encode_register(Register(uuid, vclock or VClock()), is_2_6=self.is_2_6))

    async def subscribe(
        self,
        vclock: VClock,
        uuid: UUID = REPLICA,
        *,
        sync: int = 0,
        connection: Connection | None = None,
        replicaset_uuid: UUID = REPLICASET_UUID,
        **fields: Any,
    ) -> Connection:
        version = fields.pop("version", VERSION_2_6 if self.is_2_6 else VERSION_2_11)
        asked = Subscribe(replicaset_uuid, uuid, vclock, version, **fields)
        return await self.serve(encode_subscribe(asked, sync, is_2_6=self.is_2_6), connection)

    def acknowledge(self, connection: Connection, vclock: VClock, **fields: Any) -> None:
        assert connection.receiver is not None
        connection.receiver.received(encode_ack(Ack(vclock, **fields)))

    async def close(self) -> None:
        await self.relays.close()
        await self.instance.journal.close()


def kinds(rows: list[Row]) -> list[str]:
    """Return the kinds of packets, for tests of their order: data rows by LSN, the rest by name."""
    return [f"{row.replica_id}:{row.lsn}" if row.lsn else RequestType(row.type).name for row in rows]


def lose_logs(directory: Path) -> None:
    for path in directory.glob("*.xlog"):
        path.unlink()
