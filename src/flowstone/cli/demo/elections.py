"""The elections in `flowstone demo --tour`: a leader stops, another is elected, no acknowledged write is lost."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from flowstone.cli.demo.replication import LOGIN, NAMES, SECONDS, free_port

if TYPE_CHECKING:
    import flowstone

OPTIONS: dict[str, Any] = {"election_mode": "candidate", "replication_timeout": 1.0, "election_timeout": 1.0}
DEPOSITS = 20


async def show_elections() -> str:
    """Run the elections, with files in elected-a, elected-b and elected-c; return the name of the last leader."""
    uris = {name: f"{LOGIN[0]}:{LOGIN[1]}@127.0.0.1:{free_port()}" for name in NAMES}
    print("  Three nodes, each of them a candidate:")
    nodes = dict(zip(NAMES, await asyncio.gather(*(_start(name, uris) for name in NAMES)), strict=True))
    try:
        leader = await _leader(nodes)
        _show(nodes)
        accounts = await nodes[leader].create_space("accounts", is_sync=True, format=[("id", "unsigned")])
        await accounts.create_index("primary")
        for number in range(DEPOSITS):
            await accounts.insert([number])
        print(f"  {DEPOSITS} deposits on {leader}, each acknowledged when two nodes had it. {leader} is stopped:")
        began = time.monotonic()
        await nodes.pop(leader).stop()
        successor = await _leader(nodes)
        waited = time.monotonic() - began
        count = len(nodes[successor].space("accounts"))
        print(f"  {waited:.1f} s later {successor} leads, and has {count} deposits:")
        _show(nodes)
        return successor
    finally:
        for node in nodes.values():
            await node.stop()


async def _start(name: str, uris: dict[str, str]) -> flowstone.Node:
    import flowstone

    listen = uris[name].rpartition("@")[2]
    node = flowstone.Node(f"elected-{name}", listen=listen, replication=list(uris.values()), user=LOGIN, **OPTIONS)
    await node.start()
    return node


async def _leader(nodes: dict[str, flowstone.Node]) -> str:
    """Wait for the first node that is writable, and until all nodes know it; return its name."""
    waiting = {asyncio.ensure_future(node.wait_rw(timeout=SECONDS)): name for name, node in nodes.items()}
    done, others = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for other in others:
        other.cancel()
    leader = waiting[done.pop()]
    await _until_known(nodes[leader].info()["id"], nodes)
    return leader


async def _until_known(leader: int, nodes: dict[str, flowstone.Node]) -> None:
    """Wait until all nodes know the leader and have its PROMOTE, which makes it the owner of the queue."""

    def is_known(info: dict[str, Any]) -> bool:
        election, queue = info["election"], info["synchro"]["queue"]
        return bool(election["leader"] == queue["owner"] == leader)

    async with asyncio.timeout(SECONDS):
        while not all(is_known(node.info()) for node in nodes.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def _show(nodes: dict[str, flowstone.Node]) -> None:
    for name, node in sorted(nodes.items()):
        info = node.info()
        election, queue = info["election"], info["synchro"]["queue"]
        state = f"{election['state']} in term {election['term']}"
        print(f"    {name}: id {info['id']}, {state}, queue owner {queue['owner']}")
