"""Spaces and indexes: cases that test_functions.py does not compare with the real server."""

from __future__ import annotations

import pytest

from flowstone.box.ddl import functions as ddl
from flowstone.box.dialect import Dialect
from flowstone.iproto import errors
from tests.box.bootstrapped import bootstrapped, insert, rows, run


def test_next_space_id_is_counted_in_2_6_and_after_the_highest_in_2_11() -> None:
    for dialect, expected in ((Dialect.V2_6, [512, 513, 600, 514]), (Dialect.V2_11, [512, 513, 600, 601])):
        box = bootstrapped(dialect)
        made = []
        for name, options in (("a", {}), ("b", {}), ("c", {"id": 600}), ("d", {})):
            space, result = run(box, ddl.create_space, name, **options)
            assert result == "created"
            made.append(space.id)
        assert made == expected


def test_nil_options_are_ignored() -> None:
    box = bootstrapped()
    run(box, ddl.create_space, "t", format=None, id=None, temporary=None)
    index, result = run(box, ddl.create_index, "t", "pk", parts=None, sequence=None)
    assert (index.definition.name, result) == ("pk", "created")
    assert run(box, ddl.create_index, "t", "pk", if_not_exists=True)[1] == "not created"


def test_generated_sequence_is_dropped_with_its_space() -> None:
    box = bootstrapped(Dialect.V2_11)
    run(box, ddl.create_space, "t")
    run(box, ddl.create_index, "t", "pk", sequence=True)
    run(box, insert, "t", None)
    run(box, ddl.drop_space, "t")
    assert box.sequences == {}
    assert rows(box, "_sequence_data") == []


def test_dropping_an_absent_object_fails_unless_if_exists() -> None:
    box = bootstrapped()
    run(box, ddl.drop_space, "nowhere", if_exists=True)
    for space, name in (("nowhere", "nowhere"), (999, "#999")):
        with pytest.raises(errors.NoSuchSpace, match=f"Space '{name}' does not exist"):
            run(box, ddl.drop_space, space)


def test_format_that_does_not_match_the_tuples_is_rejected() -> None:
    box = bootstrapped()
    run(box, ddl.create_space, "t")
    run(box, ddl.create_index, "t", "pk")
    run(box, insert, "t", 1, "text")
    run(box, ddl.format_space, "t", [("id", "unsigned"), ("note", "string")])
    with pytest.raises(errors.FieldType):
        run(box, ddl.format_space, "t", [("id", "unsigned"), ("note", "unsigned")])
    assert box.space("t").definition.field_names == ("id", "note")


def test_part_of_2_11_has_the_collation_of_its_field() -> None:
    for dialect, collation in ((Dialect.V2_6, None), (Dialect.V2_11, 2)):
        box = bootstrapped(dialect)
        run(box, ddl.create_space, "t", format=[{"name": "s", "type": "string", "collation": "unicode_ci"}])
        index, _ = run(box, ddl.create_index, "t", "pk", parts=["s"])
        assert index.definition.parts[0].collation == collation


def test_index_of_2_11_can_exclude_tuples_with_nil() -> None:
    box = bootstrapped(Dialect.V2_11)
    run(box, ddl.create_space, "t")
    run(box, ddl.create_index, "t", "pk")
    part = {"field": 2, "type": "string", "exclude_null": True}
    run(box, ddl.create_index, "t", "noted", parts=[part], unique=False)
    run(box, ddl.create_index, "t", "words", parts=[{**part, "field": 3, "path": "[*].word"}], unique=False)
    run(box, insert, "t", 1, "a", [{"word": "x"}, {"word": None}])
    run(box, insert, "t", 2, None, [{}])
    assert [len(index) for index in box.space("t").indexes.values()] == [2, 1, 1]
    old = bootstrapped(Dialect.V2_6)
    run(old, ddl.create_space, "t")
    with pytest.raises(errors.WrongIndexOptions, match="unexpected option 'exclude_null'"):
        run(old, ddl.create_index, "t", "pk", parts=[{**part, "is_nullable": True}])
