"""System views: `_vspace` shows the rows of `_space` that a user may see, and so on.

A view has no tuples. Its indexes have the same parts as the base space's indexes, so keys and spans are valid in both.
Users who may read the base space see all rows; others see the objects they own or have a privilege on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from flowstone.box import system
from flowstone.box.access import PUBLIC, Privilege
from flowstone.iproto.msgpack import unpack

if TYPE_CHECKING:
    from flowstone.box.engine.index import EngineIndex
    from flowstone.box.engine.keys import Key, Span
    from flowstone.box.engine.space import EngineSpace
    from flowstone.box.engine.transaction import BoxTransaction

SOURCES: Final = {
    277: system.COLLATION_ID,
    281: system.SPACE_ID,
    286: system.SEQUENCE_ID,
    289: system.INDEX_ID,
    297: system.FUNC_ID,
    305: system.USER_ID,
    313: system.PRIV_ID,
    341: system.SPACE_SEQUENCE_ID,
}
"""Id of the base space, by the id of the view."""

_CHANGES: Final = Privilege.READ | Privilege.WRITE | Privilege.DROP | Privilege.ALTER
_CALLS: Final = _CHANGES | Privilege.EXECUTE

Filter = Callable[[tuple[Any, ...]], bool]


def scan(transaction: BoxTransaction, view: EngineSpace, index: EngineIndex, span: Span) -> Iterator[tuple[Key, bytes]]:
    """Yield the entries of `span` in the base index of `index` that the user may see."""
    source = _source(transaction, view, index)
    is_visible = visible_to(transaction, view.id)
    if is_visible is None:
        yield from transaction.scan(source, span)
        return
    for key, raw in transaction.scan(source, span):
        if is_visible(unpack(raw)):
            yield key, raw


def find(transaction: BoxTransaction, view: EngineSpace, index: EngineIndex, key: Key) -> bytes | None:
    """Return the tuple at `key`, or None if there is none or the user may not see it."""
    raw = transaction.find(_source(transaction, view, index), key)
    is_visible = visible_to(transaction, view.id)
    return raw if raw is None or is_visible is None or is_visible(unpack(raw)) else None


def visible_to(transaction: BoxTransaction, view_id: int) -> Filter | None:
    """Return a filter for the rows that the transaction's user sees through the view; None if all are visible."""
    user, access = transaction.user, transaction.box.access
    kind, privilege = _KINDS.get(view_id, (None, _CHANGES))
    held = access.universal(user)
    if kind is not None:
        held |= access.on(user, (kind, None))
    if held & privilege or access.on(user, ("space", SOURCES[view_id])) & Privilege.READ:
        return None
    make = _FILTERS.get(view_id)
    return None if make is None else make(transaction)


def _source(transaction: BoxTransaction, view: EngineSpace, index: EngineIndex) -> EngineIndex:
    return transaction.box.space(SOURCES[view.id]).index(index.definition.id)


def _of_spaces(transaction: BoxTransaction) -> Filter:
    """Return the filter for rows whose first field is the id of a space."""
    spaces, user, access = transaction.box.spaces, transaction.user, transaction.box.access

    def is_visible(row: tuple[Any, ...]) -> bool:
        space = spaces.get(row[0])
        return space is not None and access.can_see(user, "space", row[0], _CHANGES, space.definition.owner)

    return is_visible


def _of_objects(kind: str) -> Callable[[BoxTransaction], Filter]:
    """Return a filter for rows of functions or sequences, which begin with id and owner."""

    def make(transaction: BoxTransaction) -> Filter:
        user, access = transaction.user, transaction.box.access
        return lambda row: access.can_see(user, kind, row[0], _CALLS, row[1])

    return make


def _of_users(transaction: BoxTransaction) -> Filter:
    user = transaction.user
    return lambda row: user in (row[0], row[1]) or row[0] == PUBLIC


def _of_privileges(transaction: BoxTransaction) -> Filter:
    user = transaction.user
    return lambda row: user in (row[0], row[1])


_KINDS: Final[dict[int, tuple[str | None, int]]] = {
    281: ("space", _CHANGES),
    286: ("sequence", _CALLS),
    289: ("space", _CHANGES),
    297: ("function", _CALLS),
    341: ("space", _CHANGES),
}
"""The type of objects in a view, and the privileges on the whole type that make all rows visible."""

_FILTERS: Final[dict[int, Callable[[BoxTransaction], Filter]]] = {
    281: _of_spaces,
    286: _of_objects("sequence"),
    289: _of_spaces,
    297: _of_objects("function"),
    305: _of_users,
    313: _of_privileges,
    341: _of_spaces,
}
"""Filters by the id of the view. `_vcollation` has none: all users see all collations."""
