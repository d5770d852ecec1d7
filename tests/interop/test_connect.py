"""`flowstone.connect` to a set of three nodes whose leader is killed: what is reported is what is found.

Each write inserts a key of its own, so a write that is done twice is a rejected one: none may be rejected.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from functools import partial
from typing import Any

import pytest

import flowstone
from tests.conftest import FULL
from tests.interop.cluster import Cluster, not_for_stand_ins
from tests.interop.compare import assert_converged
from tests.interop.member import SECONDS, Member, wait_ready
from tests.interop.mesh import SYNCHRONOUS, Mesh, keys

CLIENTS, WRITERS = (10, 20) if FULL else (2, 4)
"""Clients, and writers of each, all with one write in flight."""

RUN_SECONDS, PACE_SECONDS = (600.0, 0.5) if FULL else (0.0, 0.01)
BETWEEN = 30
KEYS_EACH = 1_000_000
REQUEST_SECONDS = 30.0


class Reported:
    """The outcome of every write, by key."""

    def __init__(self) -> None:
        self.stored: set[int] = set()
        self.unknown: set[int] = set()
        self.not_stored: set[int] = set()
        self.rejected: dict[int, flowstone.TarantoolError] = {}
        self.is_over = False

    async def write(self, space: flowstone.ClientSpace[flowstone.Tuple], first: int) -> None:
        """Insert one key after another until the end."""
        key = first
        while not self.is_over:
            key += 1
            try:
                await space.insert((key, "x" * 50))
            except flowstone.OutcomeUnknown:
                self.unknown.add(key)
            except flowstone.NoMember:
                self.not_stored.add(key)
            except flowstone.TarantoolError as error:
                self.rejected[key] = error
            else:
                self.stored.add(key)
            await asyncio.sleep(PACE_SECONDS)

    async def more(self, count: int = BETWEEN) -> None:
        """Wait for this number of further stored rows."""
        before = len(self.stored)
        async with asyncio.timeout(SECONDS):
            while len(self.stored) < before + count:  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    def compare(self, member: Member, space: int) -> None:
        assert not self.rejected, f"written twice: {list(self.rejected.items())[:3]}"
        found = set(keys(member, space))
        assert not self.stored - found, f"{len(self.stored - found)} of {len(self.stored)} stored rows are lost"
        assert not found & self.not_stored, "rows are found that were reported as not stored"
        assert not found - self.stored - self.unknown, "rows are found that nobody wrote"


async def blocking(work: Any, *arguments: Any) -> Any:
    return await asyncio.to_thread(work, *arguments)


async def _under_load(mesh: Mesh, reported: Reported, faults: Coroutine[Any, Any, None]) -> None:
    members = [f"127.0.0.1:{member.port}" for member in mesh]
    async with asyncio.TaskGroup() as tasks:
        clients = [await _connected(members) for _ in range(CLIENTS)]
        for number in range(CLIENTS * WRITERS):
            space = clients[number % CLIENTS].space(SYNCHRONOUS)
            tasks.create_task(reported.write(space, (number + 1) * KEYS_EACH))
        try:
            await faults
        finally:
            reported.is_over = True
    for client in clients:
        await client.close()


async def _connected(members: list[str]) -> flowstone.Client:
    return await flowstone.connect(members, request_timeout=REQUEST_SECONDS).__aenter__()


async def _kill_leaders(mesh: Mesh, reported: Reported) -> None:
    deadline = time.monotonic() + RUN_SECONDS
    while True:
        await reported.more()
        leader = await blocking(mesh.wait_leader)
        leader.kill()
        await reported.more()
        leader.launch()
        await blocking(partial(wait_ready, leader, seconds=5 * SECONDS))
        if time.monotonic() > deadline:
            await reported.more()
            return


@pytest.mark.timeout(1800)
@not_for_stand_ins
async def test_outcomes_are_those_that_were_reported_when_leaders_are_killed(nodes: Cluster) -> None:
    mesh = await blocking(lambda: Mesh(nodes, ("ours", "ours", "ours"), direct=True))
    await blocking(mesh.set_modes, "candidate")
    await blocking(mesh.wait_leader)
    reported = Reported()
    await _under_load(mesh, reported, _kill_leaders(mesh, reported))
    await blocking(_judge, mesh, reported)


def _judge(mesh: Mesh, reported: Reported) -> None:
    mesh.wait_leader()
    for member in mesh:
        member.wait_follow(*mesh.others(member))
    assert_converged(*mesh)
    for member in mesh:
        reported.compare(member, SYNCHRONOUS)
