"""Events of an archive: each has a sentence for users and an object for programs."""

from __future__ import annotations

import json

import msgspec
import pytest

from flowstone.archive import events as events
from flowstone.archive.events import ArchiveEvent


@pytest.mark.parametrize(
    ("event", "kind", "text"),
    [
        (events.Opened("d", {}, {}), "opened", "new archive in d"),
        (events.Opened("d", {1: 2}, {1: 1}), "opened", "archive in d, at {1: 2}, settled {1: 1}"),
        (
            events.Connected("a:1", "u", "2.6.0", {1: 2}, {1: 3}),
            "connected",
            "following a:1 (u, Tarantool 2.6.0) from {1: 2}; upstream is at {1: 3}",
        ),
        (events.Disconnected("a:1", "it is gone"), "disconnected", "it is gone; retrying"),
        (events.Snapshotted("7.snap", {1: 7}, 3, "first"), "snapshot", "snapshot 7.snap at {1: 7}, 3 rows"),
        (events.SnapshotFailed("why"), "snapshot_failed", "snapshot failed: why"),
        (
            events.GapFound(((1, 3, 9),), {1: 2}, {1: 9}, "collected"),
            "gap",
            "gap: missing LSN 3 to 9 of replica 1 (collected); replaced by the snapshot at {1: 9}",
        ),
        (
            events.Progress({1: 9}, {1: 8}, 1200, 340.2, 0.04, "follow"),
            "progress",
            "340 rows/s, lag 0.0 s, at {1: 9}, settled {1: 8}, 1,200 rows",
        ),
        (events.Progress({1: 9}, {1: 9}, 5, 0.0, None, "connect"), "progress", "0 rows/s, lag ?, at {1: 9}, 5 rows"),
        (events.CaughtUp({1: 9}, {1: 9}), "caught_up", "caught up at {1: 9}, settled {1: 9}"),
        (events.Stopped({1: 9}, {1: 9}, 4), "stopped", "stopped at {1: 9}, settled {1: 9}, 4 rows received"),
    ],
)
def test_event_is_a_sentence_and_an_object(event: ArchiveEvent, kind: str, text: str) -> None:
    assert str(event) == text
    assert json.loads(msgspec.json.encode(event))["event"] == kind


def test_registration_event_states_its_consequences() -> None:
    text = str(events.Registered(3))
    assert "replica 3" in text
    assert "quorum" in text
    assert "_cluster" in text
