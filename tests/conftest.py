"""Fixtures that every test module may use, and the scale of a run."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any, Final

import asynctnt
import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from tests import real_tarantool
from tests.places import SOURCES

FULL = os.environ.get("FLOWSTONE_SCALE") == "full"
"""True in `make test-full`: the same tests, at the counts the project promises."""

# Each worker rewrites all test modules, and hundreds of processes import what was just tested: where the environment
# forbids to keep what was compiled, nearly half of what such a process takes to start goes into compiling it once more.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Processes import the tree that the tests are of.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [SOURCES, os.environ.get("PYTHONPATH")]))

# A shell starts background jobs with SIGINT ignored, and so would be the commands that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("ci", deadline=None, max_examples=100)
settings.register_profile("full", deadline=None, max_examples=2000)
settings.load_profile("full" if FULL else "ci")


SLOW_FIRST: Final = (
    "kill",
    "restore_points",
    "spark/test_cluster",
    "chaos",
    "demo",
    "test_investigation",
    "test_mutations",
    "/docs/",
    "browser",
    "test_guided",
    "test_limestone_scale",
    "/verification/",
    "/spark/",
    "/interop/",
    "/cli/replica_set/",
    "/web/",
    "/limestone/",
    "/node/",
    "/simulation/",
)
"""Parts of paths: files begin in this order, so that no worker is left alone with a long one at the end."""

SPREAD: Final = (
    "test_mirror_kills",
    "test_chaos",
    "demo/test_lake",
    "test_investigation",
    "test_mutations",
    "docs/test_pages",
)
"""Parts of paths of long modules: the workers share their tests, since no two of these tests share a fixture."""


def _turn_of(item: pytest.Item) -> int:
    return next((turn for turn, part in enumerate(SLOW_FIRST) if part in item.path.as_posix()), len(SLOW_FIRST))


class _ByFile(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """A file stays on one worker, which starts its servers once, except for the files of `SPREAD`."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return nodeid if any(part in file for part in SPREAD) else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return _ByFile(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    """Leave the thousands of collected tests out of each later collection of garbage."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is meant for servers that are not there, such as a newer Tarantool, or for the full scale."""
    items.sort(key=_turn_of)
    names = ["unfit"] if FULL else ["unfit", "full_scale"]
    unfit = [item for item in items if any(item.get_closest_marker(name) is not None for name in names)]
    if unfit:
        config.hook.pytest_deselected(items=unfit)
        items[:] = [item for item in items if item not in unfit]


@pytest.fixture(scope="session")
def tarantool() -> object:
    """The module that runs the real Tarantool. Absent: a failure where CI=true, else a skip that says so."""
    if not real_tarantool.available():
        message = "the real Tarantool is not installed (Debian package `tarantool`)"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return real_tarantool


@pytest.fixture(scope="session")
def java() -> None:
    """Absent Java: a failure where CI=true, else a skip that says so."""
    from flowstone.spark.spark_session import SparkUnavailable, check_java
    from tests import short_java

    try:
        check_java()
    except SparkUnavailable as error:
        pytest.fail(str(error)) if os.environ.get("CI") == "true" else pytest.skip(str(error))
    short_java.shorten()


@pytest.fixture(autouse=True)
def log_of_flowstone() -> Iterator[None]:
    """Commands that are run in this process set the log up for themselves: what others look for in it is put back."""
    log = logging.getLogger("flowstone")
    handlers, propagates = list(log.handlers), log.propagate
    levels = [(each, each.level) for each in (log, *map(log.getChild, ("node", "observation", "web")))]
    yield
    for each, level in levels:
        each.setLevel(level)
    log.handlers[:], log.propagate = handlers, propagates


@pytest.fixture(autouse=True)
def streams_of_asynctnt() -> Iterator[None]:
    """A connection of asynctnt to a server without streams takes them away from all its connections: give them back."""
    stream = asynctnt.Connection.stream
    yield
    asynctnt.Connection.stream = stream
