"""Decimals, UUIDs, datetimes and binary data are printed as by Tarantool."""

from __future__ import annotations

import base64
import uuid
from decimal import Decimal

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.iproto.extensions import Datetime, ExtensionType, encode_datetime, encode_decimal
from flowstone.iproto.limits import NESTING_MAX
from flowstone.text.json_limits import EXTENSION_TEXT_MAX, OK, UNSUPPORTED
from flowstone.text.json_plain import json_value
from flowstone.text.json_text_kernels import write_column
from tests.native.twins import interpreted_module

DECIMAL, UUID, DATETIME = ExtensionType.DECIMAL, ExtensionType.UUID, ExtensionType.DATETIME


def compiled(packed: bytes) -> str | None:
    """Return the text that the kernel writes for a MessagePack value; None if the kernel does not support it."""
    out, offsets = np.empty(1000, np.uint8), np.zeros(2, np.int64)
    bounds = np.array([0]), np.array([len(packed)])
    stack = np.empty(NESTING_MAX, np.int64)
    _, status = write_column(np.frombuffer(packed, np.uint8), *bounds, 0, out, offsets, stack)
    assert status in (OK, UNSUPPORTED)
    return out[: offsets[1]].tobytes().decode() if status == OK else None


def text(kind: int, payload: bytes) -> str | None:
    """Return the kernel's output, compiled and interpreted; None if it leaves the value to the plain formatter."""
    buf = np.frombuffer(payload or b"\0", np.uint8)
    out = np.empty(EXTENSION_TEXT_MAX, np.uint8)
    end = interpreted_module("flowstone.text.json_extension").write_extension(kind, buf, 0, len(payload), out, 0)
    written = None if end < 0 else out[:end].tobytes().decode()
    assert compiled(bytes((0xC7, len(payload), kind)) + payload) == written
    return written


@pytest.mark.parametrize(
    "digits", ["0", "1.50", "-0.00012", "1E+10", "0E-3", "-0", "0E+5", "9" * 38, "-1E-38", "1E+38"]
)
def test_decimals_keep_their_scale(digits: str) -> None:
    assert text(DECIMAL, encode_decimal(Decimal(digits))) == f'"{Decimal(digits):f}"'


@given(st.integers(-(10**38) + 1, 10**38 - 1), st.integers(-38, 38))
def test_any_decimal_up_to_38_digits_is_exact(coefficient: int, scale: int) -> None:
    value = (
        Decimal(coefficient).scaleb(-scale, context=None)
        if coefficient == 0
        else Decimal((int(coefficient < 0), tuple(map(int, str(abs(coefficient)))), -scale))
    )
    assert text(DECIMAL, encode_decimal(value)) == f'"{value:f}"'


@given(st.uuids())
def test_uuids_have_canonical_text(value: uuid.UUID) -> None:
    assert text(UUID, value.bytes) == f'"{value}"'


@pytest.mark.parametrize(
    ("value", "printed"),
    [
        (Datetime(1794738030, 123456789, 180), "2026-11-15T13:20:30.123456789+0300"),
        (Datetime(0), "1970-01-01T00:00:00Z"),
        (Datetime(0, 120_000_000), "1970-01-01T00:00:00.120Z"),
        (Datetime(0, 120_000, -90), "1969-12-31T22:30:00.000120-0130"),
        (Datetime(951782400), "2000-02-29T00:00:00Z"),
        (Datetime(-62167219200), "0000-01-01T00:00:00Z"),
        (Datetime(253402300799, 999_999_999), "9999-12-31T23:59:59.999999999Z"),
    ],
)
def test_datetimes_have_iso_8601_text(value: Datetime, printed: str) -> None:
    assert text(DATETIME, encode_datetime(value)) == f'"{printed}"'


@given(st.binary(max_size=20), st.integers(0, 255))
def test_kernel_and_plain_formatter_write_equal_text(payload: bytes, kind: int) -> None:
    code = kind - 256 if kind > 127 else kind
    written = text(kind, payload)
    if written is not None:
        packed = bytes((0xC7, len(payload), kind)) + payload
        assert written == json_value(packed), code


@pytest.mark.parametrize("value", [Datetime(-62167219201), Datetime(253402300800), Datetime(0, 1_000_000_001)])
def test_unusual_datetimes_are_left_to_the_plain_formatter(value: Datetime) -> None:
    assert text(DATETIME, encode_datetime(value)) is None
    assert json_value(msgpack.packb(msgpack.ExtType(DATETIME, encode_datetime(value)))).startswith('"')


@given(st.binary(max_size=40))
def test_binary_values_are_base64(data: bytes) -> None:
    expected = f'"{base64.b64encode(data).decode()}"'
    assert compiled(bytes((0xC4, len(data))) + data) == expected
    interpreted = interpreted_module("flowstone.text.json_extension")
    out = np.empty(interpreted.base64_size(len(data)), np.uint8)
    end = interpreted.write_base64(np.frombuffer(data or b"\0", np.uint8), 0, len(data), out, 0)
    assert end == out.size
    assert out.tobytes().decode() == expected
