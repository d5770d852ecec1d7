"""User forms of constraints: names become ids, as in schema.lua of 2.11."""

from __future__ import annotations

from typing import Any

import pytest

from flowstone.box.box import Box
from flowstone.box.ddl import functions as ddl
from flowstone.box.dialect import Dialect
from flowstone.box.engine.constraints import CheckConstraint, ForeignKey
from flowstone.box.engine.function import FunctionDefinition
from flowstone.iproto import errors
from tests.node.instances import bootstrapped_box

PARENT, CHILD = 512, 513


@pytest.fixture
def box() -> Box:
    """Return a box with space 512, `parent`, and function 66, `positive`."""
    made = bootstrapped_box()
    body = "function(value) return value > 0 end"
    made.functions["positive"] = FunctionDefinition(66, 1, "positive", body=body, is_deterministic=True)
    ddl.create_space(made.begin(), "parent", format=[{"name": "id", "type": "unsigned"}])
    return made


def made(box: Box, field: dict[str, Any], **options: Any) -> tuple[tuple[ForeignKey, ...], tuple[CheckConstraint, ...]]:
    format = [{"name": "id", "type": "unsigned"}, {"name": "n", "type": "unsigned", **field}]
    space, _ = ddl.create_space(box.begin(), "child", format=format, **options)
    return space.definition.foreign_keys, space.definition.checks


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"space": "parent", "field": "id"}, ForeignKey("parent", PARENT, ((1, "id"),), 1)),
        ({"space": PARENT, "field": 1}, ForeignKey("parent", PARENT, ((1, 0),), 1)),
        ({"field": "id"}, ForeignKey("child", None, ((1, "id"),), 1)),
        ({"up": {"space": "child", "field": 1}}, ForeignKey("up", None, ((1, 0),), 1)),
        ({"f": {"space": "parent", "field": "id"}}, ForeignKey("f", PARENT, ((1, "id"),), 1)),
    ],
)
def test_foreign_key_of_a_field_is_stored_with_ids(box: Box, given: Any, expected: ForeignKey) -> None:
    assert made(box, {"foreign_key": given}) == ((expected,), ())


def test_space_options_define_tuple_constraints(box: Box) -> None:
    options = {"foreign_key": {"k": {"space": "parent", "field": {"n": 1, 1: "id"}}}, "constraint": "positive"}
    keys, checks = made(box, {"constraint": {"above": "positive"}}, **options)
    assert keys == (ForeignKey("k", PARENT, (("n", 0), (0, "id"))),)
    assert checks == (CheckConstraint("positive", 66), CheckConstraint("above", 66, 1))


def test_format_space_accepts_constraints(box: Box) -> None:
    made(box, {})
    key = {"space": "parent", "field": "id"}
    ddl.format_space(box.begin(), "child", [{"name": "id", "type": "unsigned", "foreign_key": key}])
    assert box.space("child").definition.foreign_keys == (ForeignKey("parent", PARENT, ((0, "id"),), 0),)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"constraint": "nosuch"}, r"format\[2\]: constraint function was not found by name 'nosuch'"),
        ({"constraint": 1}, "constraint must be string or table"),
        ({"constraint": {"c": 66}}, "constraint function is expected to be a string, but got number"),
        ({"foreign_key": "parent"}, "foreign key must be a table"),
        ({"foreign_key": {"space": "nosuch", "field": 1}}, r"format\[2\]: foreign key: space nosuch was not found"),
        ({"foreign_key": {"f": {"space": "parent"}}}, "foreign key: field must be specified"),
        ({"foreign_key": {"f": {"space": True, "field": 1}}}, "foreign key: space must be string or number"),
        ({"foreign_key": {"f": {"space": "parent", "field": {}}}}, "foreign key: field must be string or number"),
        ({"foreign_key": {"f": {"field": 1, "more": 1}}}, "foreign key: unexpected parameter 'more'"),
        ({"foreign_key": {"f": 1}}, "foreign key definition must be a table with 'space' and 'field' members"),
        ({"foreign_key": {1: {"field": 1}}}, "foreign key name must be a string"),
    ],
)
def test_invalid_constraint_definition_is_rejected(box: Box, given: dict[str, Any], problem: str) -> None:
    with pytest.raises(errors.IllegalParams, match=problem):
        made(box, given)


def test_complex_key_requires_a_field_mapping(box: Box) -> None:
    wrong: tuple[Any, ...] = ("id", {})
    for field in wrong:
        with pytest.raises(errors.IllegalParams, match="field must be a table with local field -> foreign field"):
            made(box, {}, foreign_key={"k": {"space": "parent", "field": field}})


def test_dialect_2_6_rejects_constraint_options() -> None:
    with pytest.raises(errors.IllegalParams, match="unexpected option 'constraint'"):
        ddl.create_space(bootstrapped_box(Dialect.V2_6).begin(), "child", constraint="positive")
