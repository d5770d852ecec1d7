"""The real server that is installed answers recorded requests as it was recorded: the players ask what was asked."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from tests.conversations import record, recording
from tests.conversations.test_answers import folded

RECORDED = ("2.6", "2.11", "3.8")


@pytest.mark.real
@pytest.mark.parametrize("scenario", [record.REFUSALS, record.PROBES])
def test_the_real_server_answers_as_recorded(scenario: str, tmp_path: Path, tarantool: ModuleType) -> None:
    version = _version("tarantool")
    if version not in RECORDED:
        pytest.skip(f"nothing is recorded of Tarantool {version}")
    record.prepare("tarantool", scenario, tmp_path / "master")
    for name, played in record.play_all("tarantool", scenario, tmp_path / "master", version):
        conversation = recording.load(version, scenario, name)
        expected = [packet for packet in conversation.answers if not packet.is_heartbeat]
        assert [str(p) for p in folded(played.answers)] == [str(p) for p in folded(expected)], name
        assert [packet.masked for packet in played.answers] == [packet.masked for packet in expected], name
        assert played.server_closed == conversation.was_refused, name


def _version(binary: str) -> str:
    text = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"Tarantool (?:Enterprise )?(\d+\.\d+)", text)
    assert found is not None, text
    return found[1]
