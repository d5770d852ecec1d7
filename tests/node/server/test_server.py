"""The server with real sockets: our own client, and misbehaving clients."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from flowstone.box.ddl import access_functions as ddl_access
from flowstone.box.ddl import functions as ddl
from flowstone.box.dialect import Dialect
from flowstone.box.engine import statements
from flowstone.client.connection import Connection
from flowstone.errors import FlowstoneError
from flowstone.iproto import auth, errors
from flowstone.iproto.constants import RequestType
from flowstone.iproto.msgpack import pack
from flowstone.iproto.packet import decode_response, encode_request, split
from flowstone.iproto.uri import Uri
from flowstone.node.instance import Instance
from flowstone.node.server.auth_deadline import AuthDeadline
from flowstone.node.server.limits import ServerLimits
from flowstone.node.server.server import Server
from flowstone.node.wal.journal import WalMode
from flowstone.outside import Tls, production
from flowstone.outside.blocking import ThreadBlocking
from flowstone.replication.limbo.control_rows import RaftState
from flowstone.replication.raft.election import Config, ElectionMode
from tests.node.fault_disk import FaultDisk
from tests.node.instances import make_instance

HOST = "127.0.0.1"


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  any state of the two ends is waited for
            await asyncio.sleep(0.001)


def with_space(instance: Instance) -> Instance:
    """Create space 512 with an unsigned first field; guests may use it."""
    transaction = instance.box.begin()
    ddl.create_space(transaction, "numbers")
    ddl.create_index(transaction, "numbers", "pk")
    ddl.grant(transaction, "guest", "super")
    return instance


@asynccontextmanager
async def serving(instance: Instance | None = None, limits: ServerLimits | None = None) -> AsyncIterator[Server]:
    server = Server(instance or with_space(make_instance()), limits=limits)
    await server.listen(HOST, 0)
    try:
        yield server
    finally:
        await server.close()
        await server.instance.journal.close()


async def connect(server: Server, user: str | None = None, password: str | None = None) -> Connection:
    return await Connection.open(production(), Uri(HOST, server.port, user, password))


class Raw:
    """A client that sends arbitrary bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, server: Server) -> Raw:
        raw = cls(*await asyncio.open_connection(HOST, server.port))
        assert len(await raw._reader.readexactly(128)) == 128
        return raw

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def read(self) -> list[Any]:
        """Return all responses up to the end of the connection."""
        async with asyncio.timeout(60):
            data = await self._reader.read(-1)
        return [decode_response(packet) for packet in split(data)[0]]

    async def read_one(self) -> Any:
        async with asyncio.timeout(60):
            head = await self._reader.readexactly(5)
            body = await self._reader.readexactly(int.from_bytes(head[1:], "big"))
        return decode_response(body)

    async def close(self) -> None:
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()


def replace(sync: int, *fields: Any) -> bytes:
    return encode_request(RequestType.REPLACE, sync, pack({0x10: 512, 0x21: fields}))


def select(sync: int, key: int) -> bytes:
    return encode_request(RequestType.SELECT, sync, pack({0x10: 512, 0x12: 1, 0x20: (key,)}))


def select_all(sync: int) -> bytes:
    return encode_request(RequestType.SELECT, sync, pack({0x10: 512, 0x12: 9, 0x14: 2, 0x20: ()}))


@pytest.mark.parametrize("dialect", Dialect)
async def test_a_client_writes_and_reads(dialect: Dialect, tmp_path: Path) -> None:
    async with serving(with_space(make_instance(tmp_path, dialect))) as server, await connect(server) as client:
        assert client.greeting.version == dialect.greeting_version
        for key in range(50):
            body = pack({0x10: 512, 0x21: (key, "x" * key)})
            assert (await client.request(RequestType.REPLACE, body))[0x30] == ((key, "x" * key),)
        answer = await client.request(RequestType.SELECT, pack({0x10: 512, 0x12: 9, 0x20: (7,)}))
        assert answer[0x30] == ((7, "x" * 7),)


