"""Bad input closes its connection, with the protocol's error if there is one, and affects no other connection."""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from flowstone.limestone.format import entries, names, transcode
from flowstone.limestone.format import wire_extensions as extensions
from flowstone.limestone.format.entries import WriteVersion, put
from flowstone.limestone.format.messages import (
    Blob,
    Error,
    ErrorCode,
    GroupCommit,
    LogChannelCreate,
    LogEntries,
    Message,
    RdmaInit,
    SessionBegin,
    SessionFlags,
    WireEntry,
    encode,
)
from flowstone.limestone.format.wire_extensions import Action
from flowstone.limestone.replica.received_blob import ReceivedBlob
from flowstone.limestone.replica.replica import Replica
from flowstone.limestone.store.recovery import recover
from tests.limestone.peer import blob_session, row, session
from tests.limestone.running_replica import (
    OUTSIDE,
    markers,
    master_of,
    master_of_control,
    peer_of,
    rows,
    running,
    until,
)

Act = Callable[[Replica], Awaitable[int | None]]


def first(*messages: Message | bytes) -> Act:
    async def act(replica: Replica) -> int | None:
        return await (await peer_of(replica)).refused(*messages)

    return act


def on_control(*messages: Message | bytes) -> Act:
    async def act(replica: Replica) -> int | None:
        return await (await master_of_control(replica)).refused(*messages)

    return act


def on_log(*messages: Message | bytes) -> Act:
    async def act(replica: Replica) -> int | None:
        peer = await master_of(replica).open(5)
        return await peer.refused(*messages)

    return act


def twice(*messages: Message | bytes) -> Act:
    async def act(replica: Replica) -> int | None:
        keeper = await peer_of(replica)
        assert not isinstance(await keeper.ask(messages[0]), Error)
        code = await (await peer_of(replica)).refused(messages[0])
        await keeper.close()
        return code

    return act


ONE = row("x", "y", 1)
BAD: dict[str, tuple[Act, int | None]] = {
    "group commit first": (first(GroupCommit(1)), 1),
    "entries first": (first(session(1, ONE)), 1),
    "the beginning of entries first": (first(b"\x11"), 1),
    "an answer first": (first(b"\x21\x00"), 1),
    "rdma first": (first(RdmaInit(1)), 1),
    "reserved type first": (first(b"\x02"), None),
    "unknown type first": (first(b"\x7f"), None),
    "zero first": (first(b"\x00"), None),
    "a long opener": (first(b"\x10\x01" + bytes(8) + b"\xff\xff\xff\xff"), None),
    "another version": (first(SessionBegin(3)), 13),
    "a second control channel": (twice(SessionBegin()), 10),
    "a log channel of another connection type": (first(LogChannelCreate(0, b"", 2)), None),
    "a channel id that is too large": (first(LogChannelCreate(10_000)), 20),
    "the largest channel id": (first(LogChannelCreate(2**64 - 1)), 20),
    "a channel id that is used": (twice(LogChannelCreate(7)), 20),
    "entries on control": (on_control(session(1, ONE)), None),
    "a channel on control": (on_control(LogChannelCreate(1)), None),
    "gc on control": (on_control(b"\x04\x00\x01"), None),
    "reserved on control": (on_control(b"\x02"), None),
    "an answer on control": (on_control(b"\x21\x00"), None),
    "no frame": (on_control(b"\x7f\x00\x00\x00\x02{}"), None),
    "a bad frame": (on_control(b"\x40\x00\x00\x00\x02{}"), None),
    "a long frame": (on_control(b"\x40\xff\xff\xff\xff"), None),
    "prepare without hello": (on_control(extensions.encode(extensions.Prepare(Action.SEED, 1))), 201),
    "group commit on log": (on_log(GroupCommit(1)), None),
    "unknown on log": (on_log(b"\x7f"), None),
    "entries outside of a session": (on_log(session(1, ONE, flags=0)), 22),
    "an end outside of a session": (on_log(session(1, flags=6)), 22),
    "a flush outside of a session": (on_log(session(1, flags=4)), 22),
    "a second begin": (on_log(session(2, flags=1), session(2, flags=1)), 22),
    "a marker": (on_log(LogEntries(1, (WireEntry(2, 0, b"", b"", WriteVersion(0, 0)),), 7)), None),
    "a message that is too long": (on_log(b"\x11" + bytes(8) + b"\xff\xff\xff\xff"), None),
    "a value that is too long": (on_log(b"\x11" + bytes(8) + b"\0\0\0\1\1" + bytes(12) + b"\xff\xff\xff\xff"), None),
}


