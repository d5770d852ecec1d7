"""Definitions of indexes: valid and invalid ways to create, alter and drop them by rows of `_index`."""

from __future__ import annotations

from tests.conformance.case import (
    ALL,
    PRIMARY,
    Space,
    alter_index,
    column,
    create_index,
    delete,
    drop_index,
    group,
    hashed,
    insert,
    part,
    select,
    tree,
    update,
    upsert,
)

ID = [[0, "unsigned"]]
BARE = Space([])

primary = group(
    "create a primary index",
    BARE,
    {
        "tree": [create_index(ID), insert([1]), select([])],
        "hash": [create_index(ID, type="hash"), insert([1]), select([1])],
        "in capitals": [create_index([[0, "UNSIGNED"]], type="TREE"), insert([1])],
        "of an old type": [create_index([[0, "num"]]), insert([1])],
        "of an old string type": [create_index([[0, "str"]]), insert(["1"])],
        "rtree": create_index([[0, "array"]], type="rtree", options={"unique": False}),
        "bitset": create_index(ID, type="bitset", options={"unique": False}),
        "of an unknown type": create_index(ID, type="stone"),
        "not unique": create_index(ID, options={"unique": False}),
        "nullable": create_index([part(0, "unsigned", is_nullable=True)]),
        "of arrays": create_index([[0, "array"]]),
        "of maps": create_index([[0, "map"]]),
        "of any": create_index([[0, "any"]]),
        "of an unknown part type": create_index([[0, "stone"]]),
        "with parts that are no array": create_index("x"),
        "with a part that is empty": create_index([[]]),
        "with a part without a type": create_index([[0]]),
        "with a part of three": create_index([[0, "unsigned", 5]]),
        "with a field that is no number": create_index([["a", "unsigned"]]),
        "with a negative field": create_index([[-1, "unsigned"]]),
        "with a field too large": create_index([[2**31 - 1, "unsigned"]]),
        "with a part twice": create_index([[0, "unsigned"], [0, "unsigned"]]),
        "with 255 parts": create_index([[number, "unsigned"] for number in range(255)]),
        "with 256 parts": create_index([[number, "unsigned"] for number in range(256)]),
        "with an unknown key in a part": create_index([{"field": 0, "type": "unsigned", "colour": 1}]),
        "with a part map without a field": create_index([{"type": "unsigned"}]),
        "with a part map without a type": create_index([{"field": 0}]),
        "with pairs and maps": create_index([[0, "unsigned"], {"field": 1, "type": "unsigned"}]),
        "with maps and pairs": create_index([{"field": 1, "type": "unsigned"}, [0, "unsigned"]]),
        "with is_nullable that is no boolean": create_index([{"field": 0, "type": "unsigned", "is_nullable": 1}]),
        "with options that are no map": create_index(ID, options=[]),
        "with an unknown option": create_index(ID, options={"colour": "blue"}),
        "with unique that is no boolean": create_index(ID, options={"unique": 1}),
        "without options": create_index(ID, options={}),
        "with options of vinyl": create_index(ID, options={"unique": True, "page_size": 1024, "bloom_fpr": 0.1}),
        "with a wrong option of vinyl": create_index(ID, options={"unique": True, "page_size": "x"}),
        "with a wrong dimension": create_index(ID, options={"unique": True, "dimension": -1}),
        "with an unknown distance": create_index(ID, options={"unique": True, "distance": "far"}),
        "without a name": create_index(ID, name=""),
        "with a name of 65001 characters": create_index(ID, name="n" * 65001),
        "with a name that is no text": create_index(ID, name=1),
        "with id 1": create_index(ID, id=1),
        "with id 128": [create_index(ID), create_index(ID, id=128, name="s")],
        "in an unknown space": create_index(ID, space=999),
        "in a view": create_index(ID, id=7, space=281, name="x"),
        "by UPSERT": upsert([512, 0, "pk", "tree", {}, ID], ["=", 2, "x"], space=288),
    },
)

