"""Collations: language-specific order of strings, by sort keys of the ICU library.

A collation is a row of `_collation`. Its sort keys compare bytewise as the server, which uses the same library,
compares the strings. ICU is loaded for the first sort key, so that a node without such indexes does not need it. The
types `binary` and none compare the bytes of the strings and need no library; `key_encoding.py` encodes these.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping
from functools import cache
from typing import Any, Final

from flowstone.errors import FlowstoneError

_VERSIONS: Final = range(99, 48, -1)
"""Releases of ICU to try, newest first; each has its number in the names of its files and functions."""

_ATTRIBUTES: Final = {
    "french_collation": 0,
    "alternate_handling": 1,
    "case_first": 2,
    "case_level": 3,
    "normalization_mode": 4,
    "strength": 5,
    "numeric_collation": 7,
}
"""Options of `_collation` by their number in ICU's `UColAttribute`, in the order in which servers set them."""

_VALUES: Final = {
    "primary": 0,
    "secondary": 1,
    "tertiary": 2,
    "quaternary": 3,
    "identical": 15,
    "off": 16,
    "on": 17,
    "shifted": 20,
    "non_ignorable": 21,
    "lower_first": 24,
    "upper_first": 25,
}

_ON_OFF: Final = ("on", "off")
OPTIONS: Final[dict[str, tuple[str, ...]]] = {
    "french_collation": _ON_OFF,
    "alternate_handling": ("non_ignorable", "shifted"),
    "case_first": ("off", "upper_first", "lower_first"),
    "case_level": _ON_OFF,
    "normalization_mode": _ON_OFF,
    "strength": ("primary", "secondary", "tertiary", "quaternary", "identical"),
    "numeric_collation": _ON_OFF,
}
"""Valid values of each option of a collation. The default of an option depends on the locale."""


class CollationError(FlowstoneError):
    """A collation cannot be used: ICU is missing, or does not support the locale or an option."""


class _Library:
    """The ICU functions that are used here, without the version suffix of their names."""

    def __init__(self, library: ctypes.CDLL, suffix: str) -> None:
        status = ctypes.POINTER(ctypes.c_int)
        self.open = getattr(library, f"ucol_open{suffix}")
        self.open.argtypes = [ctypes.c_char_p, status]
        self.open.restype = ctypes.c_void_p
        self.close = getattr(library, f"ucol_close{suffix}")
        self.close.argtypes = [ctypes.c_void_p]
        self.close.restype = None
        self.set_attribute = getattr(library, f"ucol_setAttribute{suffix}")
        self.set_attribute.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int, status]
        self.set_attribute.restype = None
        self.get_sort_key = getattr(library, f"ucol_getSortKey{suffix}")
        self.get_sort_key.argtypes = [
            ctypes.c_void_p,
            ctypes.c_char_p,
            ctypes.c_int32,
            ctypes.c_char_p,
            ctypes.c_int32,
        ]
        self.get_sort_key.restype = ctypes.c_int32


@cache
def _library() -> _Library:
    for version in _VERSIONS:
        for name in (f"libicui18n.so.{version}", f"libicui18n.{version}.dylib"):
            try:
                return _Library(ctypes.CDLL(name), f"_{version}")
            except (OSError, AttributeError):
                continue
    raise CollationError(
        "an index with a collation needs the ICU library, but libicui18n is not installed",
        hint="install ICU (Debian: libicu72 or newer; Fedora: libicu; macOS: icu4c)",
    )


class Collation:
    """A row of `_collation`. `type` is ICU or BINARY; `options` are the options in the row."""

    __slots__ = ("__weakref__", "_collator", "_room", "id", "is_binary", "locale", "name", "options", "type")

    def __init__(
        self, id: int, name: str, type: str = "ICU", locale: str = "", options: Mapping[str, str] | None = None
    ) -> None:
        self.id = id
        self.name = name
        self.type = type.upper()
        self.locale = locale
        self.options = dict(options or {})
        self.is_binary = self.type != "ICU"
        self._collator: int | None = None
        self._room: ctypes.Array[ctypes.c_char]

    def sort_key(self, text: str) -> bytes:
        """Return bytes that compare as the strings do; for ICU the only zero byte is the last one."""
        if self.is_binary:
            return text.encode("utf-8", "surrogateescape")
        collator = self._collator if self._collator is not None else self.open()
        try:
            source = text.encode("utf-16-le")
        except UnicodeEncodeError:
            # The string is not valid UTF-8. Like ICU, read each ill-formed sequence as U+FFFD.
            replaced = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
            source = replaced.encode("utf-16-le")
        get_sort_key, length = _library().get_sort_key, len(source) // 2
        size = get_sort_key(collator, source, length, self._room, len(self._room))
        if size > len(self._room):
            self._room = ctypes.create_string_buffer(2 * size)
            get_sort_key(collator, source, length, self._room, len(self._room))
        return self._room.raw[:size]

    def open(self) -> int:
        """Open the collator; raise CollationError if the locale or an option is invalid."""
        library, status = _library(), ctypes.c_int(0)
        collator: int | None = library.open(self.locale.encode(), ctypes.byref(status))
        if collator is None or status.value > 0:
            raise CollationError(f"ICU cannot open the locale {self.locale!r} of collation {self.name!r}")
        weakref.finalize(self, library.close, collator)
        for option, attribute in _ATTRIBUTES.items():
            value = self.options.get(option, "default").lower()
            if value == "default":
                continue
            if value not in _VALUES:
                raise CollationError(f"collation {self.name!r}: {option} cannot be {value!r}")
            library.set_attribute(collator, attribute, _VALUES[value], ctypes.byref(status))
            if status.value > 0:
                raise CollationError(f"ICU rejects {option}={value!r} of collation {self.name!r}")
        self._collator = collator
        self._room = ctypes.create_string_buffer(256)
        return collator

    def __repr__(self) -> str:
        return f"<Collation {self.id} {self.name}>"


def read_collation(row: tuple[Any, ...]) -> Collation:
    """Return the collation that a tuple of `_collation` defines: id, name, owner, type, locale, options."""
    return Collation(row[0], row[1], row[3], row[4], row[5])
