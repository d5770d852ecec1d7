"""DDL on `_sequence`, `_sequence_data` and `_space_sequence`: sequences, their values, and spaces that use them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flowstone.box import system
from flowstone.box.access import Privilege
from flowstone.box.ddl.definition_checks import check_identifier, check_name_length
from flowstone.box.ddl.system_rows import has_grants, has_rows, space_of
from flowstone.box.definitions import IndexDefinition
from flowstone.box.engine.paths import parse_path
from flowstone.box.engine.sequence import Sequence, SequenceDefinition, SpaceSequence, read_sequence
from flowstone.iproto import errors

if TYPE_CHECKING:
    from flowstone.box.engine.space import EngineSpace
    from flowstone.box.engine.transaction import BoxTransaction

Row = tuple[Any, ...] | None
Undo = Callable[[], None] | None


def change_sequence(transaction: BoxTransaction, old: Row, new: Row) -> Undo:
    if new is None:
        return None if old is None else _drop(transaction, old[0])
    sequences, is_checked = transaction.box.sequences, not transaction.box.is_recovering
    if is_checked:
        error = errors.CreateSequence if old is None else errors.AlterSequence
        _check(read_sequence(new), error)
    definition = read_sequence(new)
    sequence = sequences.get(definition.id)
    if sequence is None:
        if is_checked:
            _check_ddl(transaction, definition, Privilege.CREATE)
        sequences[definition.id] = Sequence(definition)
        return lambda: _forget(sequences, definition.id)
    before = sequence.definition
    if is_checked:
        _check_ddl(transaction, before, Privilege.ALTER)
    sequence.definition = definition
    return lambda: setattr(sequence, "definition", before)


def _drop(transaction: BoxTransaction, sequence_id: int) -> Undo:
    sequences = transaction.box.sequences
    sequence = sequences[sequence_id]
    if not transaction.box.is_recovering:
        _check_ddl(transaction, sequence.definition, Privilege.DROP)
        for is_used, reason in (
            (has_rows(transaction, system.SEQUENCE_DATA_ID, 0, sequence_id), "the sequence has data"),
            (has_rows(transaction, system.SPACE_SEQUENCE_ID, 1, sequence_id), "the sequence is in use"),
            (has_grants(transaction, "sequence", sequence_id), "the sequence has grants"),
        ):
            if is_used:
                raise errors.DropSequence(f"Can't drop sequence '{sequence.definition.name}': {reason}")
    del sequences[sequence_id]
    return lambda: sequences.update({sequence_id: sequence})


def _forget(sequences: dict[int, Sequence], sequence_id: int) -> None:
    del sequences[sequence_id]


def _check(definition: SequenceDefinition, error: type[errors.TarantoolError]) -> None:
    name = definition.name
    text = "Failed to create sequence '{}': {}" if error is errors.CreateSequence else "Can't modify sequence '{}': {}"
    check_name_length(name, error, text, "sequence name is too long")
    check_identifier(name)
    for is_wrong, reason in (
        (definition.step == 0, "step option must be non-zero"),
        (definition.min > definition.max, "max must be greater than or equal to min"),
        (not definition.min <= definition.start <= definition.max, "start must be between min and max"),
    ):
        if is_wrong:
            raise error(text.format(name, reason))


def _check_ddl(transaction: BoxTransaction, sequence: SequenceDefinition, privilege: Privilege) -> None:
    transaction.box.access.check_ddl(
        transaction.user, sequence.name, sequence.id, sequence.owner, "sequence", privilege
    )


def change_sequence_data(transaction: BoxTransaction, old: Row, new: Row) -> Undo:
    """Set the value of a sequence. A rollback restores a deleted value, but keeps a new one."""
    row = old or new
    assert row is not None
    sequence = transaction.box.sequences.get(row[0])
    if sequence is None:
        raise errors.NoSuchSequence(f"Sequence '{row[0]}' does not exist")
    if new is not None:
        sequence.set(new[1])
        return None
    before = sequence.value
    sequence.set(None)
    return lambda: sequence.set(before)


def change_space_sequence(transaction: BoxTransaction, old: Row, new: Row) -> Undo:
    row = new or old
    assert row is not None
    box = transaction.box
    space, sequence = space_of(transaction, row[0]), box.sequences.get(row[1])
    if sequence is None:
        raise errors.NoSuchSequence(f"Sequence '{row[1]}' does not exist")
    if not box.is_recovering:
        if old is not None and new is not None:
            raise errors.Unsupported('space "_space_sequence" does not support update')
        _check_attachment(transaction, space, sequence, is_new=new is not None, is_generated=row[2])
    before = space.sequence
    space.sequence = None if new is None else _attached(transaction, space, sequence, new)
    return lambda: setattr(space, "sequence", before)


def _check_attachment(
    transaction: BoxTransaction, space: EngineSpace, sequence: Sequence, *, is_new: bool, is_generated: bool
) -> None:
    if is_generated or not is_new:
        _check_ddl(transaction, sequence.definition, Privilege.CREATE if is_new else Privilege.DROP)
    else:
        _check_ddl(transaction, sequence.definition, Privilege.READ)
        _check_ddl(transaction, sequence.definition, Privilege.WRITE)
    definition = space.definition
    transaction.box.access.check_ddl(
        transaction.user, definition.name, definition.id, definition.owner, "space", Privilege.ALTER
    )


def _attached(
    transaction: BoxTransaction, space: EngineSpace, sequence: Sequence, row: tuple[Any, ...]
) -> SpaceSequence:
    primary = space.index(0).definition
    # Before 2.2 a sequence always filled the first part of the primary key.
    field, path = primary.parts[0].field, primary.parts[0].path
    if len(row) > 3:
        field, path = row[3], row[4] or None
    if not transaction.box.is_recovering:
        check_part(primary, space.name, field, path)
        if _is_generated(transaction, sequence):
            raise errors.AlterSpace(f"Can't modify space '{space.name}': can not attach generated sequence")
    return SpaceSequence(sequence, field, path, row[2])


def _is_generated(transaction: BoxTransaction, sequence: Sequence) -> bool:
    attached = (space.sequence for space in transaction.box.spaces.values())
    return any(other is not None and other.sequence is sequence and other.is_generated for other in attached)


def check_part(index: IndexDefinition, space_name: str, field: int, path: str | None) -> None:
    """Raise ModifyIndex unless the primary key has an integer part at the field and path that a sequence fills."""
    steps = parse_path(path or "")
    for part in index.parts:
        if part.field == field and parse_path(part.path or "") == steps:
            if part.type in ("unsigned", "integer"):
                return
            reason = "sequence cannot be used with a non-integer key"
            break
    else:
        reason = "sequence field must be a part of the index"
    raise errors.ModifyIndex(f"Can't create or modify index '{index.name}' in space '{space_name}': {reason}")
