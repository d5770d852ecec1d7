"""JSON lines of log rows: the format of the real tool, equal output of kernel and plain Python, malformed bodies."""

from __future__ import annotations

import json
import os
import random
import struct
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.iproto import row_scanner, scan
from flowstone.iproto.constants import Flag, Key, RaftKey, RequestType
from flowstone.iproto.row import Row, encode_header
from flowstone.text.json_plain import JsonError
from flowstone.text.json_rows import json_lines, plain_row
from tests.conftest import FULL

INTERPRETED = os.environ.get("FLOWSTONE_INTERPRETED") == "1"
ROUNDS = 150 if INTERPRETED else 20_000 if FULL else 3_000
NAMES = {512: "users", 513: 'odd "name"\n', 280: "_space"}
TIME = 1794773471.9940653


def row(kind: int, body: Any = None, **header: Any) -> bytes:
    fields: dict[str, Any] = {"replica_id": 1, "lsn": 10, "timestamp": TIME} | header
    return encode_header(Row(type=kind, **fields)) + (b"" if body is None else msgpack.packb(body))


def scanned(*rows: bytes) -> row_scanner.Scan:
    size = sum(map(len, rows))
    found = row_scanner.scan(np.frombuffer(b"".join(rows) or b"\0", np.uint8), np.array([[0, size]], np.int64))
    assert not rows or found.cells[scan.ROW_END, -1] == size
    return found


def lines(*rows: bytes) -> list[str]:
    """Return the lines of `rows`; check them against the plain formatter."""
    table = scanned(*rows)
    text = bytes(json_lines(table.buf, table.cells, np.arange(len(table)), NAMES)).decode()
    printed = text.removesuffix("\n").split("\n") if text else []
    assert printed == [plain_row(table.buf, table.cells, i, NAMES) for i in range(len(table))]
    return printed


HEADER = f'"replica_id":1,"type":"%s","timestamp":{TIME}'


def test_single_row_has_neither_tsn_nor_commit() -> None:
    body = {Key.SPACE_ID: 512, Key.TUPLE: [11, "b", None]}
    assert lines(row(RequestType.INSERT, body)) == [
        '{"HEADER":{"lsn":10,' + HEADER % "INSERT" + '},"BODY":{"space_id":512,"space":"users","tuple":[11,"b",null]}}'
    ]


def test_rows_of_a_transaction_show_tsn_and_commit() -> None:
    body = {Key.SPACE_ID: 700, Key.KEY: [1]}
    first = row(RequestType.DELETE, body, tsn=10, flags=0)
    last = row(RequestType.NOP, lsn=11, tsn=10, flags=Flag.COMMIT)
    shown = [json.loads(line) for line in lines(first, last)]
    assert shown[0]["HEADER"] == {"lsn": 10, "replica_id": 1, "type": "DELETE", "tsn": 10, "timestamp": TIME}
    assert shown[0]["BODY"] == {"space_id": 700, "key": [1]}
    assert shown[1] == {
        "HEADER": {"lsn": 11, "commit": True, "replica_id": 1, "type": "NOP", "tsn": 10, "timestamp": TIME}
    }


def test_flags_of_synchronous_transactions_are_shown() -> None:
    flags = Flag.COMMIT | Flag.WAIT_SYNC | Flag.WAIT_ACK
    (line,) = lines(row(RequestType.REPLACE, {Key.SPACE_ID: 513, Key.TUPLE: []}, flags=int(flags)))
    shown = json.loads(line)
    assert shown["HEADER"]["wait_sync"] is True
    assert shown["HEADER"]["wait_ack"] is True
    assert "commit" not in shown["HEADER"]
    assert shown["BODY"]["space"] == NAMES[513]


def test_snapshot_and_local_rows_have_no_replica_id() -> None:
    body = {Key.SPACE_ID: 280, Key.TUPLE: [1]}
    shown = [
        json.loads(line)["HEADER"]
        for line in lines(
            row(RequestType.INSERT, body, replica_id=0, lsn=0),
            row(RequestType.INSERT, body, replica_id=0, group_id=1, lsn=5),
        )
    ]
    assert shown == [
        {"type": "INSERT", "timestamp": TIME},
        {"lsn": 5, "group_id": 1, "type": "INSERT", "timestamp": TIME},
    ]


