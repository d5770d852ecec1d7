"""The lane: random statements have the same results, rows and effects as in transactions, and can be rolled back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowstone.box.box import Box
from flowstone.box.definitions import SpaceDefinition
from flowstone.box.engine import statements
from flowstone.box.engine.space import EngineSpace
from flowstone.box.engine.transaction import BoxTransaction
from flowstone.box.lane.statement_lane import StatementLane
from flowstone.box.lane.table import table_of
from flowstone.box.lane.writes import Writes
from flowstone.errors import FlowstoneError
from flowstone.iproto import batches
from flowstone.iproto import request_scan as scan
from flowstone.iproto.constants import Flag, Key, RequestType
from flowstone.iproto.msgpack import pack
from flowstone.iproto.packet import encode_request
from flowstone.iproto.requests import Request, decode_request
from flowstone.iproto.row import Row, encode_header
from tests.box.spaces import box_with, definition, on
from tests.iproto.scanned_requests import scanned
from tests.native.twins import twin

SELECT, INSERT, REPLACE, UPDATE, DELETE, UPSERT = 1, 2, 3, 4, 5, 9
SPACE = 512
READ_MAX = 1000
LSN = 7

SPACES: tuple[SpaceDefinition, ...] = (
    definition(
        SPACE,
        on("0:unsigned"),
        on("2:string"),
        on("4:unsigned 1:string", unique=False),
        fields="id:unsigned name:string email:string amount:double age:unsigned",
    ),
    definition(SPACE, on("0:string"), on("1:integer?"), on("2:number?", unique=False)),
    definition(SPACE, on("1:integer 0:string"), on("2:scalar?", unique=False), on("0:string", type="hash")),
    definition(SPACE, on("0:unsigned"), on("1[*]:unsigned"), on("2.a:string?", unique=False)),
    definition(SPACE, on("0:unsigned", type="hash"), field_count=3),
    definition(SPACE, on("1:number"), on("0:boolean?", unique=False), fields="flag:boolean? number:number"),
)

NUMBERS = st.sampled_from((0, 1, 2, 3, -1, 2**31, 2**63, 1.5, 2.0, 1e300))
TEXTS = st.sampled_from(("", "a", "b", "a\0", "name", "x" * 40))
VALUES: st.SearchStrategy[Any] = (
    NUMBERS | TEXTS | st.none() | st.booleans() | st.sampled_from(((1, 2), (), {"a": "x"}, {"a": None}, b"bytes"))
)
PERSONS = st.tuples(
    st.integers(0, 5), TEXTS, st.sampled_from(("a@x", "b@x", "c@x")), st.sampled_from((0.5, 1e300)), st.integers(0, 3)
)
TEXT_ROWS = st.tuples(TEXTS, st.none() | st.integers(-2, 2), st.none() | NUMBERS, VALUES)
PAIRS = st.tuples(TEXTS, st.integers(-1, 2), VALUES)
NESTED = st.tuples(
    st.integers(0, 4),
    st.lists(st.integers(0, 6), max_size=3).map(tuple),
    st.sampled_from(({"a": "x"}, {"a": "y"}, {"a": None})),
)
FLAGS = st.tuples(st.none() | st.booleans(), NUMBERS)
ROWS = (PERSONS, TEXT_ROWS, PAIRS, NESTED, st.tuples(st.integers(0, 4), VALUES, VALUES), FLAGS)

OPERATIONS = st.lists(
    st.tuples(st.just("="), st.integers(-1, 5) | st.just("name"), VALUES)
    | st.tuples(st.sampled_from("+-"), st.integers(0, 5), NUMBERS | st.just("x"))
    | st.tuples(st.sampled_from("&!#"), st.integers(0, 5), st.integers(0, 2)),
    max_size=3,
).map(tuple)


@st.composite
def requests(draw: st.DrawFn, number: int) -> bytes:
    """Draw a request on space `number`, mostly one that can succeed."""
    kind = draw(st.sampled_from((SELECT, SELECT, INSERT, REPLACE, REPLACE, UPDATE, DELETE, UPSERT)))
    defined = SPACES[number]
    row = draw(ROWS[number]) if draw(st.integers(0, 9)) else tuple(draw(st.lists(VALUES, max_size=4)))
    body: dict[int, Any] = {Key.SPACE_ID: SPACE}
    if kind in (SELECT, UPDATE, DELETE):
        index = draw(st.sampled_from((*defined.indexes, *defined.indexes, None)))
        body[Key.INDEX_ID] = 9 if index is None else index.id
        fields = [0] if index is None else [part.field for part in index.parts]
        values = [row[field] if field < len(row) else None for field in fields]
        flat = [value[0] if isinstance(value, tuple) and value else value for value in values]
        body[Key.KEY] = tuple(flat[: draw(st.integers(0, len(flat)))] if draw(st.booleans()) else flat)
    if kind == SELECT:
        body |= {Key.ITERATOR: draw(st.sampled_from((0, 0, *range(8)))), Key.LIMIT: draw(st.sampled_from((1, 3, 99)))}
        body[Key.OFFSET] = draw(st.sampled_from((0, 0, 1, 2000)))
    if kind in (UPDATE, UPSERT):
        body[Key.INDEX_BASE] = draw(st.sampled_from((0, 0, 1)))
        body[Key.TUPLE if kind == UPDATE else Key.OPS] = draw(OPERATIONS)
    if kind in (INSERT, REPLACE, UPSERT):
        body[Key.TUPLE] = row
    return encode_request(kind, 1, pack({key.value if isinstance(key, Key) else key: v for key, v in body.items()}))


def perform(txn: BoxTransaction, request: Request) -> bytes | list[bytes] | None:
    """Execute a request as a session does."""
    space, fields = txn.box.space(SPACE), request.fields
    key, raw, ops = (fields.get(each, b"") for each in (Key.KEY, Key.TUPLE, Key.OPS))
    index_id, base = request.uint(Key.INDEX_ID), request.uint(Key.INDEX_BASE)
    match request.type:
        case RequestType.SELECT:
            iterator, offset, limit = map(request.uint, (Key.ITERATOR, Key.OFFSET, Key.LIMIT))
            return statements.select(txn, space, index_id, iterator=iterator, offset=offset, limit=limit, key=key)
        case RequestType.INSERT:
            return statements.insert(txn, space, raw)
        case RequestType.REPLACE:
            return statements.replace(txn, space, raw)
        case RequestType.UPDATE:
            return statements.update(txn, space, index_id, key, raw, base)
        case RequestType.DELETE:
            return statements.delete(txn, space, index_id, key)
    statements.upsert(txn, space, raw, ops, base)
    return None


def contents(box: Box) -> list[Any]:
    space = box.space(SPACE)
    return [list(index.scan()) if index.is_ordered else sorted(index.scan()) for index in space.served]


def tuples(result: bytes | list[bytes] | None) -> list[bytes]:
    return [] if result is None else result if isinstance(result, list) else [result]


class Form(NamedTuple):
    """The compiled or the interpreted lane."""

    lane: type[StatementLane]
    table_of: Callable[[EngineSpace], Any]


COMPILED = Form(StatementLane, table_of)
INTERPRETED = Form(cast("Any", twin(StatementLane)), twin(table_of))


class Compared:
    """Two boxes with one space: one executes requests in the lane, the other in transactions."""

    def __init__(self, defined: SpaceDefinition, form: Form = COMPILED) -> None:
        self.box, self.plain = box_with(defined), box_with(defined)
        self.lane = form.lane(self.box)
        self.table = form.table_of(self.box.space(SPACE))
        self.written = Writes()
        self.taken = 0

    def execute(self, packet: bytes) -> None:
        request, found = decode_request(packet[5:]), scanned([packet])
        txn = self.plain.begin()
        try:
            wanted: bytes | list[bytes] | FlowstoneError | None = txn.attempt(lambda: perform(txn, request))
        except FlowstoneError as error:
            wanted = error
        code = int(found.cells[scan.CODE, 0])
        self.lane.begin(self.written, READ_MAX)
        buf = np.frombuffer(found.data, np.uint8)
        if code >= 0 and self.lane.execute(buf, found.cells, 0, 1, {code: self.table}, False):
            self.taken += 1
            assert not isinstance(wanted, FlowstoneError), wanted
            assert tuples(self.lane.results[0]) == tuples(wanted)
            self.check_row(txn, found.cells, buf)
            return
        if not isinstance(wanted, FlowstoneError):
            other = self.box.begin()
            perform(other, request)
            for index, key, old in (entry for entry in other._undo if isinstance(entry, tuple)):
                self.written.changes += [index, key, old]
            self.written.marks.append(len(self.written.changes))

    def check_row(self, txn: BoxTransaction, cells: Any, buf: Any) -> None:
        out = np.empty(batches.rows_bound(len(buf), self.lane.logged), np.uint8)
        size, count = batches.build_rows(buf, cells, 0, self.lane.logged, out, 1, LSN, 1.5, 0)
        wanted = [
            encode_header(Row(each.type, 1, 0, LSN, 1.5, LSN, Flag.COMMIT.value)) + each.body for each in txn.statements
        ]
        assert (out[:size].tobytes(), count) == (b"".join(wanted), len(wanted))


@settings(max_examples=200)
@given(st.sampled_from(range(len(SPACES))).flatmap(lambda n: st.tuples(st.just(n), st.lists(requests(n), max_size=25))))
def test_lane_equals_transactions_and_can_be_rolled_back(program: tuple[int, list[bytes]]) -> None:
    number, packets = program
    compared = Compared(SPACES[number])
    before = contents(compared.box)
    for packet in packets:
        compared.execute(packet)
        assert contents(compared.box) == contents(compared.plain)
    marks = len(compared.written.marks)
    last = compared.written.take_last(marks // 2)
    last.rollback()
    compared.written.rollback()
    assert contents(compared.box) == before


@settings(max_examples=15)
@given(st.sampled_from(range(len(SPACES))).flatmap(lambda n: st.tuples(st.just(n), st.lists(requests(n), max_size=6))))
def test_interpreted_lane_equals_transactions(program: tuple[int, list[bytes]]) -> None:
    number, packets = program
    compared = Compared(SPACES[number], INTERPRETED)
    for packet in packets:
        compared.execute(packet)
    assert contents(compared.box) == contents(compared.plain)


def request(kind: int, **body: Any) -> bytes:
    return encode_request(kind, 1, pack({Key.SPACE_ID.value: SPACE} | {Key[name].value: v for name, v in body.items()}))


ADA = (1, "Ada", "ada@x", 1.5, 36)
TAKEN = (
    request(INSERT, TUPLE=ADA),
    request(INSERT, TUPLE=(2, "Bob", "bob@x", 0.5, 36)),
    request(REPLACE, TUPLE=(2, "Bob", "bob@y", 0.5, 37)),
    request(UPDATE, KEY=(1,), TUPLE=(("+", 3, 0.25), ("=", 4, 40))),
    request(UPDATE, KEY=("ada@x",), INDEX_ID=1, TUPLE=(("-", 5, 1),), INDEX_BASE=1),
    request(UPDATE, KEY=(9,), TUPLE=(("=", 4, 40),)),
    request(UPDATE, KEY=(1,), TUPLE=(("=", "name", "Ada L."), ("!", 5, "more"))),
    request(UPSERT, TUPLE=ADA, OPS=(("+", 4, 1),)),
    request(UPSERT, TUPLE=(3, "Cleo", "cleo@x", 2.0, 20), OPS=(("+", 4, 1),)),
    request(SELECT, KEY=(1,), LIMIT=1),
    request(SELECT, KEY=("cleo@x",), INDEX_ID=1, LIMIT=1),
    request(SELECT, KEY=(36,), INDEX_ID=2, ITERATOR=5, OFFSET=1, LIMIT=20),
    request(SELECT, KEY=(), INDEX_ID=2, ITERATOR=1, LIMIT=20),
    request(DELETE, KEY=("bob@y",), INDEX_ID=1),
    request(DELETE, KEY=(1,)),
    request(DELETE, KEY=(1,)),
)


@pytest.mark.parametrize("form", [COMPILED, INTERPRETED], ids=["compiled", "interpreted"])
def test_lane_takes_all_common_statements(form: Form) -> None:
    compared = Compared(SPACES[0], form)
    for packet in TAKEN:
        compared.execute(packet)
    assert compared.taken == len(TAKEN)
    assert contents(compared.box) == contents(compared.plain)


@pytest.mark.parametrize(
    "packet",
    [
        request(INSERT, TUPLE=ADA),
        request(REPLACE, TUPLE=(5, "Eve", "ada@x", 0.0, 1)),
        request(REPLACE, TUPLE=(5, "Eve", "eve@x", "much", 1)),
        request(UPDATE, KEY=(1,), TUPLE=(("=", 0, 7),)),
        request(UPDATE, KEY=(1,), TUPLE=(("=", 3, "much"),)),
        request(UPDATE, KEY=(1,), TUPLE=(("+", 4, 2**64 - 1),)),
        request(UPSERT, TUPLE=ADA, OPS=(("=", 2, "x"), ("?", 1))),
        request(SELECT, KEY=(36,), INDEX_ID=2, ITERATOR=7, LIMIT=1),
        request(UPSERT, TUPLE=(9, "New", "new@x", 0.0, 1), OPS=(("+", 2**31, 1),)),
        request(UPSERT, TUPLE=(9, "New", "new@x", 0.0, 1), OPS=(("+", 2**31, 1),), INDEX_BASE=1),
        request(UPDATE, KEY=(1,), TUPLE=(("=", 2**31, "x"),), INDEX_BASE=2**31 - 1),
        request(SELECT, KEY=(1, 2), LIMIT=1),
        request(DELETE, KEY=(36,), INDEX_ID=2),
    ],
)
def test_lane_leaves_a_statement_that_fails_or_is_unusual(packet: bytes) -> None:
    compared = Compared(SPACES[0])
    compared.execute(TAKEN[0])
    compared.execute(packet)
    assert compared.taken == 1


def test_lane_leaves_a_read_that_is_too_large() -> None:
    compared = Compared(SPACES[4])
    compared.execute(request(REPLACE, TUPLE=(1, "x" * READ_MAX, None)))
    compared.execute(request(SELECT, KEY=(1,), LIMIT=1))
    assert compared.taken == 1


def test_lane_stops_before_a_write_that_is_synchronous() -> None:
    found = scanned([b"".join([request(SELECT, KEY=(1,), LIMIT=1), TAKEN[0]])])
    box = box_with(definition(SPACE, on("0:unsigned"), flags={"is_sync": True}))
    table = table_of(box.space(SPACE))
    assert table is not None
    lane, tables = StatementLane(box), dict.fromkeys(found.cells[scan.CODE].tolist(), table)
    lane.begin(Writes(), READ_MAX)
    buf = np.frombuffer(found.data, np.uint8)
    assert lane.execute(buf, found.cells, 0, 2, tables, False) == 1
    assert lane.execute(buf, found.cells, 1, 2, tables, True) == 1


@pytest.mark.parametrize("form", [COMPILED, INTERPRETED], ids=["compiled", "interpreted"])
def test_lane_has_room_for_a_key_with_a_field_twice(form: Form) -> None:
    compared = Compared(definition(SPACE, on("0:string"), on("0:string", unique=False)), form)
    for size in (500, 1500, 3500, 8000):  # each nearly fills the room that the one before needed
        compared.execute(request(REPLACE, TUPLE=("\0" * size,)))
    assert compared.taken == 4
    assert contents(compared.box) == contents(compared.plain)


def test_open_view_keeps_the_tuples_from_before_the_writes() -> None:
    compared = Compared(SPACES[0])
    for packet in TAKEN[:3]:
        compared.execute(packet)
    before = contents(compared.box)
    with compared.box.open_view() as view:
        late = Writes()
        compared.written = late
        for packet in TAKEN[3:]:
            compared.execute(packet)
        space = compared.box.space(SPACE)
        assert [list(view.scan(index)) for index in space.served] == before
    with compared.box.open_view() as view:
        late.hide_from(view)
        assert [list(view.scan(index)) for index in space.served] == before
