"""Spaces of a node or replica with rows as objects of a class: `node.space("orders").as_(Order)`.

A thin layer over `spaces.py`; `box/row_forms.py` converts the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from flowstone.box.arguments import Operations
from flowstone.box.engine.statements import LIMIT_MAX
from flowstone.box.row_forms import ObjectForm
from flowstone.box.tuples import Tuple, field_numbers

if TYPE_CHECKING:
    from flowstone.node.spaces import Index, Space

R = TypeVar("R")


class ObjectIndex(Generic[R]):
    """An index whose rows are objects: `node.space("orders").as_(Order).index("by_status")`. See `Index`."""

    def __init__(self, index: Index, space: Space, form: ObjectForm[R]) -> None:
        self._index = index
        self._space = space
        self._form = form

    def get(self, key: Any) -> R | None:
        """Return the object with this key of a unique index; None if there is none. See `Index.get`.

        Raises:
            TarantoolError: The key does not fit the index, or the index is not unique.
            RowMismatch: The row does not fit the class.
        """
        return self._read(self._index.get(key))

    def select(self, key: Any = (), *, iterator: str | int = "EQ", limit: int = LIMIT_MAX, offset: int = 0) -> list[R]:
        """Return the objects that match `key`, in the order of the index. See `Index.select`.

        Raises:
            TarantoolError: An argument does not fit the index.
            RowMismatch: A row does not fit the class.
        """
        names = self._names()
        numbers = field_numbers(names)
        found = self._index.select(key, iterator=iterator, limit=limit, offset=offset)
        return [self._form.read(row.raw, numbers) for row in found]

    async def update(self, key: Any, operations: Operations) -> R | None:
        """Change the row with this key of a unique index, and return the new object. See `Index.update`.

        Raises:
            TarantoolError: The key does not fit the index, or the new tuple is rejected.
        """
        return self._read(await self._index.update(key, operations))

    async def delete(self, key: Any) -> R | None:
        """Delete the row with this key of a unique index, and return its object. See `Index.delete`.

        Raises:
            TarantoolError: The key does not fit the index, or the node is read-only.
        """
        return self._read(await self._index.delete(key))

    def __len__(self) -> int:
        return len(self._index)

    def __iter__(self) -> Iterator[R]:
        """Iterate over the objects of this moment, in the order of the index."""
        return iter(self.select(iterator="ALL"))

    def __contains__(self, key: Any) -> bool:
        return key in self._index

    def __getitem__(self, key: Any) -> R:
        """Return the object with this key of a unique index.

        Raises:
            KeyError: There is none.
        """
        found = self.get(key)
        if found is None:
            raise KeyError(key)
        return found

    def _names(self) -> tuple[str, ...]:
        return tuple(field["name"] for field in self._space.format)

    def _read(self, found: Tuple | None) -> R | None:
        return None if found is None else self._form.read(found.raw, field_numbers(self._names()))


class ObjectSpace(ObjectIndex[R]):
    """A space whose rows are objects of a class. Reads, updates and deletes use the primary index. See `Space`.

    Example:
        orders = node.space("orders").as_(Order)
        await orders.insert(Order(42, "new"))
        print(orders[42].status)
    """

    def __init__(self, space: Space, form: ObjectForm[R]) -> None:
        super().__init__(space, space, form)

    def index(self, index: str | int) -> ObjectIndex[R]:
        """Return the index with this name or id.

        Raises:
            TarantoolError: The index does not exist (error 35 or 148, ER_NO_SUCH_INDEX_…).
        """
        return ObjectIndex(self._space.index(index), self._space, self._form)

    async def insert(self, row: Any) -> R:
        """Insert an object, a mapping or a sequence, and return the object as stored. See `Space.insert`.

        Raises:
            TarantoolError: A unique index already has the key (error 3, ER_TUPLE_FOUND), or the node rejects the tuple.
            RowMismatch: The row does not fit the class.
        """
        return self._stored(await self._space.insert(self._pack(row)))

    async def replace(self, row: Any) -> R:
        """Insert an object, or replace the row with the same primary key. See `Space.replace`.

        Raises:
            TarantoolError: Another unique index already has the key, or the node rejects the tuple.
            RowMismatch: The row does not fit the class.
        """
        return self._stored(await self._space.replace(self._pack(row)))

    async def upsert(self, row: Any, operations: Operations) -> None:
        """Insert an object, or apply `operations` to the row with its primary key. See `Space.upsert`.

        Raises:
            TarantoolError: The node rejects the tuple or the operations.
            RowMismatch: The row does not fit the class.
        """
        await self._space.upsert(self._pack(row), operations)

    def _pack(self, row: Any) -> Tuple:
        names = self._names()
        return Tuple(self._form.pack(row, names), field_numbers(names))

    def _stored(self, found: Tuple) -> R:
        return self._form.read(found.raw, field_numbers(self._names()))
