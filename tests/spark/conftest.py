"""The Spark session of the tests: one per worker process of pytest, started as by the commands."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from flowstone.spark.spark_session import session
from tests.spark.live_servers import server

CORES = 2


@pytest.fixture(scope="session")
def spark(java: None) -> Iterator[SparkSession]:
    """Return the session, which commands that run in the test's process also use."""
    with session("tests", master=f"local[{CORES}]") as started:
        yield started


@pytest.fixture(scope="session")
def real_server(tarantool: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the address of a real server with the spaces of `live_servers`.

    Tests that write use spaces of their own.
    """
    with server("real", tmp_path_factory.mktemp("real")) as address:
        yield address


@pytest.fixture(scope="session")
def node_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the address of a node of ours with the same spaces."""
    with server("node", tmp_path_factory.mktemp("node")) as address:
        yield address


@pytest.fixture(params=["real", "node"])
def address(request: pytest.FixtureRequest) -> str:
    """Return the address of a real server, then of a node."""
    found: str = request.getfixturevalue(f"{request.param}_server")
    return found
