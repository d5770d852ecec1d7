"""Extension values: exact encodings, and rejection of malformed payloads."""

from __future__ import annotations

import contextlib
import datetime
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.errors import LocalProtocolError
from flowstone.iproto.extensions import (
    Datetime,
    ExtensionError,
    Interval,
    decimal_text,
    decode_datetime,
    decode_decimal,
    decode_interval,
    decode_uuid,
    encode_datetime,
    encode_decimal,
    encode_interval,
)
from flowstone.iproto.msgpack import pack, unpack

DECIMALS = st.builds(
    lambda negative, digits, scale: Decimal((negative, tuple(map(int, str(digits))), -scale)),
    st.booleans(),
    st.integers(0, 10**38 - 1),
    st.integers(-60, 60),
)
DATETIMES = st.builds(
    Datetime,
    st.integers(-185604722870400, 185480451417600),
    st.integers(0, 999_999_999),
    st.integers(-720, 840),
    st.integers(0, 1024),
)
_INT32, _INT64 = st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
INTERVALS = st.builds(Interval, _INT32, _INT32, _INT32, _INT64, _INT64, _INT64, _INT64, _INT32, st.integers(0, 2))


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("0", "000c"),
        ("-1", "001d"),
        ("12.345", "0312345c"),
        ("-12.34", "0201234d"),
        ("0.00", "020c"),
        ("1E+5", "fb1c"),
        ("1E-40", "281c"),
        ("1E-200", "ccc81c"),
        ("1E+200", "d1ff381c"),
    ],
)
def test_decimal_encoding_equals_that_of_real_servers(text: str, data: str) -> None:
    assert encode_decimal(Decimal(text)).hex() == data
    assert decode_decimal(bytes.fromhex(data)).as_tuple() == Decimal(text).as_tuple()


@pytest.mark.parametrize("sign", "acef")
def test_decimal_with_any_plus_nibble_is_positive(sign: str) -> None:
    assert decode_decimal(bytes.fromhex("01012" + sign)) == Decimal("1.2")


@pytest.mark.parametrize("sign", "bd")
def test_decimal_with_any_minus_nibble_is_negative(sign: str) -> None:
    assert decode_decimal(bytes.fromhex("01012" + sign)) == Decimal("-1.2")


@pytest.mark.parametrize(
    "data", ["", "00", "01", "0011", "001a1c", "c01c", "cd001c", "ce7fffffff1c", "00" + "99" * 39 + "9c"]
)
def test_malformed_decimal_is_rejected(data: str) -> None:
    with pytest.raises(ExtensionError):
        decode_decimal(bytes.fromhex(data))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("1E+76", "1" + "0" * 76),
        ("-1.5E-75", "-0." + "0" * 74 + "15"),
        ("1E+77", "1E+77"),
        ("-1.5E-77", "-1.5E-77"),
        ("1E+999999", "1E+999999"),
        ("1E-999999", "1E-999999"),
    ],
)
def test_decimal_is_printed_in_full_up_to_the_precision_of_servers(value: str, text: str) -> None:
    assert decimal_text(Decimal(value)) == text


@pytest.mark.parametrize("value", [Decimal("NaN"), Decimal("-Infinity"), Decimal(10**76)])
def test_decimal_beyond_server_limits_is_rejected(value: Decimal) -> None:
    with pytest.raises(LocalProtocolError):
        encode_decimal(value)


@given(DECIMALS)
def test_decimal_round_trips_with_sign_and_trailing_zeros(value: Decimal) -> None:
    assert decode_decimal(encode_decimal(value)).as_tuple() == value.as_tuple()


def test_datetime_encoding_omits_an_empty_tail() -> None:
    assert encode_datetime(Datetime(-1)).hex() == "ff" * 8
    assert encode_datetime(Datetime(1, 2, 180, 947)).hex() == "010000000000000002000000b400b303"


@pytest.mark.real
def test_decimal_and_uuid_encodings_equal_those_of_the_real_server(tarantool: Any, tmp_path: Path) -> None:
    texts = ["0", "-1.50", "12.345", "9" * 38, "-0.001", "1e5", "12e-30", "100"]
    instance = "11111111-0000-4000-8000-000000000001"
    script = "local function show(v) print((require('msgpack').encode(v):gsub('.', function(c) "
    script += "return ('%02x'):format(c:byte()) end))) end\n"
    script += "".join(f"show(require('decimal').new('{text}'))\n" for text in texts)
    script += f"show(require('uuid').fromstr('{instance}')) os.exit(0)"
    made = tarantool.run(script, tmp_path).split()
    assert [pack(Decimal(text)).hex() for text in texts] + [pack(uuid.UUID(instance)).hex()] == made
    assert unpack(bytes.fromhex(made[1])).as_tuple() == Decimal("-1.50").as_tuple()


