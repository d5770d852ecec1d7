"""Rows of `_func`, from older and newer servers."""

from __future__ import annotations

from typing import Any

import pytest

from flowstone.box.engine.function import FunctionDefinition, check_function, read_function
from flowstone.iproto import errors

ROW: tuple[Any, ...] = (
    *(68, 1, "f", 1, "lua", "", "function", ("string",), "any", "none", "none"),
    *(True, False, True, ("LUA", "sql"), {"is_multikey": True}, "about", "now", "now"),
)


def test_function_is_read_from_its_row() -> None:
    check_function(ROW)
    assert read_function(ROW) == FunctionDefinition(
        id=68,
        owner=1,
        name="f",
        is_setuid=True,
        param_list=("string",),
        is_deterministic=True,
        exports=("LUA", "SQL"),
        options=(("is_multikey", True),),
        comment="about",
    )


def test_shorter_rows_of_older_servers_are_read() -> None:
    assert read_function((1, 1, "f")) == FunctionDefinition(1, 1, "f")
    assert read_function((1, 1, "f", 1, "C")) == FunctionDefinition(1, 1, "f", True, "C")
    check_function((1, 1, "f", 0))


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        (6, "procedure", "unsupported routine_type value"),
        (7, ("colour",), "invalid argument type"),
        (8, "colour", "invalid returns value"),
        (9, "some", "invalid aggregate value"),
        (10, "all", "unsupported sql_data_access value"),
        (13, False, "unsupported is_null_call value"),
        (14, ("COBOL",), "invalid exports value"),
        (0, 32001, "function id is too big"),
    ],
)
def test_invalid_value_is_rejected(field: int, value: Any, problem: str) -> None:
    row = (*ROW[:field], value, *ROW[field + 1 :])
    with pytest.raises(errors.CreateFunction) as caught:
        check_function(row)
    assert caught.value.message == f"Failed to create function 'f': {problem}"


def test_lists_must_contain_strings() -> None:
    with pytest.raises(errors.FieldType, match="Tuple field 15 type"):
        check_function((*ROW[:14], (1,), *ROW[15:]))
