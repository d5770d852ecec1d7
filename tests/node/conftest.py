"""A running node for the tests of its components."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

import flowstone


@pytest_asyncio.fixture
async def node(tmp_path: Path) -> AsyncIterator[flowstone.Node]:
    """Return a node in a new directory, with the space `fruit` (id, name, count) and two indexes."""
    async with flowstone.Node(tmp_path / "data") as running:
        format = [("id", "unsigned"), ("name", "string"), {"name": "count", "type": "integer", "is_nullable": True}]
        fruit = await running.create_space("fruit", format=format)
        await fruit.create_index("primary", parts=["id"])
        await fruit.create_index("by_name", parts=["name"])
        yield running
