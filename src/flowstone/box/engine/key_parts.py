"""The kinds of key parts that `key_kernels.py` encodes, their maximum size, and other numbers about keys."""

from __future__ import annotations

from typing import Final

PART_INTEGER: Final = 1
PART_NUMBER: Final = 2
PART_STRING: Final = 3
PART_BINARY: Final = 4
PART_BOOLEAN: Final = 5
PART_UUID: Final = 6
PART_SCALAR: Final = 7
"""Kinds of key parts."""

PART_OF_TYPE: Final = {
    "unsigned": PART_INTEGER,
    "integer": PART_INTEGER,
    "number": PART_NUMBER,
    "double": PART_NUMBER,
    "string": PART_STRING,
    "varbinary": PART_BINARY,
    "boolean": PART_BOOLEAN,
    "uuid": PART_UUID,
    "scalar": PART_SCALAR,
}
"""The kind of the parts of each type. A double is encoded like a number, except in indexes of 2.6."""

ENCODED, INTEGER, STRING = range(3)
"""Representations of a key: its encoded parts, or its only part, see `keys.KeyKind`."""

NEVER, WITH_NIL, ALWAYS = range(3)
"""When the primary key follows the parts of a key."""

EQ, REQ, ALL, LT, LE, GE, GT = range(7)
"""Iterators of SELECT that ordered indexes support."""

FIXED_SIZE_MAX: Final = 18
"""Maximum size of an encoded part, without the content of a string."""
