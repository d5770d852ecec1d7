"""Folding produces the engine's state: after any statements, from any state, byte for byte."""

from __future__ import annotations

import random
import time
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowstone.box.definitions import FieldDefinition, SpaceDefinition
from flowstone.box.update.update import UpdateRules
from flowstone.columns.sort_keys import sort_keys
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import pack
from flowstone.spark.fold import key_fold as fold_module
from flowstone.spark.fold.key_fold import (
    OLD,
    STATES,
    CannotFold,
    FoldDefinitions,
    fold,
    keys_needing_old,
    keys_that_may_exist,
    tuples_before,
    upsert_rules,
)
from tests.box import model
from tests.box.programs import SPACES, perform, requests
from tests.box.spaces import box_with, definition, on
from tests.spark.fold_rows import change, table

CHANGING = ("insert", "replace", "delete", "update", "update", "upsert", "upsert")
OF_2_6 = upsert_rules((2, 6, 0))
PAIRS = definition(512, on("0:unsigned"), fields="id:unsigned name:string")

INSERT, REPLACE, DELETE = RequestType.INSERT, RequestType.REPLACE, RequestType.DELETE
UPDATE, UPSERT = RequestType.UPDATE, RequestType.UPSERT


def row(
    version: int, kind: RequestType, *, space: SpaceDefinition = PAIRS, lsn: int = 0, **body: Any
) -> dict[str, Any]:
    """Return a change; `body` has key, tuple, ops, index_base."""
    made = {Key.SPACE_ID: space.id} | {Key[name.upper()]: value for name, value in body.items()}
    return change(space, version, lsn or version, kind, pack(made))


def old_of(space: SpaceDefinition, tuples: list[bytes]) -> pa.Table:
    array = pa.array(tuples, pa.binary())
    return pa.table([sort_keys(space, array), array], schema=OLD)


def states_of(folded: pa.Table) -> dict[bytes, bytes]:
    assert folded.schema == STATES
    keys = folded["sort_key"].to_pylist()
    assert keys == sorted(set(keys))
    pairs = zip(keys, folded["tuple"].to_pylist(), strict=True)
    return {key: value for key, value in pairs if value is not None}


@given(
    st.sampled_from(sorted(SPACES)).flatmap(lambda number: st.lists(requests(CHANGING, (number,)), max_size=30)),
    st.integers(0, 30),
    st.randoms(use_true_random=False),
    st.sampled_from((1, fold_module.BULK_MIN)),
)
@settings(max_examples=200, deadline=None)
def test_fold_equals_the_state_of_the_engine(
    program: list[model.Statement], split: int, shuffled: random.Random, bulk_min: int
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fold_module, "BULK_MIN", bulk_min)
        check_program(program, split, shuffled)


def check_program(program: list[model.Statement], split: int, shuffled: random.Random) -> None:
    if not program:
        return
    space = SPACES[program[0].space]
    box = box_with(*SPACES.values())
    before: list[bytes] = []
    changes: list[dict[str, Any]] = []
    lives: list[tuple[int, bytes, bytes | None]] = []
    for number, statement in enumerate(program):
        if number == split:
            before, changes, lives = list(box.space(space.id).tuples()), [], []
        transaction = box.begin()
        if isinstance(perform(transaction, statement), int):
            transaction.rollback()
            continue
        for each in transaction.statements:
            changes.append(change(space, number + 1, number + 1, each.type, each.body))
            key = changes[-1]["_sort_key"]
            if key is not None:
                held = dict(zip(*map(pa.Array.to_pylist, _keyed(box, space)), strict=True))
                lives.append((number + 1, key, held.get(key)))
    shuffled.shuffle(changes)
    made = table(changes)

    needed = {*keys_needing_old(made, last_only=True).to_pylist()}
    old = old_of(space, before)
    some = old.filter(pa.array([key in needed for key in old["sort_key"].to_pylist()], pa.bool_()))
    after = dict(zip(old["sort_key"].to_pylist(), old["tuple"].to_pylist(), strict=True))
    folded = fold(space, made, some, rules=OF_2_6)
    for key, value in zip(folded["sort_key"].to_pylist(), folded["tuple"].to_pylist(), strict=True):
        after.pop(key, None)
        if value is not None:
            after[key] = value
    keys, tuples = _keyed(box, space)
    assert after == dict(zip(keys.to_pylist(), tuples.to_pylist(), strict=True))

    every = fold(space, made, old, every_state=True, rules=OF_2_6)
    told = {(each["commit_version"], each["sort_key"]): each["tuple"] for each in every.to_pylist()}
    assert len(told) == len(every)
    for version, key, value in lives:
        # An omitted change has no effect: the key has no tuple before or after it.
        assert told.get((version, key)) == value
    assert {version for version, _ in told} <= {version for version, _, _ in lives}

    possible = {*keys_that_may_exist(made).to_pylist()}
    some = old.filter(pa.array([key in possible for key in old["sort_key"].to_pylist()], pa.bool_()))
    held = dict(zip(old["sort_key"].to_pylist(), old["tuple"].to_pylist(), strict=True))
    for each, was in zip(every.to_pylist(), tuples_before(every, some).to_pylist(), strict=True):
        assert was == held.get(each["sort_key"])
        held[each["sort_key"]] = each["tuple"]


