"""Update operations: what UPDATE and UPSERT do to a tuple.

Pure functions on decoded tuples, with the semantics and the error codes of the real server. An operation is
checked when it is decoded (`decode_operations`) and once more against the tuple it meets. Who holds the tuple,
its format and its keys is the caller's business, and so is how floats are encoded again.
"""

from __future__ import annotations

import decimal
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, Final

import msgspec

from flowstone.iproto import errors

OPERATIONS_MAX: Final = 4000
"""BOX_UPDATE_OP_CNT_MAX of the server."""

INDEX_BASE_OF_TEXT: Final = 1
"""Positions count from 1 in paths and in messages, whatever base the request has."""

_ARGUMENTS: Final = {"=": 1, "!": 1, "+": 1, "-": 1, "&": 1, "|": 1, "^": 1, "#": 1, ":": 3}
_INT64_MIN: Final = -(1 << 63)
_UINT64_MAX: Final = (1 << 64) - 1
_INT32: Final = range(-(1 << 31), 1 << 31)
_TOKEN = re.compile(r"""\[(\d+)\]|\[(["'])(.*?)\2\]|(?:\.|^)([^\W\d]\w*)""")
_DECIMAL_PROBLEMS: Final = (decimal.InvalidOperation, decimal.Overflow, decimal.DivisionByZero)

Token = int | str
"""A step into a document: a position from 0 in an array, or a key of a map."""


class Operation(msgspec.Struct, frozen=True):
    """One decoded operation. `field` counts from 0, or from the end if negative; `path` leads on from there."""

    code: str
    field: int
    arguments: tuple[Any, ...]
    path: tuple[Token, ...] = ()
    text: str = ""
    """The name or path that the request used for the field, if it was one."""

    @property
    def where(self) -> str:
        """The field as messages name it."""
        if self.text:
            return f"'{self.text}'"
        return str(self.field + INDEX_BASE_OF_TEXT if self.field >= 0 else self.field)


def decode_operations(
    operations: object, *, index_base: int = 0, field_names: Sequence[str] = ()
) -> tuple[Operation, ...]:
    """The operations of a request, checked as far as that needs no tuple.

    `operations` is what the request holds, decoded; `index_base` its INDEX_BASE; `field_names` the format's.
    """
    if not isinstance(operations, tuple):
        raise errors.IllegalParams("Illegal parameters, update operations must be an array {{op,..}, {op,..}}")
    if len(operations) > OPERATIONS_MAX:
        raise errors.IllegalParams("Illegal parameters, too many operations for update")
    return tuple(_decode(number, operation, index_base, field_names) for number, operation in enumerate(operations, 1))


def update(values: tuple[Any, ...], operations: Sequence[Operation]) -> tuple[Any, ...]:
    """`values` after all operations, left to right; the first that fails is the error."""
    fields = [_Field(value) for value in values]
    for operation in operations:
        _apply(fields, operation)
    return tuple(field.value for field in fields)


def upsert(values: tuple[Any, ...], operations: Sequence[Operation]) -> tuple[Any, ...]:
    """As `update`, but an operation that fails is left out, as the server does for a tuple it finds."""
    fields = [_Field(value) for value in values]
    for operation in operations:
        try:
            _apply(fields, operation)
        except errors.TarantoolError:
            continue
    return tuple(field.value for field in fields)


def _decode(number: int, operation: object, index_base: int, field_names: Sequence[str]) -> Operation:
    if not isinstance(operation, tuple):
        raise errors.IllegalParams("Illegal parameters, update operation must be an array {op,..}")
    if not operation:
        raise errors.IllegalParams("Illegal parameters, update operation must be an array {op,..}, got empty array")
    code = operation[0]
    if not isinstance(code, str):
        raise errors.IllegalParams("Illegal parameters, update operation name must be a string")
    if code not in _ARGUMENTS:
        raise errors.UnknownUpdateOp(f'Unknown UPDATE operation #{number}: "{code}"')
    expected = _ARGUMENTS[code] + 2
    if len(operation) != expected:
        raise errors.UnknownUpdateOp(
            f"Unknown UPDATE operation #{number}: wrong number of arguments, expected {expected}, got {len(operation)}"
        )
    field, path, text = _decode_field(code, operation[1], index_base, field_names)
    decoded = Operation(code, field, operation[2:], path, text)
    return msgspec.structs.replace(decoded, arguments=_decode_arguments(decoded, index_base))


def _decode_field(
    code: str, field: object, index_base: int, field_names: Sequence[str]
) -> tuple[int, tuple[Token, ...], str]:
    if type(field) is int:
        if field not in _INT32:
            raise _wrong_type(Operation(code, 0, ()), "an integer")
        if 0 <= field < index_base:
            raise errors.NoSuchFieldNo(f"Field {field} was not found in the tuple")
        return (field - index_base if field >= 0 else field), (), ""
    if not isinstance(field, str):
        raise errors.IllegalParams("Illegal parameters, field id must be a number or a string")
    if field in field_names:
        return field_names.index(field), (), field
    first, *path = _parse_path(field)
    if isinstance(first, str):
        if first not in field_names:
            raise errors.NoSuchFieldName(f"Field '{field}' was not found in the tuple")
        first = field_names.index(first)
    return first, tuple(path), field


