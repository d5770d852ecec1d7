"""Update operations on whole tuples: by example, and on random ones byte for byte against the real server."""

from __future__ import annotations

import contextlib
import random
import struct
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.box.definitions import FieldDefinition, IndexDefinition, IndexPart, SpaceDefinition
from flowstone.box.engine.format import TupleFormat
from flowstone.box.update import tree as update_tree
from flowstone.box.update.operation import changed_twice
from flowstone.box.update.update import (
    Operation,
    UpdateRules,
    decode_operations,
    update,
    update_raw,
    upsert,
    upsert_raw,
)
from flowstone.iproto import errors
from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.msgpack import pack, unpack
from tests.box import raw_client
from tests.box.raw_client import RawClient
from tests.conftest import FULL

NAMES = ("id", "number", "text", "list", "map", "more")


def run(values: tuple[Any, ...], *operations: tuple[Any, ...], index_base: int = 1) -> tuple[Any, ...]:
    return update(values, decode_operations(operations, index_base=index_base, field_names=NAMES))


def test_field_may_be_given_by_number_from_the_base_or_the_end_or_by_name() -> None:
    assert run((1, 2, 3), ("=", 2, "x")) == (1, "x", 3)
    assert run((1, 2, 3), ("=", 2, "x"), index_base=0) == (1, 2, "x")
    assert run((1, 2, 3), ("=", -1, "x")) == (1, 2, "x")
    assert run((1, 2, 3), ("=", "number", "x")) == (1, "x", 3)


def test_assignment_at_the_end_appends_and_beyond_is_rejected() -> None:
    assert run((1,), ("=", 2, "x")) == (1, "x")
    with pytest.raises(errors.NoSuchFieldNo, match="Field 3 was not found"):
        run((1,), ("=", 3, "x"))


def test_insertion_and_deletion_shift_later_fields() -> None:
    assert run((1, 2), ("!", 1, "a"), ("=", 2, "b")) == ("a", "b", 2)
    assert run((1, 2), ("!", -1, "end")) == (1, 2, "end")
    assert run((1, 2, 3, 4), ("#", 2, 2)) == (1, 4)
    assert run((1, 2, 3, 4), ("#", 2, 100)) == (1,)
    with pytest.raises(errors.UpdateField, match="cannot delete 0 fields"):
        run((1, 2), ("#", 1, 0))


def test_second_arithmetic_operation_on_a_field_is_rejected_but_assignment_overrides() -> None:
    assert run((1, 5), ("+", 2, 1), ("=", 2, 9)) == (1, 9)
    with pytest.raises(errors.UpdateField, match="Field 2 UPDATE error: double update of the same field"):
        run((1, 5), ("=", 2, 9), ("+", 2, 1))
    assert run((1, 5), ("!", 2, 9), ("+", 2, 1)) == (1, 10, 5)


def test_paths_address_fields_of_documents() -> None:
    values = (1, 2, "t", (10, 20), {"a": {"b": 5}, "c d": 1})
    assert run(values, ("=", "list[3]", 30))[3] == (10, 20, 30)
    assert run(values, ("!", "list[1]", 5), ("#", "map.a", 1)) == (1, 2, "t", (5, 10, 20), {"c d": 1})
    assert run(values, ("+", 'map.a["b"]', 1), ("=", "map['c d']", 2))[4] == {"a": {"b": 6}, "c d": 2}
    assert run(values, ("=", "[4][1]", 0))[3] == (0, 20)
    with pytest.raises(errors.NoSuchFieldName):
        run(values, ("+", "map.z", 1))
    with pytest.raises(errors.UpdateField, match="non-array"):
        run(values, ("=", "map[1]", 1))
    assert values[4] == {"a": {"b": 5}, "c d": 1}


def test_upsert_skips_failed_operations() -> None:
    operations = decode_operations((("+", 2, 1), ("+", 3, 1), ("=", 9, 0)), index_base=1)
    assert upsert((1, "text", 5), operations) == (1, "text", 6)