TAKES_CONTROL = [name for name in BAD if "control" in name or "frame" in name or "prepare" in name]


@pytest.mark.parametrize("name", [name for name in BAD if name not in TAKES_CONTROL])
async def test_bad_input_harms_no_other_connection(name: str, tmp_path: Path) -> None:
    act, code = BAD[name]
    async with running(tmp_path) as replica:
        master = master_of(replica)
        log = await master.open(0)
        await log.acknowledged(session(1, row("a", "1", 1)))
        assert await act(replica) == code
        await log.acknowledged(session(2, row("b", "2", 2)))
        await master.begin()
        if name == "a second begin":  # of epoch 2, which lacks the interrupted session
            await master.commit(1)
            assert await master.control.refused(GroupCommit(2)) == 201
        else:
            await master.commit(2)
    assert rows(tmp_path) == [(b"a", b"1"), (b"b", b"2")][: 1 if name == "a second begin" else 2]
    assert not (tmp_path / "blob").exists()


@pytest.mark.parametrize("name", TAKES_CONTROL)
async def test_valid_control_channel_is_accepted_after_an_invalid_one(name: str, tmp_path: Path) -> None:
    act, code = BAD[name]
    async with running(tmp_path) as replica:
        assert await act(replica) == code
        await until(lambda: replica.status().master is None)
        master = master_of(replica)
        log = await master.open(0)
        await master.begin()
        await log.acknowledged(session(1, row("a", "1", 1)))
        await master.commit(1)
    assert rows(tmp_path) == [(b"a", b"1")]


async def test_second_end_of_a_session_is_rejected(tmp_path: Path) -> None:
    async with running(tmp_path) as replica:
        log = await master_of(replica).open(0)
        log.send(session(1, ONE), session(1, flags=6))
        assert await log.receive() == ()
        assert await log.refused() == ErrorCode.LOG_CHANNEL_CONFUSED
    assert markers(tmp_path / "pwal_0000") == [(2, 1), (3, 1)]


@pytest.mark.parametrize("compatible", [False, True])
async def test_repeated_session_begin_is_ignored_and_rdma_rejected(tmp_path: Path, compatible: bool) -> None:
    """The codes and texts are the original's."""
    async with running(tmp_path, compatible=compatible) as replica:
        master = master_of(replica)
        await master.begin()
        answer = await master.control.ask(SessionBegin(), RdmaInit(4))
        assert answer == Error(101, "Failed to initialize RDMA receiver")
        await master.commit(1)
        log = await master.open(0)
        answer = await log.ask(SessionBegin(), RdmaInit(4))
        assert answer == Error(100, "Invalid handler resources for RDMA_INIT")
        await log.acknowledged(session(2, ONE))


async def test_epoch_that_lost_a_session_is_never_recorded(tmp_path: Path) -> None:
    async with running(tmp_path) as replica:
        master = master_of(replica)
        await master.begin()
        whole, broken = await master.open(0), await master.open(1)
        await whole.acknowledged(session(1, row("a", "1", 1)), session(2, row("b", "2", 2)))
        assert await whole.receive() == ()
        assert await broken.refused(session(2, flags=1), session(2, flags=1)) == 22
        await master.commit(1)
        assert await master.control.refused(GroupCommit(2)) == 201
    assert rows(tmp_path) == [(b"a", b"1")]
    assert markers(tmp_path / "pwal_0001") == []


