"""Fixtures of the interoperability tests: the server under test and the cluster; members' logs after a failure."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.interop.cluster import Cluster
from tests.interop.versions import ANY, Binary, parameters
from tests.judges.judging import refusal_of
from tests.observation.promise import broken_promises

_CLUSTER = pytest.StashKey[Cluster]()
_HAS_FAILED = pytest.StashKey[bool]()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test once per server that it supports."""
    if "binary" in metafunc.fixturenames:
        metafunc.parametrize("binary", parameters(getattr(metafunc.function, "fits", ANY)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    cluster = item.stash.get(_CLUSTER, None)
    if cluster is not None and report.failed and report.when == "call":
        report.sections.append(("logs of the members", cluster.logs()))
        item.stash[_HAS_FAILED] = True
    return report


@pytest.fixture
def cluster(binary: Binary | None, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Yield the cluster of one test."""
    assert binary is not None
    yield from _cluster(binary, tmp_path, request)


@pytest.fixture
def nodes(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Yield the cluster of a test without real servers: nodes with the rules of 2.11."""
    yield from _cluster(Binary("no server", (2, 11, 0)), tmp_path, request)


def _cluster(binary: Binary, directory: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    cluster = Cluster(directory, binary)
    request.node.stash[_CLUSTER] = cluster
    reports: list[str] = []
    try:
        yield cluster
        running = [member.address for member in cluster.members if member.is_running]
        if len(running) > 1 and not request.node.stash.get(_HAS_FAILED, False):
            reports = broken_promises(running)
    finally:
        cluster.close()
    assert not reports, f"false reports about the members: {reports}\n{cluster.logs()}"
    refusals = {member.name: refusal_of(member.directory) for member in cluster.members}
    assert not any(refusals.values()), f"servers refuse to start from their directories: {refusals}"
    broken = [member.name for member in cluster.members if "Traceback" in member.log()]
    assert not broken, f"unexpected errors in {broken}:\n{cluster.logs()}"
