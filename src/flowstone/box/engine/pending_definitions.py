"""Uncommitted definitions of an interactive transaction, as its own later statements see them.

Truncations, formats, foreign keys and checks apply from the statement that changes them, as on real servers. The spaces
created here share the indexes of the spaces in the box, or have empty ones, and are never put into the box. New and
dropped spaces and indexes take effect at commit. A foreign key whose lookup depends on such a space is not checked
before the commit. The commit applies all changes again in order and checks each change (`check_change`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

from flowstone.box import system
from flowstone.box.ddl.definition_checks import checked_space
from flowstone.box.definitions import SpaceDefinition, with_indexes
from flowstone.box.engine.foreign_keys import Guards, check_referrers, check_runnable, check_tuple, guards_of
from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from flowstone.iproto.msgpack import unpack

if TYPE_CHECKING:
    from flowstone.box.box import Box
    from flowstone.box.engine.space import EngineSpace, Values
    from flowstone.box.engine.transaction import BoxTransaction

T = TypeVar("T")

_ABOUT_SPACES: Final = (system.SPACE_ID, system.INDEX_ID, system.TRUNCATE_ID, system.FUNC_INDEX_ID)
"""System spaces whose rows begin with the id of the space that they define or change."""


class PendingDefinitions:
    """The changed definitions of one transaction; `shown` returns a space as its statements see it."""

    def __init__(self, box: Box) -> None:
        self._box = box
        self._definitions: dict[int, SpaceDefinition] = {}
        self._truncated: dict[int, EngineSpace] = {}
        self._deferred: dict[int, bool] = {}
        """Ids of spaces that are dropped or whose indexes change: their foreign keys are checked at commit."""
        self._shown: dict[EngineSpace, EngineSpace] = {}

    def note(self, system_id: int, old: Values | None, new: Values | None) -> Callable[[], None] | None:
        """Record a changed row of the system space `system_id`; return a function that undoes this, or None."""
        row = new or old
        space = self._box.spaces.get(row[0]) if row is not None and system_id in _ABOUT_SPACES else None
        if space is None or space.id < system.FIRST_USER_SPACE_ID:
            return None
        self._shown.clear()
        if system_id == system.TRUNCATE_ID:
            return self._put(self._truncated, space.id, space.empty(self._box.collations))
        definition = _redefined(self._box, space, new) if system_id == system.SPACE_ID else None
        if definition is None:
            return self._put(self._deferred, space.id, True)
        return self._put(self._definitions, space.id, definition)

    def _put(self, notes: dict[int, T], number: int, note: T) -> Callable[[], None]:
        before = notes.get(number)
        notes[number] = note

        def undo() -> None:
            self._shown.clear()
            if before is None:
                del notes[number]
            else:
                notes[number] = before

        return undo

    def shown(self, space: EngineSpace) -> EngineSpace:
        """Return `space` with the truncation, definition and constraints of the transaction applied."""
        found = self._shown.get(space)
        if found is None:
            found = self._shown[space] = self._made(space)
        return found

    def _made(self, space: EngineSpace) -> EngineSpace:
        definition = self._definitions.get(space.id, space.definition)
        guards = self._guards(definition) if self._box.dialect.has_constraints else None
        source = self._truncated.get(space.id, space)
        if definition is space.definition and guards == space.guards and source is space:
            return space
        made = source.redefined(definition, self._box.collations)
        made.guards = guards
        return made

    def _guards(self, definition: SpaceDefinition) -> Guards | None:
        changed = {number: each.foreign_keys for number, each in self._definitions.items()}
        guards = guards_of(definition, self._box.foreign_keys | changed)
        if guards is None or not self._deferred:
            return guards
        deferred, number = self._deferred, definition.id
        keys = tuple(key for key in guards.foreign_keys if key.parent_id(number) not in deferred)
        referrers = tuple(each for each in guards.referrers if number not in deferred and each[0] not in deferred)
        return Guards(keys, guards.checks, referrers)


def _redefined(box: Box, space: EngineSpace, row: Values | None) -> SpaceDefinition | None:
    """Return the definition in a row of `_space`; None if it drops `space` or the commit will reject it."""
    if row is None:
        return None
    try:
        definition = checked_space(row, errors.AlterSpace, box.dialect)
    except FlowstoneError:
        return None
    is_possible = (definition.engine, definition.is_view) == (space.definition.engine, space.definition.is_view)
    return with_indexes(definition, space.definition.indexes) if is_possible else None


def check_change(txn: BoxTransaction, space: EngineSpace, old: bytes | None, new: bytes | None) -> None:
    """Check that `old` may become `new` under the current definition of `space`, at commit."""
    if space.guards is not None:
        check_runnable(txn.box, space, space.guards.checks)
    if new is not None:
        check_tuple(txn, space, new, unpack(new))
    if old is not None:
        check_referrers(txn, space, old, new)
