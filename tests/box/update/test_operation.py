"""Operations of a request: parsing, and the errors found without a tuple."""

from __future__ import annotations

from typing import Any

import pytest

from flowstone.box.update.operation import OPERATIONS_MAX, Operation, WrongStep, decode_operations
from flowstone.iproto import errors
from flowstone.iproto.msgpack import pack

NAMES = ("id", "map", "a.b")


def decoded(*operation: Any, index_base: int = 1) -> Operation:
    (one,) = decode_operations((operation,), index_base=index_base, field_names=NAMES)
    return one


def test_field_may_be_a_number_a_name_or_a_path() -> None:
    assert (decoded("=", 3, 0).field, decoded("=", -3, 0).field) == (2, -3)
    assert (decoded("=", "map", 0).field, decoded("=", "map", 0).path) == (1, ())
    assert (decoded("=", "map.x[2]", 0).field, decoded("=", "map.x[2]", 0).path) == (1, ("x", 1))
    assert (decoded("=", "[5].x", 0).field, decoded("=", "[5].x", 0).path) == (4, ("x",))


def test_existing_name_is_not_parsed_as_a_path() -> None:
    assert (decoded("=", "a.b", 0).field, decoded("=", "a.b", 0).path) == (2, ())


def test_path_error_after_the_first_step_is_deferred_to_execution() -> None:
    assert decoded("=", "map.x[", 0).path == ("x", WrongStep(6))
    assert decoded("=", "map[*].y", 0).path == (WrongStep(5, is_every=True),)


def test_error_messages_name_fields_as_in_the_request_and_count_from_one() -> None:
    assert decoded("=", "map.x", 0).where == "'map.x'"
    assert decoded("=", 1, 0, index_base=0).where == "2"
    assert decoded("=", -1, 0).where == "-1"


def test_raw_operations_keep_the_bytes_of_their_values() -> None:
    (operation,) = decode_operations(b"\x91\x93\xa1=\x01\xca\x3f\x00\x00\x00")
    assert operation.value == b"\xca\x3f\x00\x00\x00"
    (operation,) = decode_operations((("=", 1, 0.5),))
    assert operation.value == pack(0.5)


def test_positive_number_encoded_as_signed_is_rejected() -> None:
    for code in "&|^#":
        with pytest.raises(errors.UpdateArgType, match="a positive integer"):
            decode_operations(b"\x91\x93\xa1" + code.encode() + b"\x01\xd0\x05")
    assert decode_operations(b"\x91\x93\xa1#\x01\xcc\x05")[0].arguments == (5,)


@pytest.mark.parametrize(
    ("operations", "error"),
    [
        ("x", errors.IllegalParams),
        (((),), errors.IllegalParams),
        ((("=",),), errors.UnknownUpdateOp),
        ((("==", 1, 1),), errors.UnknownUpdateOp),
        (((1, 1, 1),), errors.IllegalParams),
        ((("=", None, 1),), errors.IllegalParams),
        ((("=", 0, 1),), errors.NoSuchFieldNo),
        ((("=", 2**31, 1),), errors.UpdateArgType),
        ((("=", "nobody", 1),), errors.NoSuchFieldName),
        ((("=", "[", 1),), errors.UpdateField),
        ((("=", "", 1),), errors.NoSuchFieldName),
        ((("+", 1, "1"),), errors.UpdateArgType),
        ((("#", 1, -1),), errors.UpdateArgType),
        (((":", 1, 1, 1, 1),), errors.UpdateArgType),
        (((":", 1, 1.0, 1, "x"),), errors.UpdateArgType),
        (((":", 1, 1, "1", "x"),), errors.UpdateArgType),
        ((("=", 1, 1),) * (OPERATIONS_MAX + 1), errors.IllegalParams),
    ],
)
def test_invalid_operations_are_rejected_before_a_tuple_is_read(operations: Any, error: type[Exception]) -> None:
    for form in (operations, pack(operations)):
        with pytest.raises(error):
            decode_operations(form, index_base=1, field_names=NAMES)


@pytest.mark.parametrize(("field", "index_base", "number"), [(5, 1, 4), (-3, -5, 2), (-7, -5, -7), (0, -3, 3)])
def test_field_numbers_count_from_the_index_base(field: int, index_base: int, number: int) -> None:
    assert decoded("=", field, 0, index_base=index_base).field == number


@pytest.mark.parametrize(("field", "index_base"), [(0, 1), (0, -(1 << 31)), ((1 << 31) - 1, -1)])
def test_field_before_the_index_base_or_past_32_bits_is_rejected(field: int, index_base: int) -> None:
    with pytest.raises(errors.NoSuchFieldNo):
        decoded("=", field, 0, index_base=index_base)
