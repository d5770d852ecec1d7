"""A tuple as a Python object: MessagePack that is decoded when a field is read.

Creating a `Tuple` costs a few dozen nanoseconds, so that a read from a node costs little more than a dict lookup.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, overload

import msgspec

from flowstone.iproto.msgpack import unpack

Values = tuple[Any, ...]

# Fast path for tuples of plain values, which are most. It rejects others (with arrays, maps, binary, extensions, or
# text that is not UTF-8), so that our own codec decodes them as everywhere else.
_decode_plain: Final = msgspec.msgpack.Decoder(tuple[int | float | str | bool | None, ...]).decode


class Tuple(msgspec.Struct, gc=False, eq=False):
    """A tuple of a space: an immutable sequence of fields.

    Fields are decoded on first access; `raw` is the whole tuple as MessagePack. A `Tuple` equals a tuple or list with
    the same fields.

    Example:
        order = node.space("orders").get(42)
        print(order[0], order["status"], order.status, order.to_dict())
    """

    raw: bytes
    _numbers: Mapping[str, int]
    _values: Values | None = None

    @property
    def values(self) -> Values:
        """All fields as a Python tuple. Arrays are tuples, maps are dicts."""
        values = self._values
        if values is None:
            values = self._values = decode(self.raw)
        return values

    @overload
    def __getitem__(self, field: int | str) -> Any: ...
    @overload
    def __getitem__(self, field: slice) -> Values: ...
    def __getitem__(self, field: int | str | slice) -> Any:
        """Return a field by number from 0 or by name, or a slice of fields.

        A named field after the end of this tuple is None, as in Tarantool.

        Raises:
            IndexError: There is no field with this number.
            KeyError: The format has no field with this name.
        """
        if type(field) is not str:
            # The body of `values`, inlined: the call would dominate the cost of reading a field.
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
            raise AttributeError(f"tuple has no field {name!r}") from None

    def get(self, field: int | str, default: Any = None) -> Any:
        """Return a field by number or name; `default` if the tuple has no such field."""
        number = self._numbers.get(field) if isinstance(field, str) else field
        values = self.values
        return values[number] if number is not None and -len(values) <= number < len(values) else default

    def to_dict(self) -> dict[str, Any]:
        """Return the named fields as a dict. Fields without a name are omitted."""
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
    """Return the fields of a tuple in MessagePack."""
    try:
        return _decode_plain(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        values: Values = unpack(raw)
        return values


def field_numbers(names: Sequence[str]) -> dict[str, int]:
    """Return the number of each field of a format, as `Tuple` needs them."""
    return {name: number for number, name in enumerate(names)}
