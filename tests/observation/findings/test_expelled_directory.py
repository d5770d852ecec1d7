"""Directories of expelled members are found, and those of other members are not."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from flowstone import Node
from flowstone.box.system import CLUSTER_ID
from flowstone.observation.findings.expelled_directory import expulsion_findings
from flowstone.observation.findings.finding import Finding, Kind, Severity
from flowstone.observation.log_directory import look_into
from flowstone.outside import production
from tests.node.expelled_files import leave_expelled
from tests.observation.directories import leave

OUTSIDE = production()


async def found(path: Path) -> list[Finding]:
    return await expulsion_findings(OUTSIDE, look_into(OUTSIDE, str(path)))


async def expel_another(path: Path) -> None:
    async with Node(path) as node:
        await node.space(CLUSTER_ID).insert([2, "00000002-0000-4000-8000-000000000000"])
        await node.space(CLUSTER_ID).delete(2)


async def test_only_the_directory_of_an_expelled_member_is_found(tmp_path: Path) -> None:
    uuid = await leave_expelled(tmp_path / "data", tmp_path / "other")
    (finding,) = await found(tmp_path / "data")
    assert (finding.kind, finding.severity) == (Kind.NOT_REGISTERED, Severity.STOPPED)
    assert str(uuid) in finding.why
    assert f"flowstone rebootstrap {tmp_path / 'data'} URI" in finding.advice
    assert await found(tmp_path / "other") == []


def test_directory_without_a_readable_snapshot_has_no_expulsion_finding(tmp_path: Path) -> None:
    asyncio.run(expel_another(tmp_path))
    assert asyncio.run(found(tmp_path)) == []
    (snapshot,) = tmp_path.glob("*.snap")
    snapshot.write_bytes(b"JUNK")
    assert asyncio.run(found(tmp_path)) == []
    snapshot.unlink()
    assert asyncio.run(found(tmp_path)) == []


@pytest.mark.parametrize("kind", ["real", "ours"])
def test_directory_of_a_member_has_no_expulsion_finding(tmp_path: Path, kind: str) -> None:
    assert asyncio.run(found(leave(kind, tmp_path / "data"))) == []
