"""Masks of fields: their results, and their errors."""

from __future__ import annotations

import hashlib
import hmac
import pickle
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.box.definitions import FieldDefinition, IndexDefinition, IndexPart, SpaceDefinition
from flowstone.iproto.msgpack import pack, unpack
from flowstone.lake.masks import REDACTED, Mask, Masking, WrongMask, parse_mask

USERS = SpaceDefinition(
    512,
    "users",
    fields=(
        FieldDefinition("id", "unsigned"),
        FieldDefinition("email", "string"),
        FieldDefinition("age", "unsigned"),
        FieldDefinition("note", "any"),
    ),
    indexes=(IndexDefinition(512, 0, "pk", "tree", True, (IndexPart(0, "unsigned"),)),),
)


def masked(values: list[Any], *masks: str, salt: str | None = None) -> list[Any]:
    mask = Masking.parse(masks, salt).of(USERS)
    assert mask is not None
    tuples = pa.array([None if value is None else pack(value) for value in values], pa.binary())
    return [None if value is None else unpack(value) for value in mask.tuples(tuples).to_pylist()]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_digest_is_that_of_the_plain_text() -> None:
    values = [(1, "a@x", 30, {"k": [1, 2]}), (2, "ü", 31, b"\x00\xff"), None, (3, None), (4,)]
    assert masked(values, "users.email=sha256", "users.note=sha256") == [
        (1, sha256(b"a@x"), 30, sha256(b'{"k":[1,2]}')),
        (2, sha256("ü".encode()), 31, sha256(b"\x00\xff")),
        None,
        (3, None),
        (4,),
    ]


def test_salted_hash_is_an_hmac() -> None:
    ((_, email, _),) = masked([(1, "a@x", 5)], "users.email=sha256", salt="pepper")
    assert email == hmac.new(b"pepper", b"a@x", hashlib.sha256).hexdigest()


def test_null_and_redact_remove_the_value() -> None:
    values = [(1, "a@x", 30, "n", "extra"), (2, "b@x", None)]
    assert masked(values, "users.email=redact", "users.age=null") == [
        (1, REDACTED, None, "n", "extra"),
        (2, REDACTED, None),
    ]


value = st.one_of(st.none(), st.integers(-5, 2**64 - 1), st.text(max_size=300), st.binary(max_size=300), st.booleans())


@given(st.lists(st.lists(value, min_size=1, max_size=6)), st.integers(0, 3))
def test_other_fields_are_unchanged(rows: list[list[Any]], skipped: int) -> None:
    mask = Masking.parse(["users.email=null", "users.note=sha256"]).of(USERS)
    assert mask is not None
    array = pa.array([pack(tuple(row)) for row in rows], pa.binary())[skipped:]
    for before, after in zip(rows[skipped:], mask.tuples(array).to_pylist(), strict=True):
        left = list(unpack(after))
        assert len(left) == len(before)
        assert [each for at, each in enumerate(left) if at not in (1, 3)] == [
            each for at, each in enumerate(before) if at not in (1, 3)
        ]
        assert left[1:2] in ([], [None])


def test_definition_has_the_types_of_masked_tuples() -> None:
    mask = Masking.parse(["users.age=sha256", "users.email=null"]).of(USERS)
    assert mask is not None
    fields = mask.definition(USERS).fields
    assert [(field.type, field.is_nullable) for field in fields] == [
        ("unsigned", False),
        ("string", True),
        ("string", True),
        ("any", False),
    ]


def test_masks_can_be_pickled() -> None:
    mask = Masking.parse(["users.email=sha256"], "s").of(USERS)
    assert pickle.loads(pickle.dumps(mask)) == mask


def test_space_name_ends_at_the_last_dot() -> None:
    assert parse_mask("shop.users.email=null") == Mask("shop.users", "email", "null")


def test_other_spaces_are_not_masked() -> None:
    assert Masking.parse(["people.email=null"]).of(USERS) is None
    assert Masking().of(USERS) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("email=sha256", "invalid mask 'email=sha256'; use SPACE.FIELD=KIND"),
        ("users.email", "invalid mask"),
        (".email=null", "invalid mask"),
        ("users.email=sha265", "unknown kind of mask 'sha265'; sha256?"),
        ("users.email=zzz", "known kinds: sha256, null, redact"),
    ],
)
def test_invalid_masks_are_rejected(text: str, message: str) -> None:
    with pytest.raises(WrongMask, match="mask") as caught:
        Masking.parse([text])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [("users.emial=null", "has no field 'emial' to mask"), ("users.id=sha256", "part of its primary key")],
)
def test_masks_that_cannot_be_applied_are_rejected(text: str, message: str) -> None:
    with pytest.raises(WrongMask, match=message):
        Masking.parse([text]).of(USERS)


def renamed(*names: str, space: str = "users") -> SpaceDefinition:
    fields = tuple(FieldDefinition(name, "any") for name in names)
    return SpaceDefinition(512, space, fields=fields, indexes=USERS.indexes)


@pytest.mark.parametrize(
    ("now", "message"),
    [
        (
            renamed("id", "mail", "age", "email"),
            "would apply to different fields: field 2 was 'email' and is now 'mail'",
        ),
        (renamed("id", "age", "email", "note"), "field 2 was 'email' and is now 'age'"),
        (renamed("id", "x", "y", "z", "email"), "field 2 was 'email' and is now 'x'"),
        (renamed("id", "mail", "age", "note"), "has no field 'email' to mask"),
        (
            renamed("id", "email", "age", "note", space="people"),
            "was renamed to 'people', and --mask names only one of these",
        ),
    ],
)
def test_mask_stays_with_its_field(now: SpaceDefinition, message: str) -> None:
    masking = Masking.parse(["users.email=sha256"])
    with pytest.raises(WrongMask, match=message):
        masking.follow(USERS, now)
    with pytest.raises(WrongMask):
        masking.follow(now, USERS)


def test_unmasked_fields_can_be_altered() -> None:
    now = renamed("id", "email", "years", "note", "more")
    Masking.parse(["users.email=sha256"]).follow(USERS, now)
    Masking.parse(["users.email=null", "users.age=null"]).follow(USERS, renamed("id", "age", "email", "note"))
    Masking.parse(["people.email=null"]).follow(USERS, now)
    Masking().follow(USERS, renamed("id", "age", "email", "note", space="people"))
    # Both fields are hidden, but each mask prevents the other.
    with pytest.raises(WrongMask, match="would apply to different fields"):
        Masking.parse(["users.email=null", "users.age=redact"]).follow(USERS, renamed("id", "age", "email", "note"))


def test_second_mask_of_a_field_is_rejected() -> None:
    with pytest.raises(WrongMask, match="masked twice"):
        Masking.parse(["users.email=null", "users.email=sha256"])


def test_fingerprint_depends_on_masks_and_salt() -> None:
    texts = ["users.email=null", "users.age=sha256"]
    same = {Masking.parse(texts).fingerprint, Masking.parse(texts[::-1]).fingerprint}
    others = {Masking.parse(texts[:1]).fingerprint, Masking.parse(texts, "s").fingerprint, Masking().fingerprint}
    assert len(same) == 1
    assert len(same | others) == 4


def test_numbers_of_any_size_have_digests() -> None:
    assert masked([(1, 2**64 - 1), (2, Decimal("1.50"))], "users.email=sha256") == [
        (1, sha256(b"18446744073709551615")),
        (2, sha256(b"1.50")),
    ]