def test_untouched_fields_keep_their_bytes() -> None:
    odd = b"\x94\xcc\x01\xca\x3f\x00\x00\x00\xd9\x01a\xde\x00\x01\xd9\x01k\xd0\x05"
    assert update_raw(odd, ()) == odd
    operations = decode_operations((("=", 1, 7),))
    assert update_raw(odd, operations) == odd.replace(b"\xca\x3f\x00\x00\x00", b"\x07")
    operations = decode_operations((("=", "[4].k", 7),))
    assert update_raw(odd, operations) == odd.replace(b"\xd0\x05", b"\x07")


def test_values_are_stored_as_encoded_in_the_request() -> None:
    half = b"\xca\x3f\x00\x00\x00"
    operations = decode_operations(b"\x92\x93\xa1=\x01" + half + b"\x93\xa1!\x02\xd0\x05")
    assert update_raw(b"\x91\x01", operations) == b"\x93\x01" + half + b"\xd0\x05"


def test_float_sum_is_single_when_exact_and_allowed_by_the_format() -> None:
    fields = FieldDefinition("id"), FieldDefinition("any"), FieldDefinition("double", "double", is_nullable=True)
    format = TupleFormat(SpaceDefinition(512, "t", fields=fields))
    operations = decode_operations((("+", 1, 0.5), ("+", 2, 0.5)))
    raw, half, double = pack((1, 1.0, 1.0)), b"\xca" + struct.pack(">f", 1.5), pack(1.5)
    assert update_raw(raw, operations, format) == b"\x93\x01" + half + double
    assert update_raw(raw, operations) == b"\x93\x01" + double + double
    assert upsert_raw(b"\x93\x01\x01\xc0", operations, format) == b"\x93\x01" + half + b"\xc0"


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(max_size=5), st.binary(max_size=5)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(tuple), st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
    ),
    max_leaves=6,
)


@given(
    st.lists(VALUES, max_size=5).map(tuple),
    st.lists(
        st.lists(st.one_of(st.sampled_from("=+-&|^:!#"), VALUES, st.integers(-3, 6)), max_size=5).map(tuple), max_size=4
    ).map(tuple),
)
def test_any_operations_yield_a_tuple_or_an_error_with_a_code(values: tuple[Any, ...], operations: Any) -> None:
    before = repr(values)
    with contextlib.suppress(TarantoolError):
        decoded = decode_operations(operations, index_base=1, field_names=NAMES)
        assert isinstance(upsert(values, decoded), tuple)
        assert isinstance(update(values, decoded), tuple)
    assert repr(values) == before


# --- the real server --------------------------------------------------------------------------------------------------

FIELDS = tuple(FieldDefinition(f"f{number}", "double" if number == 3 else "any", number > 0) for number in range(8))
FORMAT = TupleFormat(
    SpaceDefinition(
        512,
        "t",
        fields=FIELDS,
        indexes=(IndexDefinition(512, 0, "pk", "tree", True, (IndexPart(0, "unsigned"),)),),
    )
)
HALF = b"\xca" + struct.pack(">f", 0.5)
INTEGERS = [pack(number) for number in (0, 1, 7, 255, 2**31, 2**63, 2**64 - 1, -1, -(2**63))]
ODD_INTEGERS = [b"\xcc\x05", b"\xd0\x05", b"\xd1\x00\x07", b"\xcf" + bytes(7) + b"\x09"]
FLOATS = [HALF, b"\xca" + struct.pack(">f", 0.1), *map(pack, (0.5, 0.1, -1.25, 1e300, 3.4e38))]
DECIMALS = [pack(Decimal(text)) for text in ("1.5", "-0.001", "9" * 38, "1e5", "0." + "9" * 38)]
TEXTS = [b"\xd9\x03abc", *map(pack, ("", "abcde", "é", "日本語", "x" * 40))]
NUMBERS = INTEGERS + ODD_INTEGERS + FLOATS + DECIMALS
PATHS = "f4[ f4[*] f4[1]x f4..a f4[1].. f5.a[*] f4.a[0] nobody f1 f2 f3 f5 [3] [4] [10]".split()
STEPS = ("[1]", "[2]", "[3]", "[4]", ".a", ".b", "['c']", '["d"]')


def random_raw(chance: random.Random, depth: int = 0) -> bytes:
    kind = chance.randrange(10 if depth < 3 else 7)
    if kind < 3:
        return chance.choice(NUMBERS)
    if kind < 5:
        return chance.choice(TEXTS)
    if kind < 7:
        return chance.choice((b"\xc0", b"\xc2", b"\xc4\x02ab", b"\x05"))
    return random_document(chance, depth)


