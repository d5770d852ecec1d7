"""Constants shared by the kernels of flow style and their callers: output formats, flags of bodies, sizes.

The kernels are compiled with the same values, from the .pxd beside this module.
"""

from __future__ import annotations

from enum import IntEnum


class Shape(IntEnum):
    """The output format of an array of values."""

    MAP = 0  # {name: value, 3: value}; fields without a name by number, starting at 1 as in Lua
    LIST = 1  # [value, value]
    OPERATIONS = 2  # [["=", "name", value]]
    CELLS = 3  # the values only, with SEPARATOR between them


SEPARATOR = "\0"
"""Separates cells; the text of a value never contains a control character."""

HAS_INDEX_ID, HAS_INDEX_BASE, STRANGE = 1, 2, 4
"""Flags set by `body_marks`. STRANGE: the body is malformed or has keys that a data change does not have."""

KEY_SIZE_MAX = 160
"""Maximum length of a map key in bytes. Escapes can make it six times as long, and YAML parsers look at most 1024
characters ahead for the colon."""
