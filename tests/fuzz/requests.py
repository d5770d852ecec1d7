"""Valid requests of every type, for mutation: header and body of each, without the length prefix."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.limits import NESTING_MAX
from flowstone.iproto.msgpack import pack

SPACE_ID = 512
SPACE_NAME = "target"
FORMAT = (("id", "unsigned"), ("name", "string"), ("amount", "number"), ("document", "any"))
"""The space of the requests; index 1 is on `name`."""

ROW = (7, "seven", 7.5, {"a": [1, {"b": None}]})


def request(type: RequestType, body: dict[int, Any] | None = None, *, stream_id: int = 0, sync: int = 5) -> bytes:
    """Return header and body of a request."""
    header = {Key.REQUEST_TYPE.value: type.value, Key.SYNC.value: sync}
    if stream_id:
        header[Key.STREAM_ID.value] = stream_id
    return pack(header) + pack(body or {})


def _select(**more: Any) -> bytes:
    body: dict[int, Any] = {Key.SPACE_ID.value: SPACE_ID, Key.INDEX_ID.value: 0, Key.LIMIT.value: 10}
    body |= {Key.OFFSET.value: 0, Key.ITERATOR.value: 0, Key.KEY.value: [7]}
    body |= {Key[name].value: value for name, value in more.items()}
    return request(RequestType.SELECT, body)


def _change(type: RequestType, *, stream_id: int = 0, **body: Any) -> bytes:
    keys = {Key[name].value: value for name, value in body.items()}
    return request(type, {Key.SPACE_ID.value: SPACE_ID} | keys, stream_id=stream_id)


OPERATIONS = (
    [["=", 1, "x"], ["+", 2, 5], ["-", 2, Decimal("0.5")]],
    [["=", "document.a[1]", 2], ["!", "document.d", 1], ["#", "document.a", 1]],
    [[":", 1, 1, 2, "zz"], ["#", -1, 1], ["!", -1, None], ["&", 2, 255], ["|", 2, 1], ["^", 2, 1]],
)
CHANGES = (
    *(_change(type, TUPLE=ROW) for type in (RequestType.INSERT, RequestType.REPLACE)),
    *(_change(RequestType.UPDATE, INDEX_ID=0, KEY=[7], TUPLE=each, INDEX_BASE=0) for each in OPERATIONS),
    *(_change(RequestType.UPSERT, TUPLE=ROW, OPS=each, INDEX_BASE=0) for each in OPERATIONS),
    _change(RequestType.DELETE, INDEX_ID=0, KEY=[7]),
    request(RequestType.REPLACE, {Key.SPACE_NAME.value: SPACE_NAME, Key.TUPLE.value: ROW}),
)
SELECTS = (
    *(_select(ITERATOR=number) for number in range(12)),
    _select(INDEX_ID=1, KEY=["seven"], ITERATOR=5),
    _select(KEY=[], FETCH_POSITION=True, ITERATOR=2, LIMIT=1),
    _select(AFTER_TUPLE=ROW, ITERATOR=2, KEY=[]),
    _select(AFTER_POSITION=b"\x91\x07", ITERATOR=2, KEY=[]),
    request(RequestType.SELECT, {Key.SPACE_NAME.value: SPACE_NAME, Key.INDEX_NAME.value: "pk", Key.KEY.value: []}),
    _select(SPACE_ID=281, KEY=[]),
    _select(SPACE_ID=289, KEY=[SPACE_ID]),
)
STREAMS = (
    request(RequestType.BEGIN, {Key.TIMEOUT.value: 1.5, Key.TXN_ISOLATION.value: 1}, stream_id=3),
    _change(RequestType.REPLACE, TUPLE=ROW, stream_id=3),
    request(RequestType.COMMIT, stream_id=3),
    request(RequestType.BEGIN, stream_id=3),
    _change(RequestType.DELETE, KEY=[7], stream_id=3),
    request(RequestType.ROLLBACK, stream_id=3),
)
CALLS = (
    *(
        request(type, {Key.FUNCTION_NAME.value: name, Key.TUPLE.value: []})
        for type in (RequestType.CALL, RequestType.CALL_16)
        for name in ("box.info", "box.info.vclock", f"box.space.{SPACE_NAME}:len")
    ),
    request(RequestType.EVAL, {Key.EXPR.value: "return ...", Key.TUPLE.value: [1, "a"]}),
    request(RequestType.EXECUTE, {Key.SQL_TEXT.value: "SELECT 1", Key.SQL_BIND.value: [], Key.OPTIONS.value: []}),
    request(RequestType.EXECUTE, {Key.STMT_ID.value: 1, Key.SQL_BIND.value: [{":a": 1}]}),
    request(RequestType.PREPARE, {Key.SQL_TEXT.value: "SELECT ?"}),
)
SESSIONS = (
    request(RequestType.PING),
    request(RequestType.ID, {Key.VERSION.value: 6, Key.FEATURES.value: list(range(7))}),
    request(RequestType.AUTH, {Key.USER_NAME.value: "nobody", Key.TUPLE.value: ["chap-sha1", bytes(20)]}),
    request(RequestType.AUTH, {Key.USER_NAME.value: "guest", Key.TUPLE.value: []}),
    *(
        request(type, {Key.EVENT_KEY.value: name})
        for type in (RequestType.WATCH, RequestType.UNWATCH, RequestType.WATCH_ONCE)
        for name in ("box.status", "own.key")
    ),
    request(RequestType.VOTE),
    request(RequestType.VOTE_DEPRECATED),
    request(RequestType.NOP),
)
UUID = "b7d4f1ac-0b2f-4f2b-9c3b-0a8e2f1f5d11"
REPLICATION = (
    request(RequestType.JOIN, {Key.INSTANCE_UUID.value: UUID, Key.SERVER_VERSION.value: 0x20B09}),
    request(RequestType.REGISTER, {Key.INSTANCE_UUID.value: UUID, Key.VCLOCK.value: {1: 5}}),
    request(RequestType.FETCH_SNAPSHOT, {Key.SERVER_VERSION.value: 0x20B09}),
    request(
        RequestType.SUBSCRIBE,
        {
            Key.REPLICASET_UUID.value: UUID,
            Key.INSTANCE_UUID.value: UUID,
            Key.VCLOCK.value: {1: 5},
            Key.SERVER_VERSION.value: 0x20B09,
            Key.REPLICA_ANON.value: False,
            Key.ID_FILTER.value: [1],
        },
    ),
)
CORPUS: tuple[bytes, ...] = (*SELECTS, *CHANGES, *STREAMS, *CALLS, *SESSIONS, *REPLICATION)


def deep(levels: int) -> tuple[bytes, ...]:
    """Return requests with deeply nested values: in a tuple, a key, operations, arguments, the header, a map."""
    for_tuple = (b"\x91" * levels + b"\xc0", b"\x81\xa1a" * levels + b"\xc0", b"\x81" * levels + b"\xc0" * (levels + 1))
    replace, select, call = (
        pack({0: type.value, 1: 5}) for type in (RequestType.REPLACE, RequestType.SELECT, RequestType.CALL)
    )
    update = pack({0: RequestType.UPDATE.value, 1: 5})
    space = b"\x10" + pack(SPACE_ID)
    return (
        *(replace + b"\x82" + space + b"\x21\x92\x07" + value for value in for_tuple),
        *(select + b"\x82" + space + b"\x20\x91" + value for value in for_tuple),
        *(update + b"\x83" + space + b"\x20\x91\x07\x21\x91\x93\xa1=\x03" + value for value in for_tuple),
        *(call + b"\x82\x22\xa8box.info\x21\x91" + value for value in for_tuple),
        *(b"\x83\x00\x40\x01\x05\x7f" + value + b"\x80" for value in for_tuple),
        *(b"\x82\x00\x40\x01\x05" + b"\x81\x7f" + value for value in for_tuple),
    )


JUST_DEEP_ENOUGH = deep(NESTING_MAX - 3)
TOO_DEEP = deep(100_000)