async def test_many_clients_pipeline_many_requests(tmp_path: Path) -> None:
    async with serving(with_space(make_instance(tmp_path))) as server:
        clients = [await connect(server) for _ in range(10)]
        futures = [
            (client, client.send(RequestType.REPLACE, pack({0x10: 512, 0x21: (number * 100 + i, number)})))
            for number, client in enumerate(clients)
            for i in range(100)
        ]
        for client, future in futures:
            assert not (await client.answer(future)).is_error
        assert len(server.instance.box.space(512)) == 1000
        assert server.connection_count == 10
        for client in clients:
            await client.close()
        await until(lambda: server.connection_count == 0)


async def test_requests_on_a_unix_socket(tmp_path: Path) -> None:
    server = Server(with_space(make_instance()))
    await server.listen(str(tmp_path / "s"), None)
    async with await Connection.open(production(), Uri(str(tmp_path / "s"), None)) as client:
        await client.request(RequestType.PING)
    await server.close()


async def test_packet_received_in_pieces_is_assembled() -> None:
    async with serving() as server:
        client = await Raw.open(server)
        for byte in replace(1, 5, "five"):
            client.send(bytes((byte,)))
            await asyncio.sleep(0)
        assert (await client.read_one()).values() == {0x30: ((5, "five"),)}
        await client.close()


async def test_large_packet_and_the_request_after_it_are_answered(tmp_path: Path) -> None:
    async with serving(with_space(make_instance(tmp_path, memtx_max_tuple_size=64 << 20))) as server:
        client = await Raw.open(server)
        client.send(replace(1, 5, "x" * (20 << 20)) + select(2, 6))
        assert (await client.read_one()).sync == 1
        assert (await client.read_one()).values() == {0x30: ()}
        await client.close()


@pytest.mark.parametrize(
    "data", [b"\x90\x01", b"\xc1", b"\x00", b"\xce\x7f\xff\xff\xff", b"\xcf" + b"\xff" * 8, b"\xa5hello"]
)
async def test_invalid_packet_gets_an_error_and_closes_only_its_connection(data: bytes) -> None:
    async with serving() as server:
        good, bad = await Raw.open(server), await Raw.open(server)
        bad.send(replace(1, 5) + data)
        first, last = await bad.read()
        assert first.values() == {0x30: ((5,),)}
        assert (last.error().code, last.sync) == (20, 0)
        good.send(select(2, 5))
        assert (await good.read_one()).values() == {0x30: ((5,),)}
        await good.close()
        await bad.close()


async def test_malformed_request_leaves_the_connection_open() -> None:
    async with serving() as server:
        client = await Raw.open(server)
        client.send(encode_request(3, 1, b"\xc1") + encode_request(3, 2, b"\x80") + encode_request(299, 3))
        assert [(await client.read_one()).error().code for _ in range(3)] == [20, 69, 48]
        client.send(select(4, 5))
        assert (await client.read_one()).sync == 4
        await client.close()


async def test_unauthenticated_client_may_send_only_small_packets() -> None:
    async with serving(make_instance()) as server:
        stranger = await Raw.open(server)
        stranger.send(b"\xce" + (1 << 20).to_bytes(4, "big"))
        (refusal,) = await stranger.read()
        assert refusal.error().code == 20
        await stranger.close()


async def test_authenticated_client_may_send_large_packets() -> None:
    instance = make_instance()
    transaction = instance.box.begin()
    ddl_access.create_user(transaction, "u", password="secret")
    async with serving(instance) as server, await connect(server, "u", "secret") as client:
        with pytest.raises(errors.NoSuchSpace):
            await client.request(RequestType.REPLACE, pack({0x10: 512, 0x21: (1, "x" * (1 << 20))}))


async def test_connections_beyond_the_limit_are_rejected_by_the_server() -> None:
    async with serving(limits=ServerLimits(connections_max=2)) as server:
        first, second = await Raw.open(server), await Raw.open(server)
        reader, writer = await asyncio.open_connection(HOST, server.port)
        with suppress(ConnectionResetError):
            assert await reader.read(1) == b""
        writer.close()
        await first.close()
        await until(lambda: server.connection_count == 1)
        third = await Raw.open(server)
        third.send(select(1, 1))
        assert (await third.read_one()).sync == 1
        for client in (second, third):
            await client.close()


