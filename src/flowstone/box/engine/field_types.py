"""Field types of formats and index parts: the MessagePack kinds each accepts, and which types contain others.

`kind_at` reads the kind of a value from the first bytes of its MessagePack. As in the server's type checks, a float
differs from a double, and the signed encoding of a number differs from the unsigned encoding. `PYTHON_TYPES` has the
same rules for decoded values, as far as these still show the difference.
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
from flowstone.iproto.scan_kernels import skip_value
from flowstone.native.msgpack import CHILDREN, FIXED, LENGTH

Class = type
"""Alias for annotations in functions that have a parameter named `type`."""

KIND_NIL: Final = 1
KIND_UINT: Final = 2
KIND_INT: Final = 4  # a negative number, or any number with a signed encoding
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
"""Kinds that a field of each type accepts. Nullable fields also accept nil; `any` always does."""

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
"""Classes of decoded values that a field of each type accepts. For `unsigned` the value must not be negative."""

_DIFFERING: Final[dict[tuple[str, Dialect], tuple[int, frozenset[type]]]] = {
    # Servers before 2.7 fail on a row with a UUID in a scalar field; they have no datetime.
    ("scalar", Dialect.V2_6): (
        _SCALAR & ~(KIND_UUID | KIND_DATETIME),
        frozenset(_SCALARS) - {uuid.UUID, Datetime},
    ),
    # Since 2.11 doubles compare like numbers and accept integers.
    ("double", Dialect.V2_11): (_INTEGER | KIND_FLOAT | KIND_DOUBLE, frozenset((int, float))),
}
"""Types that differ between the dialects: accepted kinds and classes."""


def accepted_kinds(type: str, dialect: Dialect) -> int:
    differing = _DIFFERING.get((type, dialect))
    return ACCEPTS[type] if differing is None else differing[0]


def accepted_classes(type: str, dialect: Dialect) -> frozenset[Class]:
    """Return the accepted classes of decoded values; none for an unknown type."""
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
    """Return True if a field of type `outer` accepts all values of type `inner`."""
    if inner == "uuid" and outer == "scalar":
        return dialect is Dialect.V2_11
    return outer in ("any", inner) or outer in _WIDER.get(inner, ())


_EXTENSIONS: Final = {
    ExtensionType.DECIMAL.value: KIND_DECIMAL,
    ExtensionType.UUID.value: KIND_UUID,
    ExtensionType.DATETIME.value: KIND_DATETIME,
}


def _kinds() -> tuple[int, ...]:
    """Return the kind by first byte; 0 for extensions, whose kind depends on their code."""
    kinds = [KIND_UINT] * 0x80 + [KIND_MAP] * 0x10 + [KIND_ARRAY] * 0x10 + [KIND_STR] * 0x20
    kinds += [KIND_NIL, 0, KIND_BOOL, KIND_BOOL] + [KIND_BIN] * 3 + [0] * 3 + [KIND_FLOAT, KIND_DOUBLE]
    kinds += [KIND_UINT] * 4 + [KIND_INT] * 4 + [0] * 5 + [KIND_STR] * 3 + [KIND_ARRAY] * 2 + [KIND_MAP] * 2
    return (*kinds, *[KIND_INT] * 0x20)


KINDS: Final = _kinds()
_FIXED: Final = FIXED.tobytes()
_CHILDREN: Final = CHILDREN.tobytes()
_LENGTH: Final = LENGTH.tobytes()
_SIZES: Final = bytes(0 if _LENGTH[marker] or _CHILDREN[marker] else 1 + _FIXED[marker] for marker in range(0x100))
"""Size of a value by its first byte; 0 if the first byte does not determine it."""

WALK_MAX: Final = 64
"""Number of values to skip in Python; calling the compiled scanner costs about as much."""


def kind_at(raw: bytes, at: int) -> int:
    """Return the kind of the value at `at`."""
    marker = raw[at]
    kind = KINDS[marker]
    if kind:
        return kind
    return _EXTENSIONS.get(extension_code_at(raw, at), KIND_EXT)


def extension_code_at(raw: bytes, at: int) -> int:
    """Return the signed code of the extension at `at`."""
    code = raw[at + 1 + _LENGTH[raw[at]]]
    return code - 0x100 if code >= 0x80 else code


def is_accepted(accepted: int, raw: bytes, at: int) -> bool:
    """Return True if the kind of the value at `at` is in the mask `accepted`.

    Servers accept an extension with code 0 or a negative code for no type at all.
    """
    kind = kind_at(raw, at)
    if not kind & accepted:
        return False
    # The server shifts a bit by the code modulo 32, so multiples of 32 are like code 0.
    return kind != KIND_EXT or ((code := extension_code_at(raw, at)) > 0 and code % 32 != 0)


def children_of(raw: bytes, at: int) -> tuple[int, int]:
    """Return the number of values in the array or map at `at`, including keys, and the offset of the first one."""
    marker = raw[at]
    width = _LENGTH[marker]
    if not width:
        return _CHILDREN[marker], at + 1
    start = at + 1 + width
    return int.from_bytes(raw[at + 1 : start], "big") * _CHILDREN[marker], start


def end_of(raw: bytes, at: int) -> int:
    """Return the end offset of the value at `at`. `raw` must be complete MessagePack."""
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
    """Return the raw elements of the array `raw`, such as the fields of a tuple."""
    count, at = children_of(raw, 0)
    elements = []
    for _ in range(count):
        size = _SIZES[raw[at]]
        end = at + size if size else _end_of_larger(raw, at)
        elements.append(raw[at:end])
        at = end
    return elements
