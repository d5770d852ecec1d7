"""Keys of mixed types: order and lookup of numbers, scalars, decimals, UUIDs and bytes."""

from __future__ import annotations

import math
from decimal import Decimal
from uuid import UUID

from tests.conformance.case import (
    ALL,
    GE,
    GT,
    ITERATORS,
    LE,
    LT,
    REQ,
    Space,
    group,
    hashed,
    insert,
    replace,
    select,
    tree,
)
from tests.conformance.wire import raw

FLOAT_1_5 = raw("ca 3fc00000")
FLOAT_0_1 = raw("ca 3dcccccd")
UUID_LOW = UUID("00000000-0000-0000-0000-000000000001")
UUID_HIGH = UUID("ffffffff-ffff-4fff-bfff-ffffffffffff")
UUID_MIDDLE = UUID("64d22e4d-ac92-4a23-899a-e59f34af5479")

NUMBERS = Space(
    [tree((0, "number"))],
    [
        [0],
        [-1],
        [1],
        [1.5],
        [FLOAT_0_1],
        [0.1],
        [Decimal("0.25")],
        [Decimal("0.10000000000000000001")],
        [2**53],
        [2.0**53 + 2],
        [2**53 + 1],
        [2**64 - 1],
        [2.0**64],
        [-(2**63)],
        [-(2.0**63) * 1.5],
        [Decimal("18446744073709551614.5")],
        [Decimal("-9223372036854775808.5")],
        [Decimal(99999999999999999999999999999999999999)],
        [1e300],
        [-1e300],
        [5e-324],
    ],
)

numbers = group(
    "number key",
    NUMBERS,
    {
        "all in order": select([], ALL),
        "an integer found by a double": select([1.0]),
        "an integer found by a float": select([raw("ca 3f800000")]),
        "an integer found by a decimal": select([Decimal("1.00")]),
        "a double found by a decimal": select([Decimal("1.5")]),
        "a double found by a float": select([FLOAT_1_5]),
        "0.1 as a double": select([0.1]),
        "0.1 as a decimal finds the double": select([Decimal("0.1")]),
        "0.1 as a decimal beside the double": insert([Decimal("0.1")]),
        "0.1 as a float is another number": select([FLOAT_0_1]),
        "a quarter, as a double": select([0.25]),
        "minus zero is zero": select([-0.0]),
        "2^53 + 1 is not 2^53 as a double": select([2.0**53]),
        "2^64 as a double above the largest integer": select([2.0**64], LT, limit=2),
        "above the largest integer": select([2**64 - 1], GT),
        "below the smallest integer": select([-(2**63)], LT),
        "between integers, by a decimal": select([Decimal("18446744073709551614.7")], LE, limit=2),
        "a string": select(["1"]),
        "a boolean": select([True]),
        "nil": select([None]),
        "an array": select([[1]]),
        "bytes": select([b"1"]),
        "a UUID": select([UUID_LOW]),
        "a duplicate in another type": insert([1.0, "twin"]),
        "a replacement in another type": replace([Decimal("1.500"), "twin"]),
        "a string inserted": insert(["1"]),
        "a boolean inserted": insert([False]),
        "an unknown extension inserted": insert([raw("d4 63 01")]),
    },
)

SCALARS = Space(
    [tree((0, "scalar"))],
    [
        [True],
        [False],
        [0],
        [-5],
        [1.25],
        [Decimal("3.14")],
        [""],
        ["a"],
        ["a\0"],
        ["b"],
        ["é"],
        [b""],
        [b"a"],
        [b"\0"],
        [b"\xff"],
        [2**63],
    ],
)

EXTREMES = Space([tree((0, "number"))], [[math.inf], [-math.inf], [2**64 - 1], [-(2**63)], [1.7e308], [-1.7e308]])

extremes = group(
    "infinite key",
    EXTREMES,
    {
        "in order": select([], ALL),
        "infinity": select([math.inf]),
        "infinity as a float": select([raw("ca 7f800000")]),
        "GT the largest double": select([1.7e308], GT),
        "LT the smallest double": select([-1.7e308], LT),
        "GE minus infinity": select([-math.inf], GE, limit=2),
        "a duplicate infinity": insert([raw("ca ff800000")]),
    },
)

