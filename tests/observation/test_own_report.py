"""A node's report of itself equals the one queried over the network."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from flowstone import Node
from flowstone.iproto.uri import parse_uri
from flowstone.node.node import NotRunning
from flowstone.observation.own_report import own_report
from flowstone.observation.query import Asking
from flowstone.observation.report import Report, ReportedDisk
from flowstone.outside import production
from tests.interop.member import SECONDS
from tests.node.hanging_disk import HangingDisk


async def test_own_report_equals_the_report_over_the_network(tmp_path: Path) -> None:
    logs = str(tmp_path)
    async with Node(tmp_path, listen="127.0.0.1:0", user=("app", "secret"), wal_dir=logs) as node:
        asking = Asking(production(), parse_uri(f"app:secret@{node.address}"))
        asked = await asking.ask()
        await asking.close()
        own = await own_report(node)
    assert isinstance(asked, Report)
    changing = {"queue", "uptime", "disk"}
    for name in (field for field in Report.__struct_fields__ if field not in changing):
        assert getattr(own, name) == getattr(asked, name), name
    assert own.cfg
    assert "secret" not in repr(own)
    assert logs not in repr(own)


async def test_report_of_a_node_with_a_hanging_disk_is_otherwise_complete(tmp_path: Path) -> None:
    disk = HangingDisk()
    async with Node(tmp_path, listen="127.0.0.1:0", outside=replace(production(), disk=disk)) as node:
        with disk.hanging():
            async with asyncio.timeout(SECONDS):
                own = await own_report(node)
        assert own.disk == ReportedDisk(failure="the disk does not answer")
        assert (own.status, own.vclock) == ("running", node.info()["vclock"])


async def test_stopped_node_has_no_report(tmp_path: Path) -> None:
    with pytest.raises(NotRunning):
        await own_report(Node(tmp_path))
