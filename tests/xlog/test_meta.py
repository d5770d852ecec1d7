"""The text header: headers of real servers round-trip byte for byte, malformed ones are rejected."""

from __future__ import annotations

import contextlib
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.xlog.errors import DamagedLog, NotALogFile, UnsupportedLogFormat, XlogError
from flowstone.xlog.meta import (
    HEADER_READ_SIZE,
    FileType,
    Meta,
    encode,
    file_name,
    format_vclock,
    parse,
    parse_vclock,
    signature,
)

UUID = "11111111-0000-4000-8000-000000000001"
RECORDED = (
    f"XLOG\n0.13\nVersion: 2.6.0-0-g47aa4e01e\nInstance: {UUID}\n"
    "VClock: {0: 2, 1: 112}\nPrevVClock: {0: 1, 1: 13}\n\n"
).encode()
vclocks = st.dictionaries(st.integers(0, 31), st.integers(1, 2**63 - 1), max_size=32)


def header(*lines: str) -> bytes:
    return ("\n".join(lines) + "\n\n").encode()


def test_header_of_a_real_server_round_trips_byte_for_byte() -> None:
    meta, length = parse(RECORDED + b"\xd5\xba\x0b\xab", "x")
    assert length == len(RECORDED)
    assert meta == Meta(FileType.XLOG, UUID, {0: 2, 1: 112}, prev_vclock={0: 1, 1: 13}, version="2.6.0-0-g47aa4e01e")
    assert encode(meta) == RECORDED


@given(st.sampled_from([FileType.XLOG, FileType.SNAP, FileType.VYLOG]), vclocks, st.none() | vclocks)
def test_encoded_meta_is_parsed(
    file_type: FileType, vclock: dict[int, int], prev_vclock: dict[int, int] | None
) -> None:
    meta = Meta(file_type, UUID, vclock, prev_vclock, other=(("Colour", "blue: green"),))
    data = encode(meta)
    assert parse(data, "x") == (meta, len(data))
    assert pickle.loads(pickle.dumps(meta)) == meta


def test_format_0_12_names_the_instance_uuid_server() -> None:
    data = header("SNAP", "0.12", "Version: 1.6.8", f"Server: {UUID}", "VClock: {}")
    meta, _ = parse(data, "x")
    assert (meta.format, meta.instance_uuid, meta.vclock) == ("0.12", UUID, {})
    assert encode(meta) == data


def test_vinyl_run_file_needs_no_vclock() -> None:
    data = header("RUN", "0.13", "Version: 2.6.0", f"Instance: {UUID}")
    meta, _ = parse(data, "x")
    assert meta.vclock == {}
    assert encode(meta) == data


def test_unknown_keys_are_preserved() -> None:
    data = header("XLOG", "0.13", "Version: 9", f"Instance: {UUID}", "VClock: {}", "Future: yes")
    meta, _ = parse(data, "x")
    assert meta.other == (("Future", "yes"),)
    assert encode(meta) == data


INSTANCE = f"Instance: {UUID}"


@pytest.mark.parametrize(
    ("data", "kind", "word"),
    [
        (b"", NotALogFile, "empty"),
        (b"PK\x03\x04 whatever", NotALogFile, "PK"),
        (b"\xd5\xba\x0b\xab", NotALogFile, "not a log file"),
        (b"XLO", NotALogFile, "XLO"),
        (b"XLOG\n0.1", DamagedLog, "ends inside its text header"),
        (header("XLOG", "0.14"), UnsupportedLogFormat, "'0.14'"),
        (b"XLOG\n" + b"x" * 5000, UnsupportedLogFormat, "xxx"),
        (header("XLOG", "0.13"), DamagedLog, "no Instance line"),
        (header("XLOG", "0.13", INSTANCE), DamagedLog, "no VClock line"),
        (header("XLOG", "0.13", "Instance: me", "VClock: {}"), DamagedLog, "not a UUID"),
        (header("XLOG", "0.13", INSTANCE, "VClock: 1: 2"), DamagedLog, "VClock in the text header"),
        (header("XLOG", "0.13", INSTANCE, "VClock: {}", "PrevVClock: {x}"), DamagedLog, "PrevVClock"),
        (header("XLOG", "0.13", INSTANCE, "VClock: {}", "VClock: {1: 1}"), DamagedLog, "two different VClock lines"),
        (header("XLOG", "0.13", INSTANCE, "nonsense"), DamagedLog, "no colon"),
        (b"XLOG\n0.13\nInst", DamagedLog, "ends inside its text header"),
        (b"XLOG\n0.13\n\xff\xfe: 1\n\n", DamagedLog, "not UTF-8"),
        (b"XLOG\n0.13\n" + b"Key: value\n" * 5000, DamagedLog, "does not end within"),
    ],
)
def test_meta_error_has_path_problem_and_hint(data: bytes, kind: type[XlogError], word: str) -> None:
    with pytest.raises(kind, match=word) as caught:
        parse(data[:HEADER_READ_SIZE], "some/00000000000000000000.xlog")
    assert caught.value.path == "some/00000000000000000000.xlog"
    assert str(caught.value).startswith("some/00000000000000000000.xlog: ")
    assert caught.value.hint
    restored = pickle.loads(pickle.dumps(caught.value))
    assert (type(restored), str(restored), restored.path) == (kind, str(caught.value), caught.value.path)


@given(st.binary(max_size=200) | st.binary(max_size=60).map(lambda tail: RECORDED[:-20] + tail))
def test_any_bytes_yield_a_header_or_an_xlog_error(data: bytes) -> None:
    try:
        meta, length = parse(data, "x")
    except XlogError:
        return
    assert length <= len(data)
    assert parse(encode(meta), "x")[0] == meta


@given(st.integers(0, len(RECORDED) - 1), st.integers(0, 255))
def test_changed_byte_yields_a_header_or_an_xlog_error(place: int, byte: int) -> None:
    data = bytearray(RECORDED)
    data[place] = byte
    with contextlib.suppress(XlogError):
        parse(bytes(data), "x")


@given(vclocks)
def test_vclock_round_trips_as_text(vclock: dict[int, int]) -> None:
    assert parse_vclock(format_vclock(vclock)) == vclock


@pytest.mark.parametrize(
    "text",
    ["", "{", "{1}", "{1: }", "{1: 2,}", "{-1: 2}", "{1: -2}", "{32: 1}", "{1: 1, 1: 2}",
     "{1: 9223372036854775808}", "{1: 2} x", "{1: 2 3: 4}", "{" + "9" * 50 + ": 1}", "{١: ٢}"],
)  # fmt: skip
def test_invalid_vclock_text_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"vclock"):
        parse_vclock(text)


def test_zero_components_of_a_vclock_are_dropped() -> None:
    assert parse_vclock("{0: 0, 1: 5}") == {1: 5}
    assert Meta(FileType.SNAP, UUID, {1: 5, 2: 0}).vclock == {1: 5}
    assert format_vclock({2: 3, 1: 10, 5: 0}) == "{1: 10, 2: 3}"


def test_file_name_is_the_sum_of_all_vclock_components() -> None:
    assert signature({0: 1, 1: 10, 2: 3}) == 14
    assert file_name({0: 1, 1: 10, 2: 3}, FileType.XLOG) == "00000000000000000014.xlog"
    assert file_name({}, FileType.SNAP) == "00000000000000000000.snap"
