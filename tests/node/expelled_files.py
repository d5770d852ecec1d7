"""The directory of a node that was expelled while running, and knows it."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

from flowstone import Node
from flowstone.box.system import CLUSTER_ID
from tests.node.upstream.test_applier import SECONDS, until


async def leave_expelled(directory: Path, other: Path) -> UUID:
    """Expel the node of `directory` from the replica set of `other`, and stop both; return its UUID."""
    async with (
        Node(other, listen="127.0.0.1:0", user=("app", "secret")) as master,
        Node(directory, replication=[f"app:secret@{master.address}"]) as node,
    ):
        await node.wait_rw(SECONDS)
        info = node.info()
        await master.space(CLUSTER_ID).delete(info["id"])
        await until(lambda: node.info()["id"] is None, SECONDS)
    return UUID(info["uuid"])
