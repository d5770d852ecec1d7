"""Spaces and indexes as Python objects: of a running node, inside a transaction, or in a read view.

Reads are plain calls on memory. Changes of a node's spaces are awaited, and return when they are as durable as
`wal_mode` requires; inside a transaction they are plain calls, and leaving the transaction is awaited. A handle refers
to a space by id, and stays valid when the definition of the space changes. `box/engine/statements.py` checks the
arguments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from flowstone.box.arguments import (
    Fields,
    Operations,
    iterator_number,
    pack_fields,
    pack_key,
    pack_operations,
)
from flowstone.box.ddl import functions as ddl
from flowstone.box.engine import statements
from flowstone.box.engine.index import EngineIndex as BoxIndex
from flowstone.box.engine.keys import Key, KeyKind, Span
from flowstone.box.engine.read_view import ReadView
from flowstone.box.engine.space import EngineSpace as BoxSpace
from flowstone.box.engine.transaction import BoxTransaction
from flowstone.box.row_forms import ObjectForm
from flowstone.box.tuples import Tuple, field_numbers
from flowstone.iproto import errors
from flowstone.node.object_spaces import ObjectSpace

if TYPE_CHECKING:
    from flowstone.box.box import Box

T = TypeVar("T")

PYTHON_TYPES: Final = {KeyKind.INTEGER: int, KeyKind.STRING: str}
"""Python types of single-part keys that are looked up without encoding them first."""


class Writer(Protocol):
    """Executes changes of spaces: a node, or a replica, which rejects them."""

    @property
    def box(self) -> Box: ...

    async def write(self, statement: Callable[[BoxTransaction], T]) -> T:
        """Run `statement` in its own transaction, and return its result when the transaction is committed."""
        ...


class Reads(ABC):
    """Reads through one index of a space."""

    def __init__(self, space_id: int, index_id: int) -> None:
        self._space_id = space_id
        self._index_id = index_id

    @abstractmethod
    def _begin(self) -> BoxTransaction:
        """Return the transaction to read in."""

    def _space(self, transaction: BoxTransaction) -> BoxSpace:
        return transaction.space(self._space_id)

    def _numbers(self, space: BoxSpace) -> Mapping[str, int]:
        return field_numbers(space.format.field_names)

    def get(self, key: Any) -> Tuple | None:
        """Return the tuple with this key of a unique index; None if there is none.

        Args:
            key: The value of a single part, or a tuple or list of all parts.

        Raises:
            TarantoolError: The key does not fit the index, or the index is not unique.
        """
        transaction = self._begin()
        space = self._space(transaction)
        raw = statements.get(transaction, space, self._index_id, pack_key(key))
        return None if raw is None else Tuple(raw, self._numbers(space))

    def select(
        self,
        key: Any = (),
        *,
        iterator: str | int = "EQ",
        limit: int = statements.LIMIT_MAX,
        offset: int = 0,
        after: Tuple | bytes | None = None,
    ) -> list[Tuple]:
        """Return the tuples that match `key`, in the order of the index.

        Args:
            key: The value of the first part, or a tuple or list of the first parts; an empty key matches all tuples.
            iterator: Name or number as in Tarantool: EQ, ALL, GE, GT, or in reverse order REQ, LE, LT.
            limit: Return at most this many tuples.
            offset: Skip this many tuples.
            after: Continue after this tuple or position.

        Raises:
            TarantoolError: An argument does not fit the index.
        """
        transaction = self._begin()
        space = self._space(transaction)
        if isinstance(after, Tuple):
            after = statements.position_of(space.index(self._index_id), after.raw)
        found = statements.select(
            transaction,
            space,
            self._index_id,
            iterator=iterator_number(iterator),
            offset=offset,
            limit=limit,
            key=pack_key(key),
            after=after,
        )
        numbers = self._numbers(space)
        return [Tuple(raw, numbers) for raw in found]

    def count(self, key: Any = (), *, iterator: str | int = "EQ") -> int:
        """Return the number of tuples that `select` would return for `key` and `iterator`."""
        transaction = self._begin()
        space = self._space(transaction)
        kind = iterator_number(iterator)
        return statements.count(transaction, space, self._index_id, iterator=kind, key=pack_key(key))

    def min(self, key: Any = ()) -> Tuple | None:
        """Return the first tuple that matches `key`, in the order of the index; None if there is none.

        Raises:
            TarantoolError: The index is not ordered, or the key does not fit it.
        """
        return self._edge(key, "EQ", "min")

    def max(self, key: Any = ()) -> Tuple | None:
        """Return the last tuple that matches `key`, in the order of the index; None if there is none.

        Raises:
            TarantoolError: The index is not ordered, or the key does not fit it.
        """
        return self._edge(key, "REQ", "max")

    def _edge(self, key: Any, iterator: str, name: str) -> Tuple | None:
        transaction = self._begin()
        space = self._space(transaction)
        index = space.index(self._index_id)
        if not index.is_ordered:
            definition = index.definition
            raise errors.UnsupportedIndexFeature(
                f"Index '{definition.name}' ({definition.type.upper()}) of space '{space.name}'"
                f" ({space.definition.engine}) does not support {name}()"
            )
        found = self.select(key, iterator=iterator, limit=1)
        return found[0] if found else None

    def __len__(self) -> int:
        return self.count(iterator="ALL")

    def __iter__(self) -> Iterator[Tuple]:
        """Iterate over all tuples of this moment, in the order of the index."""
        return iter(self.select(iterator="ALL"))

    def __reversed__(self) -> Iterator[Tuple]:
        """Iterate over all tuples of this moment, in the reverse order of the index."""
        return iter(self.select(iterator="REQ"))

    def __contains__(self, key: Any) -> bool:
        return self.get(key) is not None

    def __getitem__(self, key: Any) -> Tuple:
        """Return the tuple with this key of a unique index.

        Raises:
            KeyError: There is none.
        """
        found = self.get(key)
        if found is None:
            raise KeyError(key)
        return found


class Index(Reads):
    """An index of a space of a node.

    Reads are plain calls; `get` with a single-part key costs little more than a dict lookup. Changes are awaited and
    return when they are committed; they raise a TarantoolError if the node rejects them.

    Example:
        by_status = node.space("orders").index("by_status")
        print(by_status.count("late"), by_status.select("late", limit=10))
    """

    def __init__(self, writer: Writer, space_id: int, index_id: int) -> None:
        super().__init__(space_id, index_id)
        self._writer = writer
        self._box = writer.box
        # A closure instead of a method: it saves the attribute lookups, which dominate the cost of a read.
        self.get = self._learn()  # type: ignore[method-assign, assignment]

    def _learn(self) -> Callable[[Any], Tuple | None]:
        """Cache what `get` needs from the current space object, and return a `get` that uses it.

        Any change of the space replaces the space object, also a truncation, which does not change the schema version.
        """
        self._known = space = self._box.space(self._space_id)
        self._field_numbers = field_numbers(space.format.field_names)
        index = space.indexes.get(self._index_id)
        if index is None or not index.is_served or space.definition.engine == "sysview":
            return super().get
        plain_key = PYTHON_TYPES.get(index.key.kind)
        look_up: Callable[[Any], bytes | None] = index.get if plain_key is int else _by_text(index)
        numbers, spaces, space_id, slow = self._field_numbers, self._box.spaces, self._space_id, super().get

        def get(key: Any) -> Tuple | None:
            """Return the tuple with this key of a unique index; None if there is none."""
            if type(key) is plain_key and spaces.get(space_id) is space:
                raw = look_up(key)
                if raw is not None:
                    return Tuple(raw, numbers)
            return slow(key)  # also finds out why there is no tuple

        return get

    def _begin(self) -> BoxTransaction:
        return self._box.begin()

    def _space(self, transaction: BoxTransaction) -> BoxSpace:
        if self._box.spaces.get(self._space_id) is not self._known:
            self.get = self._learn()  # type: ignore[method-assign, assignment]
        return self._known

    def _numbers(self, space: BoxSpace) -> Mapping[str, int]:
        return self._field_numbers

    @property
    def name(self) -> str:
        """The name of the index."""
        return self._box.space(self._space_id).index(self._index_id).definition.name

    async def update(self, key: Any, operations: Operations) -> Tuple | None:
        """Apply `operations` to the tuple with this key of a unique index.

        Args:
            key: The value of a single part, or a tuple or list of all parts.
            operations: Operations of Tarantool's UPDATE, such as `("=", "status", "late")` or `("+", "total", 1)`, or
                the new values by name: `{"status": "late"}`.

        Returns:
            The new tuple; None if no tuple has the key.

        Raises:
            TarantoolError: The key does not fit the index, or the new tuple is rejected.
        """
        raw_key, raw_operations = pack_key(key), pack_operations(operations)
        return await self._write(
            lambda transaction, space: statements.update(transaction, space, self._index_id, raw_key, raw_operations)
        )

    async def delete(self, key: Any) -> Tuple | None:
        """Delete the tuple with this key of a unique index.

        Returns:
            The deleted tuple; None if no tuple has the key.

        Raises:
            TarantoolError: The key does not fit the index, or the node is read-only.
        """
        raw_key = pack_key(key)
        return await self._write(
            lambda transaction, space: statements.delete(transaction, space, self._index_id, raw_key)
        )

    async def _write(self, statement: Callable[[BoxTransaction, BoxSpace], bytes | None]) -> Tuple | None:
        raw = await self._writer.write(lambda transaction: statement(transaction, self._space(transaction)))
        return None if raw is None else Tuple(raw, self._field_numbers)


class Space(Index):
    """A space of a node. Reads, updates and deletes use the primary index.

    Reads are plain calls. Changes are awaited and return when they are committed; they raise a TarantoolError if the
    node rejects them.

    Example:
        orders = node.space("orders")
        await orders.insert((42, "new"))
        await orders.update(42, [("=", "status", "late")])
        print(orders.get(42), len(orders))
    """

    def __init__(self, writer: Writer, space_id: int) -> None:
        super().__init__(writer, space_id, 0)

    @property
    def id(self) -> int:
        """The id of the space."""
        return self._space_id

    @property
    def name(self) -> str:
        """The name of the space."""
        return self._box.space(self._space_id).name

    @property
    def format(self) -> tuple[dict[str, Any], ...]:
        """The fields of the format, in the form that `set_format` accepts."""
        return tuple(
            {"name": field.name, "type": field.type, "is_nullable": field.is_nullable}
            for field in self._box.space(self._space_id).definition.fields
        )

    @property
    def indexes(self) -> dict[str, Index]:
        """All indexes, by name."""
        indexes = self._box.space(self._space_id).indexes
        return {index.definition.name: Index(self._writer, self._space_id, number) for number, index in indexes.items()}

    def index(self, index: str | int) -> Index:
        """Return the index with this name or id.

        Raises:
            TarantoolError: The index does not exist (error 35 or 148, ER_NO_SUCH_INDEX_…).
        """
        found = self._box.space(self._space_id).index(index)
        return Index(self._writer, self._space_id, found.definition.id)

    def as_(self, kind: type[T]) -> ObjectSpace[T]:
        """Return the space with rows as objects of `kind`.

        Args:
            kind: A dataclass or `msgspec.Struct` whose fields have names of the format.

        Raises:
            LocalProtocolError: `kind` is no such class.
        """
        return ObjectSpace(self, ObjectForm(kind))

    async def insert(self, fields: Fields) -> Tuple:
        """Insert a tuple.

        Args:
            fields: The fields, in the order of the format.

        Returns:
            The tuple as stored, with values from a sequence.

        Raises:
            TarantoolError: A unique index already has the key (error 3, ER_TUPLE_FOUND), or the node rejects the tuple.
        """
        return _stored(await self._write_tuple(statements.insert, fields))

    async def replace(self, fields: Fields) -> Tuple:
        """Insert a tuple, or replace the tuple with the same primary key.

        Args:
            fields: The fields, in the order of the format.

        Returns:
            The tuple as stored.

        Raises:
            TarantoolError: Another unique index already has the key (error 3, ER_TUPLE_FOUND), or the node rejects the
                tuple.
        """
        return _stored(await self._write_tuple(statements.replace, fields))

    async def _write_tuple(self, statement: Callable[[BoxTransaction, BoxSpace, bytes], bytes], fields: Fields) -> Any:
        return await self._write(lambda transaction, space: statement(transaction, space, _pack(fields, space)))

    async def upsert(self, fields: Fields, operations: Operations) -> None:
        """Insert a tuple, or apply `operations` to the tuple that already has its primary key.

        Args:
            fields: The tuple to insert.
            operations: Operations as for `update`.

        Raises:
            TarantoolError: The node rejects the tuple or the operations.
        """
        raw_operations = pack_operations(operations)
        await self._write(
            lambda transaction, space: statements.upsert(transaction, space, _pack(fields, space), raw_operations)
        )

    def random(self, number: int) -> Tuple | None:
        """Return the tuple at position `number`, modulo the number of tuples; None if the space is empty."""
        space = self._space(self._begin())
        raw = space.primary.random(number) if space.primary is not None else None
        return None if raw is None else Tuple(raw, self._field_numbers)

    # --- definitions ---

    async def create_index(
        self,
        name: str,
        *,
        parts: Sequence[Any] | None = None,
        unique: bool = True,
        type: str = "tree",
        sequence: bool | str | Mapping[str, Any] | None = None,
        if_not_exists: bool = False,
        **options: Any,
    ) -> Index:
        """Create an index and return it.

        Args:
            name: Name of the index.
            parts: Its fields as in Tarantool: names, numbers from 1, or `{"field": …, "type": …}`. By default, the
                first field as unsigned.
            unique: Reject tuples whose key the index already has.
            type: `tree` or `hash`.
            sequence: Fill the first part from a sequence: True for a new one, or the name of one.
            if_not_exists: Return the index of this name if there is one.
            options: Further options of Tarantool's `create_index`.

        Raises:
            TarantoolError: The index exists, or does not fit the tuples.
        """
        settings = {
            "parts": parts,
            "unique": unique,
            "type": type,
            "sequence": sequence,
            "if_not_exists": if_not_exists,
        }
        await self._define(lambda txn: ddl.create_index(txn, self._space_id, name, **settings, **options))
        return self.index(name)

    async def drop_index(self, index: str | int) -> None:
        """Drop the index with this name or id."""
        await self._define(lambda txn: ddl.drop_index(txn, self._space_id, index))

    async def truncate(self) -> None:
        """Delete all tuples."""
        await self._define(lambda txn: ddl.truncate(txn, self._space_id))

    async def drop(self) -> None:
        """Drop the space with its tuples, indexes, generated sequence and privileges."""
        await self._define(lambda txn: ddl.drop_space(txn, self._space_id))

    async def rename(self, name: str) -> None:
        """Rename the space. Handles of the space stay valid."""
        await self._define(lambda txn: ddl.rename_space(txn, self._space_id, name))

    async def set_format(self, format: Sequence[Any]) -> None:
        """Replace the format of the space.

        Args:
            format: Fields as `("name", "type")` or `{"name": …, "type": …, "is_nullable": …}`.

        Raises:
            TarantoolError: The tuples of the space do not fit.
        """
        await self._define(lambda txn: ddl.format_space(txn, self._space_id, format))

    async def _define(self, change: Callable[[BoxTransaction], object]) -> None:
        await self._writer.write(change)

    def __repr__(self) -> str:
        return f"<Space {self.name!r}>"


class TransactionIndex(Reads):
    """An index inside a transaction: `transaction.space("orders").index("by_status")`.

    All methods are plain calls. Reads see the transaction's own changes; the commit checks them for conflicts.
    """

    def __init__(self, transaction: BoxTransaction, space_id: int, index_id: int) -> None:
        super().__init__(space_id, index_id)
        self._transaction = transaction

    def _begin(self) -> BoxTransaction:
        return self._transaction

    def update(self, key: Any, operations: Operations) -> Tuple | None:
        """Apply `operations` to the tuple with this key.

        Returns:
            The new tuple; None if no tuple has the key.
        """
        return self._write(statements.update, self._index_id, pack_key(key), pack_operations(operations))

    def delete(self, key: Any) -> Tuple | None:
        """Delete the tuple with this key.

        Returns:
            The deleted tuple; None if no tuple has the key.
        """
        return self._write(statements.delete, self._index_id, pack_key(key))

    def _write(self, statement: Callable[..., bytes | None], *arguments: Any) -> Tuple | None:
        """Execute a statement. A failed statement is rolled back alone, so that a caller may catch its error."""
        transaction = self._transaction
        space = self._space(transaction)
        savepoint = transaction.savepoint()
        try:
            raw = statement(transaction, space, *arguments)
        except errors.TarantoolError:
            transaction.rollback_to(savepoint)
            raise
        return None if raw is None else Tuple(raw, self._numbers(space))


class TransactionSpace(TransactionIndex):
    """A space inside a transaction.

    All methods are plain calls; the changes are committed when the transaction ends.

    Example:
        async with node.transaction() as transaction:
            transaction.space("orders").insert((42, "new"))
    """

    def __init__(self, transaction: BoxTransaction, space_id: int) -> None:
        super().__init__(transaction, space_id, 0)

    def index(self, index: str | int) -> TransactionIndex:
        """Return the index with this name or id, inside the transaction."""
        found = self._space(self._transaction).index(index)
        return TransactionIndex(self._transaction, self._space_id, found.definition.id)

    def insert(self, fields: Fields) -> Tuple:
        """Insert a tuple.

        Returns:
            The tuple as stored, with values from a sequence.

        Raises:
            TarantoolError: A unique index already has the key (error 3, ER_TUPLE_FOUND), or the node rejects the tuple.
        """
        return _stored(self._write(statements.insert, self._packed(fields)))

    def replace(self, fields: Fields) -> Tuple:
        """Insert a tuple, or replace the tuple with the same primary key.

        Returns:
            The tuple as stored.

        Raises:
            TarantoolError: Another unique index already has the key (error 3, ER_TUPLE_FOUND), or the node rejects the
                tuple.
        """
        return _stored(self._write(statements.replace, self._packed(fields)))

    def upsert(self, fields: Fields, operations: Operations) -> None:
        """Insert a tuple, or apply `operations` to the tuple that already has its primary key."""
        self._write(statements.upsert, self._packed(fields), pack_operations(operations))

    def _packed(self, fields: Fields) -> bytes:
        return _pack(fields, self._space(self._transaction))


class ViewIndex(Reads):
    """An index at the moment when the read view was opened."""

    def __init__(self, view: ViewTransaction, space_id: int, index_id: int) -> None:
        super().__init__(space_id, index_id)
        self._view = view

    def _begin(self) -> BoxTransaction:
        return self._view


class ViewSpace(ViewIndex):
    """A space at the moment when the read view was opened; reads use the primary index."""

    def __init__(self, view: ViewTransaction, space_id: int) -> None:
        super().__init__(view, space_id, 0)

    def index(self, index: str | int) -> ViewIndex:
        """Return the index with this name or id, in the read view."""
        return ViewIndex(self._view, self._space_id, self._space(self._view).index(index).definition.id)


class ViewTransaction(BoxTransaction):
    """A transaction whose reads use a read view."""

    def __init__(self, box: Box, view: ReadView) -> None:
        super().__init__(box)
        self._view = view

    def space(self, space: int | str) -> BoxSpace:
        spaces = self._view.spaces
        by_name = (found for found in spaces.values() if found.name == space)
        found = spaces.get(space) if isinstance(space, int) else next(by_name, None)
        if found is None:
            raise errors.NoSuchSpace(f"Space '{space if isinstance(space, str) else f'#{space}'}' does not exist")
        return found

    def find(self, index: BoxIndex, key: Key) -> bytes | None:
        return self._view.get(index, key)

    def scan(self, index: BoxIndex, span: Span) -> Iterator[tuple[Key, bytes]]:
        return self._view.scan(index, span)

    def collect(self, index: BoxIndex, span: Span, offset: int, limit: int) -> list[bytes]:
        return [raw for _, raw in islice(self.scan(index, span), offset, offset + limit)]

    def count(self, index: BoxIndex, span: Span) -> int:
        return sum(1 for _ in self._view.scan(index, span))


def _pack(fields: Fields, space: BoxSpace) -> bytes:
    return pack_fields(fields, space.format.field_names)


def _stored(found: Tuple | None) -> Tuple:
    assert found is not None, "a statement that stores a tuple returns it"
    return found


def _by_text(index: BoxIndex) -> Callable[[Any], bytes | None]:
    look_up = index.get

    def find(key: str) -> bytes | None:
        return look_up(key.encode("utf-8", "surrogateescape"))

    return find
