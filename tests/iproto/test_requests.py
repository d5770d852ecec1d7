"""Requests are decoded as by the real server, with the same error for each malformed one."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.iproto.constants import RequestType
from flowstone.iproto.msgpack import pack
from flowstone.iproto.requests import Request, decode_request, decode_text, decode_uint, split_map

REPLACE = pack({0x10: 512, 0x21: (1, "a")})


def packet(header: dict, body: bytes = b"") -> bytes:
    return pack(header) + body


def problem(data: bytes, *, is_2_6: bool = False) -> tuple[int, str]:
    error = decode_request(data, is_2_6=is_2_6).error
    assert error is not None
    return error.code, error.message


def test_request_has_header_fields_and_raw_body_values() -> None:
    request = decode_request(packet({0: 3, 1: 70000, 5: 80, 10: 2}, REPLACE))
    assert request == Request(3, 70000, 80, 2, {0x10: b"\xcd\x02\x00", 0x21: b"\x92\x01\xa1a"})
    assert request.uint(0x10) == 512
    assert request.uint(0x11, 7) == 7


@pytest.mark.parametrize("wide", ["cc40", "cd0040", "ce00000040", "cf0000000000000040"])
def test_header_numbers_may_have_any_width(wide: str) -> None:
    assert decode_request(bytes.fromhex("8200" + wide + "0105")) == Request(64, 5, 0, 0, {})
    assert decode_request(bytes.fromhex("82cc00" + wide + "0105")) == Request(64, 5, 0, 0, {})


def test_other_known_header_keys_are_ignored() -> None:
    assert decode_request(packet({0: 64, 2: 1, 3: 5, 4: 1.5, 1: 9})) == Request(64, 9, 0, 0, {})


@pytest.mark.parametrize(
    ("data", "sync"),
    [
        (b"", 0),
        (b"\x90", 0),
        (b"\xc0", 0),
        (b"\x82\x00\x03\x01", 0),
        (b"\x82\x01\x03\x00\xa1a", 3),
        (b"\x82\x01\x03\x00\xd0\x03", 3),  # a signed integer
        (b"\x82\x01\x03\x04\x05", 3),  # the timestamp must be a double
        (b"\x82\x01\x03\xa1a\x05", 3),
    ],
)
def test_malformed_header_is_answered_with_its_known_fields(data: bytes, sync: int) -> None:
    assert problem(data) == (20, "Invalid MsgPack - packet header")
    assert decode_request(data).sync == sync


def test_only_dialect_2_6_rejects_unknown_header_keys() -> None:
    data = packet({0: 64, 1: 3, 0x60: 1})
    assert decode_request(data).error is None
    assert problem(data, is_2_6=True) == (20, "Invalid MsgPack - packet header")


@pytest.mark.parametrize(
    "body",
    [
        b"\x90",
        b"\xc1",
        b"\x82\x10\x01",
        b"\x81\x10\xa1a",
        b"\x81\x21\x80",
        b"\x81\x10\xff",
        REPLACE + b"\x00",
        b"\x81\x21" + b"\x91" * 100_000,
        b"\x81\x21\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff\x10\x01",
        b"\x82\xa1a\x01\x10\xa1a",
    ],
)
@pytest.mark.parametrize("is_2_6", [False, True])
def test_malformed_body_is_answered_with_error_20(body: bytes, is_2_6: bool) -> None:
    assert problem(packet({0: 3, 1: 1}, body), is_2_6=is_2_6) == (20, "Invalid MsgPack - packet body")


def test_malformed_body_is_rejected_even_if_no_handler_reads_it() -> None:
    assert problem(packet({0: 64, 1: 1}, b"\x81")) == (20, "Invalid MsgPack - packet body")
    assert decode_request(packet({0: 64, 1: 1}, b"\x05")).error is None


def test_nop_has_no_body() -> None:
    assert problem(packet({0: 12, 1: 1}, b"\x80")) == (20, "Invalid MsgPack - packet body")
    assert decode_request(packet({0: 12, 1: 1})).error is None


@pytest.mark.parametrize(
    ("type", "body", "name"),
    [
        (1, {}, "space id"),
        (1, {0x10: 1, 0x20: ()}, "limit"),
        (1, {0x10: 1, 0x12: 1}, "key"),
        (2, {0x10: 1}, "tuple"),
        (3, {0x21: ()}, "space id"),
        (4, {0x10: 1, 0x21: ()}, "key"),
        (5, {0x10: 1}, "key"),
        (9, {0x10: 1, 0x21: ()}, "operations"),
        (10, {0x21: ()}, "function name"),
        (8, {0x21: ()}, "expression"),
        (7, {0x21: ()}, "user name"),
        (7, {0x23: "u"}, "tuple"),
    ],
)
def test_error_names_a_missing_mandatory_field(type: int, body: dict, name: str) -> None:
    for is_2_6 in (False, True):
        expected = (69, f"Missing mandatory field '{name}' in request")
        assert problem(packet({0: type, 1: 1}, pack(body)), is_2_6=is_2_6) == expected


def test_body_is_optional_for_statements_and_mandatory_for_calls() -> None:
    assert problem(packet({0: 3, 1: 1}))[0] == 69
    assert problem(packet({0: 10, 1: 1})) == (20, "Invalid MsgPack - missing request body")


def test_statement_keys_that_are_not_numbers_are_ignored() -> None:
    body = b"\x83\xa1a\x01\x10\xcd\x02\x00\x21\x91\x01"
    assert decode_request(packet({0: 3, 1: 1}, body)).fields == {0x10: b"\xcd\x02\x00", 0x21: b"\x91\x01"}
    assert problem(packet({0: 10, 1: 1}, b"\x82\xa1a\x01\x22\xa1f")) == (20, "Invalid MsgPack - packet body")


def test_space_name_replaces_the_id_except_in_2_6() -> None:
    data = packet({0: 3, 1: 1}, pack({0x5E: "a", 0x21: ()}))
    assert decode_request(data).text(0x5E) == "a"
    assert problem(data, is_2_6=True)[0] == 69


def test_transaction_requests_need_a_stream_and_some_requests_reject_one() -> None:
    assert problem(packet({0: 14, 1: 1})) == (230, "Unable to process BEGIN request out of stream")
    assert problem(packet({0: 73, 1: 1, 10: 1}, b"\x80")) == (229, "Unable to process ID request in stream")
    assert problem(packet({0: 7, 1: 1, 10: 1}, b"\x80"))[0] == 229
    for type in (14, 15, 16, 64):
        assert decode_request(packet({0: type, 1: 1, 10: 1})).error is None


def test_is_sync_is_checked_only_in_begin_and_commit() -> None:
    for type in (14, 15):
        data = packet({0: type, 1: 1, 10: 1}, pack({0x61: True}))
        assert decode_request(data).fields == {0x61: b"\xc3"}
        assert problem(packet({0: type, 1: 1, 10: 1}, pack({0x61: 1}))) == (20, "Invalid MsgPack - packet body")
    body = pack({0x10: 512, 0x21: (), 0x61: 1})
    assert decode_request(packet({0: 3, 1: 1}, body)).error is None


def test_dialect_2_6_ignores_streams_and_all_but_the_lowest_byte_of_a_type() -> None:
    request = decode_request(packet({0: 0x103, 1: 1, 10: 3}, REPLACE), is_2_6=True)
    assert (request.type, request.stream_id, request.error) == (3, 0, None)
    assert decode_request(packet({0: 14, 1: 1}), is_2_6=True).error is None


def test_dialect_2_6_does_not_check_types_of_unknown_keys() -> None:
    body = pack({0x10: 1, 0x21: (), 0x1F: "yes"})
    assert decode_request(packet({0: 3, 1: 1}, body), is_2_6=True).error is None
    assert problem(packet({0: 3, 1: 1}, body)) == (20, "Invalid MsgPack - packet body")


@pytest.mark.parametrize("text", ["", "a", "ä" * 40, "x" * 300, "y" * 70000])
def test_texts_of_every_width_are_read(text: str) -> None:
    assert decode_text(pack(text)) == text


@given(st.integers(0, 2**64 - 1))
def test_numbers_of_every_width_are_read(number: int) -> None:
    assert decode_uint(pack(number)) == number


@given(st.binary(max_size=60), st.booleans())
def test_any_bytes_yield_a_request_or_a_known_error(data: bytes, is_2_6: bool) -> None:
    request = decode_request(data, is_2_6=is_2_6)
    assert request.error is None or request.error.code in (20, 69, 229, 230)


@given(
    st.sampled_from([kind.value for kind in RequestType]),
    st.dictionaries(st.integers(0, 0x64), st.one_of(st.integers(0, 9), st.text(max_size=3), st.lists(st.none()))),
    st.booleans(),
)
def test_request_keeps_body_values_unchanged(type: int, body: dict, is_2_6: bool) -> None:
    request = decode_request(msgpack.packb({0: type, 1: 5}) + msgpack.packb(body), is_2_6=is_2_6)
    assert request.sync == 5
    for key, raw in request.fields.items():
        assert raw == msgpack.packb(body[key])


@pytest.mark.parametrize("type", [65, 66, 69, 70])
@pytest.mark.parametrize("is_2_6", [True, False])
def test_body_of_a_replica_request_is_kept_complete(type: int, is_2_6: bool) -> None:
    assert decode_request(packet({0: type, 1: 3}), is_2_6=is_2_6) == Request(type, 3, 0, 0, {})
    body = pack({0x24: "uuid", "other": [1]})
    assert decode_request(packet({0: type, 1: 3}, body), is_2_6=is_2_6) == Request(type, 3, 0, 0, {}, None, body)


def test_split_map_returns_raw_values_of_integer_keys() -> None:
    assert split_map(pack({1: "a", 2: {3: [4]}})) == {1: pack("a"), 2: pack({3: [4]})}
    assert split_map(pack({1: "a", "text": 5, (6,): 7, 300: None})) == {1: pack("a"), 300: b"\xc0"}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x90",
        b"\x01",
        b"\x81",
        b"\x81\x01",
        b"\x80\x80",
        b"\x81\x01" + b"\x91" * 5000,
        b"\x81\xa1a" + b"\x91" * 5000 + b"\x01",
    ],
)
def test_body_that_is_not_a_map_is_not_split(data: bytes) -> None:
    with pytest.raises(ValueError):
        split_map(data)