def _parse_path(path: str) -> list[Token]:
    """The steps of a JSON path: `name`, `.name`, `["name"]`, `[1]`."""
    tokens: list[Token] = []
    at = 0
    while at < len(path):
        match = _TOKEN.match(path, at)
        if match is None or match[1] == "0":
            problem = f"invalid JSON on position {at + INDEX_BASE_OF_TEXT}"
            raise errors.UpdateField(f"Field '{path}' UPDATE error: {problem}")
        at = match.end()
        tokens.append(int(match[1]) - INDEX_BASE_OF_TEXT if match[1] else match[3] or match[4])
    if not tokens:
        raise errors.NoSuchFieldName(f"Field '{path}' was not found in the tuple")
    return tokens


def _decode_arguments(operation: Operation, index_base: int) -> tuple[Any, ...]:
    first = operation.arguments[0]
    match operation.code:
        case "+" | "-" if not _is_number(first):
            raise _wrong_type(operation, "a number")
        case "&" | "|" | "^" if type(first) is not int or first < 0:
            raise _wrong_type(operation, "a positive integer")
        case "#":
            if type(first) is not int or first < 0:
                raise _wrong_type(operation, "a positive integer")
            if not first & 0xFFFFFFFF:
                raise _error(operation, "cannot delete 0 fields")
        case ":":
            return _decode_splice(operation, index_base)
    return operation.arguments


def _decode_splice(operation: Operation, index_base: int) -> tuple[int, int, bytes]:
    offset, cut, paste = operation.arguments
    if type(offset) is not int or offset not in _INT32:
        raise _wrong_type(operation, "an integer")
    if offset >= 0:
        offset -= index_base
        if offset < 0:
            raise _out_of_bound(operation)
    if type(cut) is not int or cut not in _INT32:
        raise _wrong_type(operation, "an integer")
    if not isinstance(paste, str):
        raise _wrong_type(operation, "a string")
    return offset, cut, _bytes(paste)


