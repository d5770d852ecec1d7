"""A replica on the real disk and network, messages to it, and the content of its directory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from flowstone.limestone.format.endpoint import Endpoint
from flowstone.limestone.format.entries import Marker, decode_all
from flowstone.limestone.replica.events import Event
from flowstone.limestone.replica.replica import Replica
from flowstone.limestone.store.recovery import recover
from flowstone.outside import production
from tests.limestone.peer import Connector, Master, Peer

OUTSIDE = production()
LOCAL = Endpoint("127.0.0.1", 0)
CONNECTORS: dict[Replica, Connector] = {}
Rows = list[tuple[bytes, bytes]]


@asynccontextmanager
async def running(
    path: Path,
    *,
    compatible: bool = False,
    secret: str | None = None,
    reseed: bool = False,
    told: list[Event] | None = None,
) -> AsyncIterator[Replica]:
    on_event = told.append if told is not None else lambda event: None
    options = {"compatible": compatible, "secret": secret, "reseed": reseed, "on_event": on_event}
    async with Replica(OUTSIDE, str(path), LOCAL, message_size_max=1 << 20, **options) as replica:  # type: ignore[arg-type]
        CONNECTORS[replica] = Connector(OUTSIDE.network)
        try:
            yield replica
        finally:
            await CONNECTORS.pop(replica).close()


def master_of(replica: Replica) -> Master:
    return Master(CONNECTORS[replica], replica.endpoint)


async def peer_of(replica: Replica) -> Peer:
    return await Peer.connect(CONNECTORS[replica], replica.endpoint)


def rows(path: Path) -> Rows:
    """Read the rows of the directory without changing it."""
    found = recover(OUTSIDE.disk, str(path), repairs=False).snapshot.rows()
    return [(entry.key, entry.value) for entry in found]


def markers(path: Path) -> list[tuple[int, int]]:
    return [(int(token.type), token.epoch) for token in decode_all(path.read_bytes(), "") if isinstance(token, Marker)]


def blob_files(path: Path) -> list[str]:
    return sorted(found.name for found in path.rglob("*.blob"))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def master_of_control(replica: Replica) -> Peer:
    master = master_of(replica)
    await master.begin()
    return master.control
