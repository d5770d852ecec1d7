"""Field types of formats and index parts: which MessagePack kinds each accepts, and which type contains which.

A kind is what the first bytes of a value tell: `kind_at` reads it off raw MessagePack, where a float differs from a
double and a number written as signed from one written as unsigned, as the server's type checks have it. `PYTHON_TYPES`
says the same of decoded values, as far as these still show it.
"""

from __future__ import annotations

import uuid
from decimal import Decimal
from types import NoneType
from typing import Final

import msgpack
import numpy as np

from flowstone.box.dialect import Dialect
from flowstone.iproto.extensions import Datetime, ErrorStack, Extension, ExtensionType, Interval
from flowstone.iproto.scan import CHILDREN, FIXED, LENGTH, skip_value

Class = type
"""`type` is what fields have, too."""

KIND_NIL: Final = 1
KIND_UINT: Final = 2
KIND_INT: Final = 4  # a negative number, or any that was written as signed
KIND_STR: Final = 8
KIND_BIN: Final = 16
KIND_ARRAY: Final = 32
KIND_MAP: Final = 64
KIND_BOOL: Final = 128
KIND_FLOAT: Final = 256
KIND_DOUBLE: Final = 512
KIND_DECIMAL: Final = 1024
KIND_UUID: Final = 2048
KIND_DATETIME: Final = 4096
KIND_EXT: Final = 8192  # other extensions
KIND_ALL: Final = 16383

_INTEGER: Final = KIND_UINT | KIND_INT
_NUMBER: Final = _INTEGER | KIND_FLOAT | KIND_DOUBLE | KIND_DECIMAL
_SCALAR: Final = _NUMBER | KIND_BOOL | KIND_STR | KIND_BIN | KIND_UUID | KIND_DATETIME

ACCEPTS: Final[dict[str, int]] = {
    "any": KIND_ALL,
    "unsigned": KIND_UINT,
    "string": KIND_STR,
    "number": _NUMBER,
    "double": KIND_DOUBLE,
    "integer": _INTEGER,
    "boolean": KIND_BOOL,
    "varbinary": KIND_BIN,
    "scalar": _SCALAR,
    "decimal": KIND_DECIMAL,
    "uuid": KIND_UUID,
    "datetime": KIND_DATETIME,
    "interval": KIND_EXT,
    "array": KIND_ARRAY,
    "map": KIND_MAP,
}
"""The kinds that a field of a type takes. nil is added where the field is nullable; `any` takes it in any case."""

_NUMBERS: Final = (int, float, Decimal)
_SCALARS: Final = (bool, *_NUMBERS, str, bytes, uuid.UUID, Datetime)

PYTHON_TYPES: Final[dict[str, frozenset[type]]] = {
    "any": frozenset(
        (NoneType, *_SCALARS, tuple, dict, Interval, ErrorStack, Extension, msgpack.Timestamp),
    ),
    "unsigned": frozenset((int,)),
    "string": frozenset((str,)),
    "number": frozenset(_NUMBERS),
    "double": frozenset((float,)),
    "integer": frozenset((int,)),
    "boolean": frozenset((bool,)),
    "varbinary": frozenset((bytes,)),
    "scalar": frozenset(_SCALARS),
    "decimal": frozenset((Decimal,)),
    "uuid": frozenset((uuid.UUID,)),
    "datetime": frozenset((Datetime,)),
    "interval": frozenset((Interval,)),
    "array": frozenset((tuple,)),
    "map": frozenset((dict,)),
}
"""The classes of decoded values that a field of a type takes. An unsigned one must not be negative, besides."""

_DIFFERING: Final[dict[tuple[str, Dialect], tuple[int, frozenset[type]]]] = {
    # Before 2.7 a server stops at a row with a UUID in a scalar; it has no datetime at all.
    ("scalar", Dialect.V2_6): (
        _SCALAR & ~(KIND_UUID | KIND_DATETIME),
        frozenset(_SCALARS) - {uuid.UUID, Datetime},
    ),
    # Since 2.11 it is compared as a number is.
    ("double", Dialect.V2_11): (_INTEGER | KIND_FLOAT | KIND_DOUBLE, frozenset((int, float))),
}
"""What a type accepts in one of the dialects, as kinds and as classes."""


def accepted_kinds(type: str, dialect: Dialect) -> int:
    differing = _DIFFERING.get((type, dialect))
    return ACCEPTS[type] if differing is None else differing[0]


def accepted_classes(type: str, dialect: Dialect) -> frozenset[Class]:
    """Of decoded values; none for a type that is not known."""
    differing = _DIFFERING.get((type, dialect))
    return PYTHON_TYPES.get(type, frozenset()) if differing is None else differing[1]


