"""Keys sort like their values: compared with a plain comparison of values, and with indexes of the real server."""

from __future__ import annotations

import math
import random
import struct
import uuid
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.box.definitions import IndexDefinition, IndexPart, SpaceDefinition
from flowstone.box.dialect import Dialect
from flowstone.box.engine.keys import ALL, EQ, GE, GT, LE, LT, REQ, Key, KeyDefinition, KeyKind, Span
from flowstone.iproto import errors
from flowstone.iproto.extensions import Datetime
from flowstone.iproto.msgpack import pack, unpack
from tests.box import raw_client
from tests.box.raw_client import RawClient
from tests.box.reference_order import key_rank, rank

PRIMARY = IndexDefinition(512, 0, "pk", "tree", True, (IndexPart(0, "unsigned"),))


def index(*parts: IndexPart, unique: bool = True, type: str = "tree") -> IndexDefinition:
    return IndexDefinition(512, 1, "sk", type, unique, parts)


def definition(*parts: IndexPart, unique: bool = True, type: str = "tree") -> KeyDefinition:
    return KeyDefinition(index(*parts, unique=unique, type=type), PRIMARY, {})


# --- order ------------------------------------------------------------------------------------------------------------

INTEGERS = st.integers(-(2**63), 2**64 - 1)
FLOATS = st.one_of(
    st.floats(),
    INTEGERS.map(float),
    st.sampled_from([5e-324, 2.0**64, -(2.0**64), 1e23, 0.1, 1 / 3, -0.0, 2**53 + 2.0, 1.7976931348623157e308]),
)
DECIMALS = st.builds(
    lambda digits, exponent: Decimal(digits).scaleb(exponent),
    st.integers(-(10**30), 10**30),
    st.integers(-38, 37),
)
NUMBERS = st.one_of(
    INTEGERS,
    FLOATS,
    DECIMALS,
    INTEGERS.map(Decimal),
    st.floats(allow_nan=False, allow_infinity=False, width=32).map(Decimal),
    st.floats(allow_nan=False, allow_infinity=False).map(lambda value: Decimal(f"{value:.15g}")),
    st.integers(-5, 5),
)
TEXTS = st.one_of(st.text(max_size=4), st.text("a\x00\x01\xff\udcff\U0001f600", max_size=4))
BLOBS = st.one_of(st.binary(max_size=4), st.lists(st.sampled_from([0, 1, 255]), max_size=4).map(bytes))
DATETIMES = st.builds(Datetime, st.integers(-(10**10), 10**10), st.integers(0, 10**9), st.sampled_from([0, 60]))
SCALARS = st.one_of(st.booleans(), NUMBERS, TEXTS, BLOBS, st.uuids(), DATETIMES)

VALUES_OF = {
    "unsigned": st.integers(0, 2**64 - 1),
    "integer": INTEGERS,
    "number": NUMBERS,
    "double": FLOATS,
    "decimal": DECIMALS,
    "string": TEXTS,
    "varbinary": BLOBS,
    "boolean": st.booleans(),
    "uuid": st.uuids(),
    "datetime": DATETIMES,
    "scalar": SCALARS,
}


def double_rank(value: Any) -> Any:
    return (0, 0) if value is None else rank(float(value))


@pytest.mark.parametrize("type", VALUES_OF)
def test_entries_sort_like_values(type: str) -> None:
    nullable, plain = definition(IndexPart(1, type, is_nullable=True)), definition(IndexPart(1, type))

    @given(st.lists(VALUES_OF[type], min_size=2, max_size=6))
    def check(values: list[Any]) -> None:
        # Comparing only doubles, none is treated as a decimal.
        ranks = [double_rank(value) if type == "double" else rank(value) for value in values]
        tuples = [(number, value) for number, value in enumerate(values)]
        for key in plain, nullable:
            entries: list[Any] = [key.entries(tuple_)[0] for tuple_ in tuples]
            for one, other in zip(range(len(values)), range(1, len(values)), strict=False):
                assert (entries[one] < entries[other]) == (ranks[one] < ranks[other])
                assert (entries[one] == entries[other]) == (ranks[one] == ranks[other])
        nil: Any = nullable.entries((7, None))[0]
        assert nullable.entries((7,)) == [nil]
        assert all(nil < entry for tuple_ in tuples for entry in nullable.entries(tuple_))

    check()


