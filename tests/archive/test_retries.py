"""The archive survives temporary failures: an upstream that fails for a while or is catching up, a full disk."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress
from typing import Any

import pytest

from flowstone.archive import events as events
from flowstone.archive.archive import Archive
from flowstone.archive.refusals import ArchiveRefused, UpstreamLostTail
from flowstone.archive.retries import CATCH_UP_SECONDS, Patience
from flowstone.archive.spooler import Spooling
from flowstone.iproto import errors
from flowstone.iproto.uri import Uri, parse_uri
from flowstone.outside import Outside
from flowstone.replication.applier.states import ConnectionLost
from flowstone.replication.vclock import VClock
from flowstone.xlog.errors import WriteFailed
from tests import served_node
from tests.simulation.followers import ArchiveProcess
from tests.simulation.simulation import Simulation, simulated

NOBODY = Uri("nobody", 3301, None, None)
FULL = WriteFailed("archive/1.snap", 7, OSError(28, "No space left on device"), is_usable=False)


class Archived:
    """An archive of one node, on a separate simulated machine."""

    def __init__(self, sim: Simulation, upstream: str, name: str = "archive") -> None:
        self._sim = sim
        self.upstream = upstream
        self.name = name
        self.told: list[events.ArchiveEvent] = []
        self.process: ArchiveProcess | None = None
        sim.build(name)

    async def start(self, upstream: str = "") -> None:
        self.upstream = upstream or self.upstream
        self.process = await self._sim.launch(self.name, self._archive)

    async def _archive(self, outside: Outside) -> ArchiveProcess:
        uri = self._sim.uri(self.upstream)
        return ArchiveProcess(Archive(uri, f"/{self.name}", on_event=self.told.append, outside=outside))

    async def stop(self) -> None:
        await self._sim.stop(self.name)

    async def reach(self, node: str) -> None:
        """Wait until the archive has all rows of `node`."""
        assert self.process is not None
        archive = self.process.archive

        def has_all() -> bool:
            return self._sim.node(node)._instance.vclock.without_zero() <= archive.position

        await self._sim.until(has_all, what=f"{self.name} has all rows of {node}")
        assert self.process.failure is None


async def fill(sim: Simulation, name: str, *keys: int) -> None:
    client = await sim.client(name)
    for key in keys:
        await served_node.insert(client, 512, (key, "x" * 100))
    await client.close()


async def make_space(sim: Simulation, name: str) -> None:
    client = await sim.client(name)
    fields = (("key", "unsigned"), ("text", "string"))
    await served_node.create_space(client, 512, "t", fields, ("pk", True, [(0, "unsigned")]))
    await client.close()


@simulated()
async def test_archive_begins_once_its_upstream_can_write_its_log_again(sim: Simulation) -> None:
    await sim.start("a", wal_mode="fsync")
    await make_space(sim, "a")
    client = await sim.client("a")
    sim.machine("a").blocking_seconds = (0.1, 0.1)

    async def keep_writing() -> None:
        for key in itertools.count():
            with suppress(errors.WalIo):
                await served_node.insert(client, 512, (key, "x"))

    writing = asyncio.ensure_future(keep_writing())
    sim.storage("a").broken.add("sync")
    archived = Archived(sim, "a")
    await archived.start()
    await sim.sleep(5)
    assert any("Failed to write to disk" in str(event) for event in archived.told)
    sim.storage("a").broken.clear()
    await sim.sleep(5)
    writing.cancel()
    await archived.reach("a")
    await archived.stop()


@pytest.mark.parametrize("room", [0, 150, 400, 2000])
@simulated()
async def test_archive_takes_the_snapshot_after_a_gap_once_its_disk_has_room(sim: Simulation, room: int) -> None:
    node = await sim.start("a", checkpoint_count=1)
    await make_space(sim, "a")
    archived = Archived(sim, "a")
    await archived.start()
    await archived.reach("a")
    await archived.stop()
    for key in range(3):
        await fill(sim, "a", key)
        await sim.on("a", node.snapshot())
    storage = sim.storage("archive")
    taken = storage.room - room
    storage.room -= taken
    await archived.start()
    await sim.sleep(20)
    assert archived.process is not None
    assert archived.process.failure is None
    assert any("No space left" in str(event) for event in archived.told)
    storage.room += taken
    await archived.reach("a")
    gaps = [event for event in archived.told if isinstance(event, events.GapFound)]
    assert len(gaps) == 1
    await sim.sleep(5)
    assert sim.look("archive").size("/archive/manifest.json") > 0
    await archived.stop()
    await archived.start()
    await archived.reach("a")
    await archived.stop()


@simulated()
async def test_archive_retries_an_upstream_that_is_catching_up(sim: Simulation) -> None:
    uris = [sim.uri("a"), sim.uri("b")]
    await sim.start("a", replication=uris[:1])
    await sim.start("b", replication=uris[:1], read_only=True)
    await make_space(sim, "a")
    sim.cut("a", "b")
    await fill(sim, "a", *range(10))
    archived = Archived(sim, "a")
    await archived.start()
    await archived.reach("a")
    await archived.stop()
    await archived.start("b")
    await sim.sleep(CATCH_UP_SECONDS / 2)
    assert any("has lost rows" in str(event) for event in archived.told)
    sim.heal()
    await fill(sim, "a", *range(10, 20))
    await archived.reach("a")
    await archived.stop()


@simulated()
async def test_archive_gives_up_on_an_upstream_that_never_catches_up(sim: Simulation) -> None:
    await sim.start("a")
    await sim.start("b", replication=[sim.uri("a")], read_only=True)
    await make_space(sim, "a")
    sim.cut("a", "b")
    await fill(sim, "a", *range(10))
    archived = Archived(sim, "a")
    await archived.start()
    await archived.reach("a")
    await archived.stop()
    await archived.start("b")
    await sim.sleep(CATCH_UP_SECONDS + 5)
    assert archived.process is not None
    assert isinstance(archived.process.failure, UpstreamLostTail)
    await archived.stop()


@simulated()
async def test_archive_gives_up_at_once_on_an_upstream_that_lost_rows_of_its_own(sim: Simulation) -> None:
    """A server that waited would assign the LSNs of the lost rows to other rows."""
    await sim.start("a", wal_mode="write")
    await make_space(sim, "a")
    archived = Archived(sim, "a")
    await archived.start()
    await fill(sim, "a", *range(10))
    await archived.reach("a")
    await archived.stop()
    log = max(path for path in sim.storage("a").names if path.endswith(".xlog"))
    sim.kill("a")
    inode = sim.storage("a").find(log)
    inode.truncate(len(inode.data) - 1000)
    await sim.restart("a", force_recovery=True)
    await archived.start()
    await sim.sleep(3)
    assert archived.process is not None
    assert isinstance(archived.process.failure, UpstreamLostTail)
    await archived.stop()


def lost(theirs: int) -> UpstreamLostTail:
    return UpstreamLostTail("b:3301", VClock({1: theirs}), VClock({1: 100}))


@pytest.mark.parametrize(
    ("error", "how", "is_waited_for"),
    [
        (FULL, {}, True),
        (FULL, {"has_begun": False}, False),
        (FULL, {"is_once": True}, False),
        (errors.WalIo("Failed to write to disk"), {"has_begun": False}, True),
        (errors.WalIo("Failed to write to disk"), {"is_once": True}, False),
        (errors.Loading("Instance bootstrap hasn't finished yet"), {"is_once": True}, True),
        (errors.AccessDenied("no"), {}, False),
        (errors.ReplicasetUuidMismatch("another"), {}, False),
        (ConnectionLost("gone"), {"has_begun": False}, True),
        (ConnectionLost("gone"), {"is_once": True}, False),
        (lost(90), {}, True),
        (lost(90), {"is_once": True}, False),
    ],
)
@simulated()
async def test_retryable_errors(sim: Simulation, error: Any, how: dict[str, bool], is_waited_for: bool) -> None:
    patience = Patience(sim.outside)
    how = {"has_begun": True, "is_once": False} | how
    assert await patience.outlasts(error, NOBODY, **how) is is_waited_for


@simulated()
async def test_upstream_that_makes_progress_is_retried_again(sim: Simulation) -> None:
    patience = Patience(sim.outside)

    async def is_waited_for(theirs: int) -> bool:
        return await patience.outlasts(lost(theirs), NOBODY, has_begun=True, is_once=False)

    assert await is_waited_for(80)
    for theirs in (81, 82, 99):
        await sim.sleep(CATCH_UP_SECONDS - 11)
        assert await is_waited_for(theirs)
    await sim.sleep(CATCH_UP_SECONDS)
    assert not await is_waited_for(99)
    patience.reset()
    assert await is_waited_for(99)


@simulated()
async def test_archive_hints_at_its_full_disk_when_the_upstream_disconnects(sim: Simulation) -> None:
    """Found by seed 1000093: the write failure surfaced only when the archive prepared to reconnect."""
    await sim.start("a")
    await make_space(sim, "a")
    archived = Archived(sim, "a")
    await archived.start()
    await archived.reach("a")
    assert archived.process is not None
    archive = archived.process.archive
    assert archive._intake is not None
    archive._intake.failure = FULL
    with pytest.raises(ArchiveRefused) as refusal:
        await archive._overcome(errors.System("the upstream is gone"))
    assert refusal.value.hint == "free space and start the archive again"


@simulated()
async def test_spool_hints_at_its_disk_when_the_disk_failed_only_once(sim: Simulation) -> None:
    await sim.start("a")
    sim.build("spool")
    storage = sim.storage("spool")
    storage.broken.add("sync")

    async def spool(outside: Outside) -> ArchiveProcess:
        return ArchiveProcess(Spooling([parse_uri(sim.uri("a"))], "/spool", begin="latest", outside=outside))

    process = await sim.launch("spool", spool)
    await sim.until(lambda: storage.failure_count)
    storage.broken.clear()
    await sim.until(lambda: process.failure)
    assert isinstance(process.failure, ArchiveRefused)
    assert process.failure.hint == "repair the disk and start the archive again"