scalars = group(
    "scalar key",
    SCALARS,
    {
        f"{name} {label}": select([key], iterator)
        for name, iterator in ITERATORS.items()
        for label, key in [
            ("true", True),
            ("zero", 0.0),
            ("a string", "a"),
            ("bytes", b"a"),
            ("a decimal", Decimal("3.140")),
        ]
    }
    | {
        "nil": select([None]),
        "an array": select([[]]),
        "a map": select([{}]),
        "an unknown extension": select([raw("d4 63 01")]),
        "nil inserted": insert([None]),
        "an array inserted": insert([[1]]),
        "a map inserted": insert([{"a": 1}]),
        "an unknown extension inserted": insert([raw("d4 63 01")]),
        "a duplicate boolean": insert([True, 2]),
        "a duplicate number in another type": insert([Decimal("1.25")]),
        "a UUID": select([UUID_HIGH]),
        "a UUID inserted": insert([UUID_HIGH]),
        "a string beside equal bytes": insert(["\xff"]),
    },
)

DOUBLES = Space([tree((0, "double"))], [[1.0], [-0.5], [1.5], [2.5e10]])

doubles = group(
    "double key",
    DOUBLES,
    {
        "found": select([1.0]),
        "a float": select([raw("ca 3f800000")]),
        "an integer": select([1]),
        "a decimal": select([Decimal("1.0")]),
        "in order": select([-100.0], GE),
        "an integer inserted": insert([3]),
        "a decimal inserted": insert([Decimal("3.5")]),
        "a float inserted": insert([FLOAT_1_5]),
        "a duplicate": insert([1.5, 1]),
        "not a number inserted": insert([math.nan]),
    },
)

DECIMALS = Space([tree((0, "decimal"))], [[Decimal("1.10")], [Decimal(-2)], [Decimal("1E+10")], [Decimal("0E-5")]])

decimals = group(
    "decimal key",
    DECIMALS,
    {
        "found with other zeros": select([Decimal("1.1")]),
        "zero of another scale": select([Decimal(0)]),
        "an exponent written out": select([Decimal("10000000000.0")]),
        "an integer": select([-2]),
        "a double": select([-2.0]),
        "in order": select([Decimal(-3)], GT),
        "an integer inserted": insert([5]),
        "a duplicate of another scale": insert([Decimal("1.1000")]),
        "replaced, keeping its bytes": replace([Decimal("1.1000"), 1]),
    },
)

UUIDS = Space([tree((0, "uuid"))], [[UUID_HIGH], [UUID_LOW], [UUID_MIDDLE]])

uuids = group(
    "uuid key",
    UUIDS,
    {
        "found": select([UUID_MIDDLE]),
        "in order": select([UUID_LOW], GT),
        "backwards": select([UUID_HIGH], LE),
        "as text": select([str(UUID_LOW)]),
        "as bytes": select([UUID_LOW.bytes]),
        "text inserted": insert([str(UUID_LOW)]),
        "a duplicate": insert([UUID_LOW]),
    },
)

BYTES = Space([tree((0, "varbinary"))], [[b"b"], [b""], [b"\0"], [b"\0\0"], [b"\xff\xff"], [b"a"]])

varbinary = group(
    "varbinary key",
    BYTES,
    {
        "found": select([b"\0"]),
        "empty": select([b""]),
        "in order": select([], ALL),
        "GT": select([b"\0"], GT),
        "LT": select([b"b"], LT),
        "a string": select(["a"]),
        "a string inserted": insert(["a"]),
        "a duplicate in a longer head": insert([raw("c5 0001 61")]),
    },
)

BOOLEANS = Space([tree((0, "boolean"), (1, "unsigned"))], [[True, 1], [False, 2], [True, 0], [False, 0]])

booleans = group(
    "boolean key",
    BOOLEANS,
    {
        "true": select([True]),
        "false backwards": select([False], REQ),
        "in order": select([], ALL),
        "GT false": select([False], GT),
        "a number": select([0]),
        "a number inserted": insert([1, 1]),
        "nil inserted": insert([None, 1]),
    },
)

