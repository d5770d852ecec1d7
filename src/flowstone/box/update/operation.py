"""Decodes update operations of a request, checks what can be checked without a tuple, and builds their errors.

The error texts are the server's. A path is parsed up to its first invalid step (`WrongStep`). The server parses a path
while it descends into the tuple, so a syntax error late in a path is an error of applying the operation, not of
decoding the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

import msgspec

from flowstone.box.engine.field_types import KIND_UINT, elements_of, kind_at
from flowstone.box.engine.paths import EVERY, PathError, Step, parse_step
from flowstone.iproto import errors
from flowstone.iproto.msgpack import pack, unpack

OPERATIONS_MAX: Final = 4000
"""BOX_UPDATE_OP_CNT_MAX of the server."""

INDEX_BASE_OF_TEXT: Final = 1
"""Positions in paths and in error messages count from 1, regardless of the request's INDEX_BASE."""

ARGUMENTS: Final = {"=": 1, "!": 1, "+": 1, "-": 1, "&": 1, "|": 1, "^": 1, "#": 1, ":": 3}
_CHANGED_TWICE: Final = "double update of the same field"
_INT32: Final = range(-(1 << 31), 1 << 31)
_UINT32_MAX: Final = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class WrongStep:
    """The position, from 1, at which a path becomes invalid, or has `[*]`, which operations cannot use."""

    position: int
    is_every: bool = False


UpdateStep = Step | WrongStep


class Operation(msgspec.Struct, frozen=True):
    """One decoded operation. `field` counts from 0, or from the end if negative; `path` leads from there into it."""

    code: str
    field: int
    arguments: tuple[Any, ...]
    path: tuple[UpdateStep, ...] = ()
    text: str = ""
    """The name or path of the field in the request; empty if the request used a number."""
    value: bytes = b""
    """The MessagePack value that `=` or `!` writes."""

    @property
    def where(self) -> str:
        """The name of the field in error messages."""
        if self.text:
            return f"'{self.text}'"
        return str(self.field + INDEX_BASE_OF_TEXT if self.field >= 0 else self.field)


def decode_operations(
    operations: object, *, index_base: int = 0, field_names: Sequence[str] = ()
) -> tuple[Operation, ...]:
    """Decode the operations of a request, given as MessagePack or already decoded.

    With MessagePack, values keep the encoding of the request. `index_base` is the request's INDEX_BASE; `field_names`
    are the names in the space format.
    """
    raws: Sequence[bytes] | None = None
    if isinstance(operations, bytes):
        raw, operations = operations, unpack(operations)
        if isinstance(operations, tuple) and pack(operations) != raw:
            raws = elements_of(raw)
    if not isinstance(operations, tuple):
        raise errors.IllegalParams("Illegal parameters, update operations must be an array {{op,..}, {op,..}}")
    if len(operations) > OPERATIONS_MAX:
        raise errors.IllegalParams("Illegal parameters, too many operations for update")
    return tuple(
        [
            _decode(number, operation, raws[number - 1] if raws is not None else None, index_base, field_names)
            for number, operation in enumerate(operations, 1)
        ]
    )


def _decode(
    number: int, operation: object, raw: bytes | None, index_base: int, field_names: Sequence[str]
) -> Operation:
    if not isinstance(operation, tuple):
        raise errors.IllegalParams("Illegal parameters, update operation must be an array {op,..}")
    if not operation:
        raise errors.IllegalParams("Illegal parameters, update operation must be an array {op,..}, got empty array")
    code = operation[0]
    if not isinstance(code, str):
        raise errors.IllegalParams("Illegal parameters, update operation name must be a string")
    if code not in ARGUMENTS:
        raise errors.UnknownUpdateOp(f'Unknown UPDATE operation #{number}: "{code}"')
    expected = ARGUMENTS[code] + 2
    if len(operation) != expected:
        raise errors.UnknownUpdateOp(
            f"Unknown UPDATE operation #{number}: wrong number of arguments, expected {expected}, got {len(operation)}"
        )
    field, path, text = _decode_field(code, operation[1], index_base, field_names)
    if code in "=!":
        value = pack(operation[2]) if raw is None else elements_of(raw)[2]
        return Operation(code, field, operation[2:], path, text, value)
    decoded = Operation(code, field, operation[2:], path, text)
    if raw is not None and code in "&|^#" and kind_at(elements_of(raw)[2], 0) != KIND_UINT:
        raise wrong_type(decoded, "a positive integer")
    arguments = _decode_arguments(decoded, index_base)
    return decoded if arguments is decoded.arguments else msgspec.structs.replace(decoded, arguments=arguments)


