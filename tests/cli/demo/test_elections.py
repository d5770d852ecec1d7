"""The demo's elections: a leader is elected and lost, and its successor has every acknowledged order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flowstone.cli.demo.elections import DEPOSITS, show_elections
from flowstone.cli.demo.replication import NAMES


async def test_new_leader_has_the_rows_of_the_old_leader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    last = await show_elections()
    shown = capsys.readouterr().out
    assert last in NAMES
    assert f"{last} leads, and has {DEPOSITS} deposits" in shown
    assert len(re.findall("leader in term", shown)) == 2
    assert len(re.findall("follower in term", shown)) == 3
