"""Types of columns as text and as sizes."""

from __future__ import annotations

import pytest

from flowstone.limestone.tsurugi.definitions import SqlType, TypeName
from tests.limestone.tsurugi.encoder import decimal_size


@pytest.mark.parametrize("precision", range(1, 39))
def test_decimals_have_the_size_that_their_digits_need(precision: int) -> None:
    assert SqlType(TypeName.DECIMAL, precision=precision).decimal_size == decimal_size(precision)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (SqlType(TypeName.INT4), "INT"),
        (SqlType(TypeName.DECIMAL, precision=10, scale=3), "DECIMAL(10,3)"),
        (SqlType(TypeName.CHARACTER, 5), "CHAR(5)"),
        (SqlType(TypeName.CHARACTER, None, True), "VARCHAR(*)"),
        (SqlType(TypeName.OCTET, 4), "BINARY(4)"),
        (SqlType(TypeName.OCTET, 9, True), "VARBINARY(9)"),
        (SqlType(TypeName.TIMESTAMP_WITH_ZONE), "TIMESTAMP WITH TIME ZONE"),
    ],
)
def test_types_are_shown_as_in_sql(kind: SqlType, text: str) -> None:
    assert str(kind) == text
