"""The directory of a replica holds exactly the durable data after any fault."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from flowstone.limestone.errors import DamagedFile
from flowstone.limestone.format import catalog, names
from flowstone.limestone.format.catalog import Catalog
from flowstone.limestone.format.entries import Marker, WriteVersion, decode_all, encode, put, remove
from flowstone.limestone.format.messages import Blob
from flowstone.limestone.replica.directory import HIDING_MAX, CannotSetBack, ReplicaDirectory
from flowstone.limestone.replica.log_file_channel import ReceivedSession, ReplicaChannel
from flowstone.limestone.store.recovery import recover
from flowstone.outside import AlreadyLocked, production
from tests.limestone.peer import MASTER, content, row

OUTSIDE = production()


async def opened(path: Path, *, compatible: bool = False) -> ReplicaDirectory:
    return await ReplicaDirectory.open(OUTSIDE, str(path), compatible=compatible)


def write_session(directory: ReplicaDirectory, number: int, epoch: int, key: str = "k") -> None:
    channel = directory.channel(number)
    channel.begin(epoch, directory.promised_epoch)
    channel.add(encode(row(key, "v", epoch)))
    channel.end()
    directory.written(channel, channel.flush(True))


def markers(path: Path) -> list[tuple[int, int]]:
    return [(int(token.type), token.epoch) for token in decode_all(path.read_bytes(), "") if isinstance(token, Marker)]


async def test_new_directory_equals_that_of_the_original(tmp_path: Path) -> None:
    directory = await opened(tmp_path / "new")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [names.CATALOG, names.EPOCH, names.MANIFEST]
    assert directory.durable_epoch == 0
    with pytest.raises(AlreadyLocked):
        await opened(tmp_path / "new")
    await directory.close()
    await (await opened(tmp_path / "new")).close()


async def test_withdrawn_sessions_of_a_file_are_marked_with_one_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = await opened(tmp_path)
    for epoch in range(1, 51):
        write_session(directory, epoch % 2, epoch)
    synced: list[int] = []
    sync = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: synced.append(descriptor) or sync(descriptor))  # type: ignore[func-returns-value, redundant-expr]
    assert await directory.settle() == 50
    assert len(synced) == 2
    assert {kind for kind, _ in markers(tmp_path / "pwal_0000")} == {6, 3}
    await directory.close()


async def test_settle_withdraws_sessions_beyond_the_durable_epoch(tmp_path: Path) -> None:
    directory = await opened(tmp_path)
    for number, epoch in [(0, 1), (1, 2), (0, 3), (1, 4)]:
        write_session(directory, number, epoch)
    directory.promise(2)
    await directory.commit(2)
    assert await directory.settle() == 2
    assert await directory.settle() == 0
    assert markers(tmp_path / "pwal_0000") == [(2, 1), (3, 1), (6, 3), (3, 3)]
    assert markers(tmp_path / "pwal_0001") == [(2, 2), (3, 2), (6, 4), (3, 4)]
    await directory.close()


@pytest.mark.parametrize("reason", ["too many to remember", "something could not be written"])
async def test_settle_scans_unknown_files(reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = await opened(tmp_path)
    if reason == "too many to remember":
        monkeypatch.setattr("flowstone.limestone.replica.directory.REMEMBERED_MAX", 1)
    write_session(directory, 0, 1)
    write_session(directory, 0, 2)
    if reason != "too many to remember":
        directory.look_again()
    await directory.settle()
    assert markers(tmp_path / "pwal_0000") == [(6, 1), (3, 1), (6, 2), (3, 2)]
    write_session(directory, 0, 3)
    assert markers(tmp_path / "pwal_0000")[-2:] == [(2, 3), (3, 3)]
    await directory.close()


def spill_unfinished_session(directory: ReplicaDirectory, number: int, epoch: int) -> None:
    channel = directory.channel(number)
    channel.begin(epoch, directory.promised_epoch)
    channel.add(encode(row("k", "v", epoch)))
    channel.flush(False)


async def test_hide_unfinished_syncs_a_limited_number_of_channels_concurrently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = await opened(tmp_path)
    numbers = range(2 * HIDING_MAX)
    for number in numbers:
        spill_unfinished_session(directory, number, 1)
    counting, pair, sync = threading.Lock(), threading.Barrier(2, timeout=10), os.fdatasync
    running = peak = 0

    def sync_in_pairs(descriptor: int) -> None:
        nonlocal running, peak
        with counting:
            running += 1
            peak = max(peak, running)
        pair.wait()
        sync(descriptor)
        with counting:
            running -= 1

    directory.promise(1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", sync_in_pairs)
        await directory.hide_unfinished(1)
    assert 2 <= peak <= HIDING_MAX
    assert [markers(tmp_path / names.pwal(number)) for number in numbers] == [[(6, 1)]] * len(numbers)
    for number in numbers:
        directory.channel(number).abandon()
    await directory.close()


async def test_hide_unfinished_raises_the_first_error_when_no_worker_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = await opened(tmp_path)
    for number in range(4):
        spill_unfinished_session(directory, number, 1)
    hide = ReplicaChannel.hide

    def hide_two(self: ReplicaChannel, sessions: list[ReceivedSession]) -> None:
        if self.name in (names.pwal(1), names.pwal(2)):
            raise OSError(f"cannot sync {self.name}")
        hide(self, sessions)

    monkeypatch.setattr(ReplicaChannel, "hide", hide_two)
    directory.promise(1)
    with pytest.raises(OSError, match="cannot sync pwal_0001"):
        await directory.hide_unfinished(1)
    assert not any(directory.channel(number).writing.locked() for number in range(4))
    assert [markers(tmp_path / names.pwal(number)) for number in range(4)] == [[(6, 1)], [(2, 1)], [(2, 1)], [(6, 1)]]
    for number in range(4):
        directory.channel(number).abandon()
    await directory.close()


async def test_set_back_forgets_durable_epochs(tmp_path: Path) -> None:
    directory = await opened(tmp_path)
    for epoch in (1, 2, 3):
        write_session(directory, 0, epoch)
        await directory.commit(epoch)
    await directory.set_back(3)
    assert directory.durable_epoch == 3
    await directory.set_back(1)
    assert directory.durable_epoch == directory.promised_epoch == 1
    assert markers(tmp_path / "pwal_0000") == [(2, 1), (3, 1), (6, 2), (3, 2), (6, 3), (3, 3)]
    assert markers(tmp_path / "epoch") == [(4, 1)]
    await directory.close()


async def test_compacted_epochs_cannot_be_reset(tmp_path: Path) -> None:
    directory = await opened(tmp_path)
    await directory.commit(5)
    catalog.write(OUTSIDE.disk, str(tmp_path), Catalog(((names.COMPACTED, 1),), (), 4))
    with pytest.raises(CannotSetBack, match="compacted up to epoch 4"):
        await directory.set_back(3)
    await directory.set_back(4)
    assert directory.durable_epoch == 4
    await directory.close()


async def test_blob_of_a_replaced_row_exists_after_a_reset(tmp_path: Path) -> None:
    """A start deletes unreferenced blobs, but not those that a log file still names: their entries may count again."""
    directory = await opened(tmp_path)
    named = put(1, b"k", b"v", WriteVersion(1, 1), (7,))
    await directory.store([Blob(7, b"content"), Blob(6, b"named by nobody")])
    for epoch, entry in enumerate([named, remove(1, b"k", WriteVersion(2, 1))], 1):
        channel = directory.channel(0)
        channel.begin(epoch, directory.promised_epoch)
        channel.add(encode(entry))
        channel.end()
        directory.written(channel, channel.flush(True))
        await directory.commit(epoch)
    await directory.close()
    directory = await opened(tmp_path)
    assert directory.durable_epoch == 2
    await directory.settle()
    await directory.set_back(1)
    await directory.close()
    assert recover(OUTSIDE.disk, str(tmp_path)).snapshot.rows() == [named]
    assert [data for name, data in content(tmp_path).items() if name.endswith(".blob")] == [b"content"]


async def test_blob_is_replaced_atomically(tmp_path: Path) -> None:
    directory = await opened(tmp_path)
    await directory.store([Blob(101, b"one"), Blob(1, b"two")])
    await directory.store([Blob(101, b"three")])
    assert content(tmp_path)["blob/dir_01/0000000000000065.blob"] == b"three"
    assert content(tmp_path)["blob/dir_01/0000000000000001.blob"] == b"two"
    assert not [name for name in content(tmp_path) if name.endswith(".tmp")]
    await directory.close()


async def test_followed_master_is_remembered(tmp_path: Path) -> None:
    directory = await opened(tmp_path)
    await directory.follow(None)
    assert not (tmp_path / "flowstone-replica.json").exists()
    await directory.follow(MASTER)
    await directory.close()
    directory = await opened(tmp_path)
    assert directory.state.follows == MASTER
    await directory.close()


async def test_unexplained_files_are_not_changed(tmp_path: Path) -> None:
    directory = await opened(tmp_path)
    write_session(directory, 0, 1)
    await directory.commit(1)
    await directory.close()
    data = (tmp_path / "pwal_0000").read_bytes()
    (tmp_path / "pwal_0000").write_bytes(data[:20])
    with pytest.raises(DamagedFile, match="pwal_0000"):
        await opened(tmp_path)
    assert (tmp_path / "pwal_0000").read_bytes() == data[:20]
    with pytest.raises(DamagedFile, match="pwal_0000"):  # the lock was released
        await opened(tmp_path)


async def test_concurrent_calls_of_follow_leave_the_last_master(tmp_path: Path) -> None:
    directory = await opened(tmp_path)
    await asyncio.gather(*(directory.follow(MASTER) for _ in range(5)))
    await asyncio.gather(*(directory.follow(None) for _ in range(5)))
    assert directory.state.follows is None
    await directory.close()


async def test_directory_without_durable_epochs_is_not_compacted(tmp_path: Path) -> None:
    directory = await opened(tmp_path)
    write_session(directory, 0, 1)
    assert (await directory.compact()).inputs == ()
    assert (tmp_path / "pwal_0000").exists()
    await directory.close()


async def test_blob_without_rows_on_the_master_is_kept(tmp_path: Path) -> None:
    directory = await opened(tmp_path)
    await directory.store([Blob(1, b"content")])
    await directory.store([Blob(1, b""), Blob(2, b"")], are_gone=True)
    assert (tmp_path / names.blob(1)).read_bytes() == b"content"
    assert (tmp_path / names.blob(2)).read_bytes() == b""
    await directory.store([Blob(1, b"")])
    assert (tmp_path / names.blob(1)).read_bytes() == b""
    await directory.close()


async def test_channels_that_receive_the_same_blob_do_not_collide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = await opened(tmp_path)
    both_written, replace = threading.Barrier(2, timeout=10), os.replace

    def replace_together(old: str, new: str) -> None:
        both_written.wait()
        replace(old, new)

    monkeypatch.setattr(os, "replace", replace_together)
    async with asyncio.timeout(20):
        await asyncio.gather(*(directory.store([Blob(5, b"content")]) for _ in range(2)))
    await directory.close()
    blob_directory = tmp_path / "blob" / "dir_05"
    assert {path.name: path.read_bytes() for path in blob_directory.iterdir()} == {"0000000000000005.blob": b"content"}


async def test_partly_received_blobs_are_deleted_at_open(tmp_path: Path) -> None:
    directory = await opened(tmp_path)
    await directory.store([Blob(5, b"content")])
    await directory.close()
    blob_directory = tmp_path / "blob" / "dir_05"
    for name in ("0000000000000069.blob.tmp", "0000000000000069.blob.12.tmp", "other.tmp"):
        (blob_directory / name).write_bytes(b"part")
    await (await opened(tmp_path)).close()
    assert sorted(path.name for path in blob_directory.iterdir()) == ["0000000000000005.blob", "other.tmp"]
