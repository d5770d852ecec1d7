"""The timeline of elections in a real browser: absent without elections, and neutral after they were switched off."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.interop.cluster import Cluster
from tests.interop.mesh import Mesh
from tests.real_tarantool import free_port
from tests.web.live_sets import NODES, Dashboard

PATIENCE = 30_000
"""Milliseconds, as in `test_browser_dashboard.py`."""


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Mesh]:
    """Yield a single master of a version that has terms, with `election_mode` off."""
    cluster = Cluster(tmp_path, NODES)
    try:
        yield Mesh(cluster, ["ours"], direct=True)
    finally:
        cluster.close()


@pytest.fixture
def dashboard(page: Page, mesh: Mesh, tmp_path: Path) -> Iterator[Page]:
    shown = Dashboard(tmp_path / "dashboard.log", list(mesh), free_port())
    shown.start()
    try:
        page.goto(shown.url)
        yield page
        page.goto("about:blank")  # otherwise it would report the end of the server
    finally:
        shown.stop()


def test_missing_leader_is_not_reported_without_elections(dashboard: Page, mesh: Mesh) -> None:
    summary = dashboard.locator(".elections .summary")
    expect(dashboard.locator("#verdict")).to_have_text("1 set, 1 member, all reachable", timeout=PATIENCE)
    expect(summary).to_be_hidden()
    expect(dashboard.locator(".span")).to_have_count(0)

    mesh.set_modes("candidate")
    leader = mesh.wait_leader()
    expect(summary).to_contain_text(f"{leader.address} has led for", timeout=PATIENCE)
    mesh.set_modes("off")
    expect(summary).to_have_text("Elections are off.", timeout=PATIENCE)
    expect(dashboard.locator(".span[data-last]")).to_have_attribute("data-leader", "off")
