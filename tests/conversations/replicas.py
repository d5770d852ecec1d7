"""A Flowstone node in place of a recorded replica: its start options, and its expected final data.

The recorded times are long past; to reproduce the lag, the node's wall clock starts at the start of the recording.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import flowstone
from flowstone.box.box import Box
from flowstone.iproto.constants import GROUP_LOCAL, Key, RequestType
from flowstone.node.node import NotRunning
from flowstone.outside import Outside, production
from flowstone.outside.disk import SystemDisk
from flowstone.xlog.reader import LogFile
from tests.conversations import recording
from tests.conversations.recording import Conversation, Packet, decoded
from tests.conversations.server import RecordedServer, is_ack

OWN_ID = 2
"""The id of every recorded replica."""

DEADLINE_SECONDS = 60.0
POLL_SECONDS = 0.01


class RecordedClock:
    """The real clock, shifted so that it showed `wall` when the test began."""

    def __init__(self, wall: float) -> None:
        self._ahead = time.time() - wall

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time() - self._ahead

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(seconds, 0.0))


def outside_at(conversation: Conversation) -> Outside:
    """Return an Outside at the time of a recording: that of the first row or heartbeat with a time."""
    times = (packet.field(Key.TIMESTAMP) for packet in conversation.answers)
    return replace(production(), clock=RecordedClock(next(when for when in times if when)))


@asynccontextmanager
async def following(
    directory: Path, upstream: RecordedServer, outside: Outside, instance_uuid: str, **options: Any
) -> AsyncIterator[flowstone.Node]:
    """Run a node that follows a recorded server from its start."""
    uri = f"replicator:secret@127.0.0.1:{upstream.port}"
    names = {"listen": "127.0.0.1:0", "replication": [uri], "instance_uuid": instance_uuid, **options}
    async with asyncio.timeout(DEADLINE_SECONDS):
        node = flowstone.Node(directory, outside=outside, **names)
        upstream.hold = own_rows_of(node, OWN_ID)
        await node.start()
    try:
        yield node
    finally:
        await node.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)


def own_rows_of(node: flowstone.Node, own_id: int) -> Callable[[Packet], Awaitable[None]]:
    """Wait until the node has written as many rows of its own as a recorded ACK says."""

    def written() -> int:
        try:
            return int(node.info()["vclock"].get(own_id, 0))
        except NotRunning:
            return 0

    async def wait(answer: Packet) -> None:
        wanted = answer.content(Key.VCLOCK, {}).get(own_id, 0) if is_ack(answer) else 0
        await until(lambda: written() >= wanted)

    return wait


async def write_own_rows(node: flowstone.Node, recorded: Path) -> None:
    """Make the node write the rows that the recorded replica originated."""
    for type, replica_id, _, _, _, body in logged_rows(recorded):
        if replica_id == OWN_ID:
            assert type == RequestType.INSERT
            fields = decoded(body or b"")
            await node.space(fields[Key.SPACE_ID.value]).insert(fields[Key.TUPLE.value])


# --- contents of files -------------------------------------------------------------------------------------

LoggedRow = tuple[int, int, int, int, int, bytes | None]


def logged_rows(directory: Path) -> list[LoggedRow]:
    """Return the replicated rows of all logs, in order, without times: type, originator, LSN, TSN, flags, body."""
    return [
        (row.type, row.replica_id, row.lsn, row.tsn, row.flags, row.body)
        for path in sorted(directory.glob("*.xlog"))
        for row in _rows(path)
        if row.group_id != GROUP_LOCAL
    ]


def snapshot_tuples(path: Path, *, besides: frozenset[int]) -> list[bytes]:
    """Return the bodies of a snapshot's rows in any order, except those of some spaces."""
    bodies = [row.body for row in _rows(path) if row.type == RequestType.INSERT]
    return sorted(body for body in bodies if decoded(body)[Key.SPACE_ID.value] not in besides)


def _rows(path: Path) -> list[Any]:
    with LogFile.open(SystemDisk(), str(path)) as log:
        return list(log.rows())


def recorded_files(version: str, scenario: str, node: str) -> Path:
    return recording.scenario(version, scenario) / "files" / node


def tuples(box: Box, *, besides: frozenset[int] = frozenset()) -> dict[int, list[bytes]]:
    """Return all tuples of all replicated memtx spaces; real servers keep vinyl in separate files."""
    return {
        number: sorted(space.tuples())
        for number, space in sorted(box.spaces.items())
        if space.definition.engine == "memtx" and not space.definition.is_temporary and number not in besides
    }
