"""Formats: accepted and rejected tuples and error messages, by example and on random formats of the real server."""

from __future__ import annotations

import random
import struct
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from flowstone.box.definitions import FieldDefinition, IndexDefinition, IndexPart, SpaceDefinition
from flowstone.box.dialect import Dialect
from flowstone.box.engine.field_types import ACCEPTS, KIND_EXT, KIND_NIL, elements_of, kind_at
from flowstone.box.engine.format import TupleFormat
from flowstone.iproto import errors
from flowstone.iproto.extensions import Extension
from flowstone.iproto.msgpack import pack, unpack
from tests.box import raw_client
from tests.box.raw_client import RawClient
from tests.conftest import FULL

PK = IndexDefinition(512, 0, "pk", "tree", True, (IndexPart(0, "unsigned"),))


def space(*fields: FieldDefinition, indexes: tuple[IndexDefinition, ...] = (PK,), field_count: int = 0) -> TupleFormat:
    return TupleFormat(SpaceDefinition(512, "t", field_count=field_count, fields=fields, indexes=indexes))


def index(*parts: IndexPart) -> IndexDefinition:
    return IndexDefinition(512, 1, "sk", "tree", False, parts)


def refusal(format: TupleFormat, raw: bytes) -> tuple[int, str]:
    try:
        format.check(raw, unpack(raw))
    except errors.TarantoolError as error:
        return error.code, error.message
    return 0, ""


def test_field_must_have_its_type() -> None:
    format = space(FieldDefinition("id", "unsigned"), FieldDefinition("name", "string"), FieldDefinition("any"))
    assert refusal(format, pack((1, "x", None))) == (0, "")
    assert refusal(format, pack((1, "x", 1, 2, 3))) == (0, "")
    message = "Tuple field 2 type does not match one required by operation: expected string"
    assert refusal(format, pack((1, 5, 1))) == (23, message)
    assert refusal(format, pack((1, None, 1))) == (23, message)
    assert refusal(format, pack((-1, "x", 1)))[1].startswith("Tuple field 1 type")


def test_field_is_required_unless_nullable() -> None:
    format = space(FieldDefinition("id"), FieldDefinition("a"), FieldDefinition("b", "string", is_nullable=True))
    assert refusal(format, pack((1, None))) == (0, "")
    assert refusal(format, pack((1, None, None))) == (0, "")
    assert refusal(format, pack((1,))) == (39, "Tuple field 2 required by space format is missing")
    assert refusal(format, pack(("x",))) == (
        23,
        "Tuple field 1 type does not match one required by operation: expected unsigned",
    )


def test_space_may_require_a_number_of_fields() -> None:
    format = space(field_count=2)
    assert refusal(format, pack((1, 2))) == (0, "")
    assert refusal(format, pack((1,))) == (38, "Tuple field count 1 does not match space field count 2")


def test_numbers_must_have_the_encoding_of_their_type() -> None:
    format = space(FieldDefinition("id", "unsigned"), FieldDefinition("d", "double", is_nullable=True))
    assert refusal(format, b"\x92\x01\xcb" + struct.pack(">d", 0.25)) == (0, "")
    assert refusal(format, b"\x92\x01\xca" + struct.pack(">f", 0.25))[0] == 23
    assert refusal(format, b"\x91\xd0\x05")[0] == 23
    assert refusal(format, b"\x91\xcc\x05") == (0, "")
    # Fields without a format accept any encoding.
    assert refusal(format, b"\x93\x01\xc0\xd0\x05") == (0, "")
    assert refusal(format, b"\x93\x01\xc0\xca" + bytes(4)) == (0, "")


def test_double_of_2_11_may_be_any_number_except_a_decimal() -> None:
    newer = TupleFormat(SpaceDefinition(512, "t", fields=(FieldDefinition("d", "double"),)), Dialect.V2_11)
    for raw in b"\x05", b"\xff", b"\xca" + bytes(4), pack(0.5):
        assert refusal(newer, b"\x91" + raw) == (0, "")
    assert refusal(newer, pack((Decimal(1),)))[0] == 23


def test_index_part_requires_its_field_and_type() -> None:
    format = space(indexes=(PK, index(IndexPart(2, "string"), IndexPart(3, "integer", is_nullable=True))))
    assert refusal(format, pack((1, 0, "x"))) == (0, "")
    assert refusal(format, pack((1,))) == (39, "Tuple field 3 required by space format is missing")
    assert refusal(format, pack((1, 0, "x", "y")))[1].startswith("Tuple field 4 type does not match")
    assert (format.field_count_min, format.field_count_exact) == (3, 0)


