"""The runtime of an applier, against scripted masters and against the real Tarantool."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import UUID

import pytest
from asynctnt import Connection as Client

from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.errors import error_of
from flowstone.iproto.greeting import Greeting, encode_greeting
from flowstone.iproto.msgpack import pack
from flowstone.iproto.packet import frame, split
from flowstone.iproto.replies import encode_error, encode_event
from flowstone.iproto.row import Row, decode_row
from flowstone.iproto.uri import parse_uri
from flowstone.node.upstream import applier as applier_module
from flowstone.node.upstream.applier import Applier
from flowstone.outside import production
from flowstone.outside.clock import SystemClock
from flowstone.replication import messages
from flowstone.replication.applier.states import DUPLICATE_MAX, UNKNOWN_MAX, ApplierState, ConnectionLost
from flowstone.replication.messages import Ballot, Heartbeat, SubscribeReply
from flowstone.replication.row_stream import RowStream
from flowstone.replication.vclock import VClock
from tests.node.fake_server import peer
from tests.node.memory_sink import MemorySink
from tests.real_tarantool import free_port
from tests.replication.applier_stories import raw_packet, transaction

State = ApplierState
US, THEM, SET = UUID(int=0x11 << 120), UUID(int=0x22 << 120), UUID(int=0xAA << 120)
SECONDS = 60.0


async def until(condition: Callable[[], object], seconds: float = SECONDS) -> None:
    """Wait until `condition` holds; fail on timeout."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 — what is waited for has no event
            await asyncio.sleep(0.005)


class ShortClock(SystemClock):
    """A clock whose pauses are short or endless."""

    def __init__(self, pause: float) -> None:
        self._pause = pause
        self.pauses: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        await asyncio.sleep(self._pause)


@asynccontextmanager
async def applier(
    uri: str, sink: MemorySink, *, pause: float = 0.02, **how: Any
) -> AsyncIterator[tuple[Applier, list[State]]]:
    """Return an applier that is not started, and the list of its states."""
    states: list[State] = []
    options: dict[str, Any] = {"replication_timeout": 0.3} | how
    outside = dataclasses.replace(production(), clock=ShortClock(pause))
    made = Applier(outside, parse_uri(uri), sink, on_state=lambda it: states.append(it.state), **options)
    try:
        yield made, states
    finally:
        await made.stop()


def member() -> MemorySink:
    """Return a sink that has data and is registered."""
    sink = MemorySink(US)
    sink.replicaset_uuid, sink.replica_id = SET, 2
    return sink


# --- scripted masters ---


class ScriptedMaster:
    """Answers each request by the script of its type, WATCH only once; records the requests."""

    def __init__(self, uuid: UUID = THEM, version: tuple[int, int, int] = (2, 6, 0), **scripts: list[bytes]) -> None:
        self.uuid = uuid
        self.version = version
        self.scripts: dict[str, list[bytes]] = {
            "VOTE": [raw_packet(RequestType.OK, messages.encode_ballot_body(Ballot(VClock({1: 5})), is_2_6=True))],
            "SUBSCRIBE": [
                messages.encode_subscribe_reply(SubscribeReply(1, VClock({1: 5}), SET)),
                messages.encode_heartbeat(Heartbeat(1, 1e9)),
            ],
        } | scripts
        self.connections = 0
        self.heard: list[Row] = []
        self.writers: list[asyncio.StreamWriter] = []

    @property
    def acks(self) -> list[VClock]:
        return [messages.decode_ack(row).vclock for row in self.heard if row.type == 0]

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.append(writer)
        writer.write(encode_greeting(Greeting(self.version, self.uuid, b"s" * 32)))
        buffer = b""
        while data := await reader.read(65536):
            packets, end = split(buffer + data)
            buffer = (buffer + data)[end:]
            for packet in packets:
                row = decode_row(packet)
                self.heard.append(row)
                if row.type:
                    writer.write(b"".join(self.scripts.get(RequestType(row.type).name, [])))
                if row.type == RequestType.WATCH:
                    self.scripts["WATCH"] = []


def error_packet(code: int, message: str) -> bytes:
    return encode_error(0, 0, error_of(code, message))


async def test_applier_pauses_in_a_given_state_until_resumed() -> None:
    master = ScriptedMaster()
    async with peer(master.talk) as uri, applier(uri, member()) as (it, states):
        it.start(pause_at={State.CONNECTED})
        await until(lambda: it.state is State.CONNECTED)
        for _ in range(20):
            await asyncio.sleep(0)
        assert [row.type for row in master.heard] == [RequestType.VOTE]
        assert it.ballot is not None
        assert (it.uuid, it.version, it.ballot.vclock) == (THEM, (2, 6, 0), VClock({1: 5}))
        await it.resume_to(State.READY)
        assert it.state is State.READY
        await it.resume_to(State.READY)  # the current pause
        it.resume()
        await until(lambda: it.state is State.SYNC)
        assert states == [State.CONNECT, State.CONNECTED, State.READY, State.SYNC]
        assert it.remote_vclock_at_subscribe == VClock({1: 5})
        assert it.peer_id == 1


