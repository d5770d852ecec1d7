"""Servers for the tests of the client: nodes in this process, and a real server for each module."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.node.upstream_server import Upstream
from tests.real_tarantool import Server

FRUIT = """
box.schema.space.create('fruit', {format = {{'id', 'unsigned'}, {'name', 'string'}}})
box.space.fruit:create_index('primary')
box.space.fruit:create_index('by_name', {parts = {2, 'string'}, unique = false})
"""


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Upstream]:
    """A node with the space `fruit`."""
    async with running(tmp_path / "node") as upstream:
        yield upstream


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[tuple[Upstream, Upstream]]:
    """Two nodes with the space `fruit`, which do not replicate: the data shows where a statement was executed."""
    async with running(tmp_path / "one") as one, running(tmp_path / "two", read_only=False) as two:
        await two.node.reconfigure(read_only=True)
        yield one, two


@asynccontextmanager
async def running(directory: Path, **options: Any) -> AsyncIterator[Upstream]:
    upstream = Upstream(directory, dialect="2.11", **options)
    await upstream.start()
    try:
        yield upstream
    finally:
        await upstream.stop()


@pytest.fixture(scope="module")
def fruit_server(tarantool: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real server with the space `fruit`."""
    with tarantool.serve(tmp_path_factory.mktemp("fruit"), setup=FRUIT) as server:
        yield server
