"""DDL: applies changed rows of system spaces to the box.

`on_change` is called after the row has been written to its space. It applies the change, or raises the error of a real
server (alter.cc of 2.6.0) and changes nothing. This module handles `_space`, `_index` and `_truncate`; the other
`alter_*` modules handle the rest. During recovery rows are trusted: access rights are not checked, and definitions of
features that we do not serve are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from flowstone.box import system
from flowstone.box.access import Privilege
from flowstone.box.ddl.alter_access import change_collation, change_function, change_privilege, change_user
from flowstone.box.ddl.alter_replica_set import change_cluster, change_schema
from flowstone.box.ddl.alter_sequence import change_sequence, change_sequence_data, change_space_sequence, check_part
from flowstone.box.ddl.definition_checks import (
    check_format_collations,
    check_part_types,
    checked_index,
    checked_space,
)
from flowstone.box.ddl.system_rows import has_grants, has_rows, space_of
from flowstone.box.definitions import SpaceDefinition, read_index, read_space, with_indexes
from flowstone.box.engine.foreign_keys import check_definition, check_rows, check_unreferenced
from flowstone.box.engine.space import EngineSpace
from flowstone.iproto import errors

if TYPE_CHECKING:
    from flowstone.box.box import Box
    from flowstone.box.engine.transaction import BoxTransaction

Row = tuple[Any, ...] | None
Undo = Callable[[], None] | None
Change = Callable[["BoxTransaction", Row, Row], Undo]


def on_change(transaction: BoxTransaction, space: EngineSpace, old: Row, new: Row) -> Undo:
    """Apply the change of a row of `space` from `old` to `new`; return a function that undoes it, or None."""
    change = _CHANGES.get(space.id)
    return None if change is None else change(transaction, old, new)


# --- _space ---------------------------------------------------------------------------------------


def _change_space(transaction: BoxTransaction, old: Row, new: Row) -> Undo:
    row = old or new
    assert row is not None
    space = transaction.box.spaces.get(row[0])
    if new is None:
        return None if space is None else _drop_space(transaction, space)
    if space is None:
        return _create_space(transaction, new)
    return _alter_space(transaction, space, new)


def _create_space(transaction: BoxTransaction, row: tuple[Any, ...]) -> Undo:
    box = transaction.box
    if box.is_recovering:
        definition = read_space(row)
    else:
        definition = checked_space(row, errors.CreateSpace, box.dialect)
        _check_ddl(transaction, definition, Privilege.CREATE)
        check_format_collations(definition, box.collations)
    check_definition(transaction, definition)
    box.put_space(EngineSpace(definition, box.collations, box.views, box.dialect))
    box.access.put_owner(definition.id, definition.owner)

    def undo() -> None:
        box.access.put_owner(definition.id, None)
        box.remove_space(definition.id)

    return undo


def _drop_space(transaction: BoxTransaction, space: EngineSpace) -> Undo:
    box = transaction.box
    if not box.is_recovering:
        _check_ddl(transaction, space.definition, Privilege.DROP)
    reason = _why_not_dropped(transaction, space)
    if reason is not None:
        raise errors.DropSpace(f"Can't drop space '{space.name}': {reason}")
    check_unreferenced(transaction, space, if_filled=False)
    box.remove_space(space.id)
    box.access.put_owner(space.id, None)

    def undo() -> None:
        box.put_space(space)
        box.access.put_owner(space.id, space.definition.owner)

    return undo


def _why_not_dropped(transaction: BoxTransaction, space: EngineSpace) -> str | None:
    if space.indexes:
        return "the space has indexes"
    if transaction.box.is_recovering:  # the origin may have removed these rows in another order
        return None
    if has_grants(transaction, "space", space.id):
        return "the space has grants"
    if has_rows(transaction, system.TRUNCATE_ID, 0, space.id):
        return "the space has truncate record"
    if has_rows(transaction, system.FK_CONSTRAINT_ID, 1, space.id):
        return "the space has foreign key constraints"
    if has_rows(transaction, system.CK_CONSTRAINT_ID, 0, space.id):
        return "the space has check constraints"
    return None


def _alter_space(transaction: BoxTransaction, space: EngineSpace, row: tuple[Any, ...]) -> Undo:
    box, before = transaction.box, space.definition
    if box.is_recovering:
        definition = read_space(row)
    else:
        definition = checked_space(row, errors.AlterSpace, box.dialect)
        _check_ddl(transaction, definition, Privilege.ALTER)
        check_format_collations(definition, box.collations)
        is_filled = space.primary is not None and len(space) > 0
        for is_changed, reason in (
            (definition.id != before.id, "space id is immutable"),
            (definition.engine != before.engine, "can not change space engine"),
            (definition.is_local != before.is_local, "replication group is immutable"),
            (definition.is_view != before.is_view, "can not convert a space to a view and vice versa"),
            (
                is_filled and definition.is_temporary != before.is_temporary,
                "can not switch temporary flag on a non-empty space",
            ),
        ):
            if is_changed:
                raise errors.AlterSpace(f"Can't modify space '{space.name}': {reason}")
    definition = with_indexes(definition, before.indexes)
    if not box.is_recovering:
        check_part_types(definition, box.dialect)
    check_definition(transaction, definition)
    undo = _put_altered(transaction, space, definition)
    box.access.put_owner(definition.id, definition.owner)

    def undo_all() -> None:
        box.access.put_owner(before.id, before.owner)
        undo()

    return undo_all


# --- _index ---------------------------------------------------------------------------------------


def _change_index(transaction: BoxTransaction, old: Row, new: Row) -> Undo:
    row = old or new
    assert row is not None
    box = transaction.box
    space, index_id = space_of(transaction, row[0]), row[1]
    if index_id == 0 and new is None and not _may_go(box, space):
        raise errors.LastDrop(f"Can't drop the primary key in a system space, space '{space.name}'")
    if not box.is_recovering:
        _check_index_change(transaction, space, index_id, old, new)
    others = [index for index in space.definition.indexes if index.id != index_id]
    if new is None and index_id == 0:
        check_unreferenced(transaction, space, if_filled=True)
    if new is None:
        return _put_altered(transaction, space, with_indexes(space.definition, others))
    if box.is_recovering:
        index = read_index(new, space.definition.fields)
    else:
        index = checked_index(new, space.definition, box.collations, box.dialect)
        if index_id == 0 and space.sequence is not None:
            check_part(index, space.name, space.sequence.field, space.sequence.path)
    definition = with_indexes(space.definition, [*others, index])
    if not box.is_recovering:
        check_part_types(definition, box.dialect)
    return _put_altered(transaction, space, definition)


def _may_go(box: Box, space: EngineSpace) -> bool:
    """Return True if the primary key of `space` may be dropped.

    For system spaces this is an error. As an exception, spaces that a schema downgrade of real servers drops may be
    dropped by rows from an upstream or a log.
    """
    return space.id >= system.FIRST_USER_SPACE_ID or (box.is_recovering and space.id in system.NEWER_SPACE_IDS)


def _check_index_change(transaction: BoxTransaction, space: EngineSpace, index_id: int, old: Row, new: Row) -> None:
    if space.definition.is_view:
        raise errors.AlterSpace(f"Can't modify space '{space.name}': can not add index on a view")
    privilege = Privilege.CREATE if old is None else Privilege.DROP if new is None else Privilege.ALTER
    _check_ddl(transaction, space.definition, privilege)
    if index_id == 0 and new is None:
        if len(space.indexes) > 1:
            raise errors.DropPrimaryKey(f"Can't drop primary key in space '{space.name}' while secondary keys exist")
        if space.sequence is not None:
            raise errors.AlterSpace(
                f"Can't modify space '{space.name}': can not drop primary key while space sequence exists"
            )
    if index_id != 0 and 0 not in space.indexes:
        raise errors.AlterSpace(f"Can't modify space '{space.name}': can not add a secondary key before primary")


def _put_altered(transaction: BoxTransaction, space: EngineSpace, definition: SpaceDefinition) -> Callable[[], None]:
    box = transaction.box
    # Each snapshot has about a hundred rows that define system spaces exactly as they already are.
    altered = space if definition == space.definition else space.altered(definition, box.collations)
    if definition.foreign_keys or definition.checks:
        check_rows(transaction, altered, space.definition)
    box.put_space(altered)
    return lambda: box.put_space(space)


def _check_ddl(transaction: BoxTransaction, space: SpaceDefinition, privilege: Privilege) -> None:
    transaction.box.access.check_ddl(transaction.user, space.name, space.id, space.owner, "space", privilege)


# --- _truncate ------------------------------------------------------------------------------------


def _change_truncate(transaction: BoxTransaction, _: Row, new: Row) -> Undo:
    if new is None:
        return None
    box = transaction.box
    space = space_of(transaction, new[0])
    if not box.is_recovering:
        if space.id < system.FIRST_USER_SPACE_ID:
            raise errors.TruncateSystemSpace(f"Can't truncate a system space, space '{space.name}'")
        owner = space.definition.owner
        box.access.check(transaction.user, Privilege.WRITE, "space", space.id, owner, space.name)
    check_unreferenced(transaction, space, if_filled=True)
    emptied = space.empty(box.collations)

    def put(replacement: EngineSpace) -> None:
        # Truncation changes no definition, so clients keep their cached schema.
        version = box.schema_version
        box.put_space(replacement)
        box.schema_version = version

    put(emptied)
    return lambda: put(space)


# --- unsupported features -------------------------------------------------------------------------


def _keep(what: str) -> Change:
    """Return a handler for a feature of real servers: keep rows from a log or a peer, reject local changes."""

    def change(transaction: BoxTransaction, _: Row, new: Row) -> Undo:
        if new is not None and not transaction.box.is_recovering:
            raise errors.Unsupported(f"Flowstone does not support {what}")
        return None

    return change


_CHANGES: Final[dict[int, Change]] = {
    system.SCHEMA_ID: change_schema,
    system.COLLATION_ID: change_collation,
    system.SPACE_ID: _change_space,
    system.SEQUENCE_ID: change_sequence,
    system.SEQUENCE_DATA_ID: change_sequence_data,
    system.INDEX_ID: _change_index,
    system.FUNC_ID: change_function,
    system.USER_ID: change_user,
    system.PRIV_ID: change_privilege,
    system.CLUSTER_ID: change_cluster,
    system.TRIGGER_ID: _keep("SQL triggers"),
    system.TRUNCATE_ID: _change_truncate,
    system.SPACE_SEQUENCE_ID: change_space_sequence,
    system.FK_CONSTRAINT_ID: _keep("foreign key constraints"),
    system.CK_CONSTRAINT_ID: _keep("check constraints"),
    system.FUNC_INDEX_ID: _keep("functional indexes"),
}
"""Handlers of changed rows, by the id of the system space."""