PARTS = (
    IndexPart(1, "scalar", is_nullable=True),
    IndexPart(2, "string", is_nullable=True),
    IndexPart(3, "integer", is_nullable=True),
)
SMALL = st.tuples(
    st.one_of(st.none(), st.sampled_from([0, 1, 1.0, 0.5, Decimal("0.5"), "", "a", "a\x00", b"a", False])),
    st.one_of(st.none(), st.sampled_from(["", "a", "a\x00", "a\x00\x00", "b", "\udcff"])),
    st.one_of(st.none(), st.integers(-1, 1)),
)


@given(st.lists(SMALL, max_size=12), st.booleans())
def test_parts_are_compared_from_the_left_and_equal_keys_by_the_primary_key(
    keys: list[tuple[Any, ...]], unique: bool
) -> None:
    key = definition(*PARTS, unique=unique)
    tuples = [(number, *values) for number, values in enumerate(keys)]
    by_entry = sorted(tuples, key=lambda tuple_: key.entries(tuple_)[0])
    assert by_entry == sorted(tuples, key=lambda tuple_: (key_rank(tuple_[1:]), tuple_[0]))
    entries = [entry for tuple_ in tuples for entry in key.entries(tuple_)]
    whole = [values for values in keys if not unique or None in values]
    distinct = len(whole) + len({key_rank(values) for values in keys if unique and None not in values})
    assert len({*entries}) == distinct


