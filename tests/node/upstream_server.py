"""A node in this process for tests to follow: it can be stopped, restored to an earlier state and restarted at the same
address.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import flowstone
from flowstone.node.spaces import Space
from tests.real_tarantool import free_port

USER = "replicator:secret"


class Upstream:
    """`uri` is the address to follow; `node` is set while it runs. New data has the space `fruit` (id, name)."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self._directory = directory
        self._options: dict[str, Any] = {"dialect": "2.6", "checkpoint_count": 1} | options
        self._running: flowstone.Node | None = None
        self.address = f"127.0.0.1:{free_port()}"
        self.uri = f"{USER}@{self.address}"

    @property
    def node(self) -> flowstone.Node:
        assert self._running is not None
        return self._running

    @property
    def fruit(self) -> Space:
        return self.node.space("fruit")

    @property
    def vclock(self) -> dict[int, int]:
        return self.node.info()["vclock"]

    async def start(self) -> None:
        is_new = not self._directory.exists()
        user, _, password = USER.partition(":")
        self._running = flowstone.Node(
            self._directory, listen=self.address, user=(user, password) if is_new else None, **self._options
        )
        await self._running.start()
        if is_new:
            fruit = await self.node.create_space("fruit", format=[("id", "unsigned"), ("name", "string")])
            await fruit.create_index("primary")
            await fruit.create_index("by_name", parts=["name"], unique=False)

    async def stop(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            await running.stop()

    async def lose_logs(self) -> None:
        """Write rows without any replica, and keep only the snapshot."""
        await self.fruit.replace((100, "new"))
        await self.node.snapshot()
        await self.fruit.replace((101, "newer"))
        await self.node.snapshot()

    def keep_copy(self, place: Path) -> None:
        """Copy its files while it is stopped."""
        shutil.copytree(self._directory, place)

    def set_back(self, place: Path) -> None:
        """Restore its files from a copy."""
        shutil.rmtree(self._directory)
        shutil.copytree(place, self._directory)
