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

# Each worker rewrites all test modules, and hundreds of processes import the tested code. If the environment disables
# bytecode files, compilation takes nearly half of the start-up time of such a process.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Processes import the tree to which the tests belong.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [SOURCES, os.environ.get("PYTHONPATH")]))

# A shell starts background jobs with SIGINT ignored; the commands that tests interrupt would inherit that.
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
    """Keep each file on one worker, which starts its servers once, except for the files in `SPREAD`."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return nodeid if any(part in file for part in SPREAD) else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return _ByFile(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    """Exclude the thousands of collected tests from later garbage collections."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests for unavailable servers, such as a newer Tarantool, and tests for full scale only."""
    items.sort(key=_turn_of)
    names = ["unfit"] if FULL else ["unfit", "full_scale"]
    unfit = [item for item in items if any(item.get_closest_marker(name) is not None for name in names)]
    if unfit:
        config.hook.pytest_deselected(items=unfit)
        items[:] = [item for item in items if item not in unfit]


@pytest.fixture(scope="session")
def tarantool() -> object:
    """Return the module that runs the real Tarantool. If it is missing, fail with CI=true, and skip otherwise."""
    if not real_tarantool.available():
        message = "the real Tarantool is not installed (Debian package `tarantool`)"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return real_tarantool


@pytest.fixture(scope="session")
def java() -> None:
    """Require Java. If it is missing, fail with CI=true, and skip otherwise."""
    from flowstone.spark.spark_session import SparkUnavailable, check_java
    from tests import short_java

    try:
        check_java()
    except SparkUnavailable as error:
        pytest.fail(str(error)) if os.environ.get("CI") == "true" else pytest.skip(str(error))
    short_java.shorten()


@pytest.fixture(autouse=True)
def log_of_flowstone() -> Iterator[None]:
    """Restore the logging configuration, which commands change when they run in this process."""
    log = logging.getLogger("flowstone")
    handlers, propagates = list(log.handlers), log.propagate
    levels = [(each, each.level) for each in (log, *map(log.getChild, ("node", "observation", "web")))]
    yield
    for each, level in levels:
        each.setLevel(level)
    log.handlers[:], log.propagate = handlers, propagates


@pytest.fixture(autouse=True)
def streams_of_asynctnt() -> Iterator[None]:
    """Restore streams in asynctnt: a connection to a server without streams disables them for all its connections."""
    stream = asynctnt.Connection.stream
    yield
    asynctnt.Connection.stream = stream