async def test_client_that_reads_nothing_is_throttled_and_served_when_it_reads() -> None:
    """Its 2000 answers of 100 kB would take 200 MB."""
    async with serving(limits=ServerLimits(output_max=1 << 20)) as server:
        transaction = server.instance.box.begin()
        raw = pack((1, "x" * 100_000))
        statements.replace(transaction, server.instance.box.space(512), raw)
        slow, healthy = await Raw.open(server), await Raw.open(server)
        slow.send(b"".join(select(sync, 1) for sync in range(1, 2001)))
        for sync in range(20):
            healthy.send(select(sync, 2))
            await healthy.read_one()
        (connection,) = [one for one in server._connections if one.unread or one.client.queued]
        assert connection.client.queued < 40 << 20
        syncs = [(await slow.read_one()).sync for _ in range(2000)]
        assert syncs == list(range(1, 2001))
        for client in (slow, healthy):
            await client.close()


async def test_pending_request_is_not_overtaken_by_its_own_connection() -> None:
    async with serving(limits=ServerLimits(output_max=1 << 20)) as server:
        transaction = server.instance.box.begin()
        statements.replace(transaction, server.instance.box.space(512), pack((1, "x" * 100_000)))
        client = await Raw.open(server)
        writes = b"".join(replace(sync, sync, "y") for sync in range(201, 300))
        client.send(b"".join(select_all(sync) for sync in range(1, 201)) + replace(200, 1, "gone") + writes)
        answers = [await client.read_one() for _ in range(300)]
        assert all(len(answer.values()[0x30][0][1]) == 100_000 for answer in answers[:200])
        await client.close()


async def test_client_that_reads_nothing_for_too_long_is_disconnected() -> None:
    async with serving(limits=ServerLimits(output_max=1 << 20, slow_reader_seconds=0.01)) as server:
        transaction = server.instance.box.begin()
        statements.replace(transaction, server.instance.box.space(512), pack((1, "x" * 1_000_000)))
        slow = await Raw.open(server)
        slow.send(b"".join(select(sync, 1) for sync in range(1, 500)))
        await until(lambda: server.connection_count == 0)
        await slow.close()


async def test_client_that_does_not_authenticate_in_time_is_disconnected() -> None:
    async with serving(make_instance(), ServerLimits(auth_seconds=0.01)) as server:
        client = await Raw.open(server)
        assert await client.read() == []
        await client.close()


async def test_guest_with_privileges_is_exempt_from_the_authentication_timeout() -> None:
    async with serving(limits=ServerLimits(auth_seconds=0.01)) as server, await connect(server) as guest:
        now = production().clock.monotonic() + 1
        for connection in list(server._connections):
            connection.sweep(now, AuthDeadline(server.limits, now, trusts_guests=server.trusts_guests()))
        await guest.request(RequestType.PING)


async def test_guest_that_watches_the_ballot_is_exempt_from_the_authentication_timeout() -> None:
    async with serving(make_instance(), ServerLimits(auth_seconds=0.01)) as server:
        watching, other = await Raw.open(server), await Raw.open(server)
        watching.send(encode_request(RequestType.WATCH, 1, pack({0x57: "internal.ballot"})))
        await watching.read_one()
        other.send(encode_request(RequestType.WATCH, 1, pack({0x57: "nosuchkey"})))
        assert len(await other.read()) == 1, "one event, then the end"
        assert server.connection_count == 1
        await other.close()
        await watching.close()


async def test_guests_that_watch_ballots_leave_connections_to_clients() -> None:
    instance = make_instance()
    transaction = instance.box.begin()
    ddl_access.create_user(transaction, "app", password="secret")
    async with serving(instance, ServerLimits(auth_seconds=0.01, connections_max=8)) as server:
        watching = [await Raw.open(server) for _ in range(8)]
        for each in watching:
            each.send(encode_request(RequestType.WATCH, 1, pack({0x57: "internal.ballot"})))
        await until(lambda: server.connection_count == 2)
        async with await connect(server, "app", "secret") as client:
            await client.request(RequestType.PING)
        for each in watching:
            await each.close()