INTEGERS = Space([tree((0, "integer"))], [[-(2**63)], [-1], [0], [1], [2**63], [2**64 - 1]])

integers = group(
    "integer key",
    INTEGERS,
    {
        "the smallest": select([-(2**63)]),
        "the largest": select([2**64 - 1]),
        "around zero": select([-1], GE, limit=3),
        "a double": select([1.0]),
        "a decimal": select([Decimal(1)]),
        "one in a long head": select([raw("cf 0000000000000001")]),
        "one with a signed head": select([raw("d3 0000000000000001")]),
        "a duplicate in a long head": insert([raw("cd 0001")]),
        "a duplicate with a signed head": insert([raw("d1 0001")]),
        "a double inserted": insert([2.0]),
        "a new one with a signed head": insert([raw("d0 05")]),
    },
)

UNSIGNED = Space([tree((0, "unsigned"))], [[0], [5], [2**64 - 1]])

unsigned = group(
    "unsigned key",
    UNSIGNED,
    {
        "in a long head": select([raw("cf 0000000000000005")]),
        "with a signed head": select([raw("d0 05")]),
        "with a signed head inserted": insert([raw("d0 07")]),
        "negative inserted": insert([-1]),
        "a double inserted": insert([1.0]),
        "nil inserted": insert([None]),
        "a string inserted": insert(["1"]),
        "an empty tuple inserted": insert([]),
    },
)

STRINGS = Space(
    [tree((0, "string"))], [["a"], ["B"], [""], ["a\0b"], ["a\0"], ["ab"], ["é"], ["e"], ["\U0001f600"], ["～"]]
)

strings = group(
    "string key",
    STRINGS,
    {
        "in order of bytes": select([], ALL),
        "with a zero byte": select(["a\0"]),
        "GT with a zero byte": select(["a\0"], GT, limit=2),
        "LT a prefix": select(["ab"], LT),
        "not UTF-8": [insert([raw("a2 ff fe")]), select([raw("a2 ff fe")]), select([], ALL)],
        "in a long head": select([raw("db 00000001 61")]),
        "a duplicate in a long head": insert([raw("d9 01 61")]),
        "bytes": select([b"a"]),
        "bytes inserted": insert([b"a"]),
    },
)

HASHED = Space(
    [hashed((0, "scalar")), hashed((1, "number"))],
    [[True, 1], [1, 1.5], ["a", Decimal("2.0")], [b"a", 2**64 - 1], [Decimal("7.50"), 0]],
)

hashed_mixed = group(
    "mixed hash key",
    HASHED,
    {
        "a number by an equal double": select([1.0]),
        "a decimal": select([Decimal("7.50")]),
        "a decimal by an equal double": select([7.5]),
        "true": select([True]),
        "a string, not the bytes": select(["a"]),
        "bytes, not the string": select([b"a"]),
        "the largest by a double": select([2.0**64], index=1),
        "a duplicate in another type": insert([1.0, 77]),
        "minus zero": select([-0.0], index=1),
    },
)

COMPOSED = Space(
    [tree((0, "number"), (1, "scalar"), (2, "string"))],
    [
        [1, 2, "x"],
        [1.0, "2", "x"],
        [Decimal(1), False, "x"],
        [1, b"2", ""],
        [0.5, "", "y"],
        [-1, 0, ""],
        [1, 2.5, "a"],
    ],
)

composed = group(
    "key of number, scalar and string",
    COMPOSED,
    {f"{name} one": select([1], iterator) for name, iterator in ITERATORS.items()}
    | {f"{name} one and two": select([Decimal("1.0"), 2.0], iterator) for name, iterator in ITERATORS.items()},
)

CASES = [
    *numbers,
    *extremes,
    *scalars,
    *doubles,
    *decimals,
    *uuids,
    *varbinary,
    *booleans,
    *integers,
    *unsigned,
    *strings,
    *hashed_mixed,
    *composed,
]
