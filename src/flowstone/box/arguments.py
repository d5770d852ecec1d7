"""Arguments of statements as Python objects, and their MessagePack: keys, tuples, operations, iterators.

The same forms are accepted by the spaces of a node, of a transaction and of a client. The server that executes a
statement checks types and formats.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from flowstone.box.engine import statements
from flowstone.box.tuples import Tuple
from flowstone.iproto import errors
from flowstone.iproto.msgpack import pack

Fields = Sequence[Any] | Mapping[str, Any] | Tuple
"""A tuple to store: its fields in order, or by name."""

Operation = Sequence[Any]
"""An operation of UPDATE or UPSERT, such as `("+", "stock", 1)` or `("=", 2, "new")`; fields count from 0."""

Operations = Iterable[Operation] | Mapping[str, Any]
"""Operations in order, or the new values of fields by name."""

ITERATORS: Final = {"EQ": 0, "REQ": 1, "ALL": 2, "LT": 3, "LE": 4, "GE": 5, "GT": 6}
"""Names of iterators, as in Tarantool, and their numbers in the protocol."""


def pack_key(key: Any) -> bytes:
    """Return a key as MessagePack. `key` is a tuple or list of parts, or a single part; None is the empty key."""
    if key is None:
        return statements.EMPTY_KEY
    return pack(key if isinstance(key, tuple | list) else (key,))


def pack_fields(fields: Fields, names: Sequence[str]) -> bytes:
    """Return a tuple as MessagePack; `names` are the fields of the format, for fields by name."""
    if isinstance(fields, Tuple):
        return fields.raw
    if isinstance(fields, Mapping):
        fields = _in_order(fields, names)
    return pack(tuple(fields))


def _in_order(fields: Mapping[str, Any], names: Sequence[str]) -> list[Any]:
    unknown = [name for name in fields if name not in names]
    if unknown:
        raise errors.NoSuchFieldName(f"Field '{unknown[0]}' was not found in the tuple")
    end = max((number for number, name in enumerate(names, 1) if name in fields), default=0)
    return [fields.get(name) for name in names[:end]]


def pack_operations(operations: Operations) -> bytes:
    """Return operations as MessagePack; a mapping assigns its values to its fields."""
    if isinstance(operations, Mapping):
        operations = [("=", name, value) for name, value in operations.items()]
    return pack(list(operations))


def iterator_number(iterator: str | int) -> int:
    """Return the number of an iterator in the protocol; `iterator` may be its name in Tarantool."""
    if isinstance(iterator, int):
        return iterator
    number = ITERATORS.get(iterator.upper())
    if number is None:
        raise errors.IllegalParams(f"Illegal parameters, unknown iterator type '{iterator}'")
    return number
