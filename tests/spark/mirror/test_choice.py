"""The mirrored spaces, and the effect of changed definitions on tables."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from flowstone.box.definitions import FieldDefinition, IndexDefinition, IndexPart, SpaceDefinition
from flowstone.box.schema import Schema, UnknownSpace
from flowstone.errors import FlowstoneError
from flowstone.spark.mirror.choice import MirrorChoice, TableChanges, WrongChoice, changes_between
from flowstone.text.row_table import UnknownColumn


def space(number: int, name: str, *, key: bool = True, **how: Any) -> SpaceDefinition:
    indexes = (IndexDefinition(number, 0, "pk", "tree", True, (IndexPart(0, "unsigned"),)),) if key else ()
    fields = (FieldDefinition("id", "unsigned"), FieldDefinition("name", "string"))
    return SpaceDefinition(number, name, fields=fields, indexes=indexes, **how)


USERS, ORDERS, BARE = space(512, "users"), space(513, "orders"), space(514, "bare", key=False)
LOCAL, TEMPORARY = space(515, "local", is_local=True), space(516, "temporary", is_temporary=True)
VIEW, SYSTEM = space(517, "view", is_view=True), space(300, "_own")
SCHEMA = Schema({each.id: each for each in (USERS, ORDERS, BARE, LOCAL, TEMPORARY, VIEW, SYSTEM)})


def chosen(choice: MirrorChoice) -> list[str]:
    return [each.name for each in choice.spaces_of(SCHEMA, {}).values()]


def test_spaces_that_log_their_rows_are_mirrored() -> None:
    assert chosen(MirrorChoice()) == ["users", "orders"]


def test_spaces_are_included_and_excluded_by_name_or_id() -> None:
    assert chosen(MirrorChoice.parse(["users"], [], [])) == ["users"]
    assert chosen(MirrorChoice.parse(["513"], [], [])) == ["orders"]
    assert chosen(MirrorChoice.parse([], ["513"], [])) == ["users"]
    assert chosen(MirrorChoice.parse([], ["users"], [])) == ["orders"]


def test_spaces_are_included_and_excluded_by_pattern() -> None:
    assert chosen(MirrorChoice.parse(["u*"], [], [])) == ["users"]
    assert chosen(MirrorChoice.parse(["?????", "ord*"], ["[a-o]*"], [])) == ["users"]
    assert chosen(MirrorChoice.parse([], ["*s"], [])) == []
    MirrorChoice.parse(["u*"], ["ord*"], []).check(SCHEMA)
    MirrorChoice.parse(["u*"], ["ord*"], []).check_excluded([SCHEMA])


def test_name_with_characters_of_a_pattern_means_its_space() -> None:
    odd = space(520, "odd[1]*")
    choice = MirrorChoice.parse(["odd[1]*"], [], [])
    choice.check(Schema({520: odd}))
    assert choice.takes(odd)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("usres", "no such space; known spaces: orders, users"),
        ("999", "no such space; known spaces"),
        ("Us*", "no space matches; known spaces"),
        ("_o*", "no space matches; known spaces"),
    ],
)
def test_excluding_a_space_that_does_not_exist_is_an_error(name: str, message: str) -> None:
    with pytest.raises(WrongChoice, match=rf"--exclude {re.escape(name)}: {message}"):
        MirrorChoice.parse([], [name], []).check_excluded([SCHEMA])


def test_excluding_an_unknown_space_lists_all_spaces_that_can_be_excluded() -> None:
    choice = MirrorChoice.parse([], ["orders", "usres"], [])
    with pytest.raises(WrongChoice, match=r"--exclude usres: no such space; known spaces: orders, users$"):
        choice.check_excluded([SCHEMA])


def test_excluded_space_must_exist_in_some_source_or_in_the_accepted_list() -> None:
    choice = MirrorChoice.parse([], ["users", "513", "_own"], [])
    choice.check_excluded([Schema({512: USERS}), Schema({513: ORDERS, 300: SYSTEM})])
    choice.check_excluded([Schema({300: SYSTEM})], accepted={"users", "513"})
    with pytest.raises(WrongChoice, match="--exclude 513: no such space; omit --exclude"):
        choice.check_excluded([Schema({300: SYSTEM})], accepted={"users"})


def test_included_space_with_a_table_is_kept_when_renamed() -> None:
    people = msgspec.structs.replace(USERS, name="people")
    after = MirrorChoice.parse(["users"], [], []).spaces_of(Schema({512: people}), {512: USERS})
    assert after == {512: people}


def test_columns_must_be_fields_of_the_space() -> None:
    choice = MirrorChoice.parse([], [], ["users=id"])
    assert choice.columns_of(USERS) == ("id",)
    assert choice.columns_of(ORDERS) is None
    with pytest.raises(UnknownColumn, match="space 'users' has no field 'nick'; it has id, name"):
        MirrorChoice.parse([], [], ["users=id,nick"]).columns_of(USERS)


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        (MirrorChoice.parse(["usres"], [], []), UnknownSpace, "unknown space 'usres'; known spaces: users"),
        (MirrorChoice.parse([], [], ["usres=id"]), UnknownSpace, "unknown space 'usres'"),
        (MirrorChoice.parse(["x*"], [], []), UnknownSpace, "no space matches 'x*'; known spaces: orders, users"),
        (MirrorChoice.parse(["_o*"], [], []), UnknownSpace, "no space matches"),
        (MirrorChoice.parse(["bare"], [], []), WrongChoice, "without a primary key"),
        (MirrorChoice.parse(["local"], [], []), WrongChoice, "local to its instance"),
        (MirrorChoice.parse(["temporary"], [], []), WrongChoice, "temporary"),
        (MirrorChoice.parse(["view"], [], []), WrongChoice, "a view"),
        (MirrorChoice.parse(["_own"], [], []), UnknownSpace, "is a system space"),
    ],
)
def test_unsupported_choice_is_refused(given: MirrorChoice, kind: type[FlowstoneError], message: str) -> None:
    with pytest.raises(kind) as caught:
        given.check(SCHEMA)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((["a"], ["a"], []), "both chosen and excluded"),
        (([], [], ["users"]), "invalid --columns"),
        (([], [], ["users="]), "invalid --columns"),
        (([], [], ["users=a,a"]), "has a duplicate"),
        (([], [], ["users=a", "users=b"]), "has a duplicate"),
    ],
)
def test_contradictory_choice_is_refused(given: tuple[list[str], list[str], list[str]], message: str) -> None:
    with pytest.raises(WrongChoice, match=message):
        MirrorChoice.parse(*given)


def test_changes_are_classified_by_their_effect_on_tables() -> None:
    wider = msgspec.structs.replace(ORDERS, fields=(*ORDERS.fields, FieldDefinition("more", "any")))
    people, more = msgspec.structs.replace(wider, name="people"), space(520, "more")
    assert not changes_between({512: USERS}, {512: USERS})
    assert changes_between({512: USERS, 513: ORDERS}, {513: people, 520: more}) == TableChanges(
        (USERS,), ((ORDERS, people),), ((ORDERS, people),), (more,)
    )


def test_recreated_space_is_a_drop_and_a_create() -> None:
    again = space(600, "users")
    assert changes_between({512: USERS}, {600: again}) == TableChanges(dropped=(USERS,), created=(again,))


def test_secondary_indexes_and_flags_change_no_table() -> None:
    index = IndexDefinition(512, 1, "second", "tree", False, (IndexPart(1, "string"),))
    indexed = msgspec.structs.replace(USERS, indexes=(*USERS.indexes, index), is_sync=True)
    assert not changes_between({512: USERS}, {512: indexed})
