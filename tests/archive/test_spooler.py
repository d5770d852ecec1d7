"""A spool as a kind of archive: its start position, its upstream, its end.

More tests are in `test_spool`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from flowstone.archive import events as events
from flowstone.archive.events import ArchiveEvent
from flowstone.archive.spooler import Spooling
from flowstone.errors import FlowstoneError
from flowstone.iproto.uri import parse_uri
from flowstone.replication.vclock import VClock
from tests.interop.versions import parameters
from tests.node.archived_server import RealServer

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("tarantool")]
NOBODY = "127.0.0.1:1"
TIMEOUT = 1.25
"""`replication_timeout` in seconds: on a busy machine, a delay of some seconds must not cause a reconnect."""


@pytest.fixture(params=parameters("2.6"))
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RealServer]:
    with RealServer(tmp_path / "master", cfg=f"replication_timeout={TIMEOUT}", binary=request.param.path) as running:
        yield running


@asynccontextmanager
async def spooling(directory: Path, *uris: str, **how: Any) -> AsyncIterator[tuple[Spooling, list[ArchiveEvent]]]:
    told: list[ArchiveEvent] = []
    how = {"begin": "snapshot", "replication_timeout": TIMEOUT, **how}
    spool = Spooling([parse_uri(uri) for uri in uris], str(directory), on_event=told.append, **how)
    async with spool:
        yield spool, told


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - what it waits for is in another process
            await asyncio.sleep(0.02)


async def test_unreachable_member_is_skipped(server: RealServer, tmp_path: Path) -> None:
    for begin in ("snapshot", "latest"):
        async with spooling(tmp_path / begin, NOBODY, server.uri, begin=begin) as (spool, told):
            await until(lambda spool=spool: spool.is_begun)  # type: ignore[misc]
            server.eval("fill(1, 5)")
            await until(lambda spool=spool: VClock(server.vclock()) <= spool.settled)  # type: ignore[misc]
        assert [event.address for event in told if isinstance(event, events.Connected)] == [server.address]


async def test_new_spool_fails_when_no_member_is_reachable(tmp_path: Path) -> None:
    told: list[ArchiveEvent] = []
    members = [parse_uri(NOBODY), parse_uri("127.0.0.1:2")]
    spool = Spooling(members, str(tmp_path / "spool"), begin="latest", replication_timeout=0.05, on_event=told.append)
    with pytest.raises(FlowstoneError, match="cannot connect to 127"):
        await spool.run()
    assert {event.address for event in told if isinstance(event, events.Disconnected)} == {NOBODY, "127.0.0.1:2"}


async def test_spooler_takes_no_snapshots_and_reports_durable_rows(server: RealServer, tmp_path: Path) -> None:
    durable: list[VClock] = []
    holder: list[Spooling] = []
    how = {"on_durable": lambda: durable.append(holder[0].settled) if holder else None}
    async with spooling(tmp_path / "spool", server.uri, **how) as (spool, told):
        holder.append(spool)
        await until(lambda: spool.is_begun)
        server.eval("fill(1, 5)")
        await until(lambda: bool(durable) and VClock(server.vclock()) <= durable[-1])
        assert spool.lag is not None or spool.state.value != "follow"
    assert sum(isinstance(event, events.Snapshotted) for event in told) == 1


async def test_another_replica_set_is_rejected(server: RealServer, tmp_path: Path) -> None:
    async with spooling(tmp_path / "spool", server.uri) as (spool, _):
        await until(lambda: spool.is_begun)
        position = spool.settled
    with RealServer(tmp_path / "other") as other:
        other.eval("fill(1, 100)")
        again = Spooling([parse_uri(other.uri)], str(tmp_path / "spool"), begin=position)
        with pytest.raises(FlowstoneError, match="the server belongs to another replica set"):
            await again.run()