async def test_heartbeats_are_answered_and_writes_acknowledged() -> None:
    master = ScriptedMaster()
    sink = member()
    async with peer(master.talk) as uri, applier(uri, sink, sync_lag=1e10) as (it, _):
        it.start()
        await until(lambda: master.acks)
        assert master.acks == [VClock()]
        assert it.state is State.SYNC
        master.writers[0].write(transaction(1, 1, 5))
        await until(lambda: VClock({1: 5}) in master.acks)
        await until(lambda: it.state is State.FOLLOW)
        assert [row.lsn for row in sink.rows] == [1, 2, 3, 4, 5]
        count = len(master.acks)
        master.writers[0].write(messages.encode_heartbeat(Heartbeat(1, 1e9)))
        await until(lambda: len(master.acks) == count + 1)
        assert it.info()["status"] == "follow"
        assert it.info()["lag"] > 1e8
        assert it.info()["peer"] == uri


async def test_busy_applier_still_sends_acks() -> None:
    master = ScriptedMaster()
    sink = member()
    sink.gate.clear()
    async with peer(master.talk) as uri, applier(uri, sink, replication_timeout=0.05) as (it, _):
        it.start()
        await until(lambda: master.acks)
        master.writers[0].write(transaction(1, 1))
        await until(lambda: len(master.acks) >= 10)
        assert set(master.acks) == {VClock()}
        assert it.state is State.SYNC
        sink.gate.set()
        await until(lambda: VClock({1: 1}) in master.acks)


async def test_raft_row_is_passed_to_the_sink() -> None:
    master = ScriptedMaster()
    sink = member()
    async with peer(master.talk) as uri, applier(uri, sink) as (it, _):
        it.start()
        await until(lambda: master.acks)
        master.writers[0].write(raw_packet(RequestType.RAFT, b"\x81\x00\x03"))
        await until(lambda: sink.raft_rows)


def newer_master(ballot: Ballot | None) -> ScriptedMaster:
    features = raw_packet(RequestType.OK, pack({Key.VERSION.value: 6, Key.FEATURES.value: [0, 1, 2, 3]}))
    value = None if ballot is None else messages.encode_ballot_body(ballot, is_2_6=False)
    return ScriptedMaster(version=(2, 11, 9), ID=[features], WATCH=[encode_event(0, pack("internal.ballot"), value)])


@pytest.mark.parametrize("is_newer", [False, True])
async def test_rows_are_signs_of_life_only_from_older_masters_and_heartbeats_from_all(is_newer: bool) -> None:
    master = newer_master(None) if is_newer else ScriptedMaster()
    sink, signs = member(), list[int]()
    options: dict[str, Any] = {"on_alive": lambda it: signs.append(it.peer_id)}
    async with peer(master.talk) as uri, applier(uri, sink, **options) as (it, _):
        it.start()
        await until(lambda: master.acks)
        assert signs == [1]
        master.writers[0].write(transaction(1, 1, 5))
        await until(lambda: sink.rows)
        assert signs == ([1] if is_newer else [1, 1])
        master.writers[0].write(raw_packet(RequestType.RAFT, b"\x81\x00\x03"))
        await until(lambda: sink.raft_rows)
        await until(lambda: len(signs) == (2 if is_newer else 3))


@pytest.mark.parametrize("has_event", [True, False])
async def test_ballot_of_a_newer_master_is_watched_on_a_separate_connection(has_event: bool) -> None:
    master = newer_master(Ballot(VClock({1: 5})) if has_event else None)
    told: list[Ballot | None] = []
    options: dict[str, Any] = {"on_ballot": lambda it: told.append(it.ballot)}
    async with peer(master.talk) as uri, applier(uri, member(), **options) as (it, _):
        it.start(pause_at={State.CONNECTED})
        await until(lambda: it.state is State.CONNECTED)
        assert it.ballot is not None
        assert it.ballot.vclock == VClock({1: 5})
        assert len(master.writers) == 2
        if has_event:
            later = messages.encode_ballot_body(Ballot(VClock({1: 7})), is_2_6=False)
            master.writers[1].write(encode_event(0, pack("internal.ballot"), later))
            await until(lambda: told)
            assert it.ballot.vclock == VClock({1: 7})
        it.resume()
        await until(lambda: it.state is State.SYNC)
        await until(lambda: master.writers[1].is_closing() or master.writers[1].transport.is_closing())


async def test_unavailable_ballot_is_an_error_of_the_applier() -> None:
    master = newer_master(None)
    master.scripts["WATCH"] = [error_packet(42, "Read access to universe '' is denied for user 'guest'")]
    async with peer(master.talk) as uri, applier(uri, member()) as (it, _):
        it.start()
        with pytest.raises(errors.AccessDenied):
            await it.resume_to(State.CONNECTED, is_patient=False)


def made_certificate(directory: Path) -> tuple[Path, Path]:
    directory.mkdir(exist_ok=True)
    key, certificate = directory / "key.pem", directory / "cert.pem"
    command = f"openssl req -x509 -newkey rsa:2048 -days 2 -nodes -subj /CN=test -keyout {key} -out {certificate}"
    subprocess.run(command.split(), check=True, capture_output=True)
    return key, certificate


