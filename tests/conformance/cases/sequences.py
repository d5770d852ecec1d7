"""Sequences: their definitions, their use by spaces, and rejected requests."""

from __future__ import annotations

from tests.conformance.case import (
    ALL,
    PRIMARY,
    SPACE,
    Space,
    attach_sequence,
    column,
    create_index,
    create_sequence,
    delete,
    drop_index,
    drop_space,
    group,
    insert,
    part,
    replace,
    select,
    tree,
    truncate,
    update,
    upsert,
)

PLAIN = Space([PRIMARY])
DATA = 285

definitions = group(
    "define a sequence",
    PLAIN,
    {
        "plainly": [create_sequence(1, "s"), select([], ALL, space=284)],
        "with a taken name": [create_sequence(1, "s"), create_sequence(2, "s")],
        "with a taken id": [create_sequence(1, "s"), create_sequence(1, "t")],
        "without a name": create_sequence(1, ""),
        "with step 0": create_sequence(1, "s", step=0),
        "with a minimum above its maximum": create_sequence(1, "s", min=10, max=5),
        "with a start below its minimum": create_sequence(1, "s", min=10, start=5),
        "with a start above its maximum": create_sequence(1, "s", max=10, start=11),
        "downwards": create_sequence(1, "s", step=-1, min=-100, max=-1, start=-1),
        "with a name of 65001 characters": create_sequence(1, "n" * 65001),
        "with too few fields": insert([1, 1, "s"], space=284),
        "for an unknown owner": insert([1, 999, "s", 1, 1, 100, 1, 0, False], space=284),
        "then alter it": [create_sequence(1, "s"), update([1], ["=", 3, 10], space=284)],
        "then alter it wrongly": [create_sequence(1, "s"), update([1], ["=", 3, 0], space=284)],
        "then drop it": [create_sequence(1, "s"), delete([1], space=284), select([], space=284)],
        "then drop it while it has data": [
            create_sequence(1, "s"),
            insert([1, 5], space=DATA),
            delete([1], space=284),
        ],
        "then drop it while it is used": [create_sequence(1, "s"), attach_sequence(1), delete([1], space=284)],
    },
)

attachments = group(
    "attach a sequence",
    Space([PRIMARY, tree((1, "string"), name="s", unique=False)], format=[column("id", "unsigned")]),
    {
        "to a space": [attach_sequence(1), insert([None, "a"]), insert([None, "b"]), select([])],
        "to an unknown space": attach_sequence(1, space=999),
        "an unknown one": attach_sequence(99),
        "twice to a space": [attach_sequence(1), attach_sequence(2)],
        "to two spaces": [
            insert([513, 1, "other", "memtx", 0, {}, []], space=280),
            create_index([[0, "unsigned"]], space=513),
            attach_sequence(1),
            attach_sequence(1, space=513, generated=False),
            attach_sequence(2, space=513),
        ],
        "to a field that is no key": attach_sequence(1, field=1),
        "to a field beyond": attach_sequence(1, field=7),
        "with a path": attach_sequence(1, path="a"),
        "then detach it": [attach_sequence(1), delete([SPACE], space=340), insert([None, "a"])],
        "then drop the index": [attach_sequence(1), drop_index(1), drop_index(0)],
        "then drop the space": [attach_sequence(1), drop_index(1), drop_index(0), drop_space()],
        "then alter the index": [attach_sequence(1), update([SPACE, 0], ["=", 5, [[1, "string"]]], space=288)],
        "and truncate": [attach_sequence(1), insert([None, "a"]), truncate(), insert([None, "b"])],
    },
    before=[create_sequence(1, "first"), create_sequence(2, "second", step=10, min=-5, start=-5, max=30)],
)

use = group(
    "sequence in use",
    Space([tree((0, "integer"), name="pk")]),
    {
        "nil is filled": [insert([None, "a"]), insert([None]), select([])],
        "a value is taken as it is": [insert([5]), insert([None]), select([])],
        "a smaller value moves nothing": [insert([50]), insert([7]), insert([None])],
        "a negative value moves nothing": [insert([-3]), insert([None])],
        "REPLACE": [replace([None, "a"]), replace([None, "b"])],
        "UPSERT": [upsert([None, 1], ["+", 1, 1]), upsert([None, 1], ["+", 1, 1])],
        "an existing value": [insert([3]), insert([1]), insert([None]), select([])],
        "a wrong type": [insert(["x"]), insert([None])],
        "a missing field": insert([]),
        "the end": [insert([99]), insert([None]), insert([None])],
        "beyond the end": [insert([500]), insert([None])],
        "its data": [select([], ALL, space=DATA), insert([None]), select([], ALL, space=DATA)],
        "a failed insert still moves it": [insert([None]), update([1], ["=", 0, 2]), insert([2]), insert([None])],
        "set by hand": [replace([1, 41], space=DATA), insert([None])],
        "data of an unknown one": insert([77, 1], space=DATA),
    },
    before=[create_sequence(1, "s", max=100), attach_sequence(1)],
)

cycling = group(
    "cycling sequence",
    Space([tree((0, "integer"), (1, "unsigned"), name="pk")]),
    {"goes round": [insert([None, number]) for number in range(5)]},
    before=[create_sequence(1, "s", min=-1, max=2, start=1, cycle=True), attach_sequence(1)],
)

downwards = group(
    "descending sequence",
    Space([tree((0, "integer"), name="pk")]),
    {
        "counts down": [insert([None]), insert([None]), insert([None])],
        "a smaller value moves it": [insert([-50]), insert([None])],
        "a larger value moves nothing": [insert([None]), insert([7]), insert([None])],
    },
    before=[create_sequence(1, "s", step=-2, min=-100, max=-1, start=-1), attach_sequence(1)],
)

at_a_path = group(
    "sequence at a path",
    Space([tree(part(0, "unsigned", path="id"), name="pk")]),
    {
        "nil is filled": insert([{"id": None, "x": 1}]),
        "a value is taken": [insert([{"id": 5}]), insert([{"id": None}])],
        "a missing value": insert([{"x": 1}]),
        "no document": insert([5]),
    },
    before=[create_sequence(1, "s"), attach_sequence(1, path="id")],
)

CASES = [*definitions, *attachments, *use, *cycling, *downwards, *at_a_path]
