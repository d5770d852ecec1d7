"""Rows as Python objects: the `Tuple` of Flowstone, or objects of a class of the application.

A form packs the rows that an application stores, and makes objects of the rows that it reads. Classes are dataclasses
and `msgspec.Struct`, whose fields have the names of the format. A wrong or missing field is an error that names it, and
says what was expected and what came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from flowstone.box.arguments import Fields, pack_fields
from flowstone.box.tuples import Tuple
from flowstone.errors import FlowstoneError, LocalProtocolError
from flowstone.iproto.extensions import Datetime
from flowstone.iproto.msgpack import SmallPacker

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class RowMismatch(FlowstoneError):
    """A row does not fit the class that was given to `as_`. The message names the field."""


class RowForm(Protocol[R_co]):
    """How a space takes and returns rows."""

    def pack(self, row: Any, names: Sequence[str]) -> bytes:
        """Return a row to store as MessagePack; `names` are the fields of the format."""
        ...

    def read(self, raw: bytes, numbers: Mapping[str, int]) -> R_co:
        """Return the object of a row; `numbers` are the positions of the fields of the format."""
        ...


class TupleForm:
    """Takes sequences and mappings, and returns `Tuple`. For one thread."""

    def __init__(self) -> None:
        self._packer = SmallPacker()

    def pack(self, row: Fields, names: Sequence[str]) -> bytes:
        return self._packer.pack(row) if type(row) is tuple else pack_fields(row, names)

    def read(self, raw: bytes, numbers: Mapping[str, int]) -> Tuple:
        return Tuple(raw, numbers)


class ObjectForm(Generic[R]):
    """Takes objects of a class, and mappings and sequences that fit it; returns objects of the class."""

    def __init__(self, kind: type[R]) -> None:
        try:
            found = msgspec.inspect.type_info(kind)
        except TypeError:
            found = None
        if not isinstance(found, msgspec.inspect.DataclassType | msgspec.inspect.StructType):
            raise LocalProtocolError(f"{kind!r} is not a dataclass", hint="use a dataclass or a msgspec.Struct")
        self._kind = kind
        self._names = tuple(field.name for field in found.fields)
        self._required = tuple(field.name for field in found.fields if field.required)
        self._dates = frozenset(field.name for field in found.fields if _is_date(field.type))

    def pack(self, row: R | Fields, names: Sequence[str]) -> bytes:
        """Return a row as MessagePack. Raise RowMismatch if it does not fit the class, or the class not the format."""
        values: Mapping[str, Any]
        if isinstance(row, self._kind):
            values = {name: getattr(row, name) for name in self._names}
        elif isinstance(row, Tuple):
            values = dict(zip(names, row.values, strict=False))
        elif isinstance(row, Mapping):
            values = row
        elif isinstance(row, Sequence) and not isinstance(row, str | bytes):
            values = dict(zip(names, row, strict=False))
        else:
            raise RowMismatch(f"expected {self._kind.__name__} or a mapping, got {type(row).__name__}")
        self._check_names(names)
        self._convert(values)
        return pack_fields(values, names)

    def read(self, raw: bytes, numbers: Mapping[str, int]) -> R:
        """Return the object of a row, without fields that the class lacks. Raise RowMismatch if it does not fit."""
        self._check_names(tuple(numbers))
        values = Tuple(raw, numbers).values
        return self._convert({name: values[numbers[name]] for name in self._names if numbers[name] < len(values)})

    def _convert(self, values: Mapping[str, Any]) -> R:
        fields = dict(values)
        absent = next((name for name in self._required if name not in fields), None)
        if absent is not None:
            raise RowMismatch(
                f"{self._kind.__name__}: field {absent!r} is missing, got {', '.join(fields) or 'no fields'}"
            )
        for name in self._names:
            if name in self._dates and isinstance(fields.get(name), Datetime):
                fields[name] = fields[name].to_datetime()
        try:
            return msgspec.convert(fields, self._kind)
        except msgspec.ValidationError as error:
            message, _, place = str(error).partition(" - at `$.")
            field = f"field {place.rstrip('`')!r}: " if place else ""
            raise RowMismatch(f"{self._kind.__name__}: {field}{message[:1].lower()}{message[1:]}") from None

    def _check_names(self, names: Sequence[str]) -> None:
        missing = next((name for name in self._names if name not in names), None)
        if missing is not None:
            hint = f"the format has {', '.join(names) or 'no fields'}"
            raise RowMismatch(f"{self._kind.__name__}: field {missing!r} is not in the format of the space", hint=hint)


def _is_date(kind: msgspec.inspect.Type) -> bool:
    if isinstance(kind, msgspec.inspect.UnionType):
        return any(map(_is_date, kind.types))
    return isinstance(kind, msgspec.inspect.DateTimeType)
