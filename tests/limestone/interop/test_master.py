"""Our master and the original's replica: all sessions and epochs arrive, and the replica's directory is intact."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

import pytest

from flowstone.limestone.errors import LimestoneError
from flowstone.limestone.format import names
from flowstone.limestone.format.endpoint import Endpoint
from flowstone.limestone.format.entries import Marker, WriteVersion, decode_all, encode
from flowstone.limestone.format.epoch_file import read as read_epochs
from flowstone.limestone.settings import Settings
from flowstone.limestone.store.channel import AsyncLogChannel
from flowstone.limestone.store.datastore import AsyncDatastore
from flowstone.limestone.store.recovery import recover
from flowstone.outside import production
from tests.limestone.interop.real_limestone import logutil, replica

OUTSIDE: Final = production()
EPOCHS: Final = 6


async def written(directory: Path, **options: Any) -> list[int]:
    """Return the events of a store with two channels, entries of every type, blobs and late ends, after its
    shutdown.
    """
    store, told = AsyncDatastore(OUTSIDE, Settings(str(directory), **options)), list[int]()
    store.add_persistent_callback(told.append)
    channels = [await store.create_channel() for _ in range(2)]
    await store.ready()
    for epoch in range(1, EPOCHS + 1):
        await store.switch_epoch(epoch)
        await asyncio.gather(*(session(store, channel, epoch) for channel in channels))
    late = channels[0]
    await late.begin_session()
    late.add_entry(1, b"late", b"end", (EPOCHS, 9))
    await store.switch_epoch(EPOCHS + 1)
    await late.end_session()
    await store.until_durable(EPOCHS)
    await store.shutdown()
    return told


async def session(store: AsyncDatastore, channel: AsyncLogChannel, epoch: int) -> None:
    number = channel.id
    await channel.begin_session()
    channel.add_storage(number, WriteVersion(epoch, 0))
    for key in range(20):
        channel.add_entry(number, b"%d" % key, b"%d" % epoch * key, WriteVersion(epoch, key + 1))
    channel.add_entries(number, [b"many %d" % key for key in range(50)], [b"v" * 300] * 50, WriteVersion(epoch, 100))
    channel.remove_entry(number, b"%d" % epoch, WriteVersion(epoch, 200))
    if epoch == 3:
        channel.truncate_storage(number, WriteVersion(epoch, 1000))
    pool = store.blob_pool()
    blob_id = await pool.register_data(b"blob of %d" % epoch * 1000)
    channel.add_entry(9, b"blob %d %d" % (number, epoch), b"", WriteVersion(epoch, 300), (blob_id,))
    await pool.release()
    await channel.end_session()


def shown(directory: Path) -> list[tuple[int, bytes, bytes, tuple[int, ...]]]:
    found = recover(OUTSIDE.disk, str(directory), repairs=False).snapshot.rows()
    return [(row.storage_id, row.key, row.value, row.blob_ids) for row in found]


def blobs(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.rglob("*.blob")}


def with_epoch_0(path: Path) -> bytes:
    """Return the file as the original's replica writes it."""
    tokens = decode_all(path.read_bytes(), str(path))
    return b"".join(encode(token._replace(epoch=0) if isinstance(token, Marker) else token) for token in tokens)


@pytest.mark.parametrize("compatible", [True, False])
@pytest.mark.parametrize("session_close", ["default", "async"])
@pytest.mark.parametrize("group_commit", ["local_first", "replica_first", "concurrent"])
async def test_real_replica_has_the_data_of_our_master(
    tmp_path: Path, compatible: bool, session_close: str, group_commit: str
) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    with replica(theirs) as endpoint:
        options = {"compatible": compatible, "session_close": session_close, "group_commit": group_commit}
        told = await written(ours, replicas=(Endpoint.parse(endpoint),), on_lost="fail", **options)
    assert told[-1] == EPOCHS
    assert told == sorted(set(told))
    for number in range(2):
        assert (theirs / names.pwal(number)).read_bytes() == with_epoch_0(ours / names.pwal(number))
    assert read_epochs(OUTSIDE.disk, str(theirs)).durable == EPOCHS
    assert shown(ours) == shown(theirs) != []
    assert blobs(ours) == blobs(theirs) != {}
    for directory in (ours, theirs):
        said = logutil("inspect", directory)
        assert (said.code, said.status, said.fields["durable-epoch"]) == (0, "OK", str(EPOCHS)), said


async def test_lost_real_replica_is_reported_by_policy(tmp_path: Path) -> None:
    with replica(tmp_path / "theirs") as endpoint:
        store = AsyncDatastore(OUTSIDE, Settings(str(tmp_path / "ours"), (Endpoint.parse(endpoint),), on_lost="fail"))
        channel = await store.create_channel()
        await store.ready()
        await store.switch_epoch(1)
        await channel.begin_session()
        channel.add_entry(1, b"k", b"v", (1, 1))
        await channel.end_session()
        await channel.begin_session()
    with pytest.raises(LimestoneError, match="1 of 1 replicas must acknowledge it"):
        await channel.end_session()
    await store.shutdown()
