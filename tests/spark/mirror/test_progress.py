"""Events of a mirror, and their figures."""

from __future__ import annotations

import msgspec
import pytest

from flowstone.replication.vclock import VClock
from flowstone.spark.mirror.progress import (
    Meter,
    MirrorEvent,
    MirrorOpened,
    MirrorProgress,
    MirrorSnapshot,
    MirrorStopped,
    MirrorTable,
    lsns,
)

UUID = "aaaaaaaa-0000-4000-8000-000000000001"


def test_rates_cover_the_last_seconds() -> None:
    meter = Meter(100.0)
    meter.table(100.5, "users", 400, 1)
    meter.table(101.0, "orders", 600, 7)
    meter.batch(101.0, 0.5, 0.7)
    at = {UUID: VClock({1: 500})}
    shown = meter.progress(102.0, at, {UUID: VClock({1: 520, 2: 3})})
    assert (shown.changes, shown.changes_per_second, shown.lag, shown.lag_lsn) == (1000, 500.0, 0.7, 23)
    assert (shown.tables["users"].changes_per_second, shown.tables["orders"].version) == (200.0, 7)
    assert meter.progress(110.6, at, {}).changes_per_second == 60.0
    assert meter.progress(120.0, at, {}).changes_per_second == 0.0
    assert meter.progress(120.0, at, {}).changes == 1000


def test_lag_is_none_or_zero_when_idle() -> None:
    meter = Meter(0.0)
    meter.idle()
    assert meter.progress(1.0, {}, {}).lag is None
    meter.batch(1.0, 0.5, 3.0)
    meter.idle()
    assert meter.progress(1.0, {}, {}).lag == 0.0


def test_event_is_a_json_object_with_its_kind() -> None:
    event = MirrorSnapshot(UUID, {1: 5}, 10)
    assert msgspec.json.decode(msgspec.json.encode(event)) == {
        "event": "snapshot",
        "replicaset_uuid": UUID,
        "position": {"1": 5},
        "rows": 10,
    }


@pytest.mark.parametrize(
    ("event", "sentence"),
    [
        (MirrorOpened("lake", {}, []), "new lake in lake"),
        (MirrorOpened("lake", {UUID: {1: 5}}, ["a", "b"]), "lake in lake, 2 tables, at {1: 5}"),
        (MirrorOpened("lake", {UUID: {1: 5}}, ["a"]), "lake in lake, 1 table, at {1: 5}"),
        (MirrorStopped({UUID: {1: 5}}, 1, 1, 2.0), "stopped at {1: 5}: 1 change in 1 batch, 2.0 s"),
        (MirrorStopped({}, 2000, 0, 2.0), "stopped at the start: 2,000 changes in 0 batches, 2.0 s"),
        (MirrorTable("users", "renamed", "to people"), "table users renamed: to people"),
        (MirrorSnapshot(UUID, {1: 5}, 1234), "loaded the snapshot at {1: 5}: 1,234 rows"),
        (
            MirrorProgress(lsns({UUID: VClock({1: 5})}), 7, 3.4, None, 0, {}),
            "3 changes/s, lag ? and 0 rows, at {1: 5}, 7 changes",
        ),
    ],
)
def test_event_is_a_sentence(event: MirrorEvent, sentence: str) -> None:
    assert str(event) == sentence