_WIDER: Final[dict[str, tuple[str, ...]]] = {
    "unsigned": ("integer", "number", "scalar"),
    "integer": ("number", "scalar"),
    "double": ("number", "scalar"),
    "decimal": ("number", "scalar"),
    "number": ("scalar",),
    "boolean": ("scalar",),
    "string": ("scalar",),
    "varbinary": ("scalar",),
    "datetime": ("scalar",),
}


def contains(outer: str, inner: str, dialect: Dialect = Dialect.V2_11) -> bool:
    """True where a field of type `outer` may hold all values of type `inner`."""
    if inner == "uuid" and outer == "scalar":
        return dialect is Dialect.V2_11
    return outer in ("any", inner) or outer in _WIDER.get(inner, ())


_EXTENSIONS: Final = {
    ExtensionType.DECIMAL.value: KIND_DECIMAL,
    ExtensionType.UUID.value: KIND_UUID,
    ExtensionType.DATETIME.value: KIND_DATETIME,
}


def _kinds() -> tuple[int, ...]:
    """The kind by first byte; 0 for extensions, whose code follows later."""
    kinds = [KIND_UINT] * 0x80 + [KIND_MAP] * 0x10 + [KIND_ARRAY] * 0x10 + [KIND_STR] * 0x20
    kinds += [KIND_NIL, 0, KIND_BOOL, KIND_BOOL] + [KIND_BIN] * 3 + [0] * 3 + [KIND_FLOAT, KIND_DOUBLE]
    kinds += [KIND_UINT] * 4 + [KIND_INT] * 4 + [0] * 5 + [KIND_STR] * 3 + [KIND_ARRAY] * 2 + [KIND_MAP] * 2
    return (*kinds, *[KIND_INT] * 0x20)


_KINDS: Final = _kinds()
_FIXED: Final = FIXED.tobytes()
_CHILDREN: Final = CHILDREN.tobytes()
_LENGTH: Final = LENGTH.tobytes()
_SIZES: Final = bytes(0 if _LENGTH[marker] or _CHILDREN[marker] else 1 + _FIXED[marker] for marker in range(0x100))
"""The bytes of a whole value by its first byte; 0 where that does not tell."""

WALK_MAX: Final = 64
"""Values that are stepped over here; a call of the compiled scanner costs about as much."""


def kind_at(raw: bytes, at: int) -> int:
    """The kind of the value at `at`."""
    marker = raw[at]
    kind = _KINDS[marker]
    if kind:
        return kind
    return _EXTENSIONS.get(extension_code_at(raw, at), KIND_EXT)


def extension_code_at(raw: bytes, at: int) -> int:
    """The code, signed, of the extension at `at`."""
    code = raw[at + 1 + _LENGTH[raw[at]]]
    return code - 0x100 if code >= 0x80 else code


def is_accepted(accepted: int, raw: bytes, at: int) -> bool:
    """True where the value at `at` is of one of the kinds `accepted`.

    An extension of code 0, or with a negative one, is no value of any type to a server.
    """
    kind = kind_at(raw, at)
    if not kind & accepted:
        return False
    # The server shifts a bit by the code, modulo 32.
    return kind != KIND_EXT or ((code := extension_code_at(raw, at)) > 0 and code % 32 != 0)


def children_of(raw: bytes, at: int) -> tuple[int, int]:
    """How many values stand in the array or map at `at` (keys count, too), and where the first is."""
    marker = raw[at]
    width = _LENGTH[marker]
    if not width:
        return _CHILDREN[marker], at + 1
    start = at + 1 + width
    return int.from_bytes(raw[at + 1 : start], "big") * _CHILDREN[marker], start


def end_of(raw: bytes, at: int) -> int:
    """Where the value at `at` ends. `raw` is whole MessagePack."""
    size = _SIZES[raw[at]]
    return at + size if size else _end_of_larger(raw, at)


def _end_of_larger(raw: bytes, start: int) -> int:
    at, todo = start, 1
    for _ in range(WALK_MAX):
        marker = raw[at]
        at += 1
        width = _LENGTH[marker]
        if not width:
            at += _FIXED[marker]
            todo += _CHILDREN[marker] - 1
        else:
            count = int.from_bytes(raw[at : at + width], "big")
            at += width
            todo -= 1
            if _CHILDREN[marker]:
                todo += count * _CHILDREN[marker]
            else:
                at += count + _FIXED[marker]
        if not todo:
            return at
    return skip_value(np.frombuffer(raw, np.uint8), start, len(raw))


def elements_of(raw: bytes) -> list[bytes]:
    """The elements of the array `raw`, each as it is: the fields of a tuple."""
    count, at = children_of(raw, 0)
    elements = []
    for _ in range(count):
        size = _SIZES[raw[at]]
        end = at + size if size else _end_of_larger(raw, at)
        elements.append(raw[at:end])
        at = end
    return elements
