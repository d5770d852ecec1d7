"""Random requests on spaces of many shapes, and their execution in the box and the model."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from flowstone.box.definitions import SpaceDefinition
from flowstone.box.engine import statements
from flowstone.box.engine.transaction import BoxTransaction
from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.msgpack import pack
from tests.box import model
from tests.box.model import ALL, EQ, GE, GT, LE, LT, REQ, Outcome, State, Statement
from tests.box.spaces import definition, on

NUMBERS, WORDS, NAMES, COMPOSITE, ARRAYS, HASHED, MIXED = range(512, 519)
SPACES: dict[int, SpaceDefinition] = {
    space.id: space
    for space in (
        definition(NUMBERS, on("0:unsigned"), fields="id:unsigned note:any"),
        definition(WORDS, on("0:string"), fields="word:string note:any"),
        definition(NAMES, on("0:string"), on("1:integer", unique=False), fields="name:string size:integer"),
        definition(
            COMPOSITE,
            on("0:unsigned 1:string"),
            on("2:number?"),
            on("3:scalar? 0:unsigned", unique=False),
            fields="id:unsigned name:string weight:number? thing:scalar?",
        ),
        definition(
            ARRAYS,
            on("0:integer"),
            on("1[*]:unsigned"),
            on("2[*]:string", unique=False),
            fields="id:integer numbers:array words:array",
        ),
        definition(
            HASHED, on("0:unsigned", type="hash"), on("1:string", type="hash"), fields="id:unsigned name:string"
        ),
        definition(MIXED, on("0:scalar"), on("1:number 0:scalar"), fields="key:scalar value:number"),
    )
}
EMPTY: State = dict.fromkeys(SPACES, ())

# Few values, so that statements conflict.
TEXTS = st.sampled_from(("", "a", "ab", "b", "a\0", "é"))
WEIGHTS = st.sampled_from(
    (-1, 0, 1, 2, 1.0, 0.5, -1.5, 1e300, float("-inf"), 2**64 - 1, Decimal("0.5"), Decimal("-1e30"))
)
THINGS = st.one_of(WEIGHTS, TEXTS, st.booleans(), st.sampled_from((b"", b"a\0", b"b", -(2**63))))
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "unsigned": st.integers(0, 4),
    "integer": st.integers(-2, 2),
    "string": TEXTS,
    "number": WEIGHTS,
    "scalar": THINGS,
    "any": st.none() | st.integers(0, 99),
}
WRONG = st.sampled_from((None, -1, "", (), b"", True))


def value_of(type: str, is_nullable: bool) -> st.SearchStrategy[Any]:
    return st.none() | VALUES[type] if is_nullable else VALUES[type]


def fields_of(space: SpaceDefinition) -> list[st.SearchStrategy[Any]]:
    """Return strategies for the fields of a valid tuple."""
    elements = {part.field: VALUES[part.type] for part in model.multikey_parts(space)}
    return [
        st.lists(elements[number], max_size=3).map(tuple)
        if number in elements
        else value_of(field.type, field.is_nullable)
        for number, field in enumerate(space.fields)
    ]


@st.composite
def tuples(draw: st.DrawFn, space: SpaceDefinition) -> tuple[Any, ...]:
    """Draw a tuple: mostly valid, sometimes short or with a field of another type."""
    values = [draw(field) for field in fields_of(space)]
    odd = draw(st.integers(0, 30))
    if odd == 0:
        values[draw(st.integers(0, len(values) - 1))] = draw(WRONG)
    elif odd == 1:
        del values[draw(st.integers(0, len(values) - 1)) :]
    elif odd == 2:
        values.append(draw(WRONG))
    return tuple(values)


@st.composite
def keys(draw: st.DrawFn, space: SpaceDefinition, index_id: int, *, whole: bool) -> tuple[Any, ...]:
    parts = space.indexes[index_id].parts
    count = len(parts) if whole else draw(st.integers(0, len(parts)))
    values = [draw(value_of(part.type, part.is_nullable and not whole)) for part in parts[:count]]
    odd = draw(st.integers(0, 30))
    if odd == 0 and values:
        values[draw(st.integers(0, len(values) - 1))] = draw(WRONG)
    elif odd == 1:
        values.append(draw(WRONG))
    return tuple(values)


@st.composite
def operations(draw: st.DrawFn, space: SpaceDefinition) -> tuple[tuple[str, int, Any], ...]:
    """Draw one operation of any kind, or two that do not move fields."""
    made: list[tuple[str, int, Any]] = []
    places = draw(st.lists(st.integers(0, len(space.fields)), min_size=1, max_size=2, unique=True))
    for place in places:
        sign = draw(st.sampled_from("==++!#" if len(places) == 1 else "=+"))
        if sign == "+" and place < len(space.fields) and space.fields[place].type in ("number", "scalar"):
            sign = "="  # the tests of updates check the width of float sums
        known = fields_of(space)[place] if place < len(space.fields) else WRONG
        argument = draw(known | WRONG if sign in "=!" else st.integers(1, 2))
        made.append((sign, place, argument))
    return tuple(made)


TYPES = ("select", "select", "insert", "replace", "delete", "update", "upsert")


@st.composite
def requests(draw: st.DrawFn, types: Sequence[str] = TYPES, space_ids: Sequence[int] = tuple(SPACES)) -> Statement:
    space = SPACES[draw(st.sampled_from(space_ids))]
    index = draw(st.sampled_from(range(len(space.indexes))))
    type = draw(st.sampled_from(types))
    if type == "select":
        if space.indexes[index].type == "hash":
            iterator = draw(st.sampled_from((EQ, ALL)))
            key = draw(keys(space, index, whole=True)) if iterator == EQ else ()
            assume(len(key) == (iterator == EQ))
            return Statement(type, space.id, index, key, iterator=iterator)
        iterator, key = draw(st.sampled_from((EQ, REQ, ALL, LT, LE, GE, GT))), draw(keys(space, index, whole=False))
        offset, limit = draw(st.sampled_from((0, 0, 1, 2))), draw(st.sampled_from((100, 100, 0, 1, 2)))
        return Statement(type, space.id, index, key, (), iterator, offset, limit)
    if type in ("insert", "replace"):
        return Statement(type, space.id, 0, draw(tuples(space)))
    if type == "upsert":
        return Statement(type, space.id, 0, draw(tuples(space)), draw(operations(space)))
    changes = draw(operations(space)) if type == "update" else ()
    return Statement(type, space.id, index, draw(keys(space, index, whole=True)), changes)


def perform(transaction: BoxTransaction, statement: Statement) -> list[bytes] | int:
    """Execute the statement in the box; return its tuples or error code."""
    values, changes = pack(statement.values), pack(statement.operations)
    try:
        space = transaction.space(statement.space)
        match statement.type:
            case "select":
                _, _, index_id, _, _, iterator, offset, limit = statement
                found = statements.select(
                    transaction, space, index_id, iterator=iterator, offset=offset, limit=limit, key=values
                )
                return sorted(found) if space.indexes[statement.index_id].definition.type == "hash" else found
            case "insert":
                return [statements.insert(transaction, space, values)]
            case "replace":
                return [statements.replace(transaction, space, values)]
            case "upsert":
                statements.upsert(transaction, space, values, changes)
                return []
            case "delete":
                gone = statements.delete(transaction, space, statement.index_id, values)
                return [] if gone is None else [gone]
        changed = statements.update(transaction, space, statement.index_id, values, changes)
        return [] if changed is None else [changed]
    except TarantoolError as error:
        return error.code


def expected(state: State, statement: Statement) -> Outcome:
    outcome = model.execute(SPACES, state, statement)
    if statement.type == "select" and SPACES[statement.space].indexes[statement.index_id].type == "hash":
        assert isinstance(outcome.result, list) or outcome.result > 0
        return outcome._replace(result=sorted(outcome.result) if isinstance(outcome.result, list) else outcome.result)
    return outcome


def agreed(transaction: BoxTransaction, state: State, statement: Statement) -> Outcome:
    """Execute the statement in the box and compare with the model."""
    outcome = expected(state, statement)
    found = perform(transaction, statement)
    assert found == outcome.result, f"{statement}: {found}, and {outcome.result} in the model"
    return outcome