def test_error_names_the_path_of_an_index_part() -> None:
    format = space(indexes=(PK, index(IndexPart(1, "string", path="a.b"), IndexPart(2, "unsigned", path="[2]"))))
    assert refusal(format, pack((1, {"a": {"b": "x"}, 1: 2}, (0, 1)))) == (0, "")
    type_message = "type does not match one required by operation: expected"
    assert refusal(format, pack((1, {"a": {"b": 1}}, (0, 1)))) == (
        23,
        f'Tuple field [2]["a"]["b"] {type_message} string',
    )
    assert refusal(format, pack((1, {"a": 1}, (0, 1)))) == (23, f'Tuple field [2]["a"] {type_message} map')
    assert refusal(format, pack((1, (), (0, 1)))) == (23, f"Tuple field 2 {type_message} map")
    assert refusal(format, pack((1, {"a": {}}, (0,)))) == (
        39,
        'Tuple field [2]["a"]["b"] required by space format is missing',
    )
    assert format.masks is None


def test_every_element_of_a_multikey_array_is_checked() -> None:
    format = space(indexes=(PK, index(IndexPart(1, "unsigned", path="[*].a"))))
    assert refusal(format, pack((1, ({"a": 1}, {"a": 2})))) == (0, "")
    assert refusal(format, pack((1, ()))) == (0, "")
    assert refusal(format, pack((1,))) == (0, "")
    assert refusal(format, pack((1, ({"a": 1}, {"b": 2})))) == (
        39,
        'Tuple field [2][*]["a"] required by space format is missing',
    )
    assert refusal(format, pack((1, ({"a": 1}, 5))))[1].startswith("Tuple field [2][*] type does not match")


@pytest.mark.parametrize(
    ("fields", "parts", "error"),
    [
        (
            [FieldDefinition("a", "string")],
            [IndexPart(0, "unsigned")],
            errors.FormatMismatchIndexPart(
                "Field 1 has type 'string' in space format, but type 'unsigned' in index definition"
            ),
        ),
        (
            [],
            [IndexPart(0, "unsigned"), IndexPart(0, "string")],
            errors.IndexPartTypeMismatch("Field 1 has type 'unsigned' in one index, but type 'string' in another"),
        ),
        (
            [],
            [IndexPart(1, "unsigned", path="[*]"), IndexPart(1, "unsigned", path="[1]")],
            errors.MultikeyIndexMismatch("Field 2 is used as multikey in one index and as single key in another"),
        ),
        (
            [FieldDefinition("a"), FieldDefinition("b", "array")],
            [IndexPart(1, "unsigned", path="a")],
            errors.IndexPartTypeMismatch("Field 2 has type 'array' in one index, but type 'map' in another"),
        ),
    ],
)
def test_contradictory_index_parts_are_rejected(
    fields: list[FieldDefinition], parts: list[IndexPart], error: errors.TarantoolError
) -> None:
    with pytest.raises(type(error)) as raised:
        space(*fields, indexes=(index(*parts),))
    assert raised.value.message == error.message


def test_stricter_type_of_field_and_index_part_applies() -> None:
    format = space(FieldDefinition("id", "scalar"), FieldDefinition("a", "number", is_nullable=True))
    assert refusal(format, pack((-1,)))[1].endswith("expected unsigned")
    assert format.masks is not None
    assert [int(mask) for mask in format.masks] == [ACCEPTS["unsigned"], ACCEPTS["number"] | KIND_NIL]


def test_unknown_extension_is_stored_but_not_indexed() -> None:
    fields = FieldDefinition("id"), FieldDefinition("d", "decimal")
    nonsense = b"\x92\x01\xd5\x01\xff\xff"
    assert refusal(space(*fields), nonsense) == (0, "")
    indexed = space(*fields, indexes=(PK, index(IndexPart(1, "decimal"))))
    assert refusal(indexed, nonsense)[0] == 23
    assert refusal(indexed, pack((1, Decimal(1)))) == (0, "")


def test_parts_of_a_functional_index_do_not_constrain_tuples() -> None:
    functional = IndexDefinition(512, 1, "f", "tree", False, (IndexPart(3, "string"),), is_functional=True)
    format = space(indexes=(PK, functional))
    assert format.field_count_min == 1
    assert refusal(format, pack((1,))) == (0, "")


def test_part_that_is_not_nullable_makes_its_field_required() -> None:
    parts = IndexPart(1, "unsigned", path="a"), IndexPart(1, "unsigned", is_nullable=True, path="a")
    for order in parts, parts[::-1]:
        format = space(indexes=(PK, index(order[0]), index(order[1])))
        assert refusal(format, pack((1, {}))) == (39, 'Tuple field [2]["a"] required by space format is missing')