BODIES: list[tuple[int, Any, Any]] = [
    (RequestType.RAFT_CONFIRM, {2: 1, 3: 17}, {"replica_id": 1, "lsn": 17}),
    (RequestType.RAFT_ROLLBACK, {2: 1, 3: 18}, {"replica_id": 1, "lsn": 18}),
    (
        RequestType.RAFT_PROMOTE,
        {2: 0, 3: 0, 0x53: 2, 0x26: {1: 5}},
        {"replica_id": 0, "lsn": 0, "term": 2, "vclock": {"1": 5}},
    ),
    (RequestType.RAFT_DEMOTE, {2: 1, 3: 17, 0x53: 3}, {"replica_id": 1, "lsn": 17, "term": 3}),
    (
        RequestType.RAFT,
        {RaftKey.TERM: 7, RaftKey.VOTE: 1, RaftKey.STATE: 3, RaftKey.VCLOCK: {1: 9}, 4: 1, 5: True, 6: 0},
        {
            "term": 7,
            "vote": 1,
            "state": "leader",
            "vclock": {"1": 9},
            "leader_id": 1,
            "is_leader_seen": True,
            "6": 0,
        },
    ),
    (RequestType.RAFT, {RaftKey.STATE: 9}, {"state": 9}),
    (
        RequestType.UPDATE,
        {Key.SPACE_ID: 700, Key.INDEX_ID: 2, Key.INDEX_BASE: 1, Key.KEY: [1], Key.TUPLE: [["=", 2, "z"]]},
        {"space_id": 700, "index_id": 2, "index_base": 1, "key": [1], "tuple": [["=", 2, "z"]]},
    ),
    (
        RequestType.UPSERT,
        {Key.SPACE_ID: 700, Key.OPS: [["+", 1, 1]], Key.TUPLE_META: {}, Key.TUPLE: [5], 0x7F: 1},
        {"space_id": 700, "operations": [["+", 1, 1]], "tuple_meta": {}, "tuple": [5], "127": 1},
    ),
    (RequestType.INSERT, {Key.SPACE_ID: 700, 200: [1], "text": 2}, {"space_id": 700, "200": [1], "text": 2}),
    (
        RequestType.INSERT,
        {Key.SPACE_ID: 512, Key.TUPLE: [msgpack.ExtType(99, b"abc"), {(1,): 2}]},
        {"space_id": 512, "space": "users", "tuple": [{"ext": 99, "data": "YWJj"}, {"[1]": 2}]},
    ),
    (999, {Key.SPACE_ID: 1}, {"space_id": 1}),
]


@pytest.mark.parametrize(("kind", "body", "shown"), BODIES)
def test_body_keys_have_names(kind: int, body: Any, shown: Any) -> None:
    (line,) = lines(row(kind, body))
    assert json.loads(line)["BODY"] == shown


def test_row_types_have_names() -> None:
    kinds = [30, 31, 32, 40, 41, 9, 999]
    shown = [json.loads(line)["HEADER"]["type"] for line in lines(*(row(kind, {}) for kind in kinds))]
    assert shown == ["RAFT", "PROMOTE", "DEMOTE", "CONFIRM", "ROLLBACK", "UPSERT", 999]


def test_rows_are_printed_as_selected_in_any_order() -> None:
    table = scanned(*(row(RequestType.INSERT, {Key.SPACE_ID: 512, Key.TUPLE: [i]}, lsn=i + 1) for i in range(9)))
    chosen = np.array([7, 0, 3])
    text = bytes(json_lines(table.buf, table.cells, chosen, NAMES)).decode()
    assert [json.loads(line)["BODY"]["tuple"] for line in text.splitlines()] == [[7], [0], [3]]
    assert bytes(json_lines(table.buf, table.cells, np.arange(0), {})) == b""


def test_output_buffer_grows_on_demand() -> None:
    wild = {Key.SPACE_ID: 512, Key.TUPLE: ["\x01" * 4000, msgpack.ExtType(77, b"x" * 3000)]}
    tame = {Key.SPACE_ID: 512, Key.TUPLE: ["\x01" * 4000]}
    lines(*(row(RequestType.INSERT, wild if i % 3 else tame, lsn=i + 1) for i in range(20)))


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5) | st.integers(0, 9), inner, max_size=5)
    ),
)
bodies = st.dictionaries(st.sampled_from(sorted({*Key, *RaftKey, 0x7F})), values, max_size=6)