def random_document(chance: random.Random, depth: int = 0) -> bytes:
    count = chance.randrange(5)
    values = [random_raw(chance, depth + 1) for _ in range(count)]
    if chance.random() < 0.5:
        return chance.choice((bytes((0x90 | count,)), b"\xdc" + struct.pack(">H", count))) + b"".join(values)
    keys = chance.sample((b"\xa1a", b"\xa1b", b"\xa1c", b"\xa1d", b"\xa2zz"), count)
    head = chance.choice((bytes((0x80 | count,)), b"\xde" + struct.pack(">H", count)))
    return head + b"".join(map(bytes.__add__, keys, values))


def random_tuple(chance: random.Random) -> bytes:
    fields = [b"\x01", chance.choice(INTEGERS + TEXTS), chance.choice(NUMBERS), pack(chance.choice((0.5, 0.1)))]
    fields += [random_document(chance), random_document(chance)]
    fields += [random_raw(chance) for _ in range(chance.randrange(3))]
    return bytes((0x90 | len(fields),)) + b"".join(fields)


def random_operation(chance: random.Random) -> bytes:
    code = chance.choice("======++-&|:!!!##")
    place = chance.random()
    if place < 0.3:
        field = pack(chance.choice((1, 2, 2, 3, 3, 4, 5, 6, 9, -1, -2, -3, -9)))
    elif place < 0.35:
        field = pack(chance.choice(PATHS))
    else:
        field = pack(chance.choice(("f4", "f5", "[5]")) + "".join(chance.choices(STEPS, k=chance.choice((1, 1, 2, 3)))))
    if code == ":":
        return b"\x95\xa1:" + field + pack(chance.randrange(-7, 8)) + pack(chance.randrange(-7, 8)) + pack("pq")
    if code == "#":
        argument = chance.choice((*[b"\x01"] * 9, b"\x02", b"\x00", b"\xd0\x01", b"\x32"))
    elif code in "=!":
        argument = random_raw(chance, 1)
    elif code in "&|":
        argument = chance.choice((b"\x03", b"\x05", b"\xcd\x00\xff", b"\xcf" + bytes(8), b"\xd0\x03", b"\xff"))
    else:
        argument = chance.choice(NUMBERS)
    return b"\x93" + pack(code) + field + argument


class Undefined(Exception):
    """A path into a value changed by another operation. None is sent, since some of these crash a server."""


def said_twice(operation: Operation) -> TarantoolError:
    if operation.path:
        raise Undefined
    return changed_twice(operation)


def ours(raw: bytes, operations: bytes, is_upsert: bool) -> tuple[int, str, bytes]:
    """Return the error code, the message, and the resulting tuple."""
    try:
        decoded = decode_operations(operations, field_names=FORMAT.field_names)
        new = (upsert_raw if is_upsert else update_raw)(raw, decoded, FORMAT)
        FORMAT.check(new, unpack(new))
    except TarantoolError as error:
        return error.code, error.message, raw
    return 0, "", new


