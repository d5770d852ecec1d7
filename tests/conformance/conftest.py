"""The servers for client tests: a node in each dialect, and the real server, which validates the tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests import served_node
from tests.conformance.library import Library, open_library
from tests.conformance.servers import REAL_SETUP


@pytest.fixture(scope="module", params=["server-2.6", "node-2.6", "node-2.11"])
def library(
    request: pytest.FixtureRequest, tarantool: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Library]:
    """Yield the library on each kind of server in turn."""
    kind, dialect = request.param.split("-")
    directory = tmp_path_factory.mktemp(kind)
    if kind == "server":
        with tarantool.serve(directory, setup=REAL_SETUP) as server:
            yield open_library(server.port, is_node=False)
    else:
        with served_node.serve(directory, dialect=dialect) as node:
            yield open_library(node.port, is_node=True)