@given(
    st.lists(
        st.tuples(st.sampled_from([2, 3, 4, 5, 9, 30, 31, 40, 500]), bodies, st.integers(0, 2**40), st.integers(0, 7)),
        max_size=6,
    )
)
def test_kernel_and_plain_python_agree_on_any_row(rows: list[tuple[int, Any, int, int]]) -> None:
    packed = []
    for kind, body, lsn, flags in rows:
        body.pop(Key.SPACE_ID, None)
        body.pop(Key.INDEX_ID, None)
        body.pop(Key.INDEX_BASE, None)
        packed.append(row(kind, {Key.SPACE_ID: 511 + flags, **body}, lsn=lsn, tsn=lsn // 2, flags=flags))
    lines(*packed)


def test_last_space_id_names_the_space() -> None:
    head = encode_header(Row(type=RequestType.INSERT, lsn=1))
    (line,) = lines(head + b"\x82\x10\xcd\x02\x00\x10\xcd\x02\x58")
    assert '"space":' not in line
    (line,) = lines(head + b"\x82\x10\xcd\x02\x58\x10\xcd\x02\x00")
    assert line.count('"space":"users"') == 2


def test_impossible_space_id_is_not_an_error() -> None:
    table = scanned(row(RequestType.INSERT, {Key.SPACE_ID: 512, Key.TUPLE: [1]}))
    names = {512: "users", 1 << 63: "huge", (1 << 64) - 1: "largest"}
    assert b'"space":"users"' in bytes(json_lines(table.buf, table.cells, np.arange(1), names))


def test_output_does_not_depend_on_array_layout() -> None:
    table = scanned(row(2, {16: 512, 33: [1]}), row(2, {16: 512, 33: [2]}, lsn=11))
    expected = bytes(json_lines(table.buf, table.cells, np.arange(2), NAMES))
    writable = table.buf.copy()
    frozen, wider = table.cells.copy(), np.zeros((scan.LINES, 9), np.int64)
    frozen.flags.writeable = False
    wider[:, :2] = table.cells
    for cells in (frozen, wider[:, :2], np.asfortranarray(table.cells)):
        assert bytes(json_lines(writable, cells, np.arange(4)[:2], NAMES)) == expected


def test_threads_can_print_rows_concurrently() -> None:
    table = scanned(*(row(2, {16: 512, 33: [i, "x" * (i % 50), i / 7]}, lsn=i + 1) for i in range(2000)))
    halves = np.array_split(np.arange(len(table)), 8)
    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(lambda half: bytes(json_lines(table.buf, table.cells, half, NAMES)), halves))
    assert b"".join(parts) == bytes(json_lines(table.buf, table.cells, np.arange(len(table)), NAMES))


def test_malformed_body_causes_no_access_outside_the_row() -> None:
    """Pass bodies that the scanner would mostly reject, with the table of the valid row."""
    source = random.Random(9)
    body = {16: 512, 0x28: [["+", 1, 1]], 33: [1, "text", {"k": [1.5, b"bin"]}, 2**40]}
    whole = row(RequestType.UPSERT, body)
    table = scanned(whole)
    for _ in range(ROUNDS):
        data = bytearray(whole)
        for _ in range(source.randrange(1, 3)):
            data[source.randrange(int(table.cells[scan.BODY_AT, 0]), len(data))] = source.randrange(256)
        cells = table.cells.copy()
        cells[scan.ROW_END, 0] -= source.choice((0, 0, 1, 5))
        buf = np.frombuffer(bytes(data), np.uint8)
        try:
            expected = plain_row(buf, cells, 0, NAMES)
        except JsonError:
            with pytest.raises(JsonError, match="row at byte 0"):
                json_lines(buf, cells, np.arange(1), NAMES)
        else:
            if data[int(table.cells[scan.BODY_AT, 0]) + 1 :][:4] == whole[int(table.cells[scan.BODY_AT, 0]) + 1 :][:4]:
                assert bytes(json_lines(buf, cells, np.arange(1), NAMES)).decode() == expected + "\n"


REAL = """
box.cfg{log='l.log'}
local s = box.schema.space.create('users') s:create_index('pk')
local l = box.schema.space.create('loc', {is_local = true}) l:create_index('pk')
local decimal, uuid = require('decimal'), require('uuid')
s:insert{1, 'a', box.NULL, 1.5, -3, true, {a = 1, b = {1, 2}}, {}, setmetatable({}, {__serialize = 'map'})}
s:insert{2, decimal.new('1.50'), uuid.new(), 18446744073709551615ULL, -9223372036854775807LL, 1e300, 0.1, 2^53}
s:insert{3, 'q"\\\\/\\b\\f\\n\\r\\t\\1\\127é€😀'}
s:insert{4, decimal.new('1e10'), decimal.new('-0.00012'), decimal.new('0'), 1.0, 100.0, -0.5}
box.begin() s:insert{10, 'x'} s:update(10, {{'=', 2, 'zz'}, {'!', 3, 5}}) s:upsert({12, 1}, {{'+', 2, 1}})
s:delete{12} l:insert{1} box.commit()
l:insert{2}
s:truncate()
os.exit(0)
"""


@pytest.mark.real
def test_output_equals_that_of_the_real_tool(tarantool: Any, tmp_path: Any) -> None:
    tarantool.run(REAL, tmp_path)
    compared = 0
    for path in sorted([*tmp_path.glob("*.xlog"), *tmp_path.glob("*.snap")]):
        theirs = [json.loads(line) for line in tarantool.cat(path).splitlines()]
        ours = [json.loads(line) for line in lines(*_payloads(path.read_bytes()))]
        for line in (*theirs, *ours):  # the real tool rounds the time to 14 digits
            line["HEADER"]["timestamp"] = float(f"{line['HEADER']['timestamp']:.14g}")
            line.get("BODY", {}).pop("space", None)
        assert ours == theirs
        compared += len(ours)
    assert compared > 500


def _payloads(data: bytes) -> list[bytes]:
    """Return the blocks of a small log file."""
    import zstandard

    at = data.index(b"\n\n") + 2
    blocks = []
    while data[at : at + 3] == b"\xd5\xba\x0b":
        unpacker = msgpack.Unpacker()
        unpacker.feed(data[at + 4 : at + 19])
        size = unpacker.unpack()
        block = data[at + 19 : at + 19 + size]
        blocks.append(block if data[at + 3] == 0xAB else zstandard.ZstdDecompressor().decompressobj().decompress(block))
        at += 19 + size
    assert struct.unpack(">I", data[at : at + 4]) == (0xD510ADED,)
    return blocks