def iterated(tuples: list[tuple[Any, ...]], iterator: int, key: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Return the tuples that an iterator selects, by definition."""
    wanted = key_rank(key)
    found = []
    for tuple_ in sorted(tuples, key=lambda tuple_: (key_rank(tuple_[1:]), tuple_[0])):
        own = key_rank(tuple_[1:])[: len(key)]
        at = (own > wanted) - (own < wanted)
        if (
            not key
            or {EQ: at == 0, REQ: at == 0, ALL: at >= 0, GE: at >= 0, GT: at > 0, LE: at <= 0, LT: at < 0}[iterator]
        ):
            found.append(tuple_)
    return found[::-1] if iterator in (REQ, LE, LT) else found


def scanned(tuples: list[tuple[Any, ...]], key: KeyDefinition, span: Span) -> list[tuple[Any, ...]]:
    placed: dict[Key, tuple[Any, ...]] = {entry: tuple_ for tuple_ in tuples for entry in key.entries(tuple_)}
    inside = [
        entry
        for entry in sorted(placed)
        if (span.low is None or span.low <= entry) and (span.high is None or entry < span.high)  # type: ignore[operator]
    ]
    return [placed[entry] for entry in (inside[::-1] if span.reverse else inside)]


@given(st.lists(SMALL, max_size=10), SMALL, st.integers(0, 3), st.sampled_from([EQ, REQ, ALL, LT, LE, GE, GT]))
def test_spans_equal_the_ranges_of_iterators(
    keys: list[tuple[Any, ...]], wanted: tuple[Any, ...], count: int, iterator: int
) -> None:
    key = definition(*PARTS, unique=False)
    tuples = [(number, *values) for number, values in enumerate(keys)]
    assert scanned(tuples, key, key.span(iterator, wanted[:count])) == iterated(tuples, iterator, wanted[:count])


@pytest.mark.parametrize(
    ("part", "values"),
    [
        (IndexPart(1, "integer"), st.integers(-3, 3)),
        (IndexPart(1, "string"), st.sampled_from(["", "a", "a\x00", "aa", "b", "\udcff"])),
        (IndexPart(1, "number"), st.sampled_from([0, 0.5, Decimal("0.25"), -1, -0.5, -1.5])),
    ],
)
def test_spans_of_a_unique_single_part_index(part: IndexPart, values: st.SearchStrategy[Any]) -> None:
    key = definition(part)

    @given(st.lists(values, unique=True), values, st.sampled_from([EQ, REQ, ALL, LT, LE, GE, GT]))
    def check(keys: list[Any], wanted: Any, iterator: int) -> None:
        tuples = [(number, value) for number, value in enumerate(keys)]
        for asked in (wanted,), ():
            assert scanned(tuples, key, key.span(iterator, asked)) == iterated(tuples, iterator, asked)

    check()


# --- the form of keys -------------------------------------------------------------------------------------------------


def test_unique_index_of_one_integer_or_string_uses_the_value_as_key() -> None:
    numbers, texts = definition(IndexPart(1, "unsigned")), definition(IndexPart(1, "string"))
    assert (numbers.kind, texts.kind) == (KeyKind.INTEGER, KeyKind.STRING)
    assert numbers.entries((1, 5)) == [5]
    assert numbers.exact((5,)) == 5
    assert texts.entries((1, "\udcffé")) == [b"\xff\xc3\xa9"]
    assert texts.exact(("\udcffé",)) == b"\xff\xc3\xa9"


@pytest.mark.parametrize(
    "parts",
    [
        [IndexPart(1, "integer", is_nullable=True)],
        [IndexPart(1, "string", collation=1)],
        [IndexPart(1, "integer", path="a")],
        [IndexPart(1, "integer"), IndexPart(2, "string")],
        [IndexPart(1, "number")],
    ],
)
def test_keys_of_other_types_are_encoded(parts: list[IndexPart]) -> None:
    assert definition(*parts).kind is KeyKind.ENCODED
    assert definition(IndexPart(1, "integer"), unique=False).kind is KeyKind.ENCODED


def test_exact_returns_the_entry_of_the_tuple_with_the_key() -> None:
    key = definition(IndexPart(1, "scalar", is_nullable=True), IndexPart(2, "string"))
    assert key.exact((1, "x")) == key.entries((9, 1.0, "x"))[0]


def test_doubles_of_2_11_are_compared_as_numbers() -> None:
    key = KeyDefinition(index(IndexPart(1, "double")), PRIMARY, {}, dialect=Dialect.V2_11)
    ordered = [-1, -0.5, 0, 0.5, 2**53, 2**53 + 1, 2**53 + 2.0]
    assert sorted(ordered, key=lambda value: key.exact((value,))) == ordered
    with pytest.raises(errors.KeyPartType):
        definition(IndexPart(1, "double")).exact((1,))


def test_keys_are_extracted_from_documents() -> None:
    key = definition(IndexPart(1, "integer", path="a[2].b"), IndexPart(2, "string", is_nullable=True, path="c"))
    assert key.entries((1, {"a": (0, {"b": 5})}, {"c": "x"})) == [key.exact((5, "x"))]
    (entry,) = key.entries((1, {"a": (0, {"b": 5})}))
    assert isinstance(entry, bytes)
    low, high, _ = key.span(0, (5, None))
    assert isinstance(low, bytes)
    assert isinstance(high, bytes)
    assert low <= entry < high


def test_multikey_index_has_one_entry_per_distinct_element() -> None:
    parts = IndexPart(1, "integer", path="[*].a"), IndexPart(2, "string", is_nullable=True)
    for unique, several in ((False, definition(*parts, unique=False)), (True, definition(*parts))):
        single = definition(IndexPart(1, "integer"), IndexPart(2, "string", is_nullable=True), unique=unique)
        assert several.is_multikey
        elements = ({"a": 3}, {"a": 1}, {"a": 3})
        assert several.entries((7, elements, "x")) == [single.entries((7, number, "x"))[0] for number in (1, 3)]
        assert several.entries((7, elements)) == [single.entries((7, number))[0] for number in (1, 3)]
        assert several.entries((7, ())) == []
        assert several.entries((7,)) == []


# --- invalid keys -----------------------------------------------------------------------------------------------------


def test_exact_key_must_have_all_parts_and_no_nil() -> None:
    key = definition(IndexPart(1, "unsigned"), IndexPart(2, "string", is_nullable=True))
    with pytest.raises(errors.ExactMatch, match=r"^Invalid key part count in an exact match \(expected 2, got 1\) "):
        key.exact((1,))
    message = "^Supplied key type of part 1 does not match index part type: expected string "
    for wrong in (1, None), (1, b"x"):
        with pytest.raises(errors.KeyPartType, match=message):
            key.exact(wrong)
    with pytest.raises(errors.KeyPartType, match=r"part 0 .* unsigned"):
        key.exact((-1, 5))
    for single in "unsigned", "string":
        with pytest.raises(errors.KeyPartType, match=f"part 0 .* expected {single} "):
            definition(IndexPart(1, single)).exact((None,))
        with pytest.raises(errors.ExactMatch, match="got 0"):
            definition(IndexPart(1, single)).exact(())


def test_only_a_tree_accepts_partial_keys_and_nil_in_a_select() -> None:
    parts = IndexPart(1, "unsigned"), IndexPart(2, "string", is_nullable=True)
    tree, hash = definition(*parts), definition(*parts, type="hash")
    assert tree.span(EQ, (1, None)).low == tree.span(EQ, (1,)).low + b"\x01"  # type: ignore[operator]
    with pytest.raises(errors.KeyPartCount, match=r"^Invalid key part count \(expected \[0..2\], got 3\) "):
        tree.span(EQ, (1, "x", 1))
    with pytest.raises(errors.KeyPartType):
        tree.span(GE, (None,))
    for key in (1,), ():
        with pytest.raises(errors.PartialKey, match=r"^HASH index  does not support selects via a partial key \(exp"):
            hash.span(EQ, key)
    assert hash.span(ALL, ()) == hash.span(GT, ()) == hash.span(ALL, (1, "x")) == Span(None, None, False)


def test_error_names_an_unsupported_iterator() -> None:
    space = SpaceDefinition(512, "things")
    hash = KeyDefinition(index(IndexPart(1, "unsigned"), type="hash"), PRIMARY, {}, space)
    with pytest.raises(errors.UnsupportedIndexFeature) as error:
        hash.span(GE, (1,))
    assert error.value.message == (
        "Index 'sk' (HASH) of space 'things' (memtx) does not support requested iterator type"
    )
    with pytest.raises(errors.UnsupportedIndexFeature):
        definition(IndexPart(1, "unsigned")).span(11, (1,))


# --- the real server --------------------------------------------------------------------------------------------------


def float32(value: float) -> bytes:
    return b"\xca" + struct.pack(">f", value)


# Real servers compare a decimal with a double by 15 digits only, so decimals and wide doubles are not mixed.
PLAIN_INTEGERS = [0, 1, -1, 2, 10, 255, 2**31, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**63)]
PLAIN_FLOATS = [0.5, -0.5, 1.5, -1.5, 0.1, 1e-7, 1e18, 2.0**53, 2.0**63, 2.0**64, -(2.0**63), 1e22, 1e23, 1e37, -1e37]
WIDE_FLOATS = [-0.0, 5e-324, 1e300, -1e300, 1.7976931348623157e308, 1 / 3, 2 / 3, 0.1 + 2**-56, math.inf, -math.inf]
PLAIN_DECIMALS = ["0", "0.1", "0.5", "-0.5", "1.50", "1e37", "-1e37", "9" * 38, "-" + "9" * 38, "1e-38", "1e23", "2e30"]
INTEGERS_RAW = [pack(value) for value in PLAIN_INTEGERS] + [b"\xd3" + (5).to_bytes(8, "big"), b"\xcf" + bytes(8)]
DOUBLES_RAW = [pack(value) for value in PLAIN_FLOATS + WIDE_FLOATS]
DECIMALS_RAW = [pack(Decimal(text)) for text in PLAIN_DECIMALS]
SINGLES_RAW = [float32(value) for value in (0.5, 0.1, -1.5, 3e38)]
TEXTS_RAW = [pack(text) for text in ("", "a", "a\x00", "a\x00b", "aa", "b", "\udcff", "é", "z" * 40, "\x00", "A")]
BLOBS_RAW = [pack(blob) for blob in (b"", b"a", b"a\x00", b"\xff", b"\x00", b"a\xff")]
UUIDS_RAW = [pack(uuid.UUID(int=value)) for value in (0, 1, 2**127, 2**128 - 1, 2**64)]
BOOLEANS_RAW = [b"\xc2", b"\xc3"]
NAN_RAW = [pack(math.nan)]
REAL_VALUES = {
    # A server compares unsigned ones by their first bytes, so each needs the shortest encoding.
    "unsigned": [pack(value) for value in PLAIN_INTEGERS if value >= 0],
    "integer": INTEGERS_RAW,
    "double": DOUBLES_RAW,
    "decimal": DECIMALS_RAW,
    "number": INTEGERS_RAW + [pack(value) for value in PLAIN_FLOATS] + DECIMALS_RAW + SINGLES_RAW,
    "number without decimals": INTEGERS_RAW + DOUBLES_RAW + SINGLES_RAW + NAN_RAW,
    "string": TEXTS_RAW,
    "varbinary": BLOBS_RAW,
    "uuid": UUIDS_RAW,
    "boolean": BOOLEANS_RAW,
    "scalar": INTEGERS_RAW
    + [pack(value) for value in PLAIN_FLOATS]
    + DECIMALS_RAW
    + TEXTS_RAW
    + BLOBS_RAW
    + BOOLEANS_RAW,
}


def shuffled(raws: list[bytes], seed: int) -> list[bytes]:
    chance = random.Random(seed)
    values = raws * 2 + [b"\xc0"]
    chance.shuffle(values)
    return [b"\x92" + pack(number) + value for number, value in enumerate(values)]


@pytest.mark.real
def test_index_order_of_every_type_equals_that_of_the_real_server(tarantool: ModuleType, tmp_path: Path) -> None:
    setup, spaces = [], {}
    for number, name in enumerate(REAL_VALUES):
        id, type = 512 + number, name.split(" ")[0]
        spaces[id] = name
        setup.append(
            f"s = box.schema.space.create('t{id}', {{id={id}}}) s:create_index('pk')"
            f" s:create_index('sk', {{unique=false, parts={{{{2, '{type}', is_nullable=true}}}}}})"
        )
    with (
        tarantool.serve(tmp_path, setup="local s " + " ".join(setup), cfg="wal_mode='none'") as server,
        RawClient(server.port) as client,
    ):
        for id, name in spaces.items():
            tuples = shuffled(REAL_VALUES[name], id)
            answers = client.ask([raw_client.insert(id, tuple_) for tuple_ in tuples])
            assert not any(answer.code for answer in answers), answers
            key = definition(IndexPart(1, name.split(" ")[0], is_nullable=True), unique=False)
            placed = {key.entries(unpack(tuple_))[0]: tuple_ for tuple_ in tuples}
            (answer,) = client.ask([raw_client.select(id, 1)])
            assert answer.tuples == [placed[entry] for entry in sorted(placed)], name
            asked = [
                (iterator, unpack(tuple_)[1:]) for tuple_ in tuples[::3] for iterator in (EQ, REQ, ALL, LT, LE, GE, GT)
            ]
            answers = client.ask([raw_client.select(id, 1, pack(wanted), iterator) for iterator, wanted in asked])
            for (iterator, wanted), answer in zip(asked, answers, strict=True):
                found = scanned([unpack(raw) for raw in tuples], key, key.span(iterator, wanted))
                assert [tuple_[0] for tuple_ in found] == [unpack(raw)[0] for raw in answer.tuples], (iterator, wanted)


KEYS = [
    (), (1,), (-1,), ("x",), (None,), (1.5,), (1, "a"), (1, None), (None, None), (1, "a", 1), (b"x",), (True,),
    (1, 1), (Decimal(1),), (2**64 - 1, ""), ((),), ({},), (uuid.UUID(int=1),),
]  # fmt: skip
RAW_KEYS = [*map(pack, KEYS), b"\x91\xca\x3f\xc0\x00\x00"]
"""The last one is a 4-byte float, which double parts of 2.6 do not accept."""


@pytest.mark.real
def test_invalid_keys_are_rejected_as_by_the_real_server(tarantool: ModuleType, tmp_path: Path) -> None:
    definitions = {
        1: index(IndexPart(0, "unsigned"), IndexPart(1, "string", is_nullable=True)),
        2: index(IndexPart(0, "integer")),
        3: index(IndexPart(0, "unsigned"), IndexPart(2, "string"), type="hash"),
        4: index(IndexPart(0, "number"), IndexPart(2, "scalar")),
        5: index(IndexPart(0, "unsigned"), type="hash"),
        6: index(IndexPart(3, "double")),
    }
    setup = "local s = box.schema.space.create('t', {id=512}) s:create_index('pk')"
    for id, sk in definitions.items():
        parts = ", ".join(
            f"{{{part.field + 1}, '{part.type}', is_nullable={str(part.is_nullable).lower()}}}" for part in sk.parts
        )
        setup += f" s:create_index('i{id}', {{type='{sk.type}', parts={{{parts}}}}})"
    cases = [(id, iterator, key) for id in definitions for key in RAW_KEYS for iterator in range(7)]
    exact = [(id, key) for id in definitions for key in RAW_KEYS]
    with (
        tarantool.serve(tmp_path, setup=setup, cfg="wal_mode='none'") as server,
        RawClient(server.port) as client,
    ):
        selected = client.ask([raw_client.select(512, id, key, iterator) for id, iterator, key in cases])
        deleted = client.ask([raw_client.delete(512, id, key) for id, key in exact])
    space = SpaceDefinition(512, "t")

    def keys_of(id: int) -> KeyDefinition:
        named = IndexDefinition(512, id, f"i{id}", definitions[id].type, True, definitions[id].parts)
        return KeyDefinition(named, PRIMARY, {}, space)

    def span(id: int, iterator: int, key: bytes) -> Span:
        return keys_of(id).span(iterator, keys_of(id).read(key))

    def exact_key(id: int, key: bytes) -> Key:
        return keys_of(id).exact(keys_of(id).read(key))

    for (id, iterator, key), answer in zip(cases, selected, strict=True):
        assert refusal(span, id, iterator, key) == (answer.code, answer.message), (id, iterator, key)
    for (id, key), answer in zip(exact, deleted, strict=True):
        assert refusal(exact_key, id, key) == (answer.code, answer.message), (id, key)


def refusal(function: Any, *arguments: Any) -> tuple[int, str]:
    try:
        function(*arguments)
    except errors.TarantoolError as error:
        return error.code, error.message
    return 0, ""


@pytest.mark.real
def test_documents_are_indexed_as_by_the_real_server(tarantool: ModuleType, tmp_path: Path) -> None:
    chance = random.Random(3)
    parts = {
        1: ((IndexPart(1, "integer", path="a.b"), IndexPart(2, "string", is_nullable=True, path="[2]")), False),
        2: ((IndexPart(3, "integer", path="[*].x"), IndexPart(3, "string", is_nullable=True, path="[*].y")), False),
        3: ((IndexPart(4, "scalar", is_nullable=True, path="[*]"), IndexPart(0, "unsigned")), True),
    }
    setup = (
        "local s = box.schema.space.create('t', {id=512}) s:create_index('pk')"
        " s:create_index('i1', {unique=false, parts={{2, 'integer', path='a.b'},"
        " {3, 'string', path='[2]', is_nullable=true}}})"
        " s:create_index('i2', {unique=false, parts={{4, 'integer', path='[*].x'},"
        " {4, 'string', path='[*].y', is_nullable=true}}})"
        " s:create_index('i3', {parts={{5, 'scalar', path='[*]', is_nullable=true}, {1, 'unsigned'}}})"
    )

    def document(number: int) -> tuple[Any, ...]:
        elements = tuple(
            {"x": chance.randrange(4), **({"y": chance.choice("ab")} if chance.random() < 0.6 else {})}
            for _ in range(chance.randrange(4))
        )
        scalars = tuple(chance.choice([None, 1, "a", True, 0.5]) for _ in range(chance.randrange(4)))
        return number, {"a": {"b": chance.randrange(5)}}, chance.choice([(), (1, "x"), ("y", "z")]), elements, scalars

    tuples = [document(number) for number in range(60)]
    with (
        tarantool.serve(tmp_path, setup=setup, cfg="wal_mode='none'") as server,
        RawClient(server.port) as client,
    ):
        answers = client.ask([raw_client.insert(512, pack(tuple_)) for tuple_ in tuples])
        assert not any(answer.code for answer in answers)
        for id, (index_parts, unique) in parts.items():
            key = definition(*index_parts, unique=unique)
            (answer,) = client.ask([raw_client.select(512, id)])
            placed = {entry: tuple_ for tuple_ in tuples for entry in key.entries(tuple_)}
            assert [unpack(raw)[0] for raw in answer.tuples] == [placed[entry][0] for entry in sorted(placed)], id
