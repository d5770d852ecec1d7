"""YAML for people: its layout, and that a YAML parser reads the same values."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from flowstone.text.yaml_values import WIDTH, yaml_list

INFO = {"status": "running", "vclock": {1: 7}, "gc": {}, "replication": {1: {"uuid": "a", "tags": ["x", "y"]}}}


def test_map_has_a_line_per_entry_and_short_array_is_on_one_line() -> None:
    assert yaml_list([INFO, (1, "Ada", None), True]) == (
        '- status: "running"\n'
        "  vclock:\n"
        "    1: 7\n"
        "  gc: {}\n"
        "  replication:\n"
        "    1:\n"
        '      uuid: "a"\n'
        '      tags: ["x", "y"]\n'
        '- [1, "Ada", null]\n'
        "- true\n"
    )


def test_long_array_has_an_item_per_line() -> None:
    tuples = [(number, "x" * 30) for number in range(4)]
    text = yaml_list([tuples])
    assert text.startswith('- - [0, "xxx')
    assert text.count("\n") == 4
    assert max(map(len, text.splitlines())) <= WIDTH


def test_empty_list_is_printed_as_brackets() -> None:
    assert yaml_list([]) == "[]\n"


@pytest.mark.parametrize("value", [{"k" * 2000: {"a": 1}}, {"a" * 200: ["b" * 200]}, [{}], [[]], "\x1b[31m"])
def test_yaml_parser_reads_unusual_value_back(value: Any) -> None:
    assert yaml.safe_load(yaml_list([value])) == [value]


SCALARS = st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8"))
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.integers() | st.text("abc: -\"'?"), inner)
)


@given(st.lists(VALUES))
def test_yaml_parser_reads_the_same_values(values: list[Any]) -> None:
    assert yaml.safe_load(yaml_list(values)) == values