async def test_applier_connects_over_tls(tmp_path: Path) -> None:
    key, certificate = made_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    master = ScriptedMaster()
    server = await asyncio.start_server(master.talk, "127.0.0.1", 0, ssl=context)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with applier(f"{address}?transport=ssl&ssl_ca_file={certificate}", member()) as (it, _):
        it.start()
        await until(lambda: master.acks)
        assert it.info()["peer"] == address
    async with applier(f"{address}?transport=ssl&ssl_ca_file={tmp_path}/none.pem", member()) as (it, _):
        it.start()
        await until(lambda: it.state is State.STOPPED)
        assert f"cannot read ssl_ca_file {tmp_path}/none.pem" in it.info()["message"]
    other = made_certificate(tmp_path / "other")[1]
    async with applier(f"{address}?transport=ssl&ssl_ca_file={other}", member()) as (it, _):
        it.start()
        await until(lambda: it.state is State.DISCONNECTED)
        assert f"certificate not accepted with ssl_ca_file {other}: self" in it.info()["message"]
        assert str(other) in it.info()["system_message"]
    async with applier(address, member(), replication_timeout=0.05) as (it, _):
        it.start()
        await until(lambda: it.state is State.DISCONNECTED)
        assert "the server may require TLS: add ?transport=ssl" in str(it.error)
    server.close()


async def test_error_names_a_peer_that_requires_a_certificate(tmp_path: Path) -> None:
    key, certificate = made_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    context.load_verify_locations(certificate)
    context.verify_mode = ssl.CERT_REQUIRED
    server = await asyncio.start_server(ScriptedMaster().talk, "127.0.0.1", 0, ssl=context)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with applier(f"{address}?transport=ssl", member()) as (it, _):
        it.start()
        await until(lambda: it.state is State.DISCONNECTED)
        assert "the server may require a client certificate: add ssl_cert_file and ssl_key_file" in str(it.error)
    server.close()


async def test_error_names_a_peer_without_tls() -> None:
    async with peer(ScriptedMaster().talk) as uri, applier(f"{uri}?transport=ssl", member()) as (it, _):
        it.start()
        await until(lambda: it.state is State.DISCONNECTED)
        assert f"cannot connect to {uri}: server does not use TLS" in it.info()["message"]


async def test_silent_master_is_disconnected_and_retried() -> None:
    master = ScriptedMaster()
    async with peer(master.talk) as uri, applier(uri, member(), replication_timeout=0.05) as (it, states):
        it.start()
        await until(lambda: master.connections >= 3)
        assert State.DISCONNECTED in states
        assert State.STOPPED not in states


async def test_timeout_of_a_silent_master_can_change() -> None:
    patience = 60.0
    master = ScriptedMaster()
    options: dict[str, Any] = {"silence_max": lambda: patience}
    async with peer(master.talk) as uri, applier(uri, member(), replication_timeout=0.01, **options) as (it, states):
        it.start()
        await until(lambda: master.acks)
        await until(lambda: it.info()["idle"] > 0.2)
        assert State.DISCONNECTED not in states
        patience = 0.05
        master.writers[0].write(messages.encode_heartbeat(Heartbeat(1, 1e9)))
        await until(lambda: State.DISCONNECTED in states)
        assert it.error is None or "sent nothing for 0.05 s" in it.error.message


async def test_greeting_has_a_timeout() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with peer(silent) as uri, applier(uri, member(), replication_timeout=0.05) as (it, _):
        it.start()
        with pytest.raises(ConnectionLost, match=r"sent nothing for 0\.2 s"):
            await it.resume_to(State.CONNECTED)


async def test_applier_does_not_follow_its_own_instance() -> None:
    master = ScriptedMaster(uuid=US)
    async with peer(master.talk) as uri, applier(uri, member()) as (it, states):
        it.start()
        await until(lambda: it.state is State.OFF and states)
        assert it.error is None
        assert [row.type for row in master.heard] == [RequestType.VOTE]


async def test_applier_stops_permanently_at_a_row_that_cannot_be_applied(caplog: pytest.LogCaptureFixture) -> None:
    master = ScriptedMaster()
    sink = member()
    sink.failure = errors.TupleFound("Duplicate key exists", hint="failed at row 1 of replica 1")
    async with peer(master.talk) as uri, applier(uri, sink) as (it, _):
        it.start()
        await until(lambda: master.acks)
        master.writers[0].write(transaction(1, 1))
        await until(lambda: it.state is State.STOPPED)
        assert it.info()["message"] == "Duplicate key exists; failed at row 1 of replica 1"
        with pytest.raises(errors.TupleFound):
            await it.resume_to(State.FOLLOW)
        assert [record.levelname for record in caplog.records if "stopped" in record.message] == ["ERROR"]
        assert "failed at row 1 of replica 1" in caplog.text
        assert master.connections == 1
        sink.failure = None
        it.start()
        await until(lambda: it.state is State.SYNC)
        assert it.error is None


