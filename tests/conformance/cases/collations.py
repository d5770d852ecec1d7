"""Strings with collations: unicode, unicode_ci, binary, none, in keys and duplicates."""

from __future__ import annotations

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
    create_space,
    delete,
    group,
    hashed,
    insert,
    part,
    replace,
    select,
    tree,
    update,
)

WORDS = "apple Apple APPLE äpfel zebra Zebra été ete Ångström ab ß ss я Я 日本".split()
TUPLES = [[number, word] for number, word in enumerate([*WORDS, "", "a b"])]

UNICODE = Space([PRIMARY, tree(part(1, "string", collation=1), name="unicode")], TUPLES)
UNICODE_CI = Space(
    [PRIMARY, tree(part(1, "string", collation=2), name="unicode_ci", unique=False)],
    TUPLES,
)
UNIQUE_CI = Space([tree(part(0, "string", collation=2), name="pk")], [["one"], ["Two"], ["DREI"]])
MIXED = Space(
    [PRIMARY, tree(part(1, "scalar", collation=2), part(2, "string"), name="mixed", unique=False)],
    [[1, "b", "x"], [2, "B", "a"], [3, 5, "x"], [4, "A", "x"], [5, "a", "X"], [6, True, ""]],
)

CASES = [
    *group(
        "unicode",
        UNICODE,
        {
            "in order": select([], ALL, index=1),
            "EQ": select(["apple"], index=1),
            "EQ of another case": select(["aPPLE"], index=1),
            "GT": select(["apple"], GT, index=1),
            "LT": select(["ete"], LT, index=1),
            "GE of an absent word": select(["m"], GE, index=1),
            "a duplicate": insert([99, "Zebra"]),
            "another case is another word": insert([99, "zEBRA"]),
            "decomposed is the same word": insert([99, "äpfel"]),
            "not UTF-8 as a number": insert([99, 5]),
        },
    ),
    *group(
        "unicode_ci",
        UNICODE_CI,
        {
            "in order": select([], ALL, index=1),
            "EQ": select(["APPLE"], index=1),
            "EQ backwards": select(["ZEBRA"], REQ, index=1),
            "EQ of an accent": select(["ETE"], index=1),
            "GT": select(["ZEBRA"], GT, index=1),
            "LE": select(["apple"], LE, index=1),
            "Cyrillic": select(["я"], index=1),
            "sharp s": select(["SS"], index=1),
        },
    ),
    *group(
        "unique unicode_ci",
        UNIQUE_CI,
        {
            "found": select(["TWO"]),
            "a duplicate": insert(["ONE"]),
            "REPLACE of another case": replace(["ONE", 1]),
            "UPDATE to another case": update(["one"], ["=", 0, "ONE"]),
            "UPDATE to another word": update(["one"], ["=", 0, "uno"]),
            "DELETE": delete(["drei"]),
        },
    ),
    *group(
        "scalar with a collation",
        MIXED,
        {
            "in order": select([], ALL, index=1),
            "EQ": select(["a"], index=1),
            "EQ of both": select(["a", "x"], index=1),
            "GT a number": select([5], GT, index=1),
        },
    ),
    *group(
        "hash with a collation",
        Space([hashed(part(0, "string", collation=2), name="pk")], [["one"], ["Two"]]),
        {"found": select(["TWO"]), "absent": select(["three"]), "a duplicate": insert(["ONE"])},
    ),
    *group(
        "binary and none",
        Space([PRIMARY, tree(part(1, "string", collation=3), name="binary")], [[1, "b"], [2, "B"], [3, "ä"], [4, "a"]]),
        {"in order of bytes": select([], ALL, index=1), "a duplicate": insert([9, "B"])},
    ),
    *group(
        "collation definition",
        Space([PRIMARY]),
        {
            "on a number": create_index([part(1, "unsigned", collation=1)], id=1, name="i"),
            "unknown": create_index([part(1, "string", collation=7777)], id=1, name="i"),
            "that is a name": create_index([part(1, "string", collation="unicode")], id=1, name="i"),
            "another than the format's": [
                create_space(513, "other", format=[column("a", "string", collation=1)]),
                create_index([part(0, "string", collation=2)], space=513),
            ],
            "of a format, unknown": create_space(513, "other", format=[column("a", "string", collation=7777)]),
            "of a format on a number": create_space(513, "other", format=[column("a", "unsigned", collation=1)]),
        },
    ),
]
