"""Our master and our replicas over loopback, as separate stores: an epoch reported by the master is durable on both.

Outages, seeds under load, quorums, secrets, TLS: at the end both directories have the same rows and durable epoch.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from flowstone.limestone.errors import LimestoneError
from flowstone.limestone.format import lineage, names
from flowstone.limestone.format.endpoint import Endpoint
from flowstone.limestone.format.entries import Entry
from flowstone.limestone.master import replica_link
from flowstone.limestone.master.conversation import AuthenticationFailed
from flowstone.limestone.master.propagation import QuorumLost
from flowstone.limestone.replica.replica import Replica
from flowstone.limestone.settings import Settings
from flowstone.limestone.store import offline_directory as offline
from flowstone.limestone.store import seeding as replica_seeding
from flowstone.limestone.store.channel import AsyncLogChannel
from flowstone.limestone.store.datastore import AsyncDatastore
from flowstone.limestone.store.recovery import recover
from flowstone.limestone.tools.offline_compaction import compact_offline
from flowstone.outside import Tls, production
from tests.limestone.scripted_replica import eventually

ANY_PORT = Endpoint("127.0.0.1", 0)
SECRET = "correct horse battery staple"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_link, "RETRY_SECONDS_MAX", 0.1)


def held(directory: Path) -> tuple[int, list[Entry]]:
    """Return durable epoch and rows of a directory, as the next process would find them."""
    found = recover(production().disk, str(directory), repairs=False)
    return found.durable_epoch, found.snapshot.rows()


def replica_at(directory: Path, endpoint: Endpoint = ANY_PORT, **options: Any) -> Replica:
    return Replica(production(), str(directory), endpoint, **options)


class Store:
    """A master with its channels, in the epoch `epoch`."""

    def __init__(self, store: AsyncDatastore, channels: list[AsyncLogChannel]) -> None:
        self.store = store
        self.channels = channels
        self.epoch = 0
        self._count = 0

    async def next_epoch(self) -> None:
        self.epoch = max(self.epoch, self.store.last_epoch) + 1
        await self.store.switch_epoch(self.epoch)

    async def put(self, channel: int = 0, rows: int = 1, size: int = 5) -> None:
        """Write a session of new keys, and of keys that an older session has."""
        log = self.channels[channel]
        await log.begin_session()
        for _ in range(rows):
            self._count += 1
            key = self._count if self._count % 2 else self._count // 2
            log.add_entry(1, b"key %d" % key, bytes(size), (self.epoch, self._count))
        await log.end_session()

    @property
    def states(self) -> list[str]:
        replication = self.store.status().replication
        assert replication is not None
        return [replica.state for replica in replication.replicas]


@asynccontextmanager
async def master(directory: Path, *replicas: Endpoint, channels: int = 1, **options: Any) -> AsyncIterator[Store]:
    async with AsyncDatastore(production(), Settings(str(directory), replicas, **options)) as store:
        made = [await store.create_channel() for _ in range(channels)]
        await store.ready()
        running = Store(store, made)
        await running.next_epoch()
        yield running


async def test_reported_epoch_is_durable_on_the_replica(tmp_path: Path) -> None:
    async with replica_at(tmp_path / "r") as replica, master(tmp_path / "m", replica.endpoint, channels=3) as store:
        reported: list[int] = []
        store.store.add_persistent_callback(reported.append)
        for _ in range(5):
            await asyncio.gather(*(store.put(channel, rows=20) for channel in range(3)))
            await store.next_epoch()
            assert replica.status().durable_epoch == reported[-1] == store.epoch - 1
    assert held(tmp_path / "m") == held(tmp_path / "r")
    assert (tmp_path / "m" / "pwal_0001").read_bytes() == (tmp_path / "r" / "pwal_0001").read_bytes()


async def test_empty_blob_that_reuses_an_id_is_empty_on_the_replica(tmp_path: Path) -> None:
    """The first blob with this id belonged to a session that never became durable, which freed the id."""

    async def put_blob(store: Store, content: bytes) -> None:
        blob_id = await store.store.blob_pool().register_data(content)
        assert blob_id == 1
        await store.channels[0].begin_session()
        store.channels[0].add_entry(1, b"with a blob", b"", (store.epoch, 1), [blob_id])
        await store.channels[0].end_session()

    options: dict[str, Any] = {"on_lost": "degrade"}
    async with replica_at(tmp_path / "r") as replica, master(tmp_path / "m", replica.endpoint, **options) as store:
        await eventually(lambda: store.states == ["live"])
        await store.put()
        await store.next_epoch()
        await put_blob(store, b"old content")
    blob = tmp_path / "r" / names.blob(1)
    assert blob.read_bytes() == b"old content"
    async with master(tmp_path / "m") as store:
        await put_blob(store, b"")
        await store.next_epoch()
    async with replica_at(tmp_path / "r") as replica, master(tmp_path / "m", replica.endpoint, **options) as store:
        await eventually(lambda: store.states == ["live"])
        assert blob.read_bytes() == b""
    assert held(tmp_path / "m") == held(tmp_path / "r")


async def test_large_blobs_are_replicated_completely(tmp_path: Path) -> None:
    """Blobs arrive live and while catching up, several in one session, whole and in pieces."""
    contents = [bytes([number]) * size for number, size in enumerate([3 << 20, 10, (1 << 20) + 1, 1 << 20, 0])]

    async def put_blobs(store: Store) -> list[int]:
        pool = store.store.blob_pool()
        blob_ids = [await pool.register_data(content) for content in contents]
        await store.channels[0].begin_session()
        store.channels[0].add_entry(1, b"three", b"", (store.epoch, 1), blob_ids[:3])
        store.channels[0].add_entry(1, b"two %d" % blob_ids[0], b"", (store.epoch, 2), blob_ids[3:])
        await store.channels[0].end_session()
        await store.next_epoch()
        return blob_ids

    async with replica_at(tmp_path / "r") as replica, master(tmp_path / "m", replica.endpoint) as store:
        blob_ids = await put_blobs(store)
    async with master(tmp_path / "m") as store:
        blob_ids += await put_blobs(store)
    async with replica_at(tmp_path / "r") as replica, master(tmp_path / "m", replica.endpoint) as store:
        await eventually(lambda: store.states == ["live"])
    assert held(tmp_path / "m") == held(tmp_path / "r")
    for blob_id, content in zip(blob_ids, contents * 2, strict=True):
        assert (tmp_path / "r" / names.blob(blob_id)).read_bytes() == content
    assert not list((tmp_path / "r").rglob("*.tmp"))


async def test_thousand_channels_become_live(tmp_path: Path) -> None:
    count = 1000
    async with replica_at(tmp_path / "r") as replica, master(tmp_path / "m", replica.endpoint, channels=count) as store:
        await eventually(lambda: replica.status().channels == count)
        await eventually(lambda: store.states == ["live"])
        for channel in range(0, count, 100):
            await store.put(channel)
        await store.next_epoch()
        assert replica.status().durable_epoch == store.epoch - 1
    assert held(tmp_path / "m") == held(tmp_path / "r")


async def test_session_of_many_mebibytes_is_replicated_completely(tmp_path: Path) -> None:
    async with replica_at(tmp_path / "r") as replica, master(tmp_path / "m", replica.endpoint) as store:
        await store.put(rows=100, size=100_000)
        await store.next_epoch()
    assert held(tmp_path / "m") == held(tmp_path / "r")
    assert (tmp_path / "m" / "pwal_0000").read_bytes() == (tmp_path / "r" / "pwal_0000").read_bytes()


async def test_replica_resumes_after_an_outage(tmp_path: Path) -> None:
    async with replica_at(tmp_path / "r") as replica:
        endpoint = replica.endpoint
        async with master(tmp_path / "m", endpoint, on_lost="degrade", channels=2) as store:
            await eventually(lambda: store.states == ["live"])
            await store.put(0)
            await store.next_epoch()
            before = replica.status().durable_epoch
            await replica.stop()
            await eventually(lambda: store.states != ["live"])
            for channel in (0, 1, 0):
                await store.put(channel, rows=30)
                await store.next_epoch()
            async with replica_at(tmp_path / "r", endpoint) as again:
                await eventually(lambda: store.states == ["live"])
                await store.put(1)
                await store.next_epoch()
                await eventually(lambda: again.status().durable_epoch == store.epoch - 1)
                replication = store.store.status().replication
                assert replication is not None
                assert not replication.replicas[0].was_seeded
                assert before < store.epoch - 3
    assert held(tmp_path / "m") == held(tmp_path / "r")


async def test_empty_replica_is_seeded_under_load(tmp_path: Path) -> None:
    async with replica_at(tmp_path / "a") as first:
        free = replica_at(tmp_path / "b")
        await free.start()
        endpoint = free.endpoint
        await free.stop()
        shutil.rmtree(tmp_path / "b")
        async with master(tmp_path / "m", first.endpoint, endpoint, quorum=1, channels=2) as store:
            for number in range(40):
                await store.put(number % 2, rows=50, size=2000)
                await store.next_epoch()
            writing = asyncio.ensure_future(_write(store, 60))
            async with replica_at(tmp_path / "b", endpoint) as second:
                await eventually(lambda: store.states == ["live", "live"])
                await writing
                await eventually(lambda: second.status().durable_epoch == store.epoch - 1)
                await eventually(lambda: first.status().durable_epoch == store.epoch - 1)
    assert held(tmp_path / "m") == held(tmp_path / "b") == held(tmp_path / "a")


async def _write(store: Store, epochs: int) -> None:
    for number in range(epochs):
        await asyncio.gather(store.put(0, rows=10), store.put(1, rows=number % 7))
        await store.next_epoch()


async def test_replica_of_another_master_is_seeded_only_with_reseed(tmp_path: Path) -> None:
    async with replica_at(tmp_path / "r") as replica:
        async with master(tmp_path / "other", replica.endpoint) as store:
            await store.put(rows=10)
            await store.next_epoch()
        async with master(tmp_path / "m", replica.endpoint, on_lost="degrade") as store:
            replication = store.store.status().replication
            assert replication is not None
            assert "another database" in str(replication.replicas[0].error)
    assert held(tmp_path / "other") == held(tmp_path / "r")
    async with (
        replica_at(tmp_path / "r", reseed=True) as replica,
        master(tmp_path / "m", replica.endpoint) as store,
    ):
        await store.put(rows=3)
        await store.next_epoch()
    assert held(tmp_path / "m") == held(tmp_path / "r")


async def test_replica_still_follows_its_master_after_an_offline_compaction(tmp_path: Path) -> None:
    async with replica_at(tmp_path / "r") as replica:
        for number in range(3):
            async with master(tmp_path / "m", replica.endpoint) as store:
                await store.put(rows=3)
                await store.next_epoch()
                replication = store.store.status().replication
                assert replication is not None
                assert replication.replicas[0].was_seeded
            await asyncio.to_thread(compact_offline, production(), str(tmp_path / "m"), keeps_backup=False)
            assert len(lineage.read(production().disk, str(tmp_path / "m"))) == number + 1
    assert [row.key for row in held(tmp_path / "m")[1]] == [row.key for row in held(tmp_path / "r")[1]]


async def test_replica_resumes_after_each_restart_of_the_master(tmp_path: Path) -> None:
    async with replica_at(tmp_path / "r") as replica:
        for number in range(3):
            async with master(tmp_path / "m", replica.endpoint, channels=number + 1) as store:
                await store.put(number, rows=5)
                await store.next_epoch()
                await store.put(number, rows=5)  # in an epoch that never becomes durable
    assert held(tmp_path / "m") == held(tmp_path / "r")


async def test_lagging_replica_is_seeded_after_a_compaction(tmp_path: Path) -> None:
    async with master(tmp_path / "m", channels=2) as store:
        for number in range(6):
            await store.put(number % 2, rows=300)
            await store.next_epoch()
        compacting = asyncio.ensure_future(store.store.compact())
        await asyncio.sleep(0)
        for _ in range(3):
            await store.put(0)
            await store.next_epoch()
        await compacting
        await store.put(1)
        await store.next_epoch()
    async with replica_at(tmp_path / "r") as replica, master(tmp_path / "m", replica.endpoint) as store:
        await store.put()
        await store.next_epoch()
    (epoch, rows), (there, rows_there) = held(tmp_path / "m"), held(tmp_path / "r")
    assert epoch == there
    assert [(row.key, row.value) for row in rows] == [(row.key, row.value) for row in rows_there]


async def test_blobs_are_replicated_by_a_seed_and_by_sessions(tmp_path: Path) -> None:
    async with master(tmp_path / "m") as store:
        await _put_blob(store, b"old", bytes(300_000))
        await store.next_epoch()
    async with replica_at(tmp_path / "r") as replica, master(tmp_path / "m", replica.endpoint) as store:
        await _put_blob(store, b"new", b"small")
        await _put_blob(store, b"large", bytes(3_000_000))
        await store.next_epoch()
    assert held(tmp_path / "m") == held(tmp_path / "r")
    blobs = sorted(path.relative_to(tmp_path / "m") for path in (tmp_path / "m" / "blob").rglob("*.blob"))
    assert len(blobs) == 3
    for blob in blobs:
        assert (tmp_path / "m" / blob).read_bytes() == (tmp_path / "r" / blob).read_bytes()


async def _put_blob(store: Store, key: bytes, content: bytes) -> None:
    blob_id = await store.store.blob_pool().register_data(content)
    await store.channels[0].begin_session()
    store.channels[0].add_entry(2, key, b"", (store.epoch, 0), [blob_id])
    await store.channels[0].end_session()


async def test_quorum_of_one_continues_while_the_other_replica_restarts(tmp_path: Path) -> None:
    async with replica_at(tmp_path / "a") as first, replica_at(tmp_path / "b") as second:
        endpoint = second.endpoint
        async with master(tmp_path / "m", first.endpoint, endpoint, quorum=1) as store:
            await eventually(lambda: store.states == ["live", "live"])
            await _more(store, 3)
            await second.stop()
            await _more(store, 3)
            async with replica_at(tmp_path / "b", endpoint) as again:
                await eventually(lambda: store.states == ["live", "live"])
                await first.stop()
                await _more(store, 3)
                await eventually(lambda: again.status().durable_epoch == store.epoch - 1)
    assert held(tmp_path / "m") == held(tmp_path / "b")


async def _more(store: Store, epochs: int) -> None:
    for _ in range(epochs):
        await store.put(rows=5)
        await store.next_epoch()


@pytest.mark.parametrize("group_commit", ["local_first", "replica_first", "concurrent"])
async def test_replica_one_epoch_ahead_is_reset(tmp_path: Path, group_commit: str) -> None:
    """The master loses power between the replica's record and its own, and continues alone for a while."""
    async with replica_at(tmp_path / "r") as replica:
        endpoint = replica.endpoint
        async with master(tmp_path / "m", endpoint, group_commit=group_commit) as store:
            await _more(store, 2)
            epochs = (tmp_path / "m" / "epoch").read_bytes()
            await _more(store, 1)
        (tmp_path / "m" / "epoch").write_bytes(epochs)
        async with master(tmp_path / "m", group_commit=group_commit) as store:
            await _more(store, 3)
        async with master(tmp_path / "m", endpoint, group_commit=group_commit) as store:
            await _more(store, 2)
    assert held(tmp_path / "m") == held(tmp_path / "r")