async def test_internal_error_stops_the_applier() -> None:
    master = ScriptedMaster()
    sink = member()
    sink.failure = ZeroDivisionError("division by zero")
    async with peer(master.talk) as uri, applier(uri, sink) as (it, _):
        it.start()
        await until(lambda: master.acks)
        master.writers[0].write(transaction(1, 1))
        await until(lambda: it.state is State.STOPPED)
        assert it.info()["message"] == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize("state", [State.SYNC, State.DISCONNECTED])
async def test_applier_can_be_failed_with_an_error_in_any_state(state: State) -> None:
    master = ScriptedMaster()
    async with peer(master.talk) as uri, applier(uri, member(), pause=1e3) as (it, _):
        it.start()
        await until(lambda: it.state is State.SYNC)
        if state is State.DISCONNECTED:
            master.writers[0].close()
            await until(lambda: it.state is State.DISCONNECTED)
        it.fail(errors.WalIo("Failed to write to disk"))
        await until(lambda: it.state is State.STOPPED)
        assert it.info()["message"] == "Failed to write to disk"


async def test_a_repeated_error_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    master = ScriptedMaster(SUBSCRIBE=[error_packet(116, "Instance bootstrap hasn't finished yet")])
    async with peer(master.talk) as uri, applier(uri, member()) as (it, states):
        it.start()
        await until(lambda: states.count(State.LOADING) >= 5)
        assert caplog.text.count("bootstrap hasn't finished") == 1
        assert "retrying every 0.3 s" in caplog.text
        with pytest.raises(errors.Loading):
            await it.resume_to(State.SYNC, is_patient=False)
        master.scripts["SUBSCRIBE"] = [error_packet(42, "Read access to universe '' is denied for user 'guest'")]
        await until(lambda: "Read access" in caplog.text)
        master.scripts["SUBSCRIBE"] = ScriptedMaster().scripts["SUBSCRIBE"]
        await until(lambda: it.state is State.SYNC)
        assert it.error is None