async def test_wrong_passwords_are_checked_slowly_over_any_number_of_connections() -> None:
    """30,780 guesses in 4 s were possible."""
    instance = make_instance(auth_delay=0.05, auth_retries=3)
    transaction = instance.box.begin()
    ddl_access.create_user(transaction, "app", password="secret")
    async with serving(instance) as server:
        begun = asyncio.get_running_loop().time()

        async def guess() -> None:
            with pytest.raises(errors.CredsMismatch):
                await connect(server, "app", "wrong")

        await asyncio.gather(*(guess() for _ in range(12)))
        assert asyncio.get_running_loop().time() - begun >= 8 * 0.05
        assert instance.counters.auth_failures == 12
        assert instance.counters.auth_delays == 8


async def test_requests_sent_after_a_delayed_login_run_as_its_user() -> None:
    instance = make_instance(auth_delay=0.05, auth_retries=0)
    transaction = instance.box.begin()
    ddl.create_space(transaction, "numbers")
    ddl.create_index(transaction, "numbers", "pk")
    ddl_access.create_user(transaction, "app", password="secret")
    ddl.grant(transaction, "app", "super")
    async with serving(instance) as server:
        with pytest.raises(errors.CredsMismatch):
            await connect(server, "app", "wrong")
        client = await connect(server)
        scramble = auth.scramble("secret", client.greeting.salt)
        login = client.send(RequestType.AUTH, pack({0x23: "app", 0x21: (auth.METHOD, scramble)}))
        written = client.send(RequestType.REPLACE, pack({0x10: 512, 0x21: (1, "x")}))
        client.values(await client.answer(login))
        assert client.values(await client.answer(written))[0x30] == ((1, "x"),)
        await client.close()
    assert instance.counters.auth_delays == 1


async def test_slow_requests_are_limited_and_all_answered() -> None:
    instance = with_space(make_instance())
    running, most, gate = [0], [0], asyncio.Event()

    async def work(number: int) -> int:
        running[0] += 1
        most[0] = max(most[0], running[0])
        await gate.wait()
        running[0] -= 1
        return number

    instance.functions["work"] = work
    async with serving(instance, ServerLimits(net_msg_max=10)) as server:
        client = await Raw.open(server)
        client.send(
            b"".join(encode_request(RequestType.CALL, sync, pack({0x22: "work", 0x21: (sync,)})) for sync in range(100))
        )
        await until(lambda: running[0] == 10)
        gate.set()
        answers = {(response := await client.read_one()).sync: response.values()[0x30] for _ in range(100)}
        assert answers == {sync: (sync,) for sync in range(100)}
        assert most[0] == 10
        await client.close()


async def test_a_stopped_server_closes_its_connections() -> None:
    instance = with_space(make_instance())

    async def never() -> None:
        await asyncio.Event().wait()

    instance.functions["never"] = never
    async with serving(instance) as server:
        client = await Raw.open(server)
        client.send(encode_request(RequestType.CALL, 1, pack({0x22: "never", 0x21: ()})))
        await until(lambda: server._tasks)
    assert await client.read() == []
    await client.close()


async def test_changed_listen_address_keeps_connections() -> None:
    async with serving() as server:
        client = await Raw.open(server)
        before = server.port
        await server.listen(HOST, 0)
        assert server.port != before
        client.send(select(1, 1))
        assert (await client.read_one()).sync == 1
        await client.close()


async def test_watcher_is_notified_of_an_election_without_client_activity() -> None:
    instance = make_instance()
    instance.elections.on_change.append(instance.settle_read_only)
    server = Server(instance)
    instance.elections.start(RaftState(term=1), 1)
    packets: list[bytes] = []
    for key in ("box.election", "box.status"):
        for _ in range(2):  # the watcher has the value now, and waits for the next one
            server.watchers.watch(server, packets.append, key, 1)
    packets.clear()
    instance.elections.configure(Config(mode=ElectionMode.VOTER))
    values = [decode_response(body).values() for body in split(b"".join(packets))[0]]
    assert [value[0x57] for value in values] == ["box.status", "box.election"]
    assert [value[0x58]["is_ro"] for value in values] == [True, True]
    await instance.elections.close()


