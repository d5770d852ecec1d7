"""Recordings are read completely: every byte is in a packet, and every packet can be shown."""

from __future__ import annotations

import pytest

from tests.conversations import recording
from tests.vectors import recorded

CONVERSATIONS = [
    (path.parts[-3].removeprefix("tarantool-"), path.parts[-2], path.name.removesuffix(".idx"))
    for path in sorted(recorded.HERE.rglob("*.idx"))
]


def test_recordings_exist_for_three_versions() -> None:
    assert {version for version, _, _ in CONVERSATIONS} == {"2.6", "2.11", "3.8"}


@pytest.mark.parametrize(("version", "scenario", "name"), CONVERSATIONS)
def test_every_byte_of_a_recording_is_in_a_packet(version: str, scenario: str, name: str) -> None:
    conversation = recording.load(version, scenario, name)
    path = recording.scenario(version, scenario) / name
    for side, first, packets in (
        ("s2c", conversation.greeting, conversation.answers),
        ("c2s", b"", conversation.requests),
    ):
        framed = first + b"".join(recording.framed(packet.payload) for packet in packets)
        assert framed == path.with_name(f"{name}.{side}.bin").read_bytes()
    assert all(str(packet) and packet.masked for packet in conversation.packets)
