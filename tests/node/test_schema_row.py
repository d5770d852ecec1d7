"""Rows of `_schema` are found by key, whatever their number."""

from __future__ import annotations

from typing import Any

import pytest

from flowstone.box.box import Box
from flowstone.box.dialect import Dialect
from flowstone.box.engine import statements
from flowstone.box.system import SCHEMA_ID
from flowstone.iproto.msgpack import pack, unpack
from flowstone.node import schema_row as schema_row_module
from flowstone.node.schema_row import schema_row, schema_version
from tests.box.bootstrapped import bootstrapped


@pytest.mark.parametrize("dialect", Dialect)
def test_version_of_a_bootstrapped_box_is_found(dialect: Dialect) -> None:
    box = bootstrapped(dialect)
    assert schema_version(box)[0] == 2
    assert schema_row(box, "nothing") == ()


def test_box_without_schema_has_no_version() -> None:
    assert schema_version(Box(Dialect.V2_11)) == ()


def test_lookup_unpacks_one_row_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """`box.once` leaves a row for every key, and replicas look up the version with every verdict."""
    box = bootstrapped(Dialect.V2_11)
    for number in range(1000):
        statements.insert(box.begin(), box.space(SCHEMA_ID), pack((f"once{number}", True)))
    unpacked: list[bytes] = []

    def counted(raw: bytes) -> Any:
        unpacked.append(raw)
        return unpack(raw)

    monkeypatch.setattr(schema_row_module, "unpack", counted)
    assert schema_version(box) > (2, 10, 1)
    assert len(unpacked) == 1