async def test_applier_logs_an_unreachable_peer_once_and_retries(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    async with applier(f"127.0.0.1:{port}", member()) as (it, states):
        it.start()
        await until(lambda: states.count(State.DISCONNECTED) >= 3)
        assert it.info()["message"] == f"cannot connect to 127.0.0.1:{port}: connection refused"
        assert it.info()["system_message"] == "Connection refused"
        assert caplog.text.count("connection refused") == 1
        with pytest.raises(ConnectionLost):
            await it.resume_to(State.CONNECTED)


async def test_registration_rows_after_a_gap_are_left_to_the_subscription() -> None:
    """2.6.0 sends the rows written since the request, however far we lagged."""
    master = ScriptedMaster(REGISTER=[transaction(1, 9), messages.encode_vclock_reply(VClock({1: 9}))])
    sink = member()
    sink.replica_id = 0
    async with peer(master.talk) as uri, applier(uri, sink) as (it, states):
        it.start()
        await until(lambda: it.state is State.SYNC)
        assert sink.told == ["end_join {1: 9}"]
        assert sink.vclock == VClock()
        subscribe = next(row for row in master.heard if row.type == RequestType.SUBSCRIBE)
        assert messages.decode_subscribe(subscribe.body, is_2_6=True).vclock == VClock()
        assert states[-3:] == [State.REGISTERED, State.READY, State.SYNC]


@pytest.mark.parametrize("follows_us", [True, False])
async def test_master_without_its_own_rows_is_retried_until_it_has_them(follows_us: bool) -> None:
    master = ScriptedMaster()
    sink = member()
    sink.restart_at(VClock({1: 9}))
    asked: list[UUID] = []

    def may_regain(uuid: UUID) -> bool:
        asked.append(uuid)
        return follows_us

    async with peer(master.talk) as uri, applier(uri, sink, may_regain=may_regain) as (it, states):
        it.start()
        await until(lambda: states.count(State.LOADING) >= 3)
        assert it.info()["message"] == f"{uri} has lost its rows 6…9: its vclock is {{1: 5}}, ours {{1: 9}}"
        if follows_us:
            await until(lambda: states.count(State.LOADING) >= 15)
            assert set(asked) == {THEM}
        reply = messages.encode_subscribe_reply(SubscribeReply(1, VClock({1: 9}), SET))
        master.scripts["SUBSCRIBE"] = [reply, *ScriptedMaster().scripts["SUBSCRIBE"][1:]]
        await until(lambda: it.state is State.SYNC)


async def test_rows_received_from_others_during_the_query_are_not_lost_by_the_master() -> None:
    sink = member()
    sink.restart_at(VClock({1: 5}))

    class SlowMaster(ScriptedMaster):
        async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asking = asyncio.create_task(super().talk(reader, writer))
            await until(lambda: any(row.type == RequestType.SUBSCRIBE for row in self.heard))
            sink.restart_at(VClock({1: 9}))
            writer.write(b"".join(subscription(5)))
            await asking

    master = SlowMaster(SUBSCRIBE=[])
    async with peer(master.talk) as uri, applier(uri, sink, may_regain=lambda uuid: False) as (it, _):
        it.start()
        await until(lambda: it.state in (State.SYNC, State.STOPPED))
        assert it.state is State.SYNC


async def test_applier_stops_if_the_master_never_recovers_its_rows() -> None:
    master = ScriptedMaster()
    sink = member()
    sink.restart_at(VClock({1: 9}))
    async with peer(master.talk) as uri, applier(uri, sink, may_regain=lambda uuid: False) as (it, _):
        it.start()
        await until(lambda: it.state is State.STOPPED)
        assert "has lost its rows 6…9" in it.info()["message"]


def subscription(lsn: int) -> list[bytes]:
    reply = messages.encode_subscribe_reply(SubscribeReply(1, VClock({1: lsn}), SET))
    return [reply, *ScriptedMaster().scripts["SUBSCRIBE"][1:]]


@pytest.mark.parametrize("has_acknowledged", [False, True])
async def test_master_that_wrote_other_rows_after_losing_some_is_not_followed(has_acknowledged: bool) -> None:
    """It is followed only after it was seen with the old rows; a reconnect or restart does not change that."""
    master = ScriptedMaster()
    sink = member()
    sink.restart_at(VClock({1: 9}))
    async with peer(master.talk) as uri, applier(uri, sink, may_regain=lambda uuid: True) as (it, states):
        it.start()
        await until(lambda: State.LOADING in states)
        await it.stop()
        if has_acknowledged:
            it.peer_acknowledged(1, VClock({1: 9}))
        master.scripts["SUBSCRIBE"] = subscription(12)
        it.start()
        if has_acknowledged:
            await until(lambda: it.state is State.SYNC)
            return
        await until(lambda: it.state is State.STOPPED)
        message = it.info()["message"]
        assert "had lost its rows 6…9 and has written new rows since" in message
        assert sink.rows == []


async def asked_filters(master: ScriptedMaster, count: int) -> list[tuple[int, ...]]:
    def rows() -> list[Row]:
        return [row for row in master.heard if row.type == RequestType.SUBSCRIBE]

    await until(lambda: len(rows()) >= count)
    return [messages.decode_subscribe(row.body, is_2_6=True).id_filter for row in rows()]


@pytest.mark.parametrize("is_in_ballot", [True, False])
async def test_applier_requests_its_own_rows_that_only_a_peer_has(is_in_ballot: bool) -> None:
    ballot = Ballot(VClock({1: 5, 2: 8} if is_in_ballot else {1: 5}))
    body = messages.encode_ballot_body(ballot, is_2_6=True)
    reply = messages.encode_subscribe_reply(SubscribeReply(1, VClock({1: 5, 2: 8}), SET))
    master = ScriptedMaster(VOTE=[raw_packet(RequestType.OK, body)], SUBSCRIBE=[reply])
    sink = member()
    sink.id_filter = (2,)
    sink.restart_at(VClock({2: 6}))
    async with peer(master.talk) as uri, applier(uri, sink) as (it, states):
        it.start()
        await until(lambda: it.state is State.SYNC)
        filters = await asked_filters(master, 1)
        assert filters == ([()] if is_in_ballot else [(2,), ()])
        assert it.standing.own_lsn_seen == 8
        assert (State.DISCONNECTED in states) is not is_in_ballot
        sink.restart_at(VClock({2: 8}))
        master.writers[-1].close()
        assert (await asked_filters(master, len(filters) + 1))[-1] == (2,)


@pytest.mark.parametrize("request_type", ["JOIN", "REGISTER"])
async def test_master_that_falls_silent_during_a_join_is_disconnected(
    request_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applier_module, "JOIN_SILENCE_SECONDS", 0.4)
    answer = messages.encode_vclock_reply(VClock({1: 9})) if request_type == "JOIN" else transaction(1, 1)
    master = ScriptedMaster()
    master.scripts[request_type] = [answer]
    sink = MemorySink(US) if request_type == "JOIN" else member()
    sink.replica_id = 0
    async with peer(master.talk) as uri, applier(uri, sink, replication_timeout=0.05) as (it, _):
        it.start()
        with pytest.raises(ConnectionLost, match=r"sent nothing for 0\.4 s"):
            await it.resume_to(State.JOINED)


@pytest.mark.parametrize("is_watched", [False, True])
async def test_large_messages_are_rejected_before_the_rows(is_watched: bool) -> None:
    large = b"\xce" + (200 << 20).to_bytes(4, "big")
    master = newer_master(None) if is_watched else ScriptedMaster(VOTE=[large])
    if is_watched:
        master.scripts["WATCH"] = [large]
    async with peer(master.talk) as uri, applier(uri, member()) as (it, _):
        it.start()
        await until(lambda: it.state is State.STOPPED)
        assert "packet claims 209715200 bytes" in it.info()["message"]


async def test_event_without_a_ballot_stops_the_applier_with_a_reason() -> None:
    master = newer_master(None)
    master.scripts["WATCH"] = [frame(b"\x81\x00\xcc\x4c\xc1")]
    async with peer(master.talk) as uri, applier(uri, member()) as (it, _):
        it.start()
        await until(lambda: it.state is State.STOPPED)
        assert "cannot decode the ballot of" in it.info()["message"]


async def test_master_that_does_not_know_us_yet_is_retried_for_a_limited_time() -> None:
    """The row that registered us elsewhere may be on its way to it: 2.6 has no other error for that."""
    unknown = [error_packet(62, "Replica us is not registered with replica set ours")]
    master = ScriptedMaster(SUBSCRIBE=unknown)
    async with peer(master.talk) as uri, applier(uri, member()) as (it, states):
        it.start()
        await until(lambda: states.count(State.LOADING) >= 3)
        master.scripts["SUBSCRIBE"] = subscription(5)
        await until(lambda: it.state is State.SYNC)
        states.clear()
        master.scripts["SUBSCRIBE"] = unknown
        master.writers[-1].close()
        await until(lambda: it.state is State.STOPPED)
        assert states.count(State.LOADING) == UNKNOWN_MAX


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (62, f"Replica {US} is not registered with replica set {THEM}"),
        (63, f"Replica set UUID mismatch: expected {THEM}, got {SET}"),
    ],
)
async def test_error_about_another_replica_set_does_not_call_data_invalid(code: int, text: str) -> None:
    master = ScriptedMaster(SUBSCRIBE=[error_packet(code, text)])
    async with peer(master.talk) as uri, applier(uri, member()) as (it, states):
        it.start()
        await until(lambda: it.state is State.STOPPED)
        advice = f"that is another replica set ({THEM}, ours is {SET}): correct the URI"
        assert it.info()["message"] == f"{text}; {advice}"
        assert it.error is not None
        assert it.error.hint == advice
        assert State.LOADING not in states