def _keyed(box: Any, space: SpaceDefinition) -> tuple[pa.Array, pa.Array]:
    tuples = pa.array(list(box.space(space.id).tuples()), pa.binary())
    return sort_keys(space, tuples), tuples


def test_last_change_of_a_key_in_log_order_wins() -> None:
    changes = table(
        [
            row(3, REPLACE, tuple=(1, "c")),
            row(1, INSERT, tuple=(1, "a")),
            row(2, REPLACE, tuple=(1, "b"), lsn=7),
            row(2, INSERT, tuple=(2, "x"), lsn=8),
            row(2, DELETE, key=(2,), lsn=9),
        ]
    )
    first, second = fold(PAIRS, changes).to_pylist()
    assert (first["tuple"], first["operation"], first["commit_version"], first["lsn"]) == (
        pack((1, "c")),
        "replace",
        3,
        3,
    )
    assert (second["tuple"], second["operation"], second["commit_version"], second["lsn"]) == (None, "delete", 2, 9)


def test_update_of_a_missing_tuple_has_no_effect() -> None:
    changes = table([row(lsn, UPDATE, key=(1,), tuple=(("=", 1, "x"),)) for lsn in (1, 2)])
    assert len(fold(PAIRS, changes)) == len(fold(PAIRS, changes, every_state=True)) == 0


def test_delete_of_a_possibly_existing_tuple_is_reported_once() -> None:
    changes = table([row(1, DELETE, key=(1,)), row(2, DELETE, key=(1,)), row(3, UPSERT, tuple=(1, "a"), ops=())])
    told = fold(PAIRS, changes, every_state=True)
    assert told["commit_version"].to_pylist() == [1, 3]
    plain = table([row(1, DELETE, key=(1,)), row(2, DELETE, key=(1,))])
    assert fold(PAIRS, plain, every_state=True)["commit_version"].to_pylist() == [1]


def test_rows_without_a_sort_key_have_no_effect() -> None:
    none = row(1, DELETE, key=(1,)) | {"_sort_key": None}
    assert len(fold(PAIRS, table([none]))) == 0
    assert keys_needing_old(table([none])).to_pylist() == []


def test_keys_needing_old_are_those_whose_first_change_depends_on_the_old_tuple() -> None:
    changes = table(
        [
            row(1, UPDATE, key=(1,), tuple=(("=", 1, "x"),)),
            row(2, REPLACE, tuple=(1, "y")),
            row(1, UPSERT, tuple=(2, "z"), ops=(("=", 1, "z"),), lsn=5),
            row(1, INSERT, tuple=(3, "a"), lsn=6),
            row(2, UPDATE, key=(3,), tuple=(("=", 1, "b"),), lsn=7),
        ]
    )
    one, two = (sort_keys(PAIRS, pa.array([pack((number,))], pa.binary()))[0].as_py() for number in (1, 2))
    assert keys_needing_old(changes).to_pylist() == [one, two]
    assert keys_needing_old(changes, last_only=True).to_pylist() == [two]


def test_operations_use_the_index_base_of_their_row_and_field_names() -> None:
    changes = table(
        [
            row(1, UPDATE, key=(1,), tuple=(("=", 2, "b"),), index_base=1),
            row(2, UPDATE, key=(1,), tuple=(("=", "name", "c"), ("!", 3, 5)), index_base=1),
        ]
    )
    assert fold(PAIRS, changes, old_of(PAIRS, [pack((1, "a"))]))["tuple"].to_pylist() == [pack((1, "c", 5))]