def test_masks_leave_extensions_to_the_full_check() -> None:
    format = space(FieldDefinition("id"), FieldDefinition("x"))
    assert format.masks is not None
    assert not format.masks[1] & KIND_EXT
    assert refusal(format, pack((1, Extension(7, b"")))) == (0, "")
    assert refusal(format, pack((1, Extension(0, b""))))[0] == 23


# --- the real server --------------------------------------------------------------------------------------------------

# Types newer than 2.6.0, and uuid, which newer servers accept in scalar fields.
TYPES = [type for type in ACCEPTS if type not in ("datetime", "interval", "uuid")]
PART_TYPES = [type for type in TYPES if type not in ("any", "array", "map")]
PATHS = [None, None, None, "a", "a.b", "[1]", "[2].a", "[*]", "[*].a"]  # not "a[*]", on which 2.6.0 crashes
NULLABLE_PATHS = ("a", "[2].a", "[*]")  # equal in all indexes: otherwise 2.6.0 crashes


def random_raw(chance: random.Random, depth: int = 0) -> bytes:
    kind = chance.randrange(14 if depth < 3 else 10)
    if kind < 2:
        return chance.choice([b"\x05", b"\xcc\x05", b"\xd0\x05", b"\xff", b"\xd3" + b"\xff" * 8, b"\xcf" + b"\xff" * 8])
    if kind < 4:
        return chance.choice([pack(0.25), pack(0.1), b"\xca" + struct.pack(">f", 0.1)])
    if kind < 6:
        return chance.choice([pack("a"), pack(""), b"\xd9\x01b"])
    if kind < 10:
        some = [None, True, b"a", Decimal("1.5"), None, Extension(9, b"xyz"), Extension(-2, b"x")]
        return pack(chance.choice(some))
    inside = [random_raw(chance, depth + 1) for _ in range(chance.randrange(3))]
    if kind < 12:
        return bytes((0x90 | len(inside),)) + b"".join(inside)
    keys = chance.sample([b"\xa1a", b"\xa1b", b"\x01"], len(inside))
    return bytes((0x80 | len(inside),)) + b"".join(map(bytes.__add__, keys, inside))


def fitting_raw(chance: random.Random, type: str) -> bytes:
    """Return a value that often has the type."""
    for _ in range(30):
        raw = random_raw(chance)
        if kind_at(raw, 0) & ACCEPTS[type]:
            return raw
    return b"\xc0"


def random_space(chance: random.Random, id: int) -> SpaceDefinition:
    fields = tuple(
        FieldDefinition(
            f"f{number}", "unsigned" if number == 0 else chance.choice(TYPES), chance.random() < 0.4 and number > 0
        )
        for number in range(chance.choice((0, 1, 3, 4)))
    )
    return SpaceDefinition(id, f"t{id}", field_count=chance.choice((0, 0, 0, 5)), fields=fields)


def random_index(chance: random.Random, space_id: int, id: int) -> IndexDefinition:
    parts = []
    for _ in range(chance.choice((1, 1, 2))):
        path = chance.choice(PATHS)
        is_nullable = path in NULLABLE_PATHS if path else chance.random() < 0.4
        parts.append(IndexPart(chance.randrange(1, 5), chance.choice(PART_TYPES), is_nullable, None, path))
    return IndexDefinition(space_id, id, f"i{id}", "tree", False, tuple(parts))


def space_row(space: SpaceDefinition) -> bytes:
    fields = [
        {"name": field.name, "type": field.type, **({"is_nullable": True} if field.is_nullable else {})}
        for field in space.fields
    ]
    return pack((space.id, 1, space.name, "memtx", space.field_count, {}, tuple(fields)))


def index_row(index: IndexDefinition) -> bytes:
    parts = []
    for part in index.parts:
        known: dict[str, Any] = {"field": part.field, "type": part.type}
        if part.is_nullable:
            known["is_nullable"] = True
        if part.path:
            known["path"] = part.path
        parts.append(known)
    return pack((index.space_id, index.id, index.name, "tree", {"unique": index.unique}, tuple(parts)))


OUR_CODES = (errors.FormatMismatchIndexPart.code, errors.IndexPartTypeMismatch.code, errors.MultikeyIndexMismatch.code)


def made(space: SpaceDefinition) -> tuple[int, str]:
    try:
        TupleFormat(space)
    except errors.TarantoolError as error:
        return error.code, error.message
    return 0, ""