def _decode_field(
    code: str, field: object, index_base: int, field_names: Sequence[str]
) -> tuple[int, tuple[UpdateStep, ...], str]:
    if type(field) is int:
        if field not in _INT32:
            raise wrong_type(Operation(code, 0, ()), "an integer")
        number = (field - index_base + _INT32.stop) % (2 * _INT32.stop) - _INT32.stop  # in 32 bits, as servers compute
        if number < 0 <= field:
            raise errors.NoSuchFieldNo(f"Field {field} was not found in the tuple")
        return (number if number >= 0 else field), (), ""
    if not isinstance(field, str):
        raise errors.IllegalParams("Illegal parameters, field id must be a number or a string")
    if field in field_names:
        return field_names.index(field), (), field
    steps = _parse(field)
    first = steps[0] if steps else None
    if isinstance(first, WrongStep) and not first.is_every:
        raise wrong_path(Operation(code, 0, (), (), field), first)
    if isinstance(first, str) and first in field_names:
        first = field_names.index(first)
    if not isinstance(first, int):
        raise errors.NoSuchFieldName(f"Field '{field}' was not found in the tuple")
    return first, steps[1:], field


def _parse(path: str) -> tuple[UpdateStep, ...]:
    steps: list[UpdateStep] = []
    at = 0
    while at < len(path):
        try:
            step, at = parse_step(path, at)
        except PathError as error:
            return (*steps, WrongStep(error.position))
        if step is EVERY:
            return (*steps, WrongStep(at - 1, is_every=True))
        steps.append(step)
    return tuple(steps)


def _decode_arguments(operation: Operation, index_base: int) -> tuple[Any, ...]:
    first = operation.arguments[0]
    match operation.code:
        case "+" | "-" if not is_number(first):
            raise wrong_type(operation, "a number")
        case "&" | "|" | "^" | "#" if type(first) is not int or first < 0:
            raise wrong_type(operation, "a positive integer")
        case "#":
            if not first & _UINT32_MAX:
                raise failed(operation, "cannot delete 0 fields")
            return (first & _UINT32_MAX,)
        case ":":
            return _decode_splice(operation, index_base)
    return operation.arguments


def _decode_splice(operation: Operation, index_base: int) -> tuple[int, int, bytes]:
    offset, cut, paste = operation.arguments
    if type(offset) is not int or offset not in _INT32:
        raise wrong_type(operation, "an integer")
    if offset >= 0:
        offset -= index_base
        if offset < 0:
            raise out_of_bound(operation)
    if type(cut) is not int or cut not in _INT32:
        raise wrong_type(operation, "an integer")
    if not isinstance(paste, str):
        raise wrong_type(operation, "a string")
    return offset, cut, paste.encode("utf-8", "surrogateescape")


def is_number(value: object) -> bool:
    return type(value) is int or isinstance(value, float | Decimal)


def wrong_type(operation: Operation, needed: str) -> errors.TarantoolError:
    return errors.UpdateArgType(
        f"Argument type in operation '{operation.code}' on field {operation.where}"
        f" does not match field type: expected {needed}"
    )


def failed(operation: Operation, what: str) -> errors.TarantoolError:
    return errors.UpdateField(f"Field {operation.where} UPDATE error: {what}")


def wrong_path(operation: Operation, step: WrongStep) -> errors.TarantoolError:
    return failed(operation, f"invalid JSON in position {step.position}")


def changed_twice(operation: Operation) -> errors.TarantoolError:
    return failed(operation, _CHANGED_TWICE)


def is_changed_twice(error: errors.TarantoolError) -> bool:
    return error.code == errors.UpdateField.code and error.message.endswith(_CHANGED_TWICE)


def out_of_bound(operation: Operation) -> errors.TarantoolError:
    return errors.UpdateSplice(f"SPLICE error on field {operation.where}: offset is out of bound")


def no_such_field(operation: Operation) -> errors.TarantoolError:
    if operation.text:
        # Quoted twice, as the server does.
        return errors.NoSuchFieldName(f"Field '{operation.where}' was not found in the tuple")
    return errors.NoSuchFieldNo(f"Field {operation.where} was not found in the tuple")
