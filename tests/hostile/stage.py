"""The victim of a lie: a node that serves clients, with an honest replica that follows it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar
from uuid import UUID

import flowstone
from flowstone.box.engine import statements
from flowstone.box.system import CLUSTER_ID
from flowstone.client.connection import Connection
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import pack
from flowstone.iproto.uri import parse_uri
from flowstone.outside import production
from flowstone.outside.loop_thread import LoopThread
from flowstone.replication.vclock import VClock
from flowstone.xlog.reader import LogFile
from tests.hostile.liar import LIAR, LIAR_ID, MARK, SPACE_ID, SYNCHRONOUS_ID, Role
from tests.node.small_node import State, state

T = TypeVar("T")

USER, PASSWORD = "first", "not-to-be-shown"
SECONDS: Final = 60
TIMEOUT: Final = 0.2
"""`replication_timeout`: a peer is lost after four times that."""


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110  any state of the two ends is waited for
            await asyncio.sleep(0.002)


@dataclass
class Stage:
    """`victim` is replica 1, `honest` 2, and the liar is registered as 3."""

    victim: flowstone.Node
    honest: flowstone.Node
    directory: Path

    @property
    def role(self) -> Role:
        """Return the vclock of a liar that has all rows of the victim."""
        info = self.victim.info()
        return Role(self.victim.box.dialect, UUID(info["cluster"]["uuid"]), VClock(info["vclock"]))

    @property
    def upstream(self) -> dict[str, Any]:
        """Return what `info()` of the victim shows about the liar."""
        found: dict[str, Any] = self.victim.info()["replication"][LIAR_ID].get("upstream", {})
        return found

    @property
    def downstream(self) -> dict[str, Any]:
        found: dict[str, Any] = self.victim.info()["replication"][LIAR_ID].get("downstream", {})
        return found

    def picture(self) -> tuple[dict[int, int], State]:
        """Everything that a lie could change; local rows contain terms, which any member may raise."""
        return _common(self.victim), state(self.victim.box)

    async def assert_serves(self) -> None:
        """Check that a client reads its writes, and that the honest replica receives them."""
        connection = await Connection.open(production(), parse_uri(f"{USER}:{PASSWORD}@{self.victim.address}"))
        try:
            space = {Key.SPACE_ID.value: SPACE_ID}
            await connection.request(RequestType.REPLACE, pack(space | {Key.TUPLE.value: (1, "true")}))
            key = {Key.INDEX_ID.value: 0, Key.LIMIT.value: 1, Key.KEY.value: (1,)}
            found = await connection.request(RequestType.SELECT, pack(space | key))
            assert found[Key.DATA] == ((1, "true"),)
        finally:
            await connection.close()
        await until(lambda: _common(self.honest) == _common(self.victim))
        assert state(self.honest.box) == state(self.victim.box)

    def assert_nothing_kept(self) -> None:
        """Check that neither logs nor data of the two contain a row with the mark of a lie."""
        for node in (self.victim, self.honest):
            tuples = [raw for space in node.box.spaces.values() for raw in _tuples(space)]
            assert not any(MARK.encode() in raw for raw in tuples)
        for path in sorted(self.directory.glob("*/*.xlog")):
            assert not any(MARK.encode() in payload for payload in _payloads(path))


def _common(node: flowstone.Node) -> dict[int, int]:
    """Return the vclock of a node without local rows."""
    return {number: lsn for number, lsn in node.info()["vclock"].items() if number}


def _tuples(space: Any) -> Iterator[bytes]:
    if space.primary is not None:
        yield from space.tuples()


def _payloads(path: Path) -> Iterator[bytes]:
    with LogFile.open(production().disk, str(path)) as log:
        for slab in log.slabs():
            yield slab.payload


class Stages:
    """Stages on a loop of their own, created on demand and reused: lies leave no traces."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._loop = LoopThread("stages")
        self._stages: dict[tuple[str, bool], Stage] = {}
        self._stack = AsyncExitStack()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run(work)

    async def get(self, dialect: str, *, victim_leads: bool = False) -> Stage:
        found = self._stages.get((dialect, victim_leads))
        if found is None:
            made = stage(self._directory / f"{dialect}-{victim_leads}", dialect, victim_leads=victim_leads)
            found = self._stages[dialect, victim_leads] = await self._stack.enter_async_context(made)
        return found

    def close(self) -> None:
        self.run(self._stack.aclose())
        self._loop.close()


@asynccontextmanager
async def stage(directory: Path, dialect: str, *, victim_leads: bool = False) -> AsyncIterator[Stage]:
    options: dict[str, Any] = {"dialect": dialect, "replication_timeout": TIMEOUT, "replication_connect_quorum": 0}
    if dialect != "2.6":
        options["bootstrap_strategy"] = "legacy"
    victim = flowstone.Node(directory / "victim", listen="127.0.0.1:0", user=(USER, PASSWORD), **options)
    async with victim:
        options |= {"replication": [f"{USER}:{PASSWORD}@{victim.address}"], "replication_connect_quorum": 1}
        async with flowstone.Node(directory / "honest", **options) as honest:
            await _set_up(victim)
            if victim_leads:
                await victim.promote()
            yield Stage(victim, honest, directory)


async def _set_up(node: flowstone.Node) -> None:
    for name, number, is_sync in (("plain", SPACE_ID, False), ("synchronous", SYNCHRONOUS_ID, True)):
        space = await node.create_space(name, id=number, is_sync=is_sync)
        await space.create_index("pk")
    member = pack((LIAR_ID, str(LIAR)))
    await node.write(lambda txn: statements.insert(txn, node.box.space(CLUSTER_ID), member))
