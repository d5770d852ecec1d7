"""Indexes into documents: JSON paths, multikey parts, and their checks."""

from __future__ import annotations

from decimal import Decimal

from tests.conformance.case import (
    ALL,
    GE,
    GT,
    LE,
    LT,
    PRIMARY,
    REQ,
    Space,
    column,
    create_index,
    delete,
    group,
    hashed,
    insert,
    part,
    replace,
    select,
    tree,
    update,
    upsert,
)

DOCUMENTS = Space(
    [
        PRIMARY,
        tree(part(1, "string", path="name"), name="name"),
        tree(part(1, "integer", path=".address.zip", is_nullable=True), name="zip", unique=False),
        tree(part(2, "number", path="[2]", is_nullable=True), name="second", unique=False),
    ],
    [
        [1, {"name": "ann", "address": {"zip": 100}}, [1, 2.5]],
        [2, {"name": "bob", "address": {}}, [1]],
        [3, {"name": "cid"}, []],
        [4, {"name": "", "address": {"zip": None}}, [1, Decimal("2.5"), 3]],
        [5, {"name": "eve", "address": {"zip": -1}}, [None, None]],
    ],
)

paths = group(
    "path index",
    DOCUMENTS,
    {
        "found": select(["bob"], index=1),
        "in order": select([], ALL, index=1),
        "GT": select(["bob"], GT, index=1),
        "absent values are nil": select([None], index=2),
        "nullable in order": select([], ALL, index=2),
        "nullable backwards": select([100], LE, index=2),
        "an element of an array": select([2.5], index=3),
        "elements above nil": select([None], GT, index=3),
        "a duplicate": insert([9, {"name": "ann"}, []]),
        "a missing needed value": insert([9, {"nam": "x"}, []]),
        "a nil needed value": insert([9, {"name": None}, []]),
        "a value of a wrong type": insert([9, {"name": 5}, []]),
        "a nullable value of a wrong type": insert([9, {"name": "x", "address": {"zip": "1"}}, []]),
        "a scalar on the way": insert([9, {"name": "x", "address": 5}, []]),
        "an array on the way": insert([9, {"name": "x", "address": [1]}, []]),
        "an array instead of the document": insert([9, ["x"], []]),
        "nil instead of the document": insert([9, None, []]),
        "a map instead of the array": insert([9, {"name": "x"}, {}]),
        "the array is missing": insert([9, {"name": "x"}]),
        "the document is missing": insert([9]),
        "a key of another type": insert([9, {1: 2, "name": "x"}, []]),
        "UPDATE of the path": update([1], ["=", "[2].name", "amy"]),
        "UPDATE to a duplicate": update([1], ["=", "[2].name", "bob"]),
        "UPDATE removes the value": update([1], ["#", "[2].name", 1]),
        "UPDATE by the path's index": update(["eve"], ["=", "[2].address.zip", 7], index=1),
        "DELETE by the path's index": delete(["cid"], index=1),
        "REPLACE": replace([1, {"name": "zoe", "address": {"zip": 1, "more": [1]}}, [0, 0]]),
        "UPSERT": upsert([1, {"name": "x"}, []], ["=", "[2].name", "amy"]),
    },
)

PRIMARY_PATHS = Space(
    [
        tree(part(0, "unsigned", path="id.major"), part(0, "unsigned", path="id['minor']")),
        hashed(part(0, "string", path="key")),
    ],
    [[{"id": {"major": 1, "minor": 2}, "key": "x"}], [{"id": {"major": 1, "minor": 1}, "key": "y"}]],
)

primary_paths = group(
    "primary key of paths",
    PRIMARY_PATHS,
    {
        "in order": select([], ALL),
        "by both": select([1, 2]),
        "partial": select([1], REQ),
        "by the hash": select(["y"], index=1),
        "a duplicate": insert([{"id": {"major": 1, "minor": 1}, "key": "z"}]),
        "a hash duplicate": insert([{"id": {"major": 2, "minor": 1}, "key": "x"}]),
        "a missing part": insert([{"id": {"major": 1}, "key": "z"}]),
        "a change of the key": update([1, 1], ["=", "[1].id.minor", 9]),
        "a change beside the key": update([1, 1], ["=", "[1].note", 9]),
        "DELETE": delete([1, 1]),
    },
)

