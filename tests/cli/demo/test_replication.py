"""The demo's replica set: it is bootstrapped, each member writes, one returns, a follower sees changes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flowstone.cli.demo.replication import NAMES, show_replica_set


async def test_demo_replica_set_converges_to_one_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    first = await show_replica_set()
    shown = capsys.readouterr().out
    assert first in NAMES
    assert f"{first} has bootstrapped the set" in shown
    assert len(re.findall("8 orders$", shown, re.MULTILINE)) == len(NAMES)
    assert "UPDATE (1,): Tuple(1, 'written on a') -> Tuple(1, 'changed')" in shown
