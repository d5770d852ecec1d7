"""The replication in `flowstone demo --tour`: three nodes, one of which is restarted, and a follower."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import flowstone

NAMES = ("a", "b", "c")
LOGIN = ("demo", "secret")
SECONDS = 30.0


async def show_replica_set() -> str:
    """Run the replica set, with files in a, b and c; return the name of the member that bootstrapped it."""
    uris = {name: f"{LOGIN[0]}:{LOGIN[1]}@127.0.0.1:{free_port()}" for name in NAMES}
    print("  Three nodes without data, each with the addresses of all three; they agree which one bootstraps the set.")
    nodes = dict(zip(NAMES, await asyncio.gather(*(_start(name, uris) for name in NAMES)), strict=True))
    try:
        first = next(name for name, node in nodes.items() if node.info()["id"] == 1)
        print(f"  {first} has bootstrapped the set, the others have joined it:")
        _show(nodes)
        orders = await nodes[first].create_space("orders", format=[("id", "unsigned"), ("what", "string")])
        await orders.create_index("primary")
        await _until_equal(nodes)
        print("  Each node writes, and all nodes get all rows:")
        for number, (name, node) in enumerate(nodes.items(), 1):
            await node.space("orders").insert([number, f"written on {name}"])
        await _until_equal(nodes)
        _show(nodes)
        away = next(name for name in NAMES if name != first)
        await nodes.pop(away).stop()
        for number in range(10, 15):
            await nodes[first].space("orders").insert([number, f"while {away} was away"])
        print(f"  {away} is stopped, five orders are written, {away} is started again and has caught up:")
        nodes[away] = await _start(away, uris)
        await _until_equal(nodes)
        _show(nodes)
        await _follow(uris[first], nodes[first])
        return first
    finally:
        for node in nodes.values():
            await node.stop()


async def _follow(uri: str, master: flowstone.Node) -> None:
    import flowstone

    print("  A follower in this program, as any program may have one; it receives settled changes:")
    seen: list[str] = []

    def changed(changes: Sequence[flowstone.SettledChange]) -> None:
        seen.extend(f"    {change.type} {change.key}: {change.old} -> {change.new}" for change in changes)

    async with flowstone.follow(uri, spaces=["orders"], on_change=changed) as replica:
        print(f"    {len(replica.space('orders'))} orders at the start")
        await master.space("orders").update(1, [("=", "what", "changed")])
        await master.space("orders").delete(2)
        await replica.wait_for(master.info()["vclock"], timeout=SECONDS)
    print("\n".join(seen))


async def _start(name: str, uris: dict[str, str]) -> flowstone.Node:
    import flowstone

    listen = uris[name].rpartition("@")[2]
    node = flowstone.Node(name, listen=listen, replication=list(uris.values()), user=LOGIN)
    await node.start()
    return node


async def _until_equal(nodes: dict[str, flowstone.Node]) -> None:
    """Wait until all nodes have the same vclock, and with it the same data."""
    async with asyncio.timeout(SECONDS):
        while len({str(node.info()["vclock"]) for node in nodes.values()}) > 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def _show(nodes: dict[str, flowstone.Node]) -> None:
    for name, node in sorted(nodes.items()):
        info = node.info()
        upstreams = (member.get("upstream", {}).get("status", "") for member in info["replication"].values())
        count = len(node.space("orders")) if "orders" in node.box.names else 0
        following = sum(status == "follow" for status in upstreams)
        print(f"    {name}: id {info['id']}, {following} upstreams, vclock {info['vclock']}, {count} orders")


def free_port() -> int:
    """Return a free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
