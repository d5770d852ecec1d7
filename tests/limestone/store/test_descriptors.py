"""Log channels for which the limit of open files is too small are refused before a session begins."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from flowstone.limestone.errors import LimestoneError
from flowstone.limestone.format.endpoint import Endpoint
from flowstone.limestone.format.messages import Error, LogChannelCreate
from flowstone.limestone.master.propagation import PropagationStatus
from flowstone.limestone.replica.replica import Replica
from flowstone.limestone.settings import Settings
from flowstone.limestone.store import descriptors
from flowstone.limestone.store.datastore import AsyncDatastore
from flowstone.outside import File, Outside, production
from flowstone.outside.disk import SystemDisk
from tests.limestone.peer import Peer
from tests.limestone.scripted_replica import eventually

LOCAL = Endpoint("127.0.0.1", 0)


class LimitedDisk(SystemDisk):
    """A disk with a limit of open files that may be reached."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.is_full = False

    def open_files_max(self) -> int | None:
        return self.limit

    def create(self, path: str) -> File:
        if self.is_full:
            raise OSError(errno.EMFILE, "Too many open files", path)
        return super().create(path)


def limited(limit: int | None) -> Outside:
    return replace(production(), disk=LimitedDisk(limit))


@pytest.mark.parametrize(
    ("replicas", "compatible", "per_channel"), [(0, False, 1), (1, False, 3), (2, False, 5), (1, True, 2)]
)
def test_master_needs_descriptors_for_files_connections_and_catch_up(
    replicas: int, compatible: bool, per_channel: int
) -> None:
    assert descriptors.per_master_channel(replicas, compatible=compatible) == per_channel


@pytest.mark.parametrize("limit", [None, 64 + 3000])
def test_sufficient_limit_is_no_error(limit: int | None) -> None:
    descriptors.check(LimitedDisk(limit), 1000, 3)


async def test_channel_beyond_the_descriptor_limit_is_not_created(tmp_path: Path) -> None:
    settings = Settings(str(tmp_path), (Endpoint("127.0.0.1", 1),), on_lost="degrade")
    async with AsyncDatastore(limited(64 + 2 * 3), settings) as store:
        await store.create_channel()
        channel = await store.create_channel()
        with pytest.raises(LimestoneError, match="3 log channels need 73 file descriptors") as caught:
            await store.create_channel()
        assert "the limit of open files is 70" in caught.value.message
        assert caught.value.hint is not None
        assert "ulimit -n" in caught.value.hint
        await store.ready()
        await store.switch_epoch(1)
        await channel.begin_session()
        await channel.end_session()


async def test_session_at_the_descriptor_limit_fails_with_a_hint(tmp_path: Path) -> None:
    disk = LimitedDisk(None)
    async with AsyncDatastore(replace(production(), disk=disk), Settings(str(tmp_path))) as store:
        channel = await store.create_channel()
        await store.ready()
        await store.switch_epoch(1)
        disk.is_full = True
        with pytest.raises(LimestoneError, match=r"cannot open .*pwal_0000: Too many open files") as caught:
            await channel.begin_session()
        assert caught.value.hint == descriptors.RAISE


async def test_replica_refuses_a_channel_beyond_the_descriptor_limit(tmp_path: Path) -> None:
    async with Replica(limited(64 + 2 * 2), str(tmp_path), LOCAL) as replica:
        peers = [await Peer.connect(production().network, replica.endpoint) for _ in range(3)]
        try:
            for number in (0, 1):
                await peers[number].acknowledged(LogChannelCreate(number))
            answer = await peers[2].ask(LogChannelCreate(2))
        finally:
            for peer in peers:
                await peer.close()
    assert isinstance(answer, Error)
    assert answer.code == 20
    assert "3 log channels need 70 file descriptors, and the limit of open files is 68" in answer.message


async def test_replica_with_too_few_descriptors_never_becomes_live(tmp_path: Path) -> None:
    async with Replica(limited(64 + 2 * 2), str(tmp_path / "replica"), LOCAL) as replica:
        settings = Settings(str(tmp_path / "master"), (replica.endpoint,), on_lost="degrade")
        async with AsyncDatastore(production(), settings) as store:
            for _ in range(3):
                await store.create_channel()
            states: list[str] = []

            def is_told() -> bool:
                status = store.status().replication
                assert isinstance(status, PropagationStatus)
                states.append(status.replicas[0].state)
                return "the limit of open files is 68" in (status.replicas[0].error or "")

            await store.ready()
            await eventually(is_told)
            assert "live" not in states


def test_other_errors_are_unchanged() -> None:
    with pytest.raises(FileNotFoundError), descriptors.explained():
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "x")
