"""Requests of applications: the body to send, with the schema of the member that gets it, and the result to return.

A statement can be encoded again for another member. It does not know how often it was sent, or to whom.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final, Generic, TypeVar

import msgspec

from flowstone.box.arguments import Operations, iterator_number, pack_key, pack_operations
from flowstone.box.row_forms import RowForm
from flowstone.client.known_schema import KnownSchema, KnownSpace
from flowstone.errors import RemoteProtocolError
from flowstone.iproto import errors
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import pack, unpack_body

T = TypeVar("T")
R = TypeVar("R")

LIMIT_MAX: Final = 0xFFFF_FFFF

_ONE_TUPLE: Final = b"\x81\x30\xdd\x00\x00\x00\x01"
"""Beginning of a body with one tuple, as servers write it."""

_BODY: Final = msgspec.msgpack.Decoder(dict[int, msgspec.Raw])
_TUPLES: Final = msgspec.msgpack.Decoder(list[msgspec.Raw])


class ClientStatement(ABC, Generic[T]):
    """A request. `is_write`: executing it twice may differ from executing it once."""

    __slots__ = ()

    type: RequestType
    is_write = True
    needs_schema = True

    @abstractmethod
    def body(self, schema: KnownSchema) -> bytes:
        """Return the body for a member with this schema. Raise UnknownSpace, or the error of a wrong argument."""

    @abstractmethod
    def result(self, body: bytes, schema: KnownSchema) -> T:
        """Return the result in the body of a success, of the member that `body` was encoded for."""


class Store(ClientStatement[R]):
    """INSERT or REPLACE."""

    __slots__ = ("_fields", "_form", "_space", "type")

    def __init__(self, type: RequestType, space: int | str, fields: Any, form: RowForm[R]) -> None:
        self.type = type
        self._space = space
        self._fields = fields
        self._form = form

    def body(self, schema: KnownSchema) -> bytes:
        space = schema.space(self._space)
        return space.store_head + self._form.pack(self._fields, space.names)

    def result(self, body: bytes, schema: KnownSchema) -> R:
        found = _one_of(body)
        if found is None:
            raise RemoteProtocolError("response to a stored tuple has no tuple")
        return self._form.read(found, schema.space(self._space).numbers)


class Upsert(ClientStatement[None]):
    """UPSERT."""

    __slots__ = ("_fields", "_form", "_operations", "_space")
    type = RequestType.UPSERT

    def __init__(self, space: int | str, fields: Any, operations: Operations, form: RowForm[Any]) -> None:
        self._space = space
        self._fields = fields
        self._operations = pack_operations(operations)
        self._form = form

    def body(self, schema: KnownSchema) -> bytes:
        space = schema.space(self._space)
        fields = self._form.pack(self._fields, space.names)
        return b"".join((b"\x83\x10", pack(space.id), b"\x21", fields, b"\x28", self._operations))

    def result(self, body: bytes, schema: KnownSchema) -> None:
        return None


class UpdateOrDelete(ClientStatement[R | None]):
    """UPDATE, or, without operations, DELETE."""

    __slots__ = ("_form", "_index", "_key", "_operations", "_space", "type")

    def __init__(
        self, space: int | str, index: int | str, key: Any, operations: Operations | None, form: RowForm[R]
    ) -> None:
        self.type = RequestType.DELETE if operations is None else RequestType.UPDATE
        self._space = space
        self._index = index
        self._key = pack_key(key)
        self._operations = None if operations is None else pack_operations(operations)
        self._form = form

    def body(self, schema: KnownSchema) -> bytes:
        head = schema.space(self._space).index_head(self._index)
        if self._operations is None:
            return b"".join((b"\x83", head, b"\x20", self._key))
        return b"".join((b"\x84", head, b"\x20", self._key, b"\x21", self._operations))

    def result(self, body: bytes, schema: KnownSchema) -> R | None:
        found = _one_of(body)
        return None if found is None else self._form.read(found, schema.space(self._space).numbers)


class Get(ClientStatement[R | None]):
    """SELECT of one tuple of a unique index."""

    __slots__ = ("_form", "_index", "_key", "_space")
    type = RequestType.SELECT
    is_write = False

    def __init__(self, space: int | str, index: int | str, key: Any, form: RowForm[R]) -> None:
        self._space = space
        self._index = index
        self._key = pack_key(key)
        self._form = form

    def body(self, schema: KnownSchema) -> bytes:
        space = schema.space(self._space)
        head, parts = space.get_head(self._index)
        count = _array_size(self._key)
        if count != parts:
            raise _not_one(space, parts, count)
        return head + self._key

    def result(self, body: bytes, schema: KnownSchema) -> R | None:
        found = _one_of(body)
        return None if found is None else self._form.read(found, schema.space(self._space).numbers)


class Select(ClientStatement[list[R]]):
    """SELECT."""

    __slots__ = ("_form", "_index", "_rest", "_space")
    type = RequestType.SELECT
    is_write = False

    def __init__(
        self,
        space: int | str,
        index: int | str,
        key: Any,
        *,
        iterator: str | int,
        limit: int,
        offset: int,
        form: RowForm[R],
    ) -> None:
        self._space = space
        self._index = index
        self._form = form
        numbers = {Key.LIMIT.value: limit, Key.OFFSET.value: offset, Key.ITERATOR.value: iterator_number(iterator)}
        self._rest = pack(numbers)[1:] + b"\x20" + pack_key(key)

    def body(self, schema: KnownSchema) -> bytes:
        return b"".join((b"\x86", schema.space(self._space).index_head(self._index), self._rest))

    def result(self, body: bytes, schema: KnownSchema) -> list[R]:
        numbers, read = schema.space(self._space).numbers, self._form.read
        return [read(raw, numbers) for raw in _tuples_of(body)]


class CallOrEval(ClientStatement[tuple[Any, ...]]):
    """CALL of a function, or EVAL of an expression. `is_read`: the application says that it changes nothing."""

    __slots__ = ("_body", "is_write", "type")
    needs_schema = False

    def __init__(self, type: RequestType, text: str, arguments: Sequence[Any], *, is_read: bool) -> None:
        self.type = type
        name = Key.FUNCTION_NAME if type is RequestType.CALL else Key.EXPR
        self._body = pack({name.value: text, Key.TUPLE.value: tuple(arguments)})
        self.is_write = not is_read

    def body(self, schema: KnownSchema) -> bytes:
        return self._body

    def result(self, body: bytes, schema: KnownSchema) -> tuple[Any, ...]:
        values = unpack_body(body).get(Key.DATA, ())
        if not isinstance(values, tuple):
            raise RemoteProtocolError("response to a call has no array of values")
        return values


def _array_size(raw: bytes) -> int:
    """Return the number of values in an array as `pack` writes it."""
    return raw[0] & 0x0F if raw[0] < 0xA0 else int.from_bytes(raw[1 : 3 if raw[0] == 0xDC else 5], "big")


def _not_one(space: KnownSpace, wanted: int, given: int) -> errors.TarantoolError:
    if not wanted:
        return errors.MoreThanOneTuple("Get() doesn't support partial keys and non-unique indexes")
    name = space.definition.name
    return errors.ExactMatch(
        f"Invalid key part count in an exact match (expected {wanted}, got {given}), space '{name}'"
    )


def _one_of(body: bytes) -> bytes | None:
    """Return the tuple in the body of a response; None without one."""
    if body.startswith(_ONE_TUPLE):
        return body[len(_ONE_TUPLE) :]
    found = _tuples_of(body)
    if len(found) > 1:
        raise RemoteProtocolError(f"response has {len(found)} tuples, expected one")
    return found[0] if found else None


def _tuples_of(body: bytes) -> list[bytes]:
    try:
        data = _BODY.decode(body or b"\x80").get(Key.DATA.value)
        return [] if data is None else [bytes(raw) for raw in _TUPLES.decode(data)]
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"response has no array of tuples: {error}") from None