MULTIKEY = Space(
    [
        PRIMARY,
        tree(part(1, "string", path="[*]"), name="tags", unique=False),
        tree(part(2, "unsigned", path="[*].code", is_nullable=True), name="codes"),
        tree(
            part(2, "unsigned", path="[*].code", is_nullable=True),
            part(2, "string", path="[*].lang", is_nullable=True),
            part(0, "unsigned"),
            name="pairs",
            unique=False,
        ),
    ],
    [
        [1, ["a", "b"], [{"code": 1, "lang": "en"}, {"code": 2}]],
        [2, ["b", "b", "c"], []],
        [3, [], [{"code": 3, "lang": "de"}, {"code": None}, {}]],
        [4, ["a"], [{"code": 9, "lang": "en"}, {"code": 8, "lang": "fr"}]],
    ],
)

multikey = group(
    "multikey index",
    MULTIKEY,
    {
        "EQ": select(["b"], index=1),
        "EQ backwards": select(["b"], REQ, index=1),
        "all entries": select([], ALL, index=1),
        "GT": select(["a"], GT, index=1),
        "LT": select(["c"], LT, index=1),
        "by a number": select([8], index=2),
        "by nil": select([None], index=2),
        "all codes": select([], ALL, index=2),
        "GE with a limit": select([2], GE, index=2, limit=3, offset=1),
        "pairs": select([9, "en"], index=3),
        "pairs, partial": select([2], index=3),
        "all pairs": select([], ALL, index=3),
        "a duplicate of another tuple": insert([9, [], [{"code": 8}]]),
        "a duplicate within the tuple": insert([9, [], [{"code": 5}, {"code": 5}]]),
        "a wrong element": insert([9, ["a", 5], []]),
        "nil as an element": insert([9, ["a", None], []]),
        "no array": insert([9, "a", []]),
        "a map as the array": insert([9, {}, []]),
        "nil as the array": insert([9, None, []]),
        "the array is missing": insert([9, []]),
        "an element that is no map": insert([9, [], [5]]),
        "UPDATE of the array": update([1], ["=", 1, ["z", "y"]]),
        "UPDATE of an element": update([1], ["=", "[2][1]", "z"]),
        "UPDATE to a duplicate": update([1], ["=", "[3][1].code", 9]),
        "UPDATE within its own keys": update([1], ["=", "[3][1].code", 2]),
        "UPDATE by a unique multikey": update([8], ["=", 1, []], index=2),
        "DELETE by a unique multikey": delete([9], index=2),
        "DELETE removes all entries": [delete([1]), select([], ALL, index=1)],
        "REPLACE moves all entries": [replace([1, ["q"], []]), select([], ALL, index=1)],
        "REPLACE with another's key": replace([1, [], [{"code": 8}]]),
        "UPSERT": upsert([4, [], []], ["!", "[2][1]", "0"]),
    },
)

BARE = Space([PRIMARY], [[1, {"a": 1}]], format=[column("id", "unsigned"), column("doc", "map")])

definitions = group(
    "path definition",
    BARE,
    {
        "of a map": create_index([part(1, "integer", path="a")], id=1, name="i"),
        "quoted": create_index([part(1, "integer", path="['a']")], id=1, name="i"),
        "with an index into the map": create_index([part(1, "integer", path="[1]")], id=1, name="i"),
        "broken": create_index([part(1, "integer", path="a..b")], id=1, name="i"),
        "empty": create_index([part(1, "integer", path="")], id=1, name="i"),
        "of a type the data breaks": create_index([part(1, "string", path="a")], id=1, name="i"),
        "of a value the data lacks": create_index([part(1, "string", path="b")], id=1, name="i"),
        "of a value the data lacks, nullable": create_index(
            [part(1, "string", path="b", is_nullable=True)], id=1, name="i"
        ),
        "multikey as hash": create_index([part(1, "integer", path="[*]")], id=1, name="i", type="hash"),
        "multikey into a map": create_index([part(1, "integer", path="[*]")], id=1, name="i"),
        "multikey twice": create_index([part(2, "integer", path="[*][*]")], id=1, name="i"),
        "multikeys of two fields": create_index(
            [part(2, "integer", path="[*]"), part(3, "integer", path="[*]")], id=1, name="i"
        ),
        "multikey and its plain field": create_index(
            [part(2, "integer", path="[*].a"), part(2, "integer", path="b")], id=1, name="i"
        ),
        "on a field that is no document": create_index([part(0, "integer", path="a")], id=1, name="i"),
        "two types of one path": [
            create_index([part(2, "integer", path="a")], id=1, name="i", options={"unique": False}),
            create_index([part(2, "string", path="a")], id=2, name="j"),
        ],
        "the same part twice": create_index(
            [part(1, "integer", path="a"), part(1, "integer", path="['a']")], id=1, name="i"
        ),
    },
)

CASES = [*paths, *primary_paths, *multikey, *definitions]
