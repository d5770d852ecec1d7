"""The encoder of the tests writes the bytes that Tsurugi wrote."""

from __future__ import annotations

from typing import Any

import pytest

from tests.limestone.tsurugi.encoder import (
    ColumnSpec,
    TableSpec,
    field,
    index_metadata,
    key_of,
    metadata_key,
    table_metadata,
    value_of,
)
from tests.limestone.tsurugi.recorded import fields


def spec_of(recorded: dict[str, Any]) -> ColumnSpec:
    options = recorded["options"]
    return ColumnSpec(
        recorded["column"],
        recorded["type"],
        nullable=recorded["nullable"],
        length=options.get("length"),
        varying=bool(options.get("varying")),
        precision=options.get("precision", 0),
        scale=options.get("scale", 0),
        descending=recorded["direction"] == "desc",
    )


def value_in(recorded: dict[str, Any]) -> Any:
    value = recorded["value"]
    if not isinstance(value, dict):
        return value
    if "float" in value:
        return float(value["float"])
    if "hex" in value:
        return bytes.fromhex(value["hex"])
    if "decimal" in value:
        return value["decimal"]
    parts = value["parts"]
    return tuple(parts) if len(parts) > 1 else parts[0]


@pytest.mark.parametrize("number", range(len(fields())))
def test_recorded_field_is_encoded_as_tsurugi_did(number: int) -> None:
    recorded = fields()[number]
    column = spec_of(recorded)
    inverted = recorded["where"] == "value" or column.descending
    assert field(column, value_in(recorded), inverted=inverted).hex() == recorded["hex"]


def test_recorded_index_metadata_are_encoded_as_tsurugi_did() -> None:
    assert metadata_key(6).hex() == "0000000000000006"
    assert index_metadata("ix_ck_k1", "t_ck", [("k1", False)], 7 << 32, 6).hex(" ") == (
        "00 00 00 00 07 00 00 00 ff ff ff ff ff ff ff ff 08 0e 5a 31 a2 01 0a 1a 08 69 78 5f 63 6b 5f 6b 31 ca 01 08 "
        "00 00 00 00 00 00 00 06 fa 01 08 0a 06 1a 04 74 5f 63 6b c2 02 06 0a 02 6b 31 10 01 d2 02 02 02 03"
    )


def test_recorded_table_is_encoded_as_tsurugi_did() -> None:
    table = TableSpec("t_drop", (ColumnSpec("id", "int8", nullable=False), ColumnSpec("w", "int4")), ("id",))
    assert table_metadata(table, 1 << 32, 0x16)[16:].hex() == (
        "080e5a4fa201081a06745f64726f70ca01080000000000000016f20122a201081a06745f64726f70aa01080a02696412020805"
        "aa01090a0177120208041801c202060a0269641001ca020177d2020401020304"
    )
    assert key_of(table, {"id": 77, "w": 88}).hex() == "800000000000004d"
    assert value_of(table, {"id": 77, "w": 88}).hex() == "7e7fffffa7"
