"""Lua statements: their format, and their evaluation by the real server."""

from __future__ import annotations

import base64
import math
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import UUID

import pytest

from flowstone.history.log_reading import Reading
from flowstone.history.records import records
from flowstone.iproto.constants import RequestType
from flowstone.iproto.extensions import Datetime, ErrorRecord, ErrorStack, Extension, Interval
from flowstone.iproto.msgpack import unpack
from flowstone.outside import production
from flowstone.text.lua_rows import NoLuaForm, lua_statements, lua_value
from tests.history.logs import Log

VALUES: list[Any] = [
    None, True, False, 0, -1, 2**53 - 1, 2**53, 2**64 - 1, -(2**53), -(2**63), -(2**63) + 1,
    0.5, 3.0, -0.0, 1e300, 5e-324, math.inf, -math.inf, 0.1 + 0.2, 1e21,
    "", "plain", "it's \\ \"quoted\"", "line\nand\ttab\x00\x7f", "é☃😀", "\udcff\udcfe", "]]",
    Decimal("1.50"), Decimal("-0.000000000000000000000000000000000001"), Decimal(10) ** 37,
    UUID("5313b8d5-82a0-4fb4-a280-9e8bf79e1cac"),
    (), (1, (2, ())), {}, {"a": 1, "b": {"c": ()}}, {1: "one", 2: "two"}, {10: 1},
    {"end": 1, "a b": 2}, (None, 1, None),
]  # fmt: skip


@pytest.mark.real
def test_server_evaluates_lua_to_the_same_values(tarantool: ModuleType, tmp_path: Path) -> None:
    tuples = ",\n".join(f"{{{lua_value(value)}}}" for value in VALUES)
    printed = tarantool.run(
        "local msgpack, digest = require('msgpack'), require('digest')\n"
        f"for _, value in ipairs({{{tuples}}}) do\n"
        "    print(digest.base64_encode(msgpack.encode(value), {nowrap=true}))\nend\nos.exit(0)",
        tmp_path,
    )
    made = [unpack(base64.b64decode(line))[0] for line in printed.splitlines()]
    for value, got in zip(VALUES, made, strict=True):
        assert (got, type(got)) == (value, type(value))
        assert math.copysign(1, got) == math.copysign(1, value) if isinstance(value, float) else True


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (math.nan, "0/0"),
        (b"\x00a", "require('varbinary').new('\\x00a')"),
        (Datetime(5, 6, 60), "require('datetime').new({timestamp = 5, nsec = 6, tzoffset = 60})"),
        (Interval(day=1, minute=-2), "require('datetime').interval.new({day = 1, min = -2})"),
        (Decimal("1E+999999"), "require('decimal').new('1E+999999')"),
        (ErrorStack((ErrorRecord("a", "b\udcff", code=7),)), "box.error.new({code = 7, reason = 'b\\xff'})"),
    ],
)
def test_values_of_newer_types_are_created_by_lua_modules(value: Any, text: str) -> None:
    assert lua_value(value) == text


def test_error_names_a_row_without_a_lua_form(tmp_path: Path) -> None:
    assert statements(tmp_path, (RequestType.INSERT, {0x10: 512, 0x21: (1,)})) == ["box.space[512]:insert({[1] = 1})\n"]
    with pytest.raises(NoLuaForm, match=r"row 1 of replica 1: cannot represent Extension"):
        statements(tmp_path / "other", (RequestType.INSERT, {0x10: 512, 0x21: (Extension(5, b"x"),)}))


def statements(directory: Path, *rows: tuple[RequestType, dict[int, Any]]) -> list[str]:
    log = Log(directory)
    log.write(*rows)
    log.writer.close()
    return list(lua_statements(records(Reading(production(), [log.path]).pieces())))


def test_transaction_is_one_block_and_rows_without_data_have_no_line(tmp_path: Path) -> None:
    rows = [(RequestType.INSERT, {0x10: 512, 0x21: (1,)}), (RequestType.DELETE, {0x10: 512, 0x11: 2, 0x20: ("k",)})]
    assert statements(tmp_path / "a", *rows) == [
        "box.begin()\nbox.space[512]:insert({[1] = 1})\nbox.space[512].index[2]:delete({[1] = 'k'})\nbox.commit()\n"
    ]
    assert statements(tmp_path / "b", (RequestType.RAFT_CONFIRM, {2: 1, 3: 1})) == []


def test_lua_counts_fields_from_one(tmp_path: Path) -> None:
    operations = (("=", 1, "x"), (":", 1, 0, 2, "y"), ("!", -1, 3), ("=", "name", 4))
    (from_zero,) = statements(tmp_path / "a", (RequestType.UPDATE, {0x10: 512, 0x20: (1,), 0x21: operations}))
    assert "{[1] = '=', [2] = 2, [3] = 'x'}, [2] = {[1] = ':', [2] = 2, [3] = 1, [4] = 2, [5] = 'y'}" in from_zero
    assert "{[1] = '!', [2] = -1, [3] = 3}, [4] = {[1] = '=', [2] = 'name', [3] = 4}" in from_zero
    upsert = {0x10: 512, 0x15: 1, 0x21: (1,), 0x28: (("+", 2, 1),)}
    assert statements(tmp_path / "b", (RequestType.UPSERT, upsert)) == [
        "box.space[512]:upsert({[1] = 1}, {[1] = {[1] = '+', [2] = 2, [3] = 1}})\n"
    ]


@pytest.mark.parametrize("odd", [(), ("=",), 5, "=", {"=": 1}])
def test_lua_keeps_malformed_operations_unchanged(tmp_path: Path, odd: Any) -> None:
    (line,) = statements(tmp_path, (RequestType.UPDATE, {0x10: 512, 0x20: (1,), 0x21: (("=", 1, 2), odd)}))
    assert f"[2] = {lua_value(odd)}}})" in line


def test_operations_that_are_not_an_array_are_unchanged(tmp_path: Path) -> None:
    (line,) = statements(tmp_path, (RequestType.UPSERT, {0x10: 512, 0x21: (1,), 0x28: 7}))
    assert line == "box.space[512]:upsert({[1] = 1}, 7)\n"
