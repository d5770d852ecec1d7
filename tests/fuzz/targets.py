"""The targets, and for each a corpus of valid inputs to mutate."""

from __future__ import annotations

import random
import struct
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np

from flowstone.errors import FlowstoneError
from flowstone.iproto import extensions, msgpack
from flowstone.iproto.extensions import Datetime, Interval
from flowstone.iproto.greeting import Greeting, decode_greeting, encode_greeting
from flowstone.iproto.json_text import json_column
from flowstone.iproto.limits import NESTING_MAX
from flowstone.iproto.packet import decode_response, encode_request, split
from flowstone.iproto.row import Row, decode_row
from flowstone.iproto.scan import scan, skip_value
from flowstone.iproto.uri import parse_uri
from flowstone.xlog.columns import Column, ColumnOptions, TypedDecoder, generic_batch
from flowstone.xlog.meta import parse
from flowstone.xlog.reader import Slab
from tests.xlog.files import PATH, header, opened, row, small_log
from tests.xlog.slabs import array, body, insert

LOG, _, OFFSETS = small_log()


def scan_rows(data: bytes) -> None:
    buf = np.frombuffer(data, np.uint8)
    middle = len(data) // 2
    for spans in ([[0, len(data)]], [[0, middle], [middle, len(data)]]):
        for leave_out in (False, True):
            scan(buf, np.array(spans, np.int64), leave_out_wrong=leave_out)


def plain_row(data: bytes) -> None:
    decode_row(data)


def log_file(data: bytes) -> None:
    for force in (False, True):
        log = opened(data, force=force, block_size_max=1 << 20)
        try:
            for slab in log.slabs():
                for found in slab.rows():
                    assert found.raw
        finally:
            log.ranges(100)


def text_header(data: bytes) -> None:
    parse(data, PATH)


KINDS = "unsigned integer number double string varbinary boolean decimal uuid datetime map array any scalar".split()
COLUMNS = [Column(f"f{number}", kind) for number, kind in enumerate(KINDS)]
DECODERS = [
    TypedDecoder([column], key_fields=[0], options=options)
    for column in COLUMNS
    for options in (ColumnOptions(), ColumnOptions("decimal", 5), ColumnOptions("double", 0))
]


def columns(data: bytes) -> None:
    """One value, as a field of every type; it is a value, because the scanner has seen to that."""
    buf = np.frombuffer(data, np.uint8)
    if skip_value(buf, 0, len(buf)) != len(buf) or len(buf) == 0:
        return
    raw = (
        insert([data, data]) + Row(5, 1, lsn=2, tsn=2, body=body({0x10: b"\xcd\x02\x00", 0x20: array([data])})).encode()
    )
    found = scan(np.frombuffer(raw, np.uint8), np.array([[0, len(raw)]], np.int64))
    slab = Slab(PATH, raw, np.frombuffer(raw, np.uint8), found.cells, np.zeros(1, np.int64))
    numbers = np.arange(len(found), dtype=np.int64)
    generic_batch(slab, numbers).validate(full=True)
    for decoder in DECODERS:
        try:
            decoder.batch(slab, numbers).validate(full=True)
        except FlowstoneError:
            continue


def json_texts(data: bytes) -> None:
    buf = np.frombuffer(data, np.uint8)
    json_column(buf, np.zeros(1, np.int64), np.array([len(data)], np.int64))


def unpack(data: bytes) -> None:
    msgpack.unpack(data)


def extension_types(data: bytes) -> None:
    for decode in (
        extensions.decode_decimal,
        extensions.decode_datetime,
        extensions.decode_interval,
        extensions.decode_uuid,
    ):
        try:
            decode(data)
        except FlowstoneError:
            continue


def greeting(data: bytes) -> None:
    decode_greeting(data)


def packet(data: bytes) -> None:
    packets, rest = split(data, size_max=1 << 20)
    assert 0 <= rest <= len(data)
    for found in packets:
        response = decode_response(found)
        if response.is_error:
            response.error()
        else:
            response.values()