def defined(client: RawClient, chance: random.Random, id: int) -> SpaceDefinition:
    """Create a random space on the server; its index errors must equal ours."""
    space = random_space(chance, id)
    pk = IndexDefinition(id, 0, "pk", "tree", True, PK.parts)
    answers = client.ask([raw_client.insert(280, space_row(space)), raw_client.insert(288, index_row(pk))])
    assert not any(answer.code for answer in answers), answers
    space = msgspec.structs.replace(space, indexes=(pk,))
    for number in range(1, 4):
        index = random_index(chance, id, number)
        (answer,) = client.ask([raw_client.insert(288, index_row(index))])
        wider = msgspec.structs.replace(space, indexes=(*space.indexes, index))
        if answer.code in (0, *OUR_CODES):
            assert made(wider) == (answer.code, answer.message), wider
        if not answer.code:
            space = wider
    return space


def container_of(part: IndexPart) -> str:
    if part.path is None:
        return part.type
    return "map" if part.path.startswith("a") else "array"


def random_tuple(chance: random.Random, space: SpaceDefinition, number: int) -> bytes:
    fields = [pack(number)]
    for position in range(1, chance.choice((3, 5, 5, 5, 6))):
        types = [field.type for field in space.fields[position : position + 1]]
        parts = [part for index in space.indexes for part in index.parts if part.field == position]
        types += [container_of(part) for part in parts]
        fields.append(fitting_raw(chance, chance.choice(types)) if types else random_raw(chance))
    return bytes((0x90 | len(fields),)) + b"".join(fields)


@pytest.mark.real
def test_random_formats_accept_and_reject_the_same_tuples_as_the_real_server(
    tarantool: ModuleType, tmp_path: Path
) -> None:
    chance = random.Random(8)
    seen: dict[int, int] = {}
    with (
        tarantool.serve(tmp_path, cfg="wal_mode='none', net_msg_max=10000") as server,
        RawClient(server.port) as client,
    ):
        for id in range(512, 1512 if FULL else 632):
            space = defined(client, chance, id)
            format = TupleFormat(space)
            tuples = [random_tuple(chance, space, number) for number in range(60)]
            answers = client.ask([raw_client.insert(id, raw) for raw in tuples])
            for raw, answer in zip(tuples, answers, strict=True):
                assert refusal(format, raw) == (answer.code, answer.message), (space, raw, unpack(raw))
                seen[answer.code] = seen.get(answer.code, 0) + 1
    assert all(seen[code] > 100 for code in (0, 23, 39, 38)), seen
    assert elements_of(tuples[0])[0] == b"\x00"


def rtree(dimension: int = 2, path: str | None = None) -> IndexDefinition:
    part = IndexPart(1, "array", path=path)
    return IndexDefinition(512, 1, "place", "rtree", False, (part,), dimension=dimension)


PLACES: tuple[Any, ...] = (
    (1, 2),
    (1.5, -2),
    (4, 3, 2, 1),
    (),
    (1,),
    (1, 2, 3),
    (1, 2, 3, 4, 5, 6),
    (1, "x"),
    (None, 2),
    (1, 2, 3, True),
    (1, Decimal(2)),
    (1, (2,)),
    (1, 2**53 + 1),
    (1, 2**60),
    (-(2**53) - 1, 1),
    (1, float("nan")),
)


@pytest.mark.parametrize("dimension", [1, 2, 3])
def test_rtree_field_is_a_point_or_a_box_as_on_the_real_server(
    tarantool: ModuleType, tmp_path: Path, dimension: int
) -> None:
    setup = "local s = box.schema.space.create('t', {id = 512}) s:create_index('pk') "
    setup += "s:create_index('place', {type = 'rtree', unique = false, parts = {2, 'array'}, "
    setup += f"dimension = {dimension}}})"
    format = space(indexes=(PK, rtree(dimension)))
    tuples = [pack((number, place)) for number, place in enumerate(PLACES)]
    tuples += [pack((100, 5)), pack((101,)), pack((102, None))]
    with tarantool.serve(tmp_path, setup=setup, cfg="wal_mode='none'") as server, RawClient(server.port) as client:
        answers = client.ask([raw_client.insert(512, raw) for raw in tuples])
    assert [refusal(format, raw) for raw in tuples] == [(answer.code, answer.message) for answer in answers]
    assert 0 < sum(answer.code == 101 for answer in answers) < len(answers)


def test_rtree_finds_its_field_by_a_path() -> None:
    format = space(indexes=(PK, rtree(path="where[1]")))
    assert refusal(format, pack((1, {"where": ((1, 2),)}))) == (0, "")
    assert refusal(format, pack((1, {"where": ((1,),)}))) == (
        101,
        "RTree: Field must be an array with 2 (point) or 4 (rectangle/box) numeric coordinates",
    )


def test_space_with_an_rtree_has_no_masks() -> None:
    assert space(indexes=(PK, rtree())).masks is None
