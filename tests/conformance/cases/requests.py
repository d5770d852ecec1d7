"""Requests in general: unknown types, broken headers and bodies, values of wrong types, schema versions, CALL, EVAL."""

from __future__ import annotations

from flowstone.iproto.constants import Key
from tests.conformance.case import PRIMARY, SPACE, Request, Space, call, group, insert, request, select
from tests.conformance.wire import Raw, encode, raw

FILLED = Space([PRIMARY], [[1, "one"]])
PING = request(64)


def header(type: object, sync: object = 77, **more: object) -> bytes:
    """Return a header with any values, given the names of its keys."""
    extra = {Key[key.upper()]: value for key, value in more.items()}
    return encode({Key.REQUEST_TYPE: type, Key.SYNC: sync} | extra)


def bare(payload: bytes) -> Request:
    return Request(payload=payload)


SELECT_BODY = encode({Key.SPACE_ID: SPACE, Key.LIMIT: 10, Key.KEY: []})

types = group(
    "request type",
    FILLED,
    {
        f"{number}": request(number)
        for number in (12, 14, 15, 16, 17, 18, 29, 30, 40, 41, 42, 50, 63, 71, 72, 73, 74, 75, 76, 77, 78, 99, 127, 128)
    }
    | {
        "PING": PING,
        "PING with a body": request(64, space_id=1),
        "PING without a body": bare(header(64)),
        "OK, which no client sends": request(0),
        "above one byte": request(300),
        "above four bytes": request(2**40),
        "an error": request(0x8001),
    },
)

headers = group(
    "header",
    FILLED,
    {
        "without a sync": [bare(encode({0: 64}) + encode({})), PING],
        "without a type": [bare(encode({1: 5}) + encode({})), PING],
        "empty": [bare(encode({}) + encode({})), PING],
        "that is an array": [bare(encode([]) + encode({})), PING],
        "that is a number": [bare(encode(5)), PING],
        "with a type that is text": [bare(header("PING") + encode({})), PING],
        "with a sync that is text": [bare(header(64, "x") + encode({})), PING],
        "with a negative sync": [bare(header(64, -1) + encode({})), PING],
        "with a large sync": bare(header(64, 2**64 - 1) + encode({})),
        "with an unknown key": [bare(encode({0: 64, 1: 5, 0x60: 1}) + encode({})), PING],
        "with a key that is text": [bare(encode({0: 64, 1: 5, "a": 1}) + encode({})), PING],
        "with a stream, unknown to 2.6": [bare(header(64, stream_id=5) + encode({})), PING],
        "with a replica id": bare(header(64, replica_id=5) + encode({})),
        "with an LSN": bare(header(1, lsn=5) + SELECT_BODY),
        "with a timestamp that is a float": bare(header(1, timestamp=1.5) + SELECT_BODY),
        "with a timestamp that is a number": [bare(header(1, timestamp=1) + SELECT_BODY), PING],
        "with a group": bare(header(1, group_id=0) + SELECT_BODY),
        "cut off": [bare(b"\x82\x00\x40"), PING],
        "with bytes behind the body": [bare(header(64) + encode({}) + b"\xc0"), PING],
        "in a long map head": bare(raw("de 0002 00 40 01 05").data + encode({})),
        "sync first": bare(encode({1: 5, 0: 64}) + encode({})),
    },
)

