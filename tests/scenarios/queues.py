"""Simulated members with a synchronous space and a plain one, and the visible state of the queue: in `box.info`, in the
log, in snapshots, and by waiting clients.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.msgpack import unpack, unpack_body
from flowstone.replication.limbo.control_rows import Confirm, Demote, Promote, Rollback, decode_control
from flowstone.xlog.reader import LogFile
from tests.scenarios.simulated_members import files, held, insert, make_space, reconfigure, rows_of, uris
from tests.simulation.cluster import all_follow_all, converge, vclock
from tests.simulation.disk import SimulatedDisk
from tests.simulation.loop import Life
from tests.simulation.simulation import Simulation

SYNC, PLAIN = "synchronous", "plain"
NEVER = 31
"""A quorum larger than any set here."""

PATIENCE = 1000.0
"""A `replication_synchro_timeout` longer than any test."""


async def start_members(sim: Simulation, names: Sequence[str] = "ab", *, owner: str = "a", **options: Any) -> None:
    """Start members that follow each other, with ids from 1 on.

    With `owner`, which needs 2.11, that member claims the queue.
    """
    options = {"replication_synchro_timeout": PATIENCE} | options
    replication = uris(sim, *names)
    for number, name in enumerate(names):
        await sim.start(name, replication=replication[:number], **options)
        for present in names[: number + 1]:
            await reconfigure(sim, present, replication=replication[: number + 1])
    for name in names:
        sim.machine(name).options["replication"] = replication
    await sim.until(lambda: all_follow_all(sim, names) and not any(sim.node(name).info()["ro"] for name in names))
    await make_space(sim, names[0], PLAIN)
    await make_space(sim, names[0], SYNC, is_sync=True)
    if owner and options.get("dialect") != "2.6":
        await promote(sim, owner)
        await owned_by(sim, owner, names)
    await converge(sim, names)


def number_of(sim: Simulation, name: str) -> int:
    found: int = sim.node(name).info()["id"]
    return found


def queue(sim: Simulation, name: str) -> dict[str, Any]:
    found: dict[str, Any] = sim.node(name).info()["synchro"]["queue"]
    return found


async def owned_by(sim: Simulation, owner: str, names: Sequence[str] = "ab") -> int:
    """Wait until all `names` know the owner of the queue; return its term."""
    number = number_of(sim, owner) if owner else 0
    await sim.until(lambda: all(queue(sim, name)["owner"] == number for name in names))
    (term,) = {queue(sim, name)["term"] for name in names}
    found: int = term
    return found


async def promote(sim: Simulation, name: str) -> None:
    await sim.on(name, sim.node(name).promote())


async def demote(sim: Simulation, name: str) -> None:
    await sim.on(name, sim.node(name).demote())


class Pending:
    """A transaction in the middle of its commit."""

    def __init__(self, sim: Simulation, name: str, *keys: int, space: str = SYNC) -> None:
        self._sim = sim
        self._keys = keys
        self._space = space
        self._task = asyncio.ensure_future(insert(sim, name, *keys, space=space))

    async def seen_by(self, *names: str) -> Pending:
        """Wait until the transaction is in the data of all `names`, decided or not."""

        def is_seen() -> bool:
            return all(key in held(self._sim, name, self._space) for key in self._keys for name in names)

        await self._sim.until(is_seen)
        return self

    @property
    def is_waiting(self) -> bool:
        return not self._task.done()

    async def code(self) -> int:
        """Return the answer to the client: 0, or the error code."""
        try:
            async with asyncio.timeout(60):
                await self._task
        except TarantoolError as error:
            return error.code
        return 0


def told(sim: Simulation, name: str, origin: int, after: int) -> list[str]:
    """Return the rows of an originator in the log of a member: "+1 insert", "+2 confirm +1", numbered from
    `after` on.
    """
    return [_told(row, after) for row in rows_of(sim, name, origin, after)]


def _told(row: Any, after: int) -> str:
    number = f"+{row.lsn - after}"
    if row.type not in (RequestType.RAFT_CONFIRM, RequestType.RAFT_ROLLBACK, *_TRANSFERS):
        return f"{number} {RequestType(row.type).name.lower()}"
    body = decode_control(row.type, row.body)
    assert isinstance(body, Confirm | Rollback | Promote | Demote)
    what = f"{number} {type(body).__name__.lower()}"
    if isinstance(body, Promote | Demote):
        return f"{what} in term {body.term} after {body.owner_id}"
    return f"{what} {body.owner_id}+{body.lsn - after}"


_TRANSFERS = (RequestType.RAFT_PROMOTE, RequestType.RAFT_DEMOTE)


def last_lsn(sim: Simulation, name: str) -> int:
    """Return the LSN of the last row that the member originated."""
    return vclock(sim, name).get(number_of(sim, name), 0)


def keys_in_snapshot(sim: Simulation, name: str, space: str = SYNC) -> list[int]:
    """Return the contents of a member's newest snapshot file."""
    number = sim.node(name).box.names[space].id
    disk = SimulatedDisk(sim.storage(name), Life("reader"))
    with LogFile.open(disk, files(sim, name, ".snap")[-1]) as snap:
        rows = [row for one in snap.transactions() for row in one.rows if row.type == RequestType.INSERT]
    bodies = map(unpack_body, (row.body for row in rows))
    return sorted(_key(body[Key.TUPLE.value]) for body in bodies if body[Key.SPACE_ID.value] == number)


def _key(found: Any) -> int:
    key: int = (unpack(found) if isinstance(found, bytes) else found)[0]
    return key
