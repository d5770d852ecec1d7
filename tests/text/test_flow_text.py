"""The kernel of flow style, and the values that it leaves to the caller."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import yaml

from flowstone.iproto.extensions import Extension
from flowstone.iproto.msgpack import pack
from flowstone.text.flow_shapes import KEY_SIZE_MAX, SEPARATOR, Shape
from flowstone.text.flow_text import flow_texts
from flowstone.text.json_text import Integers


def texts(*values: Any, shape: Shape, names: tuple[str, ...] = (), bases: Integers | None = None) -> list[str]:
    packed = [pack(value) for value in values]
    ends = np.cumsum([len(each) for each in packed])
    starts = ends - [len(each) for each in packed]
    return flow_texts(np.frombuffer(b"".join(packed), np.uint8), starts, ends, shape, names, bases)


def test_map_has_field_names_or_numbers() -> None:
    assert texts((1, "Ann", None), (), shape=Shape.MAP, names=("id: ", "name: ")) == [
        '{id: 1, name: "Ann", 3: null}',
        "{}",
    ]


def test_list_has_values_without_names() -> None:
    assert texts((1, "Ann", [2, {"a": True}]), shape=Shape.LIST) == ['[1, "Ann", [2,{"a":true}]]']


def test_cells_are_unambiguous_for_any_content() -> None:
    (text,) = texts((1, "a\0b", 2.5), shape=Shape.CELLS)
    assert text.split(SEPARATOR) == ["1", '"a\\u0000b"', "2.5"]


def test_operations_have_field_names_according_to_their_index_base() -> None:
    operations = (("=", 1, 5), ("+", -1, 1), ("#", 7, 1), ("=", "path", 2))
    assert texts(operations, operations, shape=Shape.OPERATIONS, names=('"a"', '"b"'), bases=np.array([0, 1])) == [
        '[["=", "b", 5], ["+", -1, 1], ["#", 7, 1], ["=", "path", 2]]',
        '[["=", "a", 5], ["+", -1, 1], ["#", 7, 1], ["=", "path", 2]]',
    ]
    many = tuple(f'"{number}"' for number in range(200))
    assert texts((("=", 130, 1),), (("=", 3, 130),), shape=Shape.OPERATIONS, names=many) == ["", '[["=", "3", 130]]']


@pytest.mark.parametrize(
    "value",
    [
        b"bytes", Extension(5, b"x"), math.nan, math.inf, 1e16, 1e-5, {1: 2}, {"k" * (KEY_SIZE_MAX + 1): 1},
        "\x7f", "\x85", "\u2028", "\u202e", "\ufeff", "\uffff", "\udcff", "end \udce2",
    ],
)  # fmt: skip
def test_values_that_differ_between_json_and_yaml_are_left_to_the_caller(value: Any) -> None:
    assert texts((1, value), ([{"a": value}],), (1,), shape=Shape.LIST) == ["", "", "[1]"]


@pytest.mark.parametrize(
    "value", ["", "é—Привет №", "😀", '\n\t"\\/', "x" * 1000, 2**64 - 1, -(2**63), 0.0001, 9e15, -0.0, {"k" * 160: [1]}]
)
def test_yaml_parser_reads_other_values_back(value: Any) -> None:
    (text,) = texts((value,), shape=Shape.LIST)
    assert yaml.safe_load(text) == [value]


def test_output_buffer_grows_on_demand() -> None:
    value = ("\x01" * 10_000, 1)
    assert [yaml.safe_load(text) for text in texts(value, value, shape=Shape.LIST)] == [list(value)] * 2


def test_value_that_is_not_an_array_is_left_to_the_plain_formatter() -> None:
    assert texts({"a": 1}, 5, shape=Shape.MAP) == ["", ""]
    assert texts((1,), 5, shape=Shape.OPERATIONS) == ["", ""]