bodies = group(
    "body",
    FILLED,
    {
        "that is an array": [bare(header(1) + encode([])), PING],
        "that is a number": [bare(header(1) + encode(1)), PING],
        "that is missing": [bare(header(1)), PING],
        "cut off": [bare(header(1) + SELECT_BODY[:-1]), PING],
        "with a space id that is text": request(1, space_id="test", limit=1, key=[]),
        "with a space id that is negative": request(1, space_id=-1, limit=1, key=[]),
        "with a space id that is nil": request(1, space_id=Raw(b"\xc0"), limit=1, key=[]),
        "with a space id above 32 bits": request(1, space_id=2**32 + SPACE, limit=1, key=[]),
        "with a limit that is text": request(1, space_id=SPACE, limit="1", key=[]),
        "with a limit that is negative": request(1, space_id=SPACE, limit=-1, key=[]),
        "with an offset that is a double": request(1, space_id=SPACE, limit=1, offset=1.0, key=[]),
        "with an iterator that is text": request(1, space_id=SPACE, limit=1, iterator="EQ", key=[]),
        "with a key that is a number": request(1, space_id=SPACE, limit=1, key=1),
        "with a key that is a map": request(1, space_id=SPACE, limit=1, key={}),
        "with a key that is nil": request(1, space_id=SPACE, limit=1, key=Raw(b"\xc0")),
        "with a tuple that is a map": request(2, space_id=SPACE, tuple={}),
        "with a tuple that is a number": request(2, space_id=SPACE, tuple=1),
        "with a tuple that is text": request(2, space_id=SPACE, tuple="x"),
        "with an unknown key": [Request(1, {16: SPACE, 18: 5, 32: [], 0x7F: "x"}), PING],
        "with a key above one byte": [Request(1, {16: SPACE, 18: 5, 32: [], 500: "x"}), PING],
        "with a key that is text": [Request(1, {16: SPACE, 18: 5, 32: [], "more": "x"}), PING],
        "with a key twice": bare(header(1) + raw("84 10 cd0200 12 05 20 90 20 91 01").data),
        "with a long map head": bare(header(1) + raw("de 0003 10 cd0200 12 05 20 90").data),
        "with keys of newer servers": request(1, space_id=SPACE, limit=5, key=[], fetch_position=True),
        "with a function name that is a number": request(10, function_name=5, tuple=[]),
        "with an expression besides": request(1, space_id=SPACE, limit=5, key=[], expr="x"),
        "with a tuple cut off": [bare(header(2) + b"\x82\x10\xcd\x02\x00\x21\x92\x01"), PING],
        "with an index id that is text": request(1, space_id=SPACE, index_id="pk", limit=1, key=[]),
        "with an empty map": Request(1, {}),
    },
)

framing = group(
    "framing",
    FILLED,
    {
        "a length in one byte": Request(data=bytes([len(header(64)) + 1]) + header(64) + b"\x80"),
        "a length in two bytes": Request(data=b"\xcc" + bytes([len(header(64)) + 1]) + header(64) + b"\x80"),
        "a length in three bytes": Request(data=b"\xcd\x00" + bytes([len(header(64)) + 1]) + header(64) + b"\x80"),
        "a length in nine bytes": Request(
            data=b"\xcf" + (len(header(64)) + 1).to_bytes(8, "big") + header(64) + b"\x80"
        ),
        "a length that is text": [Request(data=b"\xa5hello"), PING],
    },
)

versions = group(
    "schema version",
    FILLED,
    {
        "wrong": Request(1, select([1]).body, schema_version=1_000_000),
        "wrong in PING": Request(64, {}, schema_version=1_000_000),
        "wrong in CALL": Request(10, call("nothing").body, schema_version=1_000_000),
        "zero": Request(1, select([1]).body, schema_version=0),
        "wrong in a write": [Request(2, insert([2]).body, schema_version=1_000_000), select([])],
    },
)

functions = group(
    "CALL",
    FILLED,
    {
        "an unknown function": call("nothing"),
        "an unknown function of a table": call("box.nothing"),
        "an unknown method": call("box.space.test:nothing"),
        "an empty name": call(""),
        "without a name": request(10, tuple=[]),
        "arguments that are a map": request(10, function_name="nothing", tuple={}),
        "an unknown function in the old way": request(6, function_name="nothing", tuple=[]),
        "a name with a dot at its end": call("box."),
        "a name with two dots": call("box..info"),
        "an unknown table": call("nothing.at.all"),
        "EVAL without an expression": request(8, tuple=[]),
        "EXECUTE": request(11, sql_text="SELECT 1", sql_bind=[]),
        "PREPARE": request(13, sql_text="SELECT 1"),
        "EVAL by guest": request(8, expr="return 1", tuple=[]).by("guest"),
        "CALL by guest": call("box.info").by("guest"),
    },
)

CASES = [*types, *headers, *bodies, *framing, *versions, *functions]
