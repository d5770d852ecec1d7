"""The kinds of key parts that `key_kernels.py` encodes, and their maximum size."""

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

FIXED_SIZE_MAX: Final = 18
"""Maximum size of an encoded part, without the content of a string."""
