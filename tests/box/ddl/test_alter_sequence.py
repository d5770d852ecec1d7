"""Rows of `_sequence`, `_sequence_data` and `_space_sequence`; test_functions.py compares the errors."""

from __future__ import annotations

import pytest

from flowstone.box.box import Box
from flowstone.box.ddl import functions as ddl
from flowstone.box.engine.sequence import SpaceSequence
from flowstone.iproto import errors
from flowstone.iproto.msgpack import pack, unpack
from tests.box.bootstrapped import bootstrapped, delete, insert, recover, replace, run


@pytest.fixture
def box() -> Box:
    """Return a box with space `t` and its generated sequence."""
    box = bootstrapped()
    run(box, ddl.create_space, "t")
    run(box, ddl.create_index, "t", "pk", sequence=True)
    return box


def test_generated_sequence_numbers_the_tuples(box: Box) -> None:
    assert run(box, insert, "t", None, "a") == (1, "a")
    assert run(box, insert, "t", 10, "b") == (10, "b")
    assert run(box, insert, "t", None, "c") == (11, "c")


def test_generated_values_are_in_read_views_but_not_in_the_log(box: Box) -> None:
    transaction = box.begin()
    insert(transaction, "t", None)
    assert [statement.space.name for statement in transaction.statements if statement.space] == ["t"]
    with box.open_view() as view:
        run(box, insert, "t", None)
        assert [unpack(row) for row in view.sequence_rows] == [(1, 1)]


def test_rolled_back_value_is_not_generated_again(box: Box) -> None:
    transaction = box.begin()
    insert(transaction, "t", None)
    transaction.rollback()
    assert run(box, insert, "t", None) == (2,)


def test_values_are_set_by_rows_of_sequence_data(box: Box) -> None:
    run(box, replace, "_sequence_data", 1, 100)
    assert run(box, insert, "t", None) == (101,)
    run(box, delete, "_sequence_data", 1)
    assert box.sequences[1].value is None


def test_dropped_value_is_restored_by_a_rollback(box: Box) -> None:
    run(box, replace, "_sequence_data", 1, 7)
    transaction = box.begin()
    delete(transaction, "_sequence_data", 1)
    transaction.rollback()
    assert box.sequences[1].value == 7


def test_sequence_fills_a_field_found_by_path() -> None:
    box = bootstrapped()
    run(box, ddl.create_space, "t")
    parts = [{"field": 2, "type": "unsigned", "path": "key.id"}]
    run(box, ddl.create_index, "t", "pk", parts=parts, sequence=True)
    assert run(box, insert, "t", "x", {"key": {"id": None}}) == ("x", {"key": {"id": 1}})


def test_row_of_an_older_server_means_the_first_part_of_the_primary_key() -> None:
    box = bootstrapped()
    run(box, ddl.create_space, "t")
    run(box, ddl.create_index, "t", "pk", parts=[[2, "unsigned"]])
    run(box, ddl.create_sequence, "s")
    old_format = [("id", "unsigned"), ("sequence_id", "unsigned"), ("is_generated", "boolean")]
    run(box, ddl.format_space, "_space_sequence", old_format)
    recover(box, [(340, pack((512, 1, False)))])
    assert box.space("t").sequence == SpaceSequence(box.sequences[1], 1, None, False)


def test_generated_sequence_cannot_be_attached_to_another_space(box: Box) -> None:
    run(box, ddl.create_space, "other")
    with pytest.raises(errors.AlterSpace, match="can not attach generated sequence"):
        run(box, ddl.create_index, "other", "pk", sequence="t_seq")
    run(box, ddl.create_index, "other", "pk")
    with pytest.raises(errors.AlterSpace, match="can not attach generated sequence"):
        run(box, insert, "_space_sequence", 513, 1, False, 0, "")