@pytest.mark.real
def test_random_operations_equal_those_of_the_real_server(
    tarantool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(update_tree, "changed_twice", said_twice)
    chance = random.Random(20)
    cases: list[tuple[bytes, bytes, bool, tuple[int, str, bytes]]] = []
    while len(cases) < (40_000 if FULL else 4_000):
        raw, count, is_upsert = random_tuple(chance), chance.choice((1, 1, 2, 3, 4)), chance.random() < 0.5
        operations = bytes((0x90 | count,)) + b"".join(random_operation(chance) for _ in range(count))
        with contextlib.suppress(Undefined):
            cases.append((raw, operations, is_upsert, ours(raw, operations, is_upsert)))
    fields = ", ".join(
        f"{{'{field.name}', '{field.type}', is_nullable={str(field.is_nullable).lower()}}}" for field in FIELDS
    )
    setup = f"box.schema.space.create('t', {{id=512, format={{{fields}}}}}):create_index('pk')"
    requests = []
    for raw, operations, is_upsert, _ in cases:
        change = (
            raw_client.upsert(512, raw, operations) if is_upsert else raw_client.update(512, b"\x91\x01", operations)
        )
        requests += [raw_client.replace(512, raw), change, raw_client.select(512, 0)]
    # Without a WAL no request yields, so they run in sending order.
    with (
        tarantool.serve(tmp_path, setup=setup, cfg="wal_mode='none', net_msg_max=100000") as server,
        RawClient(server.port) as client,
    ):
        answers = client.ask(requests)
    changed = 0
    for number, (raw, operations, is_upsert, (code, message, new)) in enumerate(cases):
        answer, (now,) = answers[3 * number + 1], answers[3 * number + 2].tuples
        case = f"{unpack(raw)!r} {unpack(operations)!r} upsert={is_upsert}"
        if unpack(new)[0] != 1:
            # The engine checks changes of the primary key, not the operation.
            code, message, new = answer.code, answer.message, raw
            assert code == (0 if is_upsert else errors.CantUpdatePrimaryKey.code), case
        assert (answer.code, answer.message) == (code, message), case
        assert now == new, f"{case}: server {unpack(now)!r}, we {unpack(new)!r}"
        changed += now != raw
    assert changed > len(cases) // 6


# --- newer servers ---

NEWER = UpdateRules(fills_gaps=True)
NEWEST = UpdateRules(fills_gaps=True, repeats=True)


def run_newer(values: tuple[Any, ...], *operations: tuple[Any, ...], rules: UpdateRules = NEWER) -> tuple[Any, ...]:
    decoded = decode_operations(operations, index_base=1, field_names=NAMES)
    changed: tuple[Any, ...] = unpack(update_raw(pack(values), decoded, rules=rules))
    return changed


def test_newer_rules_fill_the_gap_after_a_tuple_with_nils() -> None:
    assert run_newer((1, 2), ("=", 4, "x")) == (1, 2, None, "x")
    assert run_newer((1, 2), ("!", "map", "x"), ("=", 3, 0)) == (1, 2, 0, None, "x")
    assert run_newer((1, 2), ("=", 3, "x")) == (1, 2, "x")
    with pytest.raises(errors.NoSuchFieldName):
        run_newer((1, 2), ("=", "map.key", "x"))
    with pytest.raises(errors.NoSuchFieldNo):
        run_newer((1, 2), ("+", 4, 1))
    with pytest.raises(errors.NoSuchFieldNo):
        run_newer((1, 2), ("=", -3, 1))
    with pytest.raises(errors.MemtxMaxTupleSize):
        run_newer((1, 2), ("=", 2**31 - 1, 1))


def test_newer_rules_ignore_deletion_after_the_end_of_a_tuple() -> None:
    assert run_newer((1, 2), ("#", 3, 1), ("#", 9, 4)) == (1, 2)
    with pytest.raises(errors.NoSuchFieldNo):
        run_newer((1, 2), ("#", -3, 1))


def test_newest_rules_allow_any_number_of_changes_of_a_field() -> None:
    with pytest.raises(errors.UpdateField, match="double update"):
        run_newer((1, 2), ("+", 2, 1), ("-", 2, 5))
    assert run_newer((1, 2), ("+", 2, 1), ("-", 2, 5), rules=NEWEST) == (1, -2)
    assert run_newer((1, 0.5), ("+", 2, 1), ("+", 2, 0.25), rules=NEWEST) == (1, 1.75)
    assert run_newer((1, 2, "abc"), (":", 3, 1, 1, "x"), (":", 3, 2, 1, "y"), rules=NEWEST) == (1, 2, "xyc")
    changed = run_newer((1, 2, 3, {"a": 1}), ("+", "[4].a", 1), ("+", "[4].a", 1), ("=", "[4].b", 9), rules=NEWEST)
    assert changed == (1, 2, 3, {"a": 3, "b": 9})
    with pytest.raises(errors.UpdateArgType):
        run_newer((1, 2), ("=", 2, "text"), ("+", 2, 1), rules=NEWEST)
    decoded = decode_operations((("+", 1, 1), ("-", 1, 5)))
    assert unpack(upsert_raw(pack((1, 2)), decoded, rules=NEWER)) == (1, 3)
    assert unpack(upsert_raw(pack((1, 2)), decoded, rules=NEWEST)) == (1, -2)