async def test_expelled_peer_is_retried_and_the_log_gives_advice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    text = "Anonymous replica does not support non-anonymous followers."
    master = ScriptedMaster(SUBSCRIBE=[error_packet(5, text)])
    async with peer(master.talk) as uri, applier(uri, member()) as (it, states):
        it.start()
        await until(lambda: states.count(State.LOADING) >= 3)
        assert caplog.text.count(f"{text} (ER_UNSUPPORTED, 5); it was expelled, or is an anonymous replica") == 1
        assert f"cannot follow {it.uri.address}: {text}" in caplog.text
        assert "release or engine" not in caplog.text


async def test_error_of_a_member_unknown_to_a_newer_master_mentions_its_removal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    master = ScriptedMaster(
        SUBSCRIBE=[error_packet(220, f"Can't subscribe non-anonymous replica {US} until join is done")]
    )
    sink = member()
    sink.version_id = 2 << 16 | 11 << 8 | 9
    async with peer(master.talk) as uri, applier(uri, sink) as (it, states):
        it.start()
        await until(lambda: states.count(State.LOADING) > UNKNOWN_MAX + 2)
        assert it.error is not None
        assert "if this instance was removed from the replica set, delete its data" in (it.error.hint or "")
        assert "it does not know us: if this instance was removed" in it.info()["message"]
        assert caplog.text.count("may not have reached it yet") == caplog.text.count("it does not know us") == 1
        assert "retry in a moment" not in caplog.text


