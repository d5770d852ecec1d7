"""A tuple as Python code sees it: MessagePack that is decoded when somebody asks for a field.

Making one costs a few dozen nanoseconds, so that reading from a node is little more than looking into a dictionary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, overload

import msgspec

from flowstone.iproto.msgpack import unpack

Values = tuple[Any, ...]

# Tuples of nothing but plain values, which are most. Others (arrays, maps, binary, extensions, text that is not
# UTF-8) are refused by it and left to our own codec, which decodes them to what it decodes them to everywhere.
_decode_plain: Final = msgspec.msgpack.Decoder(tuple[int | float | str | bool | None, ...]).decode


class Tuple(msgspec.Struct, gc=False, eq=False):
    """An immutable sequence of fields: `tuple[0]`, `tuple["name"]`, `tuple.name`; `raw` is its MessagePack."""

    raw: bytes
    _numbers: Mapping[str, int]
    _values: Values | None = None

    @property
    def values(self) -> Values:
        """All fields: arrays are tuples, maps dicts."""
        values = self._values
        if values is None:
            values = self._values = decode(self.raw)
        return values

    @overload
    def __getitem__(self, field: int | str) -> Any: ...
    @overload
    def __getitem__(self, field: slice) -> Values: ...
    def __getitem__(self, field: int | str | slice) -> Any:
        """By number from 0, or by name. A named field behind the end of this tuple is None, as in Tarantool."""
        if type(field) is not str:
            # What `values` does, without the call: this is what reading a field costs.
            if (values := self._values) is not None:
                return values[field]  # type: ignore[index]
            try:
                self._values = values = _decode_plain(self.raw)
            except (msgspec.DecodeError, UnicodeDecodeError):
                self._values = values = unpack(self.raw)
            return values[field]  # type: ignore[index]
        values = self.values
        number = self._numbers[field]
        return values[number] if number < len(values) else None

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the tuple has no field {name!r}") from None

    def get(self, field: int | str, default: Any = None) -> Any:
        """The field, or `default` where there is none."""
        number = self._numbers.get(field) if isinstance(field, str) else field
        values = self.values
        return values[number] if number is not None and -len(values) <= number < len(values) else default

    def to_dict(self) -> dict[str, Any]:
        """The fields by their names; those behind the named ones are left out."""
        values = self.values
        return {name: values[number] for name, number in self._numbers.items() if number < len(values)}

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values)

    def __contains__(self, value: object) -> bool:
        return value in self.values

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Tuple):
            return self.raw == other.raw or self.values == other.values
        return self.values == tuple(other) if isinstance(other, tuple | list) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.values)

    def __repr__(self) -> str:
        return f"Tuple{self.values!r}"


Sequence.register(Tuple)


def decode(raw: bytes) -> Values:
    """The fields of a tuple."""
    try:
        return _decode_plain(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        values: Values = unpack(raw)
        return values


def field_numbers(names: Sequence[str]) -> dict[str, int]:
    """Where each field of a format stands, for `Tuple`."""
    return {name: number for number, name in enumerate(names)}