def uri(data: bytes) -> None:
    parse_uri(data.decode("utf-8", "replace"))


VALUES: tuple[Any, ...] = (
    [1, -1, 2**64 - 1, "text", b"bytes", None, True, 1.5],
    {"a": [1, {"b": 2}], 3: "c"},
    [Decimal("-1.50"), uuid.UUID(int=7), Datetime(-5, 999_999_999, 60, 3), Interval(year=1, nsec=-5)],
    [[[[[[]]]]]],
)
PACKED = [msgpack.pack(value) for value in VALUES] + [msgpack.pack(item) for value in VALUES[:3] for item in value]
DEEP = b"\x91" * (NESTING_MAX + 2) + b"\xc0"
ROWS = [
    row(7, "note"),
    Row(12, 1, lsn=3, tsn=2).encode(),
    Row(30, group_id=1, lsn=1, tsn=1, body=b"\x82\x00\x02\x01\x01").encode(),
]
GREETING = encode_greeting(Greeting((2, 11, 9), uuid.UUID(int=5), bytes(range(32))))


@dataclass(frozen=True)
class Target:
    """A decoder and inputs that it takes."""

    decode: Callable[[bytes], None]
    corpus: tuple[bytes, ...]

    def try_input(self, data: bytes) -> None:
        """Raises what the decoder must not raise."""
        try:
            self.decode(data)
        except FlowstoneError:
            return


TARGETS: dict[str, Target] = {
    "scan_rows": Target(scan_rows, (*ROWS, b"".join(ROWS))),
    "decode_row": Target(plain_row, tuple(ROWS)),
    "log_file": Target(log_file, (LOG, LOG[:-4], LOG[: OFFSETS[2]], LOG[: OFFSETS[0]])),
    "text_header": Target(text_header, (header(), header(format="0.12"))),
    "columns": Target(columns, tuple(PACKED)),
    "json_text": Target(json_texts, (*PACKED, DEEP)),
    "unpack": Target(unpack, (*PACKED, DEEP)),
    "extension_types": Target(
        extension_types,
        (
            extensions.encode_decimal(Decimal("-12.345")),
            extensions.encode_datetime(Datetime(5, 6, 7, 8)),
            extensions.encode_interval(Interval(1, 2, 3)),
            bytes(16),
        ),
    ),
    "greeting": Target(greeting, (GREETING,)),
    "packet": Target(packet, (encode_request(1, 5, b"\x81\x10\xcd\x02\x00"), b"\x05\x82\x00\x00\x01\x05" * 2)),
    "uri": Target(uri, (b"user:secret@host:3301", b"unix/:/tmp/x.sock", b"[::1]:3301")),
}

INTERESTING = [0, 1, 0x7F, 0x80, 0x8F, 0x90, 0xC0, 0xC1, 0xC7, 0xCF, 0xD3, 0xD4, 0xD9, 0xDB, 0xDD, 0xDF, 0xFF]


def mutated(data: bytes, rng: random.Random) -> bytes:
    """A few changes of the kinds that decoders fall over."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed) + 1)
        kind = rng.randrange(7)
        if kind == 0:
            changed[at : at + 1] = bytes((rng.randrange(256),))
        elif kind == 1:
            changed[at : at + 1] = bytes((rng.choice(INTERESTING),))
        elif kind == 2:
            del changed[at : at + rng.randint(1, 8)]
        elif kind == 3:
            changed[at:at] = rng.randbytes(rng.randint(1, 8))
        elif kind == 4:
            start = rng.randrange(len(changed) + 1)
            changed[at:at] = changed[start : start + rng.randint(1, 32)]
        elif kind == 5:
            changed[at : at + 4] = struct.pack(">I", rng.choice((0, 1, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF)))
        else:
            del changed[at:]
    return bytes(changed)
