"""Real servers answer recorded requests as recorded: the replayed requests are correct, and only times are masked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conversations import record, recording
from tests.conversations.test_answers import folded
from tests.interop.versions import Binary, parameters

RECORDED = ("2.6", "2.11", "3.8")

_CREATED = re.compile(r"(SPACE_ID: 304, .*), \d{10}\]")
_LEADER = re.compile(r"8: '[0-9a-f-]{36}'")


def shown(packet: recording.Packet) -> str:
    """Return a packet without the creation time of a user and the bootstrap leader, which a restart forgets."""
    return _LEADER.sub("8: *", _CREATED.sub(r"\1, *]", str(packet)))


@pytest.mark.real
@pytest.mark.parametrize("binary", [each for series in RECORDED for each in parameters(series)])
@pytest.mark.parametrize("scenario", [record.REFUSALS, record.PROBES])
def test_real_server_answers_as_recorded(scenario: str, binary: Binary, tmp_path: Path) -> None:
    version = ".".join(map(str, binary.version[:2]))
    record.prepare(binary.path, scenario, tmp_path / "master")
    for name, played in record.play_all(binary.path, scenario, tmp_path / "master", version):
        conversation = recording.load(version, scenario, name)
        expected = [packet for packet in conversation.answers if not packet.is_heartbeat]
        assert [shown(packet) for packet in folded(played.answers)] == [shown(packet) for packet in folded(expected)], (
            name
        )
        assert [shown(packet) for packet in played.answers] == [shown(packet) for packet in expected], name
        assert [packet.masked[0] for packet in played.answers] == [packet.masked[0] for packet in expected], name
        assert played.server_closed == conversation.was_refused, name