FILLED = Space(
    [PRIMARY],
    [[1, "a", 5, None, [1]], [2, "b", 5, 1.5, {"x": 1}], [3, "a", -5, "s"]],
)

secondary = group(
    "create a secondary index",
    FILLED,
    {
        "unique over unique data": [
            create_index([[0, "unsigned"], [1, "string"]], id=1, name="s"),
            select([2], index=1),
        ],
        "unique over duplicates": create_index([[1, "string"]], id=1, name="s"),
        "not unique over duplicates": [
            create_index([[1, "string"]], id=1, name="s", options={"unique": False}),
            select(["a"], index=1),
        ],
        "of a type the data breaks": create_index([[2, "unsigned"]], id=1, name="s", options={"unique": False}),
        "of a field that is nil": create_index([[3, "scalar"]], id=1, name="s"),
        "nullable over nil": [
            create_index([part(3, "scalar", is_nullable=True)], id=1, name="s"),
            select([], ALL, index=1),
        ],
        "of a field that is missing": create_index([[4, "any"]], id=1, name="s"),
        "of a field beyond all": create_index([[9, "unsigned"]], id=1, name="s"),
        "nullable of a field beyond all": [
            create_index([part(9, "unsigned", is_nullable=True)], id=1, name="s"),
            select([None], index=1),
        ],
        "hash over unique data": [create_index([[0, "unsigned"]], id=1, name="s", type="hash"), select([2], index=1)],
        "hash over duplicates": create_index([[1, "string"]], id=1, name="s", type="hash"),
        "hash that is not unique": create_index(ID, id=1, name="s", type="hash", options={"unique": False}),
        "hash that is nullable": create_index([part(3, "scalar", is_nullable=True)], id=1, name="s", type="hash"),
        "with a taken id": create_index(ID, id=0, name="s"),
        "with a taken name": create_index(ID, id=1),
        "with a gap in the ids": [create_index(ID, id=5, name="s"), select([2], index=5), select([2], index=3)],
        "rtree that is unique": create_index([[4, "array"]], id=1, name="s", type="rtree"),
        "bitset that is unique": create_index(ID, id=1, name="s", type="bitset"),
        "bitset of integers": create_index([[2, "integer"]], id=1, name="s", type="bitset", options={"unique": False}),
        "rtree of two fields": create_index(
            [[4, "array"], [5, "array"]], id=1, name="s", type="rtree", options={"unique": False}
        ),
        "with a function that does not exist": create_index(ID, id=1, name="s", options={"unique": True, "func": 999}),
        "of two types for one field": create_index([[0, "string"]], id=1, name="s"),
        "of a wider type": [create_index([[0, "integer"]], id=1, name="s"), select([2], index=1), insert([-1])],
        "of a wider type, scalar": [create_index([[0, "scalar"]], id=1, name="s"), select([2], index=1)],
        "then it guards": [
            create_index([[0, "unsigned"], [1, "string"]], id=1, name="s"),
            insert([9, 9]),
            insert([9]),
        ],
    },
)

FORMATTED = Space(
    [PRIMARY],
    format=[
        column("id", "unsigned"),
        column("name", "string", is_nullable=True),
        column("any"),
        column("uuid", "uuid"),
    ],
)

against_format = group(
    "index against the format",
    FORMATTED,
    {
        "another type": create_index([[1, "unsigned"]], id=1, name="s"),
        "a wider type": create_index([part(1, "scalar", is_nullable=True)], id=1, name="s"),
        "a narrower type": create_index([[2, "unsigned"]], id=1, name="s"),
        "not nullable over nullable": create_index([part(1, "string")], id=1, name="s"),
        "a pair over nullable": create_index([[1, "string"]], id=1, name="s"),
        "nullable over not nullable": create_index([part(2, "string", is_nullable=True)], id=1, name="s"),
        "beyond the format": create_index([[5, "string"]], id=1, name="s"),
        "scalar over UUIDs": create_index([[3, "scalar"]], id=1, name="s"),
        "UUID over UUIDs": create_index([[3, "uuid"]], id=1, name="s"),
    },
)