class _Field:
    """A field on its way through the operations, and how it was changed.

    A second arithmetic, bitwise or splice operation on what another one has written is an error, though not on
    what `!` inserted; `=` always overrides.
    """

    __slots__ = ("is_written", "paths", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.is_written = False
        self.paths: list[tuple[Token, ...]] = []


def _apply(fields: list[_Field], operation: Operation) -> None:
    inserts = not operation.path and (
        operation.code == "!" or (operation.code == "=" and operation.field == len(fields))
    )
    operation = _located(operation, len(fields) + inserts)
    at = operation.field
    if inserts:
        fields.insert(at, _Field(operation.arguments[0]))
    elif operation.path:
        _apply_inside(fields[at], operation)
    elif operation.code == "#":
        del fields[at : at + (operation.arguments[0] & 0xFFFFFFFF)]
    elif operation.code == "=":
        fields[at].value = operation.arguments[0]
        fields[at].is_written = True
    else:
        if fields[at].is_written or fields[at].paths:
            raise _twice(operation)
        fields[at].value = _scalar(operation, fields[at].value)
        fields[at].is_written = True


def _located(operation: Operation, count: int) -> Operation:
    """`operation` with its field counted from the start, of `count` fields."""
    at = operation.field if operation.field >= 0 else operation.field + count
    if not 0 <= at < count:
        raise _no_such_field(operation)
    return operation if at == operation.field else msgspec.structs.replace(operation, field=at)


def _apply_inside(field: _Field, operation: Operation) -> None:
    if field.is_written or (operation.code not in "!#" and operation.path in field.paths):
        raise _twice(operation)
    field.value = _changed(field.value, operation, operation.path)
    field.paths.append(operation.path)


def _changed(document: Any, operation: Operation, path: tuple[Token, ...]) -> Any:
    """A copy of `document` in which `operation` was done at `path`; what is off the path is shared."""
    step, rest = path[0], path[1:]
    if isinstance(document, tuple) and isinstance(step, int):
        if not rest:
            return _changed_array(document, operation, step)
        if step >= len(document):
            raise _no_such_field(operation)
        return (*document[:step], _changed(document[step], operation, rest), *document[step + 1 :])
    if isinstance(document, dict) and isinstance(step, str):
        if not rest:
            return _changed_map(document, operation, step)
        if step not in document:
            raise _no_such_field(operation)
        return {**document, step: _changed(document[step], operation, rest)}
    if not rest and operation.code in "=!":
        kind = "index a non-array" if isinstance(step, int) else "key a non-map"
        raise _error(operation, f"can not access by {kind} field")
    raise _no_such_field(operation)


def _changed_array(array: tuple[Any, ...], operation: Operation, at: int) -> tuple[Any, ...]:
    inserts = operation.code == "!" or (operation.code == "=" and at == len(array))
    if at >= len(array) + inserts:
        raise _no_such_field(operation)
    if inserts:
        return (*array[:at], operation.arguments[0], *array[at:])
    if operation.code == "#":
        return array[:at] + array[at + operation.arguments[0] :]
    value = operation.arguments[0] if operation.code == "=" else _scalar(operation, array[at])
    return (*array[:at], value, *array[at + 1 :])


def _changed_map(document: dict[Any, Any], operation: Operation, key: str) -> dict[Any, Any]:
    if operation.code == "!" and key in document:
        raise _error(operation, "the key exists already")
    if key not in document:
        if operation.code not in "=!":
            raise _no_such_field(operation)
        # The server, too, puts a new key first.
        return {key: operation.arguments[0], **document}
    if operation.code == "=":
        return {**document, key: operation.arguments[0]}
    if operation.code == "#":
        if operation.arguments[0] != 1:
            raise _error(operation, "can delete only 1 field from a map in a row")
        return {other: value for other, value in document.items() if other != key}
    return {**document, key: _scalar(operation, document[key])}


def _scalar(operation: Operation, value: Any) -> Any:
    return _SCALAR[operation.code](operation, value)


def _arithmetic(operation: Operation, left: Any) -> int | float | Decimal:
    right = operation.arguments[0]
    if not _is_number(left):
        raise _wrong_type(operation, "a number")
    if type(left) is int and type(right) is int:
        integer = left + right if operation.code == "+" else left - right
        if not _INT64_MIN <= integer <= _UINT64_MAX:
            raise errors.UpdateIntegerOverflow(
                f"Integer overflow when performing '{operation.code}' operation on field {operation.where}"
            )
        return integer
    if isinstance(left, Decimal) or isinstance(right, Decimal):
        return _decimal_arithmetic(operation, left, right)
    return float(left) + float(right) if operation.code == "+" else float(left) - float(right)


def _decimal_arithmetic(operation: Operation, left: Any, right: Any) -> Decimal:
    # The server's decNumber context: 38 digits, of which up to 38 may stand behind the point.
    context = decimal.Context(
        prec=38, rounding=decimal.ROUND_HALF_UP, Emin=-1, Emax=37, capitals=1, clamp=0, flags=[], traps=[]
    )
    first, second = _to_decimal(left, context), _to_decimal(right, context)
    if any(context.flags[problem] for problem in _DECIMAL_PROBLEMS):
        raise _wrong_type(operation, "a number convertible to decimal")
    result = context.add(first, second) if operation.code == "+" else context.subtract(first, second)
    if any(context.flags[problem] for problem in _DECIMAL_PROBLEMS):
        raise errors.UpdateDecimalOverflow(
            f"Decimal overflow when performing operation '{operation.code}' on field {operation.where}"
        )
    return result


def _to_decimal(value: float | Decimal, context: decimal.Context) -> Decimal:
    if isinstance(value, float):
        # 15 digits are what a double guarantees; the server converts by way of this text too.
        text = f"{value:.15g}"
        number = context.create_decimal(text)
        if not number.is_finite():
            context.flags[decimal.InvalidOperation] = True
        return number
    return Decimal(value)


def _bitwise(operation: Operation, left: Any) -> int:
    right: int = operation.arguments[0]
    if type(left) is not int or left < 0:
        raise _wrong_type(operation, "a positive integer")
    if operation.code == "&":
        return left & right
    return left | right if operation.code == "|" else left ^ right


def _splice(operation: Operation, value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong_type(operation, "a string")
    # Offsets count bytes, and may cut a character in two.
    old = _bytes(value)
    offset, cut, paste = operation.arguments
    if offset < 0:
        offset += len(old) + 1
        if offset < 0:
            raise _out_of_bound(operation)
    offset = min(offset, len(old))
    end = offset + cut if cut >= 0 else max(offset, len(old) + cut)
    if cut < 0 and -cut > len(old) - offset:
        end = offset
    spliced: bytes = old[:offset] + paste + old[end:]
    return spliced.decode("utf-8", "surrogateescape")


_SCALAR: Final[dict[str, Callable[[Operation, Any], Any]]] = {
    "+": _arithmetic,
    "-": _arithmetic,
    "&": _bitwise,
    "|": _bitwise,
    "^": _bitwise,
    ":": _splice,
}


def _is_number(value: object) -> bool:
    return type(value) is int or isinstance(value, float | Decimal)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _wrong_type(operation: Operation, needed: str) -> errors.TarantoolError:
    return errors.UpdateArgType(
        f"Argument type in operation '{operation.code}' on field {operation.where}"
        f" does not match field type: expected {needed}"
    )


def _error(operation: Operation, what: str) -> errors.TarantoolError:
    return errors.UpdateField(f"Field {operation.where} UPDATE error: {what}")


def _twice(operation: Operation) -> errors.TarantoolError:
    return _error(operation, "double update of the same field")


def _out_of_bound(operation: Operation) -> errors.TarantoolError:
    return errors.UpdateSplice(f"SPLICE error on field {operation.where}: offset is out of bound")


def _no_such_field(operation: Operation) -> errors.TarantoolError:
    message = f"Field {operation.where} was not found in the tuple"
    return errors.NoSuchFieldName(message) if operation.text else errors.NoSuchFieldNo(message)