async def test_number_of_silent_connections_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowstone.limestone.replica.replica.OPENING_SECONDS", 0.2)
    monkeypatch.setattr("flowstone.limestone.replica.replica.UNOPENED_MAX", 3)
    async with running(tmp_path) as replica:
        silent = [await peer_of(replica) for _ in range(4)]
        for peer in silent:
            assert await peer.receive() is None
        await master_of(replica).begin()


# --- blobs ---


async def test_reused_blob_id_becomes_empty_although_another_blob_of_the_entry_was_deleted(tmp_path: Path) -> None:
    version, contents = WriteVersion(2, 0), {5: None, 6: transcode.BlobContent(0, ())}
    disk = entries.encode(put(1, b"k", b"", version, (5, 6)))
    async with running(tmp_path) as replica:
        master = master_of(replica)
        await master.begin()
        await master.hello()
        log = await master.open(0)
        await log.acknowledged(blob_session(1, "k", Blob(5, b"five"), Blob(6, b"old")))
        await log.acknowledged(*transcode.wire_parts(disk, 2, begin=True, end=True, open_blob=contents.__getitem__))
        await master.commit(2)
        assert (tmp_path / names.blob(5)).read_bytes() == b"five"
        assert (tmp_path / names.blob(6)).read_bytes() == b""
    (row,) = recover(OUTSIDE.disk, str(tmp_path), repairs=False).snapshot.rows()
    assert (row.version, row.blob_ids) == (version, (5, 6))


@pytest.fixture
def _large_blobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transcode, "BLOB_WHOLE_MAX", 1000)


def temporaries(path: Path) -> list[Path]:
    return list(path.rglob("*.tmp"))


LARGE = blob_session(1, "k", Blob(5, b"x" * 5000))


@pytest.mark.usefixtures("_large_blobs")
async def test_truncated_large_blob_leaves_no_file(tmp_path: Path) -> None:
    async with running(tmp_path) as replica:
        log = await master_of(replica).open(0)
        log.send(encode(LARGE)[:3000])
        await until(lambda: temporaries(tmp_path))
        await log.close()
        await until(lambda: not temporaries(tmp_path))
        log = await master_of(replica).open(0)
        await log.acknowledged(LARGE)
        assert (tmp_path / names.blob(5)).read_bytes() == b"x" * 5000


@pytest.mark.usefixtures("_large_blobs")
async def test_large_blob_outside_of_a_session_is_rejected_and_removed(tmp_path: Path) -> None:
    async with running(tmp_path) as replica:
        log = await master_of(replica).open(0)
        assert await log.refused(LARGE._replace(flags=0)) == ErrorCode.LOG_CHANNEL_CONFUSED
        await until(lambda: not temporaries(tmp_path))
        assert not (tmp_path / names.blob(5)).exists()


@pytest.mark.usefixtures("_large_blobs")
async def test_two_channels_receive_the_same_large_blob_concurrently(tmp_path: Path) -> None:
    data = encode(LARGE)
    async with running(tmp_path) as replica:
        master = master_of(replica)
        logs = [await master.open(channel) for channel in range(2)]
        for log in logs:
            log.send(data[:3000])
        for log in logs:
            await log.acknowledged(data[3000:])
        assert (tmp_path / names.blob(5)).read_bytes() == b"x" * 5000
        assert not temporaries(tmp_path)


@pytest.mark.usefixtures("_large_blobs")
async def test_session_is_abandoned_when_an_unfinished_blob_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(received: ReceivedBlob) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(ReceivedBlob, "discard", fail)
    async with running(tmp_path) as replica:
        log = await master_of(replica).open(0)
        log.send(session(1, row("a", "1", 1), flags=SessionFlags.BEGIN))
        log.send(encode(LARGE._replace(flags=0))[:3000])
        await until(lambda: temporaries(tmp_path))
        await log.close()
        await until(lambda: replica.directory.channel(0).session is None)
        log = await master_of(replica).open(0)
        await log.acknowledged(session(1, row("b", "2", 1)))