INDEXED = Space(
    [PRIMARY, tree((1, "string"), name="s"), tree((2, "integer"), name="n", unique=False)],
    [[1, "a", 5], [2, "b", 5], [3, "c", -5]],
)

alter = group(
    "alter an index",
    INDEXED,
    {
        "rename": [alter_index([[1, "string"]], id=1, name="renamed"), insert([4, "a", 0])],
        "rename to a taken name": alter_index([[1, "string"]], id=1, name="n"),
        "to not unique": [
            alter_index([[1, "string"]], id=1, name="s", options={"unique": False}),
            insert([4, "a", 0]),
            select(["a"], index=1),
        ],
        "to unique over duplicates": alter_index([[2, "integer"]], id=2, name="n"),
        "to other parts": [alter_index([[1, "string"], [2, "integer"]], id=1, name="s"), select(["b", 5], index=1)],
        "to a wider type": [alter_index([[1, "scalar"]], id=1, name="s"), insert([4, 4, 4])],
        "to a narrower type the data breaks": alter_index([[2, "unsigned"]], id=2, name="n", options={"unique": False}),
        "to hash and back": [
            alter_index([[1, "string"]], id=1, name="s", type="hash"),
            select(["b"], index=1),
            alter_index([[1, "string"]], id=1, name="s"),
        ],
        "to nullable": [
            alter_index([part(1, "string", is_nullable=True)], id=1, name="s"),
            insert([4, None, 0]),
            insert([5, None, 0]),
        ],
        "the primary to other parts": [alter_index([[1, "string"]], id=0), select([]), insert([1, "z", 1])],
        "the primary to parts with duplicates": alter_index([[2, "integer"]], id=0),
        "the primary to not unique": alter_index([[0, "unsigned"]], id=0, options={"unique": False}),
        "the primary to nullable": alter_index([part(0, "unsigned", is_nullable=True)], id=0),
        "the primary to hash and back": [
            alter_index([[0, "unsigned"]], id=0, type="hash"),
            select([2]),
            alter_index([[0, "unsigned"]], id=0),
        ],
        "the primary to a wider type": [alter_index([[0, "integer"]], id=0), insert([-1, "z", 1]), select([])],
        "by UPDATE": update([512, 1], ["=", 2, "renamed"], space=288),
        "by UPDATE of its number": update([512, 1], ["=", 1, 7], space=288),
        "by UPDATE of its space": update([512, 1], ["=", 0, 280], space=288),
    },
)

drop = group(
    "drop an index",
    INDEXED,
    {
        "the last secondary": [drop_index(2), select([5], index=2), insert([4, "d", "x"])],
        "one in the middle": [drop_index(1), select(["a"], index=1), select([5], index=2)],
        "the primary with secondaries": drop_index(0),
        "the primary after all": [drop_index(1), drop_index(2), drop_index(0), insert([1]), select([])],
        "the primary, then anew": [
            drop_index(1),
            drop_index(2),
            drop_index(0),
            create_index([[1, "string"]]),
            select([]),
            insert([1, "x"]),
        ],
        "that does not exist": drop_index(9),
        "of the system": drop_index(0, space=280),
        "a secondary of the system": drop_index(2, space=280),
        "of a view": drop_index(0, space=281),
        "by its name": delete([512, "s"], space=288, index=2),
        "by its name, unknown": delete([512, "x"], space=288, index=2),
    },
)

HASHED = Space(
    [hashed((0, "unsigned"), name="pk"), tree((1, "integer"), name="t", unique=False)], [[1, 5], [2, 5], [3, 1]]
)

hashed_primary = group(
    "secondary of a hash primary",
    HASHED,
    {
        "equal keys in order of the primary": select([5], index=1),
        "equal keys backwards": select([5], 1, index=1),
        "the primary to tree": [alter_index(ID, id=0), select([])],
        "one more": [insert([0, 5]), select([], ALL, index=1)],
    },
)

CASES = [*primary, *secondary, *against_format, *alter, *drop, *hashed_primary]