async def test_peer_without_the_secret_is_rejected(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with replica_at(tmp_path / "r", secret=SECRET) as replica:
        endpoint = replica.endpoint
        for secret in (None, "guess"):
            with pytest.raises(AuthenticationFailed) as refused:
                async with master(tmp_path / "m", endpoint, secret=secret):
                    pass
            assert SECRET not in str(refused.value)
        async with master(tmp_path / "m", endpoint, secret=SECRET) as store:
            await _more(store, 2)
            assert SECRET not in repr(store.store.settings)
            assert SECRET not in repr(store.store.status())
    assert held(tmp_path / "m") == held(tmp_path / "r")
    async with replica_at(tmp_path / "r") as replica:
        with pytest.raises(AuthenticationFailed):
            async with master(tmp_path / "m", replica.endpoint, secret=SECRET):
                pass
    assert SECRET not in caplog.text


@pytest.fixture
def certificate(tmp_path: Path) -> Tls:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost "
        f"-keyout {key} -out {cert}".split(),
        check=True,
        capture_output=True,
    )
    return Tls(cert_file=str(cert), key_file=str(key), ca_file=str(cert))


async def test_pair_replicates_over_tls_and_rejects_plain_connections(tmp_path: Path, certificate: Tls) -> None:
    async with replica_at(tmp_path / "r", Endpoint("127.0.0.1", 0, True), tls=certificate, secret=SECRET) as replica:
        async with master(tmp_path / "m", replica.endpoint, tls=certificate, secret=SECRET, channels=2) as store:
            await _more(store, 2)
            await store.put(1, rows=1000, size=3000)
            await store.next_epoch()
        with pytest.raises(QuorumLost):
            async with master(tmp_path / "m", replica.endpoint, on_lost="fail"):
                pass
    assert held(tmp_path / "m") == held(tmp_path / "r")


