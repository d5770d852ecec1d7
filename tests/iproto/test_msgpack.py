"""MessagePack to Python and back, and malformed input."""

from __future__ import annotations

import contextlib
import resource
from typing import Any

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flowstone.errors import LocalProtocolError, RemoteProtocolError
from flowstone.iproto.extensions import ErrorRecord, ErrorStack, Extension
from flowstone.iproto.limits import NESTING_MAX
from flowstone.iproto.msgpack import ERROR_DEPTH_MAX, MessagePackError, error_map, pack, unpack, unpack_body
from tests.iproto.test_extensions import DATETIMES, DECIMALS, INTERVALS

TEXT = st.one_of(st.text(max_size=20), st.binary(max_size=20).map(lambda raw: raw.decode("utf-8", "surrogateescape")))
PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False),
    TEXT,
    st.binary(max_size=20),
    DECIMALS,
    st.uuids(),
    DATETIMES,
    INTERVALS,
    st.builds(
        Extension,
        st.integers(-128, 127).filter(lambda code: code not in (-1, 1, 2, 3, 4, 6)),
        st.binary(max_size=40),
    ),
)
RECORDS = st.builds(
    ErrorRecord,
    TEXT,
    TEXT,
    TEXT,
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.dictionaries(TEXT, PLAIN, max_size=2),
)
LEAVES = st.one_of(PLAIN, st.builds(ErrorStack, st.lists(RECORDS, max_size=2).map(tuple)))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5).map(tuple),
        st.dictionaries(st.one_of(TEXT, st.integers(2, 2**64 - 1)), inner, max_size=5),
    ),
    max_leaves=30,
)


@given(VALUES)
def test_values_round_trip(value: Any) -> None:
    data = pack(value)
    assert unpack(data) == value
    assert unpack(memoryview(data)) == value
    assert pack(unpack(data)) == data


@given(st.lists(VALUES, max_size=3).map(tuple))
def test_large_values_round_trip(value: Any) -> None:
    assert unpack(pack((value, "x" * 600))) == (value, "x" * 600)


def test_string_with_invalid_utf8_round_trips() -> None:
    data = b"\xa3\xff\xfea"
    assert pack(unpack(data)) == data


def test_error_has_the_key_order_of_real_servers() -> None:
    record = ErrorRecord("ClientError", "no", "a.c", 7, 0, 3, {"name": "X"})
    assert list(error_map(ErrorStack((record,)))[0][0]) == [0, 2, 1, 3, 4, 5, 6]
    assert 6 not in error_map(ErrorStack((ErrorRecord("a", "b"),)))[0][0]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "malformed"),
        (b"\xc1", "malformed"),
        (b"\x01\x02", "1 bytes follow"),
        (b"\x92\x01", "malformed"),
        (b"\x81\x80\x01", "unhashable"),
        (b"\xdd\xff\xff\xff\xff", "malformed"),
        (b"\xdb\xff\xff\xff\xff", "malformed"),
        (b"\x91" * (NESTING_MAX + 1) + b"\x01", "nested deeper"),
        (b"\x91" * 5000 + b"\x01", "malformed"),
        (b"\x01" * 600, "599 bytes follow"),
    ],
)
def test_malformed_bytes_raise_remote_protocol_error(data: bytes, said: str) -> None:
    with pytest.raises(RemoteProtocolError, match=said):
        unpack(data)


def test_nesting_up_to_the_limit_is_read() -> None:
    unpack(b"\x91" * NESTING_MAX + b"\x01")


def test_nested_errors_are_decoded_up_to_the_depth_limit() -> None:
    value: Any = None
    for _ in range(ERROR_DEPTH_MAX):
        value = ErrorStack((ErrorRecord("a", "b", fields={"cause": value}),))
    assert unpack(pack(value)) == value
    deeper = pack(ErrorStack((ErrorRecord("a", "b", fields={"cause": value}),)))
    innermost = unpack(deeper)
    for _ in range(ERROR_DEPTH_MAX):
        innermost = innermost.errors[0].fields["cause"]
    assert isinstance(innermost, Extension)
    assert pack(unpack(deeper)) == deeper


@pytest.mark.parametrize(
    "odd",
    [
        Extension(1, b"\x00\x01"),
        Extension(1, b"\xce\x7f\xff\xff\xff\x1c"),
        Extension(2, b"abcde"),
        Extension(3, b"\xc0"),
        Extension(3, b"\xc1"),
        Extension(3, b"\x81\x00\x91\x81\x00\x01"),
        Extension(4, b"\x00" * 9),
        Extension(6, b"\x01\xff"),
    ],
)
def test_extension_with_invalid_content_does_not_affect_its_neighbours(odd: Extension) -> None:
    data = pack((1, odd, "next"))
    assert unpack(data) == (1, odd, "next")
    assert pack(unpack(data)) == data


def test_body_values_may_have_the_full_nesting_depth() -> None:
    deepest = b"\x91" * (NESTING_MAX - 1) + b"\x90"
    assert 0x21 in unpack_body(b"\x81\x21" + deepest)
    with pytest.raises(MessagePackError, match="nested deeper"):
        unpack_body(b"\x81\x21\x91" + deepest)


def test_forged_array_lengths_allocate_no_memory() -> None:
    lie = b"\xdd\x00\x0f\x00\x00" * 1000 + b"\x00" * 1_000_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(MessagePackError):
        unpack(lie)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, object(), {1, 2}])
def test_values_without_a_messagepack_form_are_rejected(value: object) -> None:
    with pytest.raises(LocalProtocolError):
        pack(value)


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, 1 << 99999], ids=["above", "below", "far above"])
def test_error_names_an_integer_out_of_range(value: int) -> None:
    with pytest.raises(LocalProtocolError, match=r"outside the range of -2\^63 to 2\^64 - 1"):
        pack((1, {"deep": value}))


def test_body_must_be_a_map_with_integer_keys() -> None:
    assert unpack_body(b"") == {}
    assert unpack_body(b"\x81\x10\x05") == {16: 5}
    for data in (b"\x90", b"\x81\xa1a\x01", b"\xc0"):
        with pytest.raises(MessagePackError):
            unpack_body(data)


@given(st.binary(max_size=200))
@example(b"\xc7\x0c\xff" + b"\xff" * 12)
def test_random_bytes_yield_a_value_or_a_protocol_error(data: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        unpack(data)


@given(VALUES, st.data())
def test_damaged_values_yield_a_value_or_a_protocol_error(value: Any, data: st.DataObject) -> None:
    raw = bytearray(pack(value))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(0, len(raw)))]
    with contextlib.suppress(RemoteProtocolError):
        unpack(bytes(raw))


def test_messagepack_timestamp_is_decoded_by_the_library() -> None:
    assert unpack(pack(msgpack.Timestamp(5, 6))) == msgpack.Timestamp(5, 6)