@given(DATETIMES)
def test_datetime_round_trips(value: Datetime) -> None:
    assert decode_datetime(encode_datetime(value)) == value


@pytest.mark.parametrize(
    "data",
    ["", "00" * 7, "00" * 12, "ff" * 7 + "7f", "00" * 8 + "ffffffff" + "00" * 4, "00" * 12 + "ff7f0000"],
)
def test_malformed_datetime_is_rejected(data: str) -> None:
    with pytest.raises(ExtensionError):
        decode_datetime(bytes.fromhex(data))


def test_datetime_is_printed_as_iso_8601() -> None:
    assert str(Datetime(0)) == "1970-01-01T00:00:00Z"
    assert str(Datetime(1645036200, 500_000_000, 180)) == "2022-02-16T21:30:00.5+03:00"
    assert str(Datetime(-1, 1, -90)) == "1969-12-31T22:29:59.000000001-01:30"
    assert str(Datetime(185480451417600)).startswith("5879611-")
    assert str(Datetime(-185604722870400)).startswith("-5879610-")


@given(st.datetimes(timezones=st.just(datetime.UTC)), st.integers(-720, 840))
def test_datetime_agrees_with_the_standard_library(moment: datetime.datetime, offset: int) -> None:
    span = moment - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    value = Datetime(span.days * 86400 + span.seconds, span.microseconds * 1000)
    assert value.to_datetime() == moment
    assert datetime.datetime.fromisoformat(str(value)) == moment


@given(st.datetimes(timezones=st.integers(-720, 840).map(lambda m: datetime.timezone(datetime.timedelta(minutes=m)))))
def test_standard_datetime_is_encoded_with_its_utc_offset(moment: datetime.datetime) -> None:
    value = unpack(pack(moment))
    assert isinstance(value, Datetime)
    assert datetime.timedelta(minutes=value.tz_offset) == moment.utcoffset()
    with contextlib.suppress(OverflowError):  # the first and the last day of the library's calendar in UTC
        assert value.to_datetime() == moment


def test_datetime_without_a_timezone_is_rejected_with_a_hint() -> None:
    with pytest.raises(LocalProtocolError, match="datetime 2024-02-29 00:00:00 has no timezone; add a timezone"):
        pack([datetime.datetime(2024, 2, 29)])  # noqa: DTZ001


def test_error_names_a_timezone_unknown_to_tarantool() -> None:
    zone = datetime.timezone(datetime.timedelta(hours=-13))
    with pytest.raises(LocalProtocolError, match="zone offset of -780 minutes"):
        pack(datetime.datetime(2024, 2, 29, tzinfo=zone))


def test_datetime_repr_contains_the_iso_text() -> None:
    assert repr(Datetime(1645036200, 500_000_000, 180)) == "Datetime(2022-02-16T21:30:00.5+03:00)"
    assert repr(Datetime(0, 0, 180, 947)) == "Datetime(1970-01-01T03:00:00+03:00, tz_index=947)"


def test_interval_omits_zeros() -> None:
    assert encode_interval(Interval()).hex() == "00"
    assert encode_interval(Interval(year=1, month=200, day=-77)).hex() == "03000101ccc803d0b3"
    assert str(Interval(year=1, day=-77)) == "+1 years, -77 days"


@given(INTERVALS)
def test_interval_round_trips(value: Interval) -> None:
    assert decode_interval(encode_interval(value)) == value


@pytest.mark.parametrize("data", ["", "01", "0100", "010901", "0100c0", "000001", "0108ff", "0100ce80000000"])
def test_malformed_interval_is_rejected(data: str) -> None:
    with pytest.raises(ExtensionError):
        decode_interval(bytes.fromhex(data))


def test_uuid_payload_must_be_16_bytes() -> None:
    value = uuid.UUID("11111111-0000-4000-8000-000000000001")
    assert decode_uuid(value.bytes) == value
    with pytest.raises(ExtensionError):
        decode_uuid(value.bytes[:-1])


@given(st.binary(max_size=60), st.sampled_from([decode_decimal, decode_datetime, decode_interval, decode_uuid]))
def test_random_payload_yields_a_value_or_an_extension_error(data: bytes, decode: object) -> None:
    assert callable(decode)
    with contextlib.suppress(ExtensionError):
        decode(data)
