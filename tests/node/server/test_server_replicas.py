"""Replicas on real sockets: the state of a connection before, during and after its requests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import UUID

import pytest

from flowstone.box.dialect import Dialect
from flowstone.iproto import errors
from flowstone.iproto.constants import RequestType
from flowstone.iproto.packet import encode_request
from flowstone.iproto.row import decode_row
from flowstone.node.downstream.relays import Relays
from flowstone.node.server.limits import ServerLimits
from flowstone.node.server.server import Server
from flowstone.node.wal.gc import GarbageCollector
from flowstone.replication.messages import (
    Ack,
    FetchSnapshot,
    Join,
    Subscribe,
    encode_ack,
    encode_fetch_snapshot,
    encode_join,
    encode_subscribe,
)
from flowstone.replication.row_stream import RowStream
from flowstone.replication.vclock import VClock
from tests.node.instances import REPLICASET_UUID, make_instance
from tests.node.server.test_server import Raw, replace, serving, until, with_space

REPLICA = UUID("33333333-3333-4333-8333-333333333333")


@asynccontextmanager
async def master(
    path: Path, dialect: Dialect = Dialect.V2_6, limits: ServerLimits | None = None
) -> AsyncIterator[Server]:
    """Run a server whose guests have all privileges, with a log and relays."""
    instance = with_space(make_instance(path, dialect, replication_timeout=0.2))
    async with serving(instance, limits) as server:
        collector = GarbageCollector(instance.outside, str(path), str(path))
        server.relays = Relays(instance, collector)
        yield server
        await server.relays.close()


def join(sync: int) -> bytes:
    return encode_join(Join(REPLICA), sync, is_2_6=True)


def subscribe(sync: int, vclock: VClock, *, is_anonymous: bool = True) -> bytes:
    asked = Subscribe(REPLICASET_UUID, REPLICA, vclock, 132608, is_anonymous)
    return encode_subscribe(asked, sync, is_2_6=True)


PING = encode_request(RequestType.PING, 9)


async def test_connection_serves_ordinary_requests_after_a_join(tmp_path: Path) -> None:
    async with master(tmp_path) as server:
        raw = await Raw.open(server)
        raw.send(join(1))
        oks = 0
        while oks < 3:
            response = await raw.read_one()
            assert response.sync == 1
            oks += response.type == RequestType.OK
        raw.send(PING)
        assert (await raw.read_one()).sync == 9
        await raw.close()


async def test_requests_after_a_replica_request_wait_for_it(tmp_path: Path) -> None:
    async with master(tmp_path) as server:
        raw = await Raw.open(server)
        raw.send(encode_fetch_snapshot(FetchSnapshot(), 1, is_2_6=True) + PING)
        syncs: list[int] = []
        while not syncs or syncs[-1] != 9:
            syncs.append((await raw.read_one()).sync)
        assert set(syncs[:-1]) == {1}
        await raw.close()


async def test_second_replication_request_is_rejected(tmp_path: Path) -> None:
    async with master(tmp_path) as server:
        raw = await Raw.open(server)
        raw.send(PING + join(2))
        assert (await raw.read_one()).sync == 9
        with pytest.raises(errors.Protocol, match="while there are pending requests"):
            (await raw.read_one()).values()
        raw.send(replace(3, 1))
        assert (await raw.read_one()).sync == 3
        await raw.close()


async def test_rejected_join_keeps_the_connection_open(tmp_path: Path) -> None:
    async with master(tmp_path) as server:
        server.instance.is_orphan = True
        server.instance.settle_read_only()
        raw = await Raw.open(server)
        raw.send(join(1))
        with pytest.raises(errors.Readonly):
            (await raw.read_one()).values()
        raw.send(PING)
        assert (await raw.read_one()).sync == 9
        await raw.close()


async def test_rejected_subscription_ends_the_connection(tmp_path: Path) -> None:
    async with master(tmp_path) as server:
        raw = await Raw.open(server)
        raw.send(subscribe(1, VClock(), is_anonymous=False))
        (refused,) = await raw.read()
        with pytest.raises(errors.UnknownReplica):
            refused.values()
        await raw.close()


async def test_connection_serves_only_replication_after_a_subscription(tmp_path: Path) -> None:
    async with master(tmp_path, limits=ServerLimits(slow_reader_seconds=0.01, auth_seconds=0.3)) as server:
        raw = await Raw.open(server)
        raw.send(subscribe(0, VClock({1: 1})) + encode_ack(Ack(VClock({1: 1}))))
        assert (await raw.read_one()).type == RequestType.OK
        for _ in range(5):  # longer than unauthenticated clients may stay
            assert (await raw.read_one()).type == RequestType.OK
            raw.send(encode_ack(Ack(VClock({1: 1}))))
        writer = await Raw.open(server)
        writer.send(replace(1, 5))
        assert (await writer.read_one()).sync == 1
        while (await raw.read_one()).type == RequestType.OK:
            pass
        await raw.close()
        await until(lambda: server.relays is not None and not server.relays.anonymous)
        await writer.close()


async def test_large_snapshot_is_sent_as_fast_as_it_is_read(tmp_path: Path) -> None:
    async with master(tmp_path) as server:
        raw = await Raw.open(server)
        for key in range(64):
            raw.send(replace(key, key, "x" * 256 * 1024))
        for _ in range(64):
            await raw.read_one()
        raw.send(encode_fetch_snapshot(FetchSnapshot(), 1, is_2_6=True))
        (connection,) = server._connections
        await until(lambda: connection.client.queued > 0)
        most = 0
        stream = RowStream("test")
        oks = 0
        while oks < 2:
            most = max(most, connection.client.queued)
            data = await raw._reader.read(64 * 1024)
            stream.feed(data)
            while (packet := stream.take_packet()) is not None:
                oks += decode_row(packet).type == RequestType.OK
        assert most < 3 * 1024 * 1024
        await raw.close()


async def test_replica_that_disconnects_during_a_join_leaves_no_state(tmp_path: Path) -> None:
    async with master(tmp_path) as server:
        writer = await Raw.open(server)
        for key in range(64):
            writer.send(replace(key, key, "x" * 256 * 1024))
        for _ in range(64):
            await writer.read_one()
        raw = await Raw.open(server)
        raw.send(join(1))
        await until(lambda: server.instance.box.views)
        raw._writer.transport.abort()
        await until(lambda: not server.instance.box.views)
        await writer.close()