async def test_pair_replicates_over_ipv6(tmp_path: Path) -> None:
    here = Endpoint.parse("tcp://[::1]:0")
    async with replica_at(tmp_path / "r", here) as replica, master(tmp_path / "m", replica.endpoint) as store:
        await _more(store, 2)
    assert held(tmp_path / "m") == held(tmp_path / "r")


async def test_socket_options_are_accepted(tmp_path: Path) -> None:
    async with replica_at(tmp_path / "r") as replica:
        options = {"no_delay": False, "send_buffer": 1 << 16, "receive_buffer": 1 << 16}
        async with master(tmp_path / "m", replica.endpoint, **options) as store:
            await _more(store, 2)
    assert held(tmp_path / "m") == held(tmp_path / "r")


PROCESS = """
import asyncio, sys
from flowstone.limestone.format.endpoint import Endpoint
from flowstone.limestone.replica.replica import Replica
from flowstone.outside import production

async def main():
    async with Replica(production(), sys.argv[1], Endpoint.parse(sys.argv[2])) as replica:
        print(replica.endpoint, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def in_a_process(started: list[subprocess.Popen[str]], directory: Path, endpoint: Endpoint) -> Endpoint:
    command = [sys.executable, "-c", PROCESS, str(directory), str(endpoint)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    started.append(process)
    assert process.stdout is not None
    return Endpoint.parse(process.stdout.readline())


async def test_replica_killed_repeatedly_is_finally_complete(
    tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    endpoint = await asyncio.to_thread(in_a_process, processes, tmp_path / "r", ANY_PORT)
    async with master(tmp_path / "m", endpoint, channels=2) as store:
        writing = asyncio.ensure_future(_write(store, 150))
        for _ in range(3):
            await asyncio.sleep(0.15)
            processes[-1].send_signal(signal.SIGKILL)
            processes[-1].wait()
            await asyncio.to_thread(in_a_process, processes, tmp_path / "r", endpoint)
        async with asyncio.timeout(60):
            await writing
    processes[-1].kill()
    processes[-1].wait()
    assert held(tmp_path / "m") == held(tmp_path / "r")


async def test_restored_master_seeds_a_replica_newer_than_the_backup(tmp_path: Path) -> None:
    """The replica is seeded although the master has advanced further when they reconnect."""
    async with replica_at(tmp_path / "r") as replica:
        endpoint = replica.endpoint
        async with master(tmp_path / "m", endpoint) as store:
            await store.put()
            await store.next_epoch()
            shutil.copytree(tmp_path / "m", tmp_path / "backup")
            for _ in range(3):
                await store.put()
                await store.next_epoch()
    async with AsyncDatastore(production(), Settings(str(tmp_path / "m"))) as restored:
        await restored.restore(str(tmp_path / "backup"), replaces=True)
    async with master(tmp_path / "m", endpoint, on_lost="degrade") as store:
        for _ in range(5):
            await store.put(rows=3)
            await store.next_epoch()
        async with replica_at(tmp_path / "r", endpoint):
            await eventually(lambda: store.states == ["live"])
            await store.put()
            await store.next_epoch()
    assert held(tmp_path / "m") == held(tmp_path / "r")


async def test_promoted_replica_is_not_resumed_by_its_old_master(tmp_path: Path) -> None:
    """Both stores have written epochs with the same numbers; an operator must permit the loss of the replica's."""
    async with replica_at(tmp_path / "r") as replica:
        endpoint = replica.endpoint
        async with master(tmp_path / "m", endpoint) as store:
            await store.put()
            await store.next_epoch()
    async with master(tmp_path / "r") as promoted:
        assert held(tmp_path / "m")[1] == (await promoted.store.snapshot()).rows() != []
        for _ in range(2):
            await promoted.put(rows=2)
            await promoted.next_epoch()
    async with master(tmp_path / "m", endpoint, on_lost="degrade") as store:
        for _ in range(5):
            await store.put(rows=3)
            await store.next_epoch()
        async with replica_at(tmp_path / "r", endpoint):
            await eventually(lambda: "another database" in str(store.store.status()))
        async with replica_at(tmp_path / "r", endpoint, reseed=True):
            await eventually(lambda: store.states == ["live"])
            await store.put()
            await store.next_epoch()
    assert held(tmp_path / "m") == held(tmp_path / "r")