def test_field_names_are_those_at_the_row() -> None:
    later = SpaceDefinition(
        512,
        "s512",
        fields=(FieldDefinition("id", "unsigned"), FieldDefinition("title"), FieldDefinition("name")),
        indexes=PAIRS.indexes,
    )
    rows = [row(lsn, UPDATE, key=(1,), tuple=(("=", "name", f"at {lsn}"),)) for lsn in (5, 6, 7)]
    definitions = FoldDefinitions((PAIRS, later), ((6, 7),))
    changes = table([rows[0], rows[1] | {"_lsn": 6}, rows[2]])
    (folded,) = fold(definitions, changes, old_of(PAIRS, [pack((1, "a", "b"))])).to_pylist()
    assert folded["tuple"] == pack((1, "at 6", "at 7"))
    assert definitions.at((6, 6)) is PAIRS
    assert definitions.at((6, 7)) is later


def test_upsert_follows_the_rules_of_the_servers_version() -> None:
    changes = table([row(1, UPSERT, tuple=(1, "x"), ops=(("=", 4, 5), ("+", 2, 1), ("+", 2, 1)))])
    old = old_of(PAIRS, [pack((1, "a", 1))])
    assert fold(PAIRS, changes, old, rules=OF_2_6)["tuple"].to_pylist() == [pack((1, "a", 2))]
    assert fold(PAIRS, changes, old)["tuple"].to_pylist() == [pack((1, "a", 2, None, 5))]
    assert fold(PAIRS, changes, old, rules=upsert_rules((3, 8)))["tuple"].to_pylist() == [pack((1, "a", 3, None, 5))]
    assert upsert_rules((2, 11, 9)) == UpdateRules(fills_gaps=True)


@pytest.mark.parametrize("operation", [("=", 0, 2), ("!", 0, 7), ("=", -2, 9)])
def test_upsert_that_would_change_the_key_is_ignored(operation: tuple[Any, ...]) -> None:
    changes = table([row(1, UPSERT, tuple=(1, "x"), ops=(operation,))])
    assert fold(PAIRS, changes, old_of(PAIRS, [pack((1, "a"))]))["tuple"].to_pylist() == [pack((1, "a"))]


def test_error_for_an_inapplicable_update_names_the_space() -> None:
    changes = table([row(1, UPDATE, key=(1,), tuple=(("+", 1, 1),))])
    with pytest.raises(CannotFold, match="s512"):
        fold(PAIRS, changes, old_of(PAIRS, [pack((1, "a"))]))


def test_updates_in_bulk_equal_updates_one_by_one() -> None:
    """Updates are compiled if possible; here some cannot be compiled, and some keys have several updates."""
    operations = [
        (("=", 1, "b"),),
        (("+", 2, 1), ("=", 1, "c")),
        (("=", "name", "d"),),
        ((":", 1, 0, 1, "zz"),),
        (("=", 0, 9),),
    ]
    old = old_of(PAIRS, [pack((number, "a", number)) for number in range(100)])
    changes = []
    for version in range(1, 300):
        key, each = version * 37 % 100, operations[version % 4]
        kind, body = (
            (UPDATE, {"key": (key,), "tuple": each}) if version % 3 else (UPSERT, {"tuple": (key, "x"), "ops": each})
        )
        changes.append(row(version, kind, **body))
    changes.append(row(301, UPSERT, tuple=(5, "x"), ops=operations[4]))
    found = [fold(PAIRS, table(changes), old)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fold_module, "BULK_MIN", 10_000)
        found.append(fold(PAIRS, table(changes), old))
    assert found[0] == found[1]
    assert len(found[0]) == 100


def test_fold_accepts_several_chunks_and_empty_tables() -> None:
    one, two = table([row(1, INSERT, tuple=(1, "a"))]), table([row(2, UPDATE, key=(1,), tuple=(("=", 1, "b"),))])
    assert fold(PAIRS, pa.concat_tables([two, one]))["tuple"].to_pylist() == [pack((1, "b"))]
    assert fold(PAIRS, one.slice(0, 0)).schema == STATES


def test_plain_changes_are_folded_by_column() -> None:
    count = 100_000
    tuples = pa.array([pack((number % 30_000, "name")) for number in range(count)], pa.binary())
    nothing = pa.nulls(count, pa.binary())
    numbers = pa.array(range(count), pa.int64())
    columns = [pa.array([512] * count), sort_keys(PAIRS, tuples), pa.array(["replace"] * count), numbers]
    columns += [numbers, pa.array([1] * count), numbers, tuples, nothing, nothing, pa.array([0] * count)]
    changes = pa.table(columns, names=table([]).schema.names).cast(table([]).schema)
    fold(PAIRS, changes.slice(0, 10))
    started = time.perf_counter()
    folded = fold(PAIRS, changes)
    assert len(folded) == 30_000
    # Folding them one by one takes a hundred times as long; an idle core folds 2 M rows/s.
    assert count / (time.perf_counter() - started) > 100_000
