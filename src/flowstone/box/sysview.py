"""System views: `_vspace` shows the rows of `_space` that a user may see, and so on.

A view has no tuples. Its indexes have the parts of the ones that it looks through, so a key or span found with one
fits the other. Who may read the base space sees all; others see what they own or have a privilege on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from flowstone.box import system
from flowstone.box.access import PUBLIC, Privilege
from flowstone.iproto.msgpack import unpack

if TYPE_CHECKING:
    from flowstone.box.index import Index
    from flowstone.box.keys import Key, Span
    from flowstone.box.space import Space
    from flowstone.box.transaction import Transaction

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
"""Which space each view shows."""

_CHANGES: Final = Privilege.READ | Privilege.WRITE | Privilege.DROP | Privilege.ALTER
_CALLS: Final = _CHANGES | Privilege.EXECUTE

Filter = Callable[[tuple[Any, ...]], bool]


def scan(transaction: Transaction, view: Space, index: Index, span: Span) -> Iterator[tuple[Key, bytes]]:
    """The entries of `span` in the index that `index` of `view` stands for, as far as the user may see them."""
    source = _source(transaction, view, index)
    is_visible = visible_to(transaction, view.id)
    if is_visible is None:
        yield from transaction.scan(source, span)
        return
    for key, raw in transaction.scan(source, span):
        if is_visible(unpack(raw)):
            yield key, raw


def find(transaction: Transaction, view: Space, index: Index, key: Key) -> bytes | None:
    """The tuple at `key`, if the user may see it."""
    raw = transaction.find(_source(transaction, view, index), key)
    is_visible = visible_to(transaction, view.id)
    return raw if raw is None or is_visible is None or is_visible(unpack(raw)) else None


def visible_to(transaction: Transaction, view_id: int) -> Filter | None:
    """Which rows of the base space the transaction's user sees through the view; None: all."""
    user, access = transaction.user, transaction.box.access
    kind, privilege = _KINDS.get(view_id, (None, _CHANGES))
    held = access.universal(user)
    if kind is not None:
        held |= access.on(user, (kind, None))
    if held & privilege or access.on(user, ("space", SOURCES[view_id])) & Privilege.READ:
        return None
    make = _FILTERS.get(view_id)
    return None if make is None else make(transaction)


def _source(transaction: Transaction, view: Space, index: Index) -> Index:
    return transaction.box.space(SOURCES[view.id]).index(index.definition.id)


def _of_spaces(transaction: Transaction) -> Filter:
    """Rows about a space, whose id is their first field."""
    spaces, user, access = transaction.box.spaces, transaction.user, transaction.box.access

    def is_visible(row: tuple[Any, ...]) -> bool:
        space = spaces.get(row[0])
        return space is not None and access.can_see(user, "space", row[0], _CHANGES, space.definition.owner)

    return is_visible


def _of_objects(kind: str) -> Callable[[Transaction], Filter]:
    """Rows of functions or sequences: id, owner, …"""

    def make(transaction: Transaction) -> Filter:
        user, access = transaction.user, transaction.box.access
        return lambda row: access.can_see(user, kind, row[0], _CALLS, row[1])

    return make


def _of_users(transaction: Transaction) -> Filter:
    user = transaction.user
    return lambda row: user in (row[0], row[1]) or row[0] == PUBLIC


def _of_privileges(transaction: Transaction) -> Filter:
    user = transaction.user
    return lambda row: user in (row[0], row[1])


_KINDS: Final[dict[int, tuple[str | None, int]]] = {
    281: ("space", _CHANGES),
    286: ("sequence", _CALLS),
    289: ("space", _CHANGES),
    297: ("function", _CALLS),
    341: ("space", _CHANGES),
}
"""The type of objects that a view is about, and the privileges on all of them that open it."""

_FILTERS: Final[dict[int, Callable[[Transaction], Filter]]] = {
    281: _of_spaces,
    286: _of_objects("sequence"),
    289: _of_spaces,
    297: _of_objects("function"),
    305: _of_users,
    313: _of_privileges,
    341: _of_spaces,
}
"""`_vcollation` is not here: everybody sees all collations."""