async def test_registration_with_a_lost_answer_counts_as_done() -> None:
    refused = error_packet(207, f"Replica '{US}' is not anonymous and cannot register.")
    master = ScriptedMaster(REGISTER=[refused])
    sink = member()
    sink.replica_id = 0
    async with peer(master.talk) as uri, applier(uri, sink) as (it, states):
        it.start()
        await until(lambda: it.state is State.SYNC)
        assert states[-4:] == [State.REGISTER, State.REGISTERED, State.READY, State.SYNC]
        assert master.connections == 1
        subscribe = next(row for row in master.heard if row.type == RequestType.SUBSCRIBE)
        assert not messages.decode_subscribe(subscribe.body, is_2_6=True).is_anonymous
        master.writers[0].write(transaction(1, 1))
        await until(lambda: sink.rows)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (116, "Instance bootstrap hasn't finished yet"),
        (59, "Incorrect value for option 'replication': duplicate connection with the same replica UUID"),
    ],
)
async def test_applier_logs_temporary_errors_without_a_warning(
    code: int, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    master = ScriptedMaster(SUBSCRIBE=[error_packet(code, text)])
    async with peer(master.talk) as uri, applier(uri, member()) as (it, states):
        it.start()
        await until(lambda: states.count(State.LOADING) >= 3)
        assert [record.levelname for record in caplog.records if text in record.message] == ["INFO"]
        if code == 59:  # another instance has our UUID
            await until(lambda: states.count(State.LOADING) > DUPLICATE_MAX + 1)
            assert [record.levelname for record in caplog.records if text in record.message] == ["INFO", "WARNING"]


async def test_rows_after_skipped_registration_rows_are_skipped() -> None:
    """A gap in one batch would not be visible in the next one."""
    sink = member()
    sink.replica_id = 0
    async with applier("127.0.0.1:1", sink) as (it, _):
        it.state = State.REGISTER
        for first in (3, 1, 2):
            stream = RowStream("upstream")
            stream.feed(transaction(1, first))
            slab = stream.take()
            assert slab is not None
            await it._final(slab)
        assert sink.rows == []


async def test_stop_of_an_applier_propagates_cancellation() -> None:
    master = ScriptedMaster()
    sink = member()
    closing, may_close = asyncio.Event(), asyncio.Event()
    async with peer(master.talk) as uri, applier(uri, sink) as (it, _):
        it.start()
        await until(lambda: it.state is State.SYNC)
        assert it._stream is not None
        close = it._stream.close

        async def slow_close() -> None:
            closing.set()
            await may_close.wait()
            await close()

        it._stream.close = slow_close  # type: ignore[method-assign]
        stopping = asyncio.create_task(it.stop())
        await closing.wait()
        stopping.cancel()
        may_close.set()
        with pytest.raises(asyncio.CancelledError):
            await stopping


async def test_error_reported_to_a_caller_is_not_announced_as_retried(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with applier(f"127.0.0.1:{free_port()}", member(), pause=1e3) as (it, _):
        it.start()
        with pytest.raises(ConnectionLost):
            await it.resume_to(State.CONNECTED)
    assert "retrying" not in caplog.text


async def test_join_without_a_replica_set_is_not_retried() -> None:
    vclock = messages.encode_vclock_reply(VClock({1: 9}))
    master = ScriptedMaster(JOIN=[vclock, vclock, vclock])
    async with peer(master.talk) as uri, applier(uri, MemorySink(US)) as (it, _):
        it.start()
        await until(lambda: it.state is State.STOPPED)
        assert "has no replica set UUID" in it.info()["message"]


# --- the real master ---

SPACE = "box.schema.space.create('t'):create_index('pk') for i = 1, 100 do box.space.t:insert{i, 'x'} end\n"
PATIENT = {"replication_timeout": 1.25}
TIMEOUT = "replication_timeout=1.25, "
"""On a busy machine a delay of some seconds must not cause a timeout: the server would log it."""


CAUGHT_UP = """
local fiber = require('fiber')
while box.info.replication[2].downstream.vclock[1] ~= box.info.lsn do fiber.sleep(0.01) end
"""


LEFT = """
local fiber = require('fiber')
local function is_followed()
    for _, all in ipairs({box.info.replication, box.info.replication_anon()}) do
        for _, one in pairs(all) do
            if one.downstream ~= nil and one.downstream.status == 'follow' then return true end
        end
    end
    return false
end
while is_followed() do fiber.sleep(0.01) end
"""
"""Wait until the server has noticed that its replica left: a replica that returns earlier is connected twice."""


async def lua(server: Any, code: str) -> Any:
    async with Client(host="127.0.0.1", port=server.port) as client:
        return (await client.eval(code)).body


def tuples(sink: MemorySink) -> list[bytes]:
    """Return the bodies of the rows of space `t`, which has id 512."""
    heads = (b"\x82\x10\xcd\x02\x00", b"\x82\x10\xce\x00\x00\x02\x00")
    return [row.body for row in (*sink.snapshot, *sink.rows) if row.body.startswith(heads)]


def complaints(server: Any) -> list[str]:
    """Return the errors in the server's log, except closed connections."""
    lines = [line for line in server.log().splitlines() if " E> " in line or " !> " in line]
    return [line for line in lines if "unexpected EOF" not in line and "Broken pipe" not in line]


async def test_applier_joins_and_follows_a_real_master(tarantool: ModuleType, tmp_path: Path) -> None:
    with tarantool.serve(tmp_path, setup=SPACE, cfg=TIMEOUT) as server:
        sink = MemorySink(US)
        async with applier(server.uri, sink, **PATIENT) as (it, states):
            it.start(pause_at={State.CONNECTED})
            await it.resume_to(State.JOINED)
            assert (sink.replica_id, sink.replicaset_uuid is None) == (2, False)
            assert [line.split()[0] for line in sink.told] == [
                "begin_snapshot",
                "snapshot_rows",
                "begin_final",
                "final_rows",
                "end_join",
            ]
            it.resume()
            await until(lambda: it.state is State.FOLLOW)
            await lua(server, "for i = 101, 200 do box.space.t:insert{i, 'y'} end")
            await lua(server, "box.begin() for i = 1, 50 do box.space.t:delete{i} end box.commit()")
            await until(lambda: len(sink.rows) == 1 + 100 + 50)
            await until(lambda: it.info()["lag"] < 5)
            await lua(server, CAUGHT_UP)
            (downstream,) = await lua(server, "return box.info.replication[2].downstream")
            assert downstream["status"] == "follow"
            assert State.STOPPED not in states
        assert complaints(server) == []


async def test_applier_follows_anonymously_and_registers_later(tarantool: ModuleType, tmp_path: Path) -> None:
    with tarantool.serve(tmp_path, setup=SPACE, cfg=TIMEOUT) as server:
        sink = MemorySink(US, is_anonymous=True)
        async with applier(server.uri, sink, **PATIENT) as (it, states):
            it.start()
            await until(lambda: it.state is State.FOLLOW)
            assert State.FETCHED_SNAPSHOT in states
            assert (await lua(server, "return box.info.replication_anon.count"))[0] == 1
            await lua(server, "box.space.t:insert{500, 'z'}")
            await until(lambda: len(sink.rows) == 1)
            await it.stop()
            await lua(server, LEFT)
            sink.is_anonymous, sink.id_filter = False, ()
            it.start()
            await it.resume_to(State.REGISTERED)
            assert sink.replica_id == 2
            it.resume()
            await until(lambda: it.state is State.FOLLOW)
        assert complaints(server) == []


async def test_applier_reconnects_to_a_restarted_master(tarantool: ModuleType, tmp_path: Path) -> None:
    port = free_port()
    cfg = f"{TIMEOUT}listen='127.0.0.1:{port}'"
    sink = MemorySink(US)
    async with applier(f"127.0.0.1:{port}", sink, **PATIENT) as (it, _):
        with tarantool.serve(tmp_path, setup=SPACE, cfg=cfg):
            it.start()
            await until(lambda: it.state is State.FOLLOW)
        await until(lambda: it.state is not State.FOLLOW)
        more = "for i = 1, 10 do box.space.t:replace{i, 'again'} end"
        with tarantool.serve(tmp_path, setup=more, cfg=cfg) as server:
            await until(lambda: it.state is State.FOLLOW and len(sink.rows) == 1 + 10)
            assert len(tuples(sink)) == 100 + 10
            assert complaints(server) == []


async def test_applier_catches_up_after_an_interruption(tarantool: ModuleType, tmp_path: Path) -> None:
    with tarantool.serve(tmp_path, setup=SPACE, cfg=TIMEOUT) as server:
        sink = MemorySink(US)
        async with applier(server.uri, sink, **PATIENT) as (it, _):
            it.start()
            await until(lambda: it.state is State.FOLLOW)
            for _ in range(3):
                await it.stop()
                await lua(server, LEFT)
                await lua(server, "for i = 1, 20 do box.space.t:replace{i, 'more'} end")
                it.start()
                await until(lambda: it.state is State.FOLLOW)
            assert [row.lsn for row in sink.rows] == list(range(sink.rows[0].lsn, sink.rows[0].lsn + 61))
        assert complaints(server) == []


USERS = """
box.schema.user.create('replicator', {password='secret'})
box.schema.user.grant('replicator', 'replication')
box.schema.user.create('nobody', {password='secret'})
"""


@pytest.mark.parametrize(
    ("login", "error", "message"),
    [
        ("replicator:wrong", errors.CredsMismatch, "Incorrect password supplied for user 'replicator'"),
        ("stranger:secret", errors.NoSuchUser, "User 'stranger' is not found"),
        ("nobody:secret", errors.AccessDenied, "Read access to universe '' is denied for user 'nobody'"),
    ],
)
async def test_rejected_login_is_reported_and_retried(
    tarantool: ModuleType, tmp_path: Path, login: str, error: type[FlowstoneError], message: str
) -> None:
    with tarantool.serve(tmp_path, setup=USERS) as server:
        async with applier(f"{login}@{server.uri}", MemorySink(US)) as (it, states):
            it.start()
            with pytest.raises(error):
                await it.resume_to(State.JOINED, is_patient=False)
            assert it.info()["message"] == message
            it.resume()
            await until(lambda: states.count(State.LOADING) >= 3)
            assert "secret" not in str(it.info())


async def test_valid_login_joins(tarantool: ModuleType, tmp_path: Path) -> None:
    with tarantool.serve(tmp_path, setup=USERS, cfg=TIMEOUT) as server:
        async with applier(f"replicator:secret@{server.uri}", MemorySink(US), **PATIENT) as (it, states):
            it.start()
            await until(lambda: it.state is State.FOLLOW)
            assert State.AUTH in states
        assert complaints(server) == []


async def test_a_master_of_another_replica_set_is_not_followed(tarantool: ModuleType, tmp_path: Path) -> None:
    with tarantool.serve(tmp_path, setup=SPACE) as server:
        sink = MemorySink(US)
        async with applier(server.uri, sink) as (it, _):
            it.start()
            await it.resume_to(State.JOINED)
            await it.stop()
            sink.replicaset_uuid = SET
            it.start()
            await until(lambda: it.state is State.STOPPED)
            assert it.info()["message"].startswith("Replica set UUID mismatch: expected ")


async def test_expelled_instance_is_reported_as_expelled(tarantool: ModuleType, tmp_path: Path) -> None:
    with tarantool.serve(tmp_path, setup=SPACE) as server:
        sink = MemorySink(US)
        async with applier(server.uri, sink) as (it, _):
            it.start()
            await it.resume_to(State.JOINED)
            await it.stop()
            await lua(server, "box.space._cluster:delete{2}")
            it.start()
            await until(lambda: it.state is State.STOPPED)
            assert "is not registered with replica set" in it.info()["message"]