async def test_watcher_is_notified_of_a_schema_change() -> None:
    async with serving() as server:
        client = await Raw.open(server)
        client.send(encode_request(RequestType.WATCH, 7, pack({0x57: "box.schema"})))
        first = (await client.read_one()).values()[0x58]["version"]
        client.send(encode_request(RequestType.WATCH, 8, pack({0x57: "box.schema"})))
        client.send(
            encode_request(RequestType.CALL, 1, pack({0x22: "box.schema.space.create", 0x21: ("other",)})),
        )
        responses = [await client.read_one() for _ in range(2)]
        (event,) = [response for response in responses if response.type == RequestType.EVENT]
        assert (event.sync, event.values()[0x58]["version"] > first) == (8, True)
        await client.close()


async def test_transactions_of_a_lost_connection_are_rolled_back() -> None:
    async with serving() as server:
        client = await Raw.open(server)
        client.send(encode_request(RequestType.BEGIN, 1, stream_id=5))
        client.send(encode_request(RequestType.REPLACE, 2, pack({0x10: 512, 0x21: (1,)}), stream_id=5))
        assert not (await client.read_one()).is_error
        assert not (await client.read_one()).is_error
        assert len(server.instance.box.views) == 1
        await client.close()
        await until(lambda: not server.instance.box.views)
        assert len(server.instance.box.space(512)) == 0


async def test_unauthenticated_clients_may_open_fewer_transactions_than_trusted_guests() -> None:
    for instance, count in ((make_instance(), 2), (with_space(make_instance()), 4)):
        async with serving(instance, ServerLimits(transactions_max=4, transactions_max_before_auth=2)) as server:
            client = await Raw.open(server)
            for stream in range(1, 7):
                client.send(encode_request(RequestType.BEGIN, stream, stream_id=stream))
            assert [(await client.read_one()).is_error for _ in range(6)] == [False] * count + [True] * (6 - count)
            await client.close()


async def test_lost_connection_cancels_its_calls_and_later_requests() -> None:
    async with serving() as server:
        ended: list[int] = []

        async def wait(number: int) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(number)

        server.instance.functions["wait"] = wait
        client = await Raw.open(server)
        for number in (5, 6):
            client.send(encode_request(RequestType.CALL, 1, pack({0x22: "wait", 0x21: (number,)}), stream_id=number))
            client.send(encode_request(RequestType.REPLACE, 2, pack({0x10: 512, 0x21: (1,)}), stream_id=number))
            client.send(encode_request(RequestType.BEGIN, 3, stream_id=number))
        await until(lambda: server._tasks)
        await client.close()
        await until(lambda: not server._tasks)
        assert ended == [5, 6]
        assert len(server.instance.box.space(512)) == 0
        assert not server.instance.box.views


async def test_listener_with_a_certificate_uses_tls(tmp_path: Path) -> None:
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=test -keyout {key} -out {cert}"
    await asyncio.to_thread(subprocess.run, command.split(), check=True, capture_output=True)
    server = Server(with_space(make_instance()))
    await server.listen(HOST, 0, tls=Tls(cert_file=cert, key_file=key))
    for parameters in ((("transport", "ssl"),), (("transport", "ssl"), ("ssl_ca_file", cert))):
        async with await Connection.open(production(), Uri(HOST, server.port, parameters=parameters)) as client:
            body = pack({0x10: 512, 0x21: (1, "x" * 100_000)})
            assert (await client.request(RequestType.REPLACE, body))[0x30] == ((1, "x" * 100_000),)
    with pytest.raises(FlowstoneError):
        await Connection.open(production(), Uri(HOST, server.port), timeout=0.5)
    await server.close()


async def test_full_disk_fails_writes_and_the_node_stays_readable() -> None:
    disk = FaultDisk()
    disk.make_directory("data")
    instance = with_space(make_instance(Path("data"), outside=disk.outside()))
    async with serving(instance) as server:
        client = await Raw.open(server)
        client.send(replace(1, 1, "one"))
        assert not (await client.read_one()).is_error
        disk.room = 0
        client.send(b"".join(replace(sync, sync, "x") for sync in range(2, 100)) + select(100, 1))
        answers = [await client.read_one() for _ in range(99)]
        assert {answer.error().code for answer in answers[:-1]} == {40}
        assert answers[-1].values() == {0x30: ((1, "one"),)}
        assert len(instance.box.space(512)) == 1
        disk.room = None
        client.send(replace(200, 2, "two"))
        assert not (await client.read_one()).is_error
        await client.close()


