"""The targets, each with a corpus of valid inputs to mutate."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np

from flowstone.box.schema import SchemaTracker
from flowstone.box.update.update import decode_operations, update, upsert
from flowstone.client.log_statement import statement_of
from flowstone.columns.arrow_columns import Column, ColumnOptions, TypedDecoder, generic_batch
from flowstone.errors import FlowstoneError
from flowstone.history.log_reading import Piece
from flowstone.history.records import records
from flowstone.history.secrets import hide_secrets
from flowstone.iproto import extensions, msgpack
from flowstone.iproto.constants import RequestType
from flowstone.iproto.extensions import Datetime, ErrorRecord, ErrorStack, Extension, Interval
from flowstone.iproto.greeting import Greeting, decode_greeting, encode_greeting
from flowstone.iproto.limits import NESTING_MAX
from flowstone.iproto.packet import decode_response, encode_request, split
from flowstone.iproto.row import Row, decode_row
from flowstone.iproto.row_scanner import scan
from flowstone.iproto.scan import SPACE_ID
from flowstone.iproto.scan_kernels import skip_value
from flowstone.iproto.slab import Slab
from flowstone.iproto.uri import parse_uri
from flowstone.replication.limbo.control_rows import decode_control
from flowstone.text import json_rows
from flowstone.text.json_rows import json_lines
from flowstone.text.json_text import json_column
from flowstone.text.lua_rows import lua_statements
from flowstone.text.row_table import table_text
from flowstone.text.yaml_rows import yaml_documents
from flowstone.xlog.meta import FileType, Meta, parse
from flowstone.xlog.transactions import CONTROL_TYPES
from tests.fuzz import (
    conversation_targets,
    file_targets,
    limestone_targets,
    replication_targets,
    request_targets,
    turn_target,
)
from tests.xlog.files import PATH, header, opened, row, small_log
from tests.xlog.slabs import array, body, insert

LOG, _, OFFSETS = small_log()
OTHER_FILES = tuple(small_log(file_type=kind)[0] for kind in FileType if kind is not FileType.XLOG)
"""Snapshots, and files of vinyl, which are read up to the first difference."""


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
    """Decode one value as a field of every type; the scanner has checked that it is a value."""
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


def scanned(data: bytes) -> Slab:
    """Return the rows before the first invalid one."""
    buf = np.frombuffer(data, np.uint8)
    found = scan(buf, np.array([[0, len(data)]], np.int64))
    return Slab(PATH, data, buf, found.cells, np.zeros(1, np.int64))


def row_lines(data: bytes) -> None:
    """Return the lines of the kernel, which must equal those of the plain formatter."""
    slab = scanned(data)
    text = bytes(json_lines(slab.buf, slab.cells, np.arange(len(slab)), NAMES)).decode()
    assert text == "".join(json_rows.plain_row(slab.buf, slab.cells, row, NAMES) + "\n" for row in range(len(slab)))


def control(data: bytes) -> None:
    for kind in sorted(CONTROL_TYPES):
        try:
            decode_control(kind, data)
        except FlowstoneError:
            continue


def schema(data: bytes) -> None:
    """Apply any changes after a definition; the schema must be readable and the next row applicable."""
    tracker = SchemaTracker()
    for definition in DEFINITIONS[:2]:
        tracker.apply(RequestType.INSERT, definition)
    for kind in CHANGES:
        tracker.apply(kind, data)
        assert len(list(tracker.schema)) == len(tracker.schema)
    tracker.apply(RequestType.REPLACE, DEFINITIONS[0])
    assert tracker.schema.space(512).name == "s"


def operations(data: bytes) -> None:
    decoded = decode_operations(msgpack.unpack(data), field_names=("id", "document"))
    for change in (update, upsert):
        try:
            change(TUPLE, decoded)
        except FlowstoneError:
            continue


def statement(data: bytes) -> None:
    for kind in CHANGES:
        try:
            found = statement_of(Row(kind, lsn=1, body=data))
            if found is not None:
                found.for_lua()
        except FlowstoneError:
            continue


def shown(write: Callable[[Any], Iterable[str]], space_id: int | None = None) -> Callable[[bytes], None]:
    """Return the target of a text writer: the rows of a log or a space, with users hidden, under a schema."""

    def decode(data: bytes) -> None:
        slab = scanned(data)
        numbers = np.flatnonzero((slab.cells[SPACE_ID] == space_id) | (space_id is None))
        piece = Piece(Meta(FileType.XLOG, str(uuid.UUID(int=5)), {}), slab, numbers, SCHEMA)
        for text in write(records(hide_secrets([piece] if len(numbers) else []))):
            text.encode()

    return decode


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
NAMES = {512: "s", 280: "_space"}
CHANGES = [
    kind.value
    for kind in (RequestType.INSERT, RequestType.REPLACE, RequestType.UPDATE, RequestType.DELETE, RequestType.UPSERT)
]
FIELDS = ({"name": "id", "type": "unsigned"}, {"name": "document", "type": "any"})
DEFINITIONS = [
    msgpack.pack(body)
    for body in (
        {0x10: 280, 0x21: (512, 1, "s", "memtx", 0, {"is_sync": True}, FIELDS)},
        {0x10: 288, 0x21: (512, 0, "pk", "tree", {"unique": True}, ((0, "unsigned"),))},
        {0x10: 280, 0x20: (512,), 0x21: (("=", 2, "x"), ("!", 6, 1), (":", 2, 1, 1, "zz"), ("+", 4, 1.5))},
        {0x10: 280, 0x20: (512,), 0x21: (("=", "format[1].name", "q"), ("#", "format[2]", 1))},
        {0x10: 280, 0x21: (512, 1, "s"), 0x28: (("=", 2, "x"), ("#", 3, 1), ("&", 4, 3))},
        {0x10: 280, 0x11: 2, 0x20: ("s",)},
    )
]
TRACKER = SchemaTracker()
for definition in DEFINITIONS[:2]:
    TRACKER.apply(RequestType.INSERT, definition)
SCHEMA = TRACKER.schema
TUPLE = (1, {"a": [1, {"b": 2}], "c": "text"}, 7, "text", 1.5, Decimal("1.5"))
OPERATIONS = [
    msgpack.pack(each)
    for each in (
        (("=", 0, 2), ("+", 2, 5), (":", 3, 1, 2, "zz"), ("-", 5, Decimal("0.1"))),
        (("=", "document.a[1]", 2), ("!", "document.d", 1), ("#", "document['c']", 1), ("|", 2, 8)),
        (("#", -1, 2), ("!", 1, None), ("^", 3, 1), ("&", 3, 255)),
    )
]
CONTROLS = [msgpack.pack(each) for each in ({2: 1, 3: 5, 0x53: 6, 0x26: {1: 5}}, {0: 1, 1: 2, 2: 3, 3: {1: 2}})]
CHANGED = [
    Row(kind, 1, lsn=lsn, tsn=2, timestamp=1.5, body=msgpack.pack(body)).encode()
    for lsn, (kind, body) in enumerate(
        (
            (2, {0x10: 512, 0x21: (1, VALUES[1], Extension(1, b"odd"), *VALUES[0], *VALUES[2])}),
            (4, {0x10: 512, 0x15: 1, 0x20: (1,), 0x21: (("=", 1, 2), (":", 2, 1, 1, "x"), ("=", "document.a", 1))}),
            (9, {0x10: 512, 0x21: (1,), 0x28: (("+", 1, 2),)}),
            (5, {0x10: 600, 0x11: 1, 0x20: ("x", ErrorStack((ErrorRecord("a", "b\udcff"),)))}),
            (3, {0x10: 304, 0x21: (32, 1, "clerk", "user", {"chap-sha1": "hash"})}),
        ),
        2,
    )
]
SHOWN = (b"".join(ROWS + CHANGED), *CHANGED, *ROWS)
GREETING = encode_greeting(Greeting((2, 11, 9), uuid.UUID(int=5), bytes(range(32))))


@dataclass(frozen=True)
class Target:
    """A decoder and valid inputs; `runs` is its number of runs in the suite, about a second."""

    decode: Callable[[bytes], None]
    corpus: tuple[bytes, ...]
    runs: int = 300

    def try_input(self, data: bytes) -> None:
        """Raise unexpected errors of the decoder."""
        try:
            self.decode(data)
        except FlowstoneError:
            return


TARGETS: dict[str, Target] = {
    "scan_rows": Target(scan_rows, (*ROWS, b"".join(ROWS))),
    "decode_row": Target(plain_row, tuple(ROWS)),
    "log_file": Target(log_file, (LOG, LOG[:-4], LOG[: OFFSETS[2]], LOG[: OFFSETS[0]], *OTHER_FILES)),
    "text_header": Target(text_header, (header(), header(format="0.12"))),
    "columns": Target(columns, tuple(PACKED)),
    "json_text": Target(json_texts, (*PACKED, DEEP)),
    "json_lines": Target(row_lines, SHOWN),
    "yaml": Target(shown(yaml_documents), SHOWN),
    "yaml_plain": Target(shown(partial(yaml_documents, names=False)), SHOWN),
    "lua": Target(shown(lua_statements), SHOWN[2:]),
    "table": Target(shown(table_text), SHOWN),
    "table_fields": Target(shown(partial(table_text, fields=True, width=100), 512), SHOWN),
    "control": Target(control, (*CONTROLS, b"\x80")),
    "schema": Target(schema, tuple(DEFINITIONS)),
    "operations": Target(operations, tuple(OPERATIONS)),
    "statement": Target(statement, tuple(DEFINITIONS)),
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
    "one_request": Target(request_targets.one_request, request_targets.ONE),
    "many_requests": Target(request_targets.many_requests, request_targets.MANY),
    "row_stream": Target(replication_targets.row_stream, replication_targets.STREAMS),
    "messages": Target(replication_targets.any_message, replication_targets.MESSAGES),
    "turn": Target(turn_target.turn, turn_target.CORPUS, runs=20),
    "applier": Target(conversation_targets.applier, conversation_targets.APPLIERS),
    "ballot_watch": Target(conversation_targets.ballot_watch, conversation_targets.WATCHES),
    "login": Target(conversation_targets.login, conversation_targets.ANSWERS),
    "error_stack": Target(conversation_targets.stack_of_errors, conversation_targets.STACKS),
    "archive_blocks": Target(file_targets.blocks, file_targets.BLOCKS),
    "archive_definitions": Target(file_targets.definitions, file_targets.DEFINITIONS),
    "archive_manifest": Target(file_targets.manifest, file_targets.MANIFESTS),
    "settings": Target(file_targets.settings, file_targets.SETTINGS),
    "select_reply": Target(conversation_targets.select_reply, conversation_targets.REPLIES),
    "offsets": Target(file_targets.offsets, file_targets.OFFSETS),
    "vclock_text": Target(file_targets.vclock_text, file_targets.VCLOCKS),
    "limestone_identities": Target(file_targets.former_identities, file_targets.IDENTITIES),
    "limestone_seeding": Target(file_targets.seeding_state, file_targets.STATES),
    "limestone_log": Target(limestone_targets.log_file, limestone_targets.LOGS),
    "limestone_messages": Target(limestone_targets.stream, limestone_targets.STREAMS),
    "limestone_log_channel": Target(limestone_targets.log_channel, limestone_targets.STREAMS),
    "limestone_control": Target(limestone_targets.control_channel, limestone_targets.CONTROLS),
    "limestone_epochs": Target(limestone_targets.epochs, limestone_targets.EPOCHS),
    "limestone_manifest": Target(limestone_targets.manifest_file, limestone_targets.MANIFESTS),
    "limestone_catalog": Target(limestone_targets.catalog_file, limestone_targets.CATALOGS),
    "uri": Target(uri, (b"user:secret@host:3301", b"unix/:/tmp/x.sock", b"[::1]:3301")),
}
