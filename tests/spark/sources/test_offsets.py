"""Offsets: the JSON in Spark's checkpoint, its round trip, and the forms that users write."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.replication.vclock import VClock
from flowstone.spark.sources.offsets import INITIAL, Offset, Position, WrongOffset, parse_offsets
from tests.spark.change_rows import UUID

OTHER = "bbbbbbbb-0000-4000-8000-000000000002"
VCLOCKS = st.dictionaries(st.integers(0, 31), st.integers(1, 2**62)).map(VClock)
POSITIONS = st.builds(Position, VCLOCKS, st.integers(0, 2**60), st.none() | st.integers(0, 10**6))
OFFSETS = st.dictionaries(st.sampled_from([UUID, OTHER]), POSITIONS).map(Offset)


@given(OFFSETS)
def test_offset_round_trips_through_a_checkpoint(offset: Offset) -> None:
    assert Offset.from_json(json.loads(json.dumps(offset.to_json()))) == offset


def test_json_form_is_a_vclock_per_replica_set() -> None:
    offset = INITIAL.moved(OTHER, Position(VClock({2: 7}))).moved(UUID, Position(VClock({1: 500, 2: 30})))
    assert json.dumps(offset.to_json()) == f'{{"{UUID}": {{"1": 500, "2": 30}}, "{OTHER}": {{"2": 7}}}}'
    later = offset.moved(UUID, Position(VClock({1: 500}), stamp=12, chunk=0))
    assert later.to_json()["stamps"] == {UUID: 12}
    assert later.to_json()["snapshots"] == {UUID: 0}
    assert offset.get("another") is None


@given(POSITIONS, POSITIONS)
def test_equal_offsets_have_equal_texts(one: Position, two: Position) -> None:
    there, back = Offset({UUID: one, OTHER: two}), Offset({OTHER: two, UUID: one})
    assert json.dumps(there.to_json()) == json.dumps(back.to_json())


def test_initial_offset_is_an_empty_object() -> None:
    assert INITIAL.to_json() == {}
    assert Offset.from_json({}) == INITIAL


@pytest.mark.parametrize(
    "value", [[], {"x": {}}, {UUID: 5}, {UUID: {"a": 1}}, {UUID: {"1": -1}}, {UUID: {"1": 1.5}}, {UUID: {"99": 1}},
              {"stamps": {UUID: 1}}, {UUID: {}, "snapshots": {UUID: "x"}}]
)  # fmt: skip
def test_foreign_checkpoint_is_refused(value: Any) -> None:
    with pytest.raises(WrongOffset):
        Offset.from_json(value)


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("earliest", "earliest"),
        (" Latest", "latest"),
        ("snapshot", "snapshot"),
        ('{"1": 500}', {None: VClock({1: 500})}),
        ("{}", {None: VClock()}),
        (f'{{"{UUID}": {{"1": 5}}, "stamps": {{}}}}', {UUID: VClock({1: 5})}),
    ],
)
def test_users_write_names_vclocks_or_offsets(text: str, meaning: object) -> None:
    assert parse_offsets(text) == meaning


@pytest.mark.parametrize("text", ["", "now", "[1]", '{"1": "x"}', '{"x": {"1": 5}}', '{"snapshots": {}}', "{1: 5}"])
def test_invalid_offset_is_refused_with_one_sentence(text: str) -> None:
    with pytest.raises(WrongOffset):
        parse_offsets(text)