async def test_slow_disk_throttles_writers() -> None:
    disk, gate = FaultDisk(), asyncio.Event()
    disk.make_directory("data")

    class Slow(ThreadBlocking):
        async def __call__(self, fn: Any, *args: object) -> Any:
            await gate.wait()
            return fn(*args)

    outside = dataclasses.replace(disk.outside(), blocking=Slow())
    instance = with_space(make_instance(Path("data"), outside=outside, mode=WalMode.FSYNC))
    async with serving(instance, ServerLimits(wal_queue_max_size=10_000)) as server:
        client = await Raw.open(server)
        for first in range(0, 20_000, 1000):
            client.send(b"".join(replace(sync, sync, "x" * 50) for sync in range(first, first + 1000)))
            await asyncio.sleep(0.001)
        await until(lambda: server._tasks)
        executed = len(instance.box.space(512))
        assert executed < 20_000
        gate.set()
        assert [(await client.read_one()).sync for _ in range(20_000)] == list(range(20_000))
        assert len(instance.box.space(512)) == 20_000
        await client.close()


async def test_replies_pending_for_the_disk_delay_later_requests(tmp_path: Path) -> None:
    instance = with_space(make_instance(tmp_path, mode=WalMode.FSYNC))
    async with serving(instance, ServerLimits(output_max=10_000)) as server:
        client = await Raw.open(server)
        client.send(b"".join(replace(sync, sync % 10, "x" * 1000) + select_all(sync) for sync in range(200)))
        syncs = [(await client.read_one()).sync for _ in range(400)]
        assert sorted(syncs) == sorted([*range(200), *range(200)])
        await client.close()


# --- request logging ---


async def test_slow_request_is_logged_with_its_id(caplog: pytest.LogCaptureFixture) -> None:
    instance = with_space(make_instance(too_long_threshold=0.01))

    async def slow() -> None:
        await asyncio.sleep(0.05)

    instance.functions["slow"] = slow
    async with serving(instance) as server, await Connection.open(production(), Uri(HOST, server.port)) as connection:
        await connection.request(RequestType.CALL, pack({0x22: "slow", 0x21: []}))
    [record] = [record for record in caplog.records if record.getMessage().startswith("too long CALL: ")]
    fields = record.__dict__
    assert fields["request_id"] == f"{fields['connection']}-{fields['sync']}"
    assert fields["request"] == "CALL"
    assert fields["peer"].startswith(HOST)
    assert fields["seconds"] >= 0.05


async def test_slow_turn_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    instance = with_space(make_instance(too_long_threshold=-1))
    async with serving(instance) as server, await Connection.open(production(), Uri(HOST, server.port)) as connection:
        await connection.request(RequestType.PING, b"\x80")
    assert re.search(r"event loop turn took \d+\.\d{3} s \(1 connections, ", caplog.text)


async def test_rejected_request_is_logged_at_debug_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "flowstone.node")
    async with serving() as server, await Connection.open(production(), Uri(HOST, server.port)) as connection:
        with pytest.raises(errors.NoSuchSpace):
            await connection.request(RequestType.SELECT, pack({0x10: 999, 0x12: 1, 0x20: []}))
    [record] = [record for record in caplog.records if "SELECT request rejected" in record.getMessage()]
    assert record.__dict__["error_code"] == errors.NoSuchSpace.code
    assert record.__dict__["request_id"].startswith("1-")


async def test_invalid_packet_is_logged_with_connection_and_peer(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "flowstone.node")
    async with serving() as server:
        reader, writer = await asyncio.open_connection(HOST, server.port)
        await reader.readexactly(128)
        writer.write(b"\xa3no packet")
        await reader.read()
        writer.close()
    [record] = [record for record in caplog.records if "invalid packet" in record.getMessage()]
    assert record.__dict__["connection"] == 1
    assert record.__dict__["peer"].startswith(HOST)


async def test_task_started_before_close_runs_its_first_step() -> None:
    """Otherwise its coroutines would never be awaited."""
    begun: list[str] = []

    async def part() -> None:
        begun.append("part")
        await asyncio.Event().wait()

    async def whole(work: Coroutine[Any, Any, None]) -> None:
        await work

    async with serving() as server:
        server.start(whole(part()))
    assert begun == ["part"]