async def test_old_master_becomes_the_replica_of_its_successor(tmp_path: Path) -> None:
    async with replica_at(tmp_path / "r") as replica, master(tmp_path / "m", replica.endpoint) as store:
        await store.put()
        await store.next_epoch()
    async with replica_at(tmp_path / "m") as replica, master(tmp_path / "r", replica.endpoint) as store:
        await store.put(rows=3)
        await store.next_epoch()
    assert held(tmp_path / "m") == held(tmp_path / "r")


async def test_store_opened_during_an_unfinished_seeding_has_the_old_data(tmp_path: Path) -> None:
    async with replica_at(tmp_path / "r") as replica, master(tmp_path / "m", replica.endpoint) as store:
        await store.put(rows=5)
        await store.next_epoch()
    replica_seeding.put_aside(production().disk, str(tmp_path / "r"))
    with (
        pytest.raises(LimestoneError, match="put_aside: a seeding did not complete"),
        offline.held(production().disk, str(tmp_path / "r"), only_looks=True),
    ):
        pass
    async with master(tmp_path / "r") as promoted:
        assert (await promoted.store.snapshot()).rows() == held(tmp_path / "m")[1] != []
        await promoted.put()
        await promoted.next_epoch()
    assert held(tmp_path / "r")[0] > held(tmp_path / "m")[0]
