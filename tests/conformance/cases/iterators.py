"""SELECT: every iterator over composite keys, partial, empty, absent, too long and of wrong types; offset and limit."""

from __future__ import annotations

from tests.conformance.case import (
    ALL,
    EQ,
    GE,
    GT,
    ITERATORS,
    LE,
    LT,
    PRIMARY,
    REQ,
    Space,
    delete,
    group,
    hashed,
    insert,
    part,
    select,
    tree,
)

COMPOSITE = Space(
    [tree((0, "unsigned"), (1, "string"), (2, "integer")), tree((2, "integer"), unique=False)],
    [
        [1, "a", 0],
        [1, "b", -1],
        [2, "a", 5],
        [2, "b", -7],
        [2, "b", 0],
        [2, "b", 7, "more"],
        [2, "bb", 0],
        [2, "c", 0],
        [3, "", 0],
        [3, "b", 2**64 - 1],
        [2**64 - 1, "z", -(2**63)],
    ],
)

KEYS = {
    "no part": [],
    "one part": [2],
    "two parts": [2, "b"],
    "all parts": [2, "b", 0],
    "an absent first part": [9],
    "an absent second part": [2, "ba"],
    "an absent third part": [2, "b", 3],
    "the largest number": [2**64 - 1],
    "one part too many": [2, "b", 0, 1],
    "a string for a number": ["2"],
    "a number for a string": [2, 2],
    "nil for a number": [None],
    "a negative number for an unsigned": [-2],
    "a double for an unsigned": [2.0],
}

composite = group(
    "composite key",
    COMPOSITE,
    {f"{name} with {key}": select(KEYS[key], iterator) for key in KEYS for name, iterator in ITERATORS.items()},
)

by_secondary = group(
    "non-unique key",
    COMPOSITE,
    {f"{name} 0": select([0], iterator, index=1) for name, iterator in ITERATORS.items()}
    | {
        "GT the largest": select([2**64 - 1], GT, index=1),
        "LT the smallest": select([-(2**63)], LT, index=1),
        "LE -1": select([-1], LE, index=1),
        "too many parts": select([0, 1], EQ, index=1),
    },
)

NUMBERS = Space([PRIMARY], [[number] for number in (1, 2, 3, 5, 8, 13)])

offset_and_limit = group(
    "offset and limit",
    NUMBERS,
    {
        "limit 0": select(limit=0),
        "limit 2": select(limit=2),
        "limit beyond the end": select(limit=100),
        "offset 2": select(offset=2),
        "offset at the end": select(offset=6),
        "offset beyond the end": select(offset=7),
        "offset and limit": select(offset=1, limit=2),
        "offset with EQ": select([3], EQ, offset=1),
        "offset and limit backwards": select([8], LE, offset=1, limit=2),
        "offset with GT": select([2], GT, offset=3, limit=5),
        "limit of 32 bits": select(limit=2**32 - 1),
        "limit above 32 bits": select(limit=2**32),
        "limit of 64 bits": select(limit=2**64 - 1),
        "offset above 32 bits": select(offset=2**32 + 1),
    },
)

unknown_iterators = group(
    "iterator",
    NUMBERS,
    {
        "bits all set on a tree": select([1], 7),
        "bits any set on a tree": select([1], 8),
        "bits all not set on a tree": select([1], 9),
        "overlaps on a tree": select([1], 10),
        "neighbor on a tree": select([1], 11),
        "the first that does not exist": select([1], 12),
        "far outside": select([1], 100),
        "of 32 bits": select([1], 2**32 - 1),
        "above 32 bits": select([1], 2**32),
    },
)

HASHED = Space(
    [hashed((0, "unsigned"), (1, "string")), hashed((2, "string")), tree((0, "unsigned"), unique=False)],
    [[1, "a", "x"], [1, "b", "y"], [2, "a", "z"]],
)

hash_index = group(
    "hash index",
    HASHED,
    {
        "EQ with all parts": select([1, "b"], EQ),
        "EQ with all parts, absent": select([7, "b"], EQ),
        "EQ with a partial key": select([1], EQ),
        "EQ with too many parts": select([1, "a", "x"], EQ),
        "EQ with a wrong type": select([1, 2], EQ),
        "REQ": select([1, "b"], REQ),
        "ALL": select([], ALL, unordered=True),
        "ALL with a key": select([1, "a"], ALL, unordered=True),
        "ALL with a partial key": select([1], ALL, unordered=True),
        "EQ without a key": select([], EQ, unordered=True),
        "GE without a key": select([], GE, unordered=True),
        "GT without a key": select([], GT, unordered=True),
        "GT with a partial key": select([1], GT),
        "GT with an absent key": select([7, "a"], GT),
        "GT with a wrong type": select([1, 2], GT),
        "GT with too many parts": select([1, "a", "x"], GT),
        "GT with a key and beyond all of them": select([1, "a"], GT, offset=2),
        "GE with a key": select([1, "a"], GE),
        "LE with a key": select([1, "a"], LE),
        "LT with a key": select([1, "a"], LT),
        "LT without a key": select([], LT),
        "of strings": select(["y"], EQ, index=1),
        "of strings, a number as key": select([1], EQ, index=1),
        "limit of a full scan": select([], ALL, limit=0),
        "offset beyond a full scan": select([], ALL, offset=3),
    },
)

hash_index_of_one = group(
    "hash index of one tuple",
    Space([hashed((0, "unsigned"))], [[5, "a"]]),
    {
        "GT with its key": select([5], GT),
        "GT with a smaller key": select([4], GT),
        "GT without a key": select([], GT),
        "GT with its key, once there is another": [
            insert([6, "b"]),
            select([5], GT, offset=1),
            select([], GT, offset=2),
        ],
        "GT with its key, once it is gone": [delete([5]), select([5], GT)],
    },
)

DESCENT = Space(
    [tree((1, "string"), (0, "unsigned")), tree((2, "unsigned"), part(3, "string", is_nullable=True), unique=False)],
    [[3, "c", 1], [1, "a", 1, "z"], [2, "a", 1, None], [2, "b", 2, "a"], [9, "", 2, "b"], [4, "a", 2, "a"]],
)

parts_in_another_order = group(
    "parts in another order",
    DESCENT,
    {f"{name} by the first": select(["a"], iterator) for name, iterator in ITERATORS.items()}
    | {f"{name} by both": select(["a", 2], iterator) for name, iterator in ITERATORS.items()}
    | {f"{name} with nil": select([1, None], iterator, index=1) for name, iterator in ITERATORS.items()}
    | {f"{name} with equal keys": select([2, "a"], iterator, index=1) for name, iterator in ITERATORS.items()},
)

EMPTY = Space([PRIMARY, tree((1, "string"), unique=False)])

empty_space = group(
    "empty space",
    EMPTY,
    {f"{name} of nothing": select([], iterator) for name, iterator in ITERATORS.items()}
    | {"EQ by key": select([1]), "by secondary": select(["a"], GE, index=1)},
)

CASES = [
    *composite,
    *by_secondary,
    *offset_and_limit,
    *unknown_iterators,
    *hash_index,
    *hash_index_of_one,
    *parts_in_another_order,
    *empty_space,
]
