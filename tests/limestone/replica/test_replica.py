"""A running replica: recorded masters get the recorded answers, invalid ones an error, and durable data is
never lost.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
from pathlib import Path

import pytest

from flowstone.limestone.errors import LimestoneError
from flowstone.limestone.format import epoch_file
from flowstone.limestone.format import wire_extensions as extensions
from flowstone.limestone.format.endpoint import Endpoint
from flowstone.limestone.format.entries import EntryType, Marker, WriteVersion, decode_all, put, remove, walk
from flowstone.limestone.format.messages import (
    Blob,
    Error,
    GroupCommit,
    LogChannelCreate,
    LogEntries,
    SessionBegin,
    SessionBeginAck,
    WireEntry,
)
from flowstone.limestone.format.wire_extensions import Action, Hello, Prepare
from flowstone.limestone.replica import replica as replica_module
from flowstone.limestone.replica.directory import ReplicaDirectory
from flowstone.limestone.replica.events import Event, Seeded
from flowstone.limestone.replica.replica import Replica
from flowstone.outside import Outside
from tests.limestone import recorded
from tests.limestone.peer import MASTER, Connector, Master, blob_session, content, replay, row, session
from tests.limestone.running_replica import (
    CONNECTORS,
    OUTSIDE,
    blob_files,
    markers,
    master_of,
    master_of_control,
    peer_of,
    rows,
    running,
    until,
)

RECORDED = ["basic", "late_end", "epochs", "restart"]

# --- recorded masters ---


def prepared(name: str, path: Path) -> None:
    initial = recorded.HERE / name / "replica-dir-initial"
    if initial.exists():
        shutil.copytree(initial, path)


@pytest.mark.parametrize("name", RECORDED)
async def test_compatible_replica_gives_the_recorded_answers_and_files(name: str, tmp_path: Path) -> None:
    prepared(name, tmp_path / "data")
    async with running(tmp_path / "data", compatible=True) as replica:
        await replay(CONNECTORS[replica], replica.endpoint, name)
    assert content(tmp_path / "data") == content(recorded.HERE / name / "replica-dir")


@pytest.mark.parametrize("name", RECORDED)
async def test_recorded_bytes_sent_at_once_give_the_recorded_files(name: str, tmp_path: Path) -> None:
    """Each connection sends all its bytes at once, log channels first: pipelining is legal."""
    prepared(name, tmp_path / "data")
    wire = recorded.HERE / name / "wire"
    async with running(tmp_path / "data", compatible=True) as replica:
        for number in range(3):
            peer = await peer_of(replica)
            peer.send((wire / f"conn{number}.m2r.bin").read_bytes())
            answer = (wire / f"conn{number}.r2m.bin").read_bytes()
            assert await peer.receive_bytes(len(answer)) == answer
    assert content(tmp_path / "data") == content(recorded.HERE / name / "replica-dir")


@pytest.mark.parametrize("name", RECORDED)
async def test_default_markers_equal_those_of_the_master(name: str, tmp_path: Path) -> None:
    prepared(name, tmp_path / "data")
    before = {path.name: path.stat().st_size for path in (tmp_path / "data").glob("pwal_*")}
    async with running(tmp_path / "data") as replica:
        wire = recorded.HERE / name / "wire"
        for number in range(3):
            peer = await peer_of(replica)
            peer.send((wire / f"conn{number}.m2r.bin").read_bytes())
            if number < 2:
                answer = (wire / f"conn{number}.r2m.bin").read_bytes()
                assert await peer.receive_bytes(len(answer)) == answer
            else:
                assert isinstance(await peer.receive(), SessionBeginAck)
                for _ in range((wire / f"conn{number}.r2m.bin").read_bytes()[34:].count(b"\x21\x00")):
                    assert await peer.receive() == ()
    master = recorded.HERE / name / "master-dir"
    for path in master.glob("pwal_*"):
        ours = (tmp_path / "data" / path.name).read_bytes()
        assert ours[before.get(path.name, 0) :] == path.read_bytes()[before.get(path.name, 0) :]
    assert epoch_file.read(OUTSIDE.disk, str(tmp_path / "data")).durable == max(
        epoch for _, epoch in markers(recorded.HERE / name / "replica-dir" / "epoch")
    )


async def test_group_commit_before_the_end_of_its_session_is_recorded_at_once(tmp_path: Path) -> None:
    """The original sends these messages in its default order."""
    async with running(tmp_path) as replica:
        master = master_of(replica)
        log = await master.open(0)
        await master.begin()
        log.send(session(1, flags=1), session(1, row("k", "v", 1), flags=0))
        await until((tmp_path / "pwal_0000").exists)
        await master.commit(1)
        assert markers(tmp_path / "epoch") == [(4, 1)]
        assert rows(tmp_path) == []
        await log.acknowledged(session(1, flags=6))
        assert rows(tmp_path) == [(b"k", b"v")]


async def test_session_of_a_durable_epoch_counts_when_ended(tmp_path: Path) -> None:
    async with running(tmp_path) as replica:
        master = master_of(replica)
        await master.begin()
        await master.commit(5)
        log = await master.open(0)
        log.send(session(5, row("k", "v", 5), flags=1))
        await until((tmp_path / "pwal_0000").exists)
        assert rows(tmp_path) == []
        await log.acknowledged(session(5, flags=6))
        assert markers(tmp_path / "pwal_0000") == [(2, 5), (3, 5)]
        assert rows(tmp_path) == [(b"k", b"v")]


async def test_stale_epoch_in_an_asynchronous_end_message_is_ignored(tmp_path: Path) -> None:
    async with running(tmp_path) as replica:
        log = await master_of(replica).open(0)
        log.send(session(7, row("k", "v", 7), flags=1))
        await log.acknowledged(session(0, flags=6))
    assert markers(tmp_path / "pwal_0000") == [(2, 7), (3, 7)]


async def test_unusual_entries_are_handled_as_by_the_original(tmp_path: Path) -> None:
    """Blobs of a plain put are stored, an empty list makes a plain put, and unknown types are skipped."""
    version = WriteVersion(1, 1)
    odd = (
        WireEntry(1, 1, b"a", b"1", version, (Blob(7, b"stored"),)),
        WireEntry(10, 1, b"b", b"2", version),
        WireEntry(99, 1, b"c", b"3", version),
        WireEntry(5, 1, b"d", b"dropped", version),
        WireEntry(7, 1, b"dropped", b"dropped", version),
    )
    async with running(tmp_path) as replica:
        log = await master_of(replica).open(0)
        await log.acknowledged(LogEntries(1, odd, 7))
    found = decode_all((tmp_path / "pwal_0000").read_bytes(), "")
    assert found[1:-1] == [
        put(1, b"a", b"1", version),
        put(1, b"b", b"2", version),
        remove(1, b"d", version),
        found[4],
    ]
    assert found[4].type is EntryType.CLEAR_STORAGE
    assert (tmp_path / "blob/dir_07/0000000000000007.blob").read_bytes() == b"stored"


# --- one master after another ---


async def test_replica_serves_consecutive_masters_without_a_restart(tmp_path: Path) -> None:
    async with running(tmp_path) as replica:
        for epoch in range(1, 4):
            master = master_of(replica)
            log = await master.open(0)
            await master.begin()
            await log.acknowledged(session(epoch, row(f"k{epoch}", "v", epoch)))
            await master.commit(epoch)
            await master.close()
            await until(lambda: replica.status().master is None)
        assert replica.status().durable_epoch == 3
    assert rows(tmp_path) == [(b"k1", b"v"), (b"k2", b"v"), (b"k3", b"v")]


async def test_undurable_sessions_are_withdrawn_before_the_next_master(tmp_path: Path) -> None:
    told: list[Event] = []
    async with running(tmp_path, told=told) as replica:
        master = master_of(replica)
        log = await master.open(0)
        await master.begin()
        await log.acknowledged(session(1, row("a", "1", 1)))
        await master.commit(1)
        await log.acknowledged(session(2, row("b", "2", 2)))
        log.send(session(3, row("c", "3", 3), flags=1))
        await master.close()
        await until(lambda: replica.status().master is None)
        master = master_of(replica)
        log = await master.open(0)
        await master.begin()
        await log.acknowledged(session(4, row("d", "4", 4)))
        await master.commit(4)
    assert rows(tmp_path) == [(b"a", b"1"), (b"d", b"4")]
    assert markers(tmp_path / "pwal_0000") == [(2, 1), (3, 1), (6, 2), (3, 2), (2, 4), (3, 4)]
    assert any("withdrawn" in str(event) for event in told)


async def test_master_with_a_closed_control_channel_is_replaced_by_the_next(tmp_path: Path) -> None:
    async with running(tmp_path) as replica:
        first = master_of(replica)
        log = await first.open(0)
        await first.begin()
        log.send(session(1, row("a", "1", 1), flags=1))
        await first.control.close()
        await until(lambda: replica.status().master is None)
        second = master_of(replica)
        await second.begin()
        assert await log.receive() is None
        await (await second.open(0)).acknowledged(session(1, row("b", "2", 1)))
        await second.commit(1)
    assert rows(tmp_path) == [(b"b", b"2")]


async def test_restart_appends_after_a_torn_file(tmp_path: Path) -> None:
    """The original does not notice the torn end, and loses new data after it."""
    async with running(tmp_path) as replica:
        master = master_of(replica)
        await master.begin()
        await (await master.open(0)).acknowledged(session(1, row("a", "1", 1)))
        await master.commit(1)
    whole = (tmp_path / "pwal_0000").read_bytes()
    (tmp_path / "pwal_0000").write_bytes(whole + session_bytes(2)[:20])
    async with running(tmp_path) as replica:
        assert (tmp_path / "pwal_0000").read_bytes() == whole
        master = master_of(replica)
        await master.begin()
        await (await master.open(0)).acknowledged(session(2, row("b", "2", 2)))
        await master.commit(2)
    assert rows(tmp_path) == [(b"a", b"1"), (b"b", b"2")]


def session_bytes(epoch: int) -> bytes:
    return bytes([2]) + epoch.to_bytes(8, "little") + bytes([1]) + bytes(40)


@pytest.mark.parametrize("compatible", [False, True])
async def test_torn_directory_of_a_killed_original_is_reused(compatible: bool, tmp_path: Path) -> None:
    shutil.copytree(recorded.HERE / "replica_crash/crash.dir.asleft", tmp_path / "data")
    before = len(decode_whole_sessions(tmp_path / "data/pwal_0000"))
    async with running(tmp_path / "data", compatible=compatible) as replica:
        log = await master_of(replica).open(0)
        await log.acknowledged(session(9, row("new", "n", 9)))
        await (await master_of_control(replica)).acknowledged(GroupCommit(9))
    assert (b"new", b"n") in rows(tmp_path / "data")
    assert len(decode_whole_sessions(tmp_path / "data/pwal_0000")) == before + 1


def decode_whole_sessions(path: Path) -> list[int]:
    data = path.read_bytes()
    return [
        offset
        for offset, token in walk(lambda at, size: data[at : at + size], len(data))
        if isinstance(token, Marker) and token.type is EntryType.MARKER_END
    ]


# --- secrets ---


async def test_peer_without_the_secret_writes_nothing(tmp_path: Path) -> None:
    async with running(tmp_path, secret="s3cret") as replica:
        before = content(tmp_path)
        assert await (await peer_of(replica)).refused(LogChannelCreate(0)) == 200
        control = await master_of_control(replica)
        assert await control.refused(GroupCommit(1)) == 200
        for proof in (None, bytes(32)):
            control = await master_of_control(replica)
            answer = await control.hello(Hello(MASTER, 0, 0, bytes(32), proof))
            assert isinstance(answer, Error)
            assert answer.code == 200
        assert content(tmp_path) == before
        master = master_of(replica)
        await master.begin()
        ack = await master.hello(secret="s3cret")
        assert ack.proof == extensions.replica_proof(b"s3cret", bytes(32), master.nonce or b"")
        assert await (await peer_of(replica)).refused(LogChannelCreate(0)) == 200
        assert await (await peer_of(replica)).refused(LogChannelCreate(0, bytes(32))) == 200
        await (await master.open(0)).acknowledged(session(1, row("a", "1", 1)))
        await master.commit(1)
    assert rows(tmp_path) == [(b"a", b"1")]


async def test_pending_authentication_blocks_no_other_peer(tmp_path: Path) -> None:
    async with running(tmp_path, secret="s3cret") as replica:
        await master_of_control(replica)
        master = master_of(replica)
        await master.begin()
        await master.hello(secret="s3cret")
        await master.prepare(Action.RESUME, 0)
        again = master_of(replica)
        await again.begin()
        await again.hello(secret="s3cret")  # the master reconnects, so the old connection is dead
        assert await master.control.receive() is None
        await again.prepare(Action.RESUME, 0)


# --- resume and seed ---


async def filled(replica: Replica, *epochs: int) -> Master:
    master = master_of(replica)
    await master.begin()
    await master.hello()
    await master.prepare(Action.RESUME, replica.status().durable_epoch)
    log = await master.open(0)
    for epoch in epochs:
        await log.acknowledged(session(epoch, row(f"k{epoch}", "v", epoch)))
        await master.commit(epoch)
    return master


async def test_hello_reports_the_position_and_the_followed_master(tmp_path: Path) -> None:
    async with running(tmp_path) as replica:
        await (await filled(replica, 1, 2)).close()
        await until(lambda: replica.status().master is None)
        master = master_of(replica)
        await master.begin()
        ack = await master.hello()
        assert (ack.follows, ack.durable_epoch, ack.instance) == (MASTER, 2, replica.status().instance_uuid)
        await master.close()
    async with running(tmp_path) as replica:
        assert replica.status().follows == MASTER
        original = master_of(replica)  # this master does not identify itself
        await original.begin()
        await (await original.open(0)).acknowledged(session(3, row("o", "o", 3)))
        assert replica.status().follows is None


async def test_resume_resets_epochs_that_the_master_has_lost(tmp_path: Path) -> None:
    async with running(tmp_path) as replica:
        await (await filled(replica, 1, 2, 3)).close()
        await until(lambda: replica.status().master is None)
        master = master_of(replica)
        await master.begin()
        await master.hello()
        await master.prepare(Action.RESUME, 1)
        assert replica.status().durable_epoch == 1
        assert rows(tmp_path) == [(b"k1", b"v")]
        await (await master.open(0)).acknowledged(session(2, row("other", "o", 2)))
        await master.commit(3)
    assert rows(tmp_path) == [(b"k1", b"v"), (b"other", b"o")]


STRANGER = "22222222-2222-4222-8222-222222222222"


async def seeding_by(replica: Replica, instance: str, *formerly: str) -> Master:
    await until(lambda: replica.status().master is None)
    master = master_of(replica)
    await master.begin()
    await master.hello(instance=instance, formerly=formerly)
    return master


async def test_master_of_another_database_does_not_replace_the_data(tmp_path: Path) -> None:
    async with running(tmp_path) as replica:
        await (await filled(replica, 1, 2)).close()
        master = await seeding_by(replica, STRANGER)
        before = content(tmp_path)
        answer = await master.control.ask(extensions.encode(Prepare(Action.SEED, 9)))
        assert isinstance(answer, Error)
        assert answer.code == 201
        assert MASTER in answer.message
        assert "--reseed" in answer.message
        await until(lambda: replica.status().master is None)
        assert content(tmp_path) == before
        await (await filled(replica, 3)).close()  # the owner of the data can continue
        await until(lambda: replica.status().master is None)
        original = master_of(replica)
        await original.begin()
        await (await original.open(0)).acknowledged(session(4, row("o", "o", 4)))
        await original.close()
        # Clear the owner, so that it is unknown.
        again = await seeding_by(replica, MASTER)
        assert await again.control.refused(extensions.encode(Prepare(Action.SEED, 9))) == 201


async def test_master_with_its_former_identity_replaces_its_former_data(tmp_path: Path) -> None:
    async with running(tmp_path) as replica:
        await (await filled(replica, 1, 2)).close()
        master = await seeding_by(replica, STRANGER, "33333333-3333-4333-8333-333333333333", MASTER)
        await master.prepare(Action.SEED, 9)
        await (await master.open(9999)).acknowledged(session(9, row("seeded", "", 9)))
        await master.commit(9)
        assert replica.status().follows == STRANGER


async def test_reseed_accepts_one_master_and_reports_seeded_once(tmp_path: Path) -> None:
    told: list[Event] = []
    async with running(tmp_path, reseed=True, told=told) as replica:
        await (await filled(replica, 1, 2)).close()
        master = await seeding_by(replica, STRANGER)
        await master.prepare(Action.SEED, 9)
        await master.close()  # a reconnection before any epoch became durable
        master = await seeding_by(replica, STRANGER)
        await master.prepare(Action.SEED, 9)
        await (await master.open(9999)).acknowledged(session(9, row("seeded", "", 9)))
        master.control.send(*map(GroupCommit, range(9, 15)))
        for _ in range(6):
            assert await master.control.receive() == ()
        assert [event.epoch for event in told if isinstance(event, Seeded)] == [9]
        await master.close()
        again = await seeding_by(replica, MASTER)
        assert await again.control.refused(extensions.encode(Prepare(Action.SEED, 9))) == 201


async def test_durable_seed_replaces_all_data(tmp_path: Path) -> None:
    async with running(tmp_path, reseed=True) as replica:
        await (await filled(replica, 1, 2)).close()
        await until(lambda: replica.status().master is None)
        master = master_of(replica)
        await master.begin()
        await master.hello(instance=STRANGER)
        await master.prepare(Action.SEED, 9)
        assert rows(tmp_path) == []
        seed = await master.open(9999)
        await seed.acknowledged(blob_session(9, "seeded", Blob(1, b"content")))
        await master.commit(9)
        await until(lambda: not list((tmp_path / "put_aside").rglob("*pwal*")))
        assert replica.status().follows == "22222222-2222-4222-8222-222222222222"
    assert rows(tmp_path) == [(b"seeded", b"")]
    assert (tmp_path / "blob/dir_01/0000000000000001.blob").read_bytes() == b"content"


@pytest.mark.parametrize("restarts", [False, True])
async def test_old_data_is_restored_if_a_seed_never_became_durable(restarts: bool, tmp_path: Path) -> None:
    async with running(tmp_path) as replica:
        await (await filled(replica, 1, 2)).close()
        await until(lambda: replica.status().master is None)
        before = content(tmp_path)
        master = master_of(replica)
        await master.begin()
        await master.hello()
        await master.prepare(Action.SEED, 9)
        await (await master.open(9999)).acknowledged(session(9, row("seeded", "s", 9)))
        if not restarts:
            await master.close()
            await until(lambda: replica.status().master is None)
            assert (await filled(replica)).nonce
            assert content(tmp_path) == before
    async with running(tmp_path) as replica:
        assert content(tmp_path) == before
        assert replica.status().durable_epoch == 2


async def test_blobs_named_only_by_compacted_sessions_are_deleted_at_the_next_start(tmp_path: Path) -> None:
    """They are kept until then because a master may set the replica back to uncompacted data."""
    async with running(tmp_path) as replica:
        master = master_of(replica)
        await master.begin()
        log = await master.open(0)
        await log.acknowledged(blob_session(1, "k", Blob(1, b"old")), blob_session(2, "k", Blob(2, b"new")))
        assert await log.receive() == ()
        await master.commit(2)
    async with running(tmp_path) as replica:
        assert len(blob_files(tmp_path)) == 2
        await replica.compact()
        assert len(blob_files(tmp_path)) == 2
    async with running(tmp_path):
        assert blob_files(tmp_path) == ["0000000000000002.blob"]


# --- compaction ---


async def test_replica_compacts_while_a_master_writes(tmp_path: Path) -> None:
    told: list[Event] = []
    async with running(tmp_path, told=told) as replica:
        master = await filled(replica, 1, 2, 3)
        log = master.channels[0]
        other = await master.open(1)
        await other.acknowledged(blob_session(4, "b", Blob(1, b"old")))
        log.send(session(4, row("k1", "new", 4), flags=1))  # this session is open during the rotation
        await until(lambda: replica.directory.channel(0).session is not None)
        compacting = asyncio.get_running_loop().create_task(replica.compact())
        await log.acknowledged(session(4, flags=6))
        assert await compacting == 2
        await other.acknowledged(blob_session(5, "b", Blob(2, b"new")))
        await master.commit(5)
        assert {"pwal_0000.compacted", "pwal_0001"} <= set(content(tmp_path))
        # no blob is deleted while the replica runs
        assert blob_files(tmp_path) == ["0000000000000001.blob", "0000000000000002.blob"]
        assert rows(tmp_path) == [(b"b", b""), (b"k1", b"new"), (b"k2", b"v"), (b"k3", b"v")]
        (tmp_path / "ctrl").mkdir()
        (tmp_path / "ctrl/start_compaction").touch()
        await until(lambda: sum("compacted up to epoch" in str(event) for event in told) == 2)
    assert rows(tmp_path) == [(b"b", b""), (b"k1", b"new"), (b"k2", b"v"), (b"k3", b"v")]
    async with running(tmp_path):
        assert blob_files(tmp_path) == ["0000000000000002.blob"]


async def test_undurable_session_is_withdrawn_after_a_compaction(tmp_path: Path) -> None:
    async with running(tmp_path) as replica:
        master = await filled(replica, 1)
        await master.channels[0].acknowledged(session(2, row("k2", "never", 2)))
        assert await replica.compact() == 1
        await master.close()
        await until(lambda: replica.status().master is None)
        await filled(replica, 3)
        assert rows(tmp_path) == [(b"k1", b"v"), (b"k3", b"v")]


async def test_compacted_epochs_cannot_be_withdrawn_and_require_a_seed(tmp_path: Path) -> None:
    async with running(tmp_path) as replica:
        master = await filled(replica, 1, 2)
        await replica.compact()
        await master.close()
        await until(lambda: replica.status().master is None)
        master = master_of(replica)
        await master.begin()
        await master.hello()
        prepare = extensions.encode(extensions.Prepare(Action.RESUME, 1))
        assert await master.control.refused(prepare) == 201
        master = master_of(replica)
        await master.begin()
        await master.hello()
        await master.prepare(Action.SEED, 1)
        assert rows(tmp_path) == []


async def test_compatible_replica_does_not_compact_while_running(tmp_path: Path) -> None:
    async with running(tmp_path, compatible=True) as replica:
        with pytest.raises(LimestoneError, match="stop it first"):
            await replica.compact()


async def test_masters_wait_during_the_directory_scan_and_are_rejected_if_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").mkdir()
    opened = ReplicaDirectory.open
    masters: list[asyncio.Task[SessionBeginAck]] = []
    connector = Connector(OUTSIDE.network)

    async def slow(outside: Outside, path: str, *, compatible: bool = False) -> ReplicaDirectory:
        masters.append(asyncio.ensure_future(Master(connector, replica.endpoint).begin()))
        await asyncio.sleep(0.2)
        assert not masters[-1].done()
        return await opened(outside, path, compatible=compatible)

    monkeypatch.setattr(ReplicaDirectory, "open", slow)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = Endpoint("127.0.0.1", free.getsockname()[1])
    replica = Replica(OUTSIDE, str(tmp_path / "data"), endpoint)
    async with replica:
        assert extensions.offered_nonce((await masters[0]).session_secret)
    (tmp_path / "taken" / "file").touch()
    replica = Replica(OUTSIDE, str(tmp_path / "taken"), endpoint)
    with pytest.raises(LimestoneError, match="cannot create a data directory"):
        await replica.start()
    with pytest.raises(AssertionError):
        await masters[1]
    await connector.close()


async def test_master_gets_an_error_for_an_oversized_message(tmp_path: Path) -> None:
    async with running(tmp_path) as replica:
        master = await filled(replica, 1)
        log = master.channels[0]
        answer = await log.ask(session(2, row("long", "v" * (2 << 20), 2)))
        assert isinstance(answer, Error)
        assert answer.code == 201
        assert "exceeds the limit of 1048576 bytes" in answer.message


@pytest.mark.parametrize("secret", [None, "s"])
async def test_idle_connections_do_not_keep_masters_from_connecting(
    tmp_path: Path, secret: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_module, "UNOPENED_MAX", 5)
    async with running(tmp_path, secret=secret) as replica:
        for number in range(20):
            idle = await master_of(replica).connect()
            if secret is not None and number % 2:
                assert isinstance(await idle.ask(SessionBegin()), SessionBeginAck)
            elif secret is not None:
                idle.send(LogChannelCreate(number, b"wrong"))
        master = master_of(replica)
        await master.begin()
        await master.hello(secret=secret)
        for _ in range(10):
            await master_of(replica).connect()
        await (await master.open(0)).acknowledged(session(1, row("k", "v", 1)))
        await master.commit(1)
