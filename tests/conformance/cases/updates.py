"""UPDATE: every operation at its boundaries."""

from __future__ import annotations

from decimal import Decimal
from uuid import UUID

from tests.conformance.case import PRIMARY, Space, column, group, request, tree, update
from tests.conformance.wire import raw

FLOAT_HALF = raw("ca 3f000000")

# 0 id, 1 integer, 2 negative, 3 double, 4 float, 5 decimal, 6 string, 7 array, 8 map, 9 boolean, 10 nil, 11 large
ROW = [
    1, 10, -5, 1.5, FLOAT_HALF, Decimal("2.50"), "hello", [1, [2, 3], {"x": 4}], {"a": 1, "b": {"c": [5]}},
    True, None, 2**63,
]  # fmt: skip
SPACE = Space([PRIMARY], [ROW])

arithmetic = group(
    "arithmetic",
    SPACE,
    {
        "adds to an integer": update([1], ["+", 1, 5]),
        "adds a negative number": update([1], ["+", 1, -11]),
        "subtracts below zero": update([1], ["-", 1, 20]),
        "subtracts a negative number": update([1], ["-", 1, -20]),
        "adds to a negative number beyond zero": update([1], ["+", 2, 7]),
        "adds up to 2^64 - 1": update([1], ["+", 11, 2**63 - 1]),
        "adds beyond 2^64 - 1": update([1], ["+", 11, 2**63]),
        "subtracts down to -2^63": update([1], ["-", 2, 2**63 - 5]),
        "subtracts below -2^63": update([1], ["-", 2, 2**63 - 4]),
        "adds a double to an integer": update([1], ["+", 1, 0.5]),
        "adds a float to an integer": update([1], ["+", 1, FLOAT_HALF]),
        "adds a double that needs 64 bits": update([1], ["+", 1, 0.1]),
        "adds an integer to a double": update([1], ["+", 3, 1]),
        "adds an integer to a float": update([1], ["+", 4, 1]),
        "adds a float to a float": update([1], ["+", 4, FLOAT_HALF]),
        "adds a double to a float": update([1], ["+", 4, 0.1]),
        "adds a double to a double": update([1], ["+", 3, 0.25]),
        "adds a large integer to a float": update([1], ["+", 4, 2**53 + 1]),
        "overflows a float": update([1], ["=", 4, raw("ca 7f7fffff")], ["+", 5, 1]),
        "overflows a float by a float": [
            update([1], ["=", 4, raw("ca 7f7fffff")]),
            update([1], ["+", 4, raw("ca 7f7fffff")]),
        ],
        "overflows a double": [update([1], ["=", 3, 1.7e308]), update([1], ["+", 3, 1.7e308])],
        "adds a decimal to an integer": update([1], ["+", 1, Decimal("0.10")]),
        "adds a decimal to a double": update([1], ["+", 3, Decimal("0.1")]),
        "adds a decimal to a float": update([1], ["+", 4, Decimal("0.1")]),
        "adds an integer to a decimal": update([1], ["+", 5, 1]),
        "adds a negative integer to a decimal": update([1], ["+", 5, -1]),
        "adds a double to a decimal": update([1], ["+", 5, 0.1]),
        "subtracts a decimal to zero": update([1], ["-", 5, Decimal("2.50")]),
        "subtracts a decimal of another scale": update([1], ["-", 5, Decimal("0.001")]),
        "overflows a decimal": [
            update([1], ["=", 5, Decimal(10**38 - 1)]),
            update([1], ["+", 5, Decimal(1)]),
        ],
        "adds a decimal beyond its digits": [
            update([1], ["=", 5, Decimal(10**37)]),
            update([1], ["+", 5, Decimal("0.1234")]),
        ],
        "adds to a string": update([1], ["+", 6, 1]),
        "adds to an array": update([1], ["+", 7, 1]),
        "adds to a map": update([1], ["+", 8, 1]),
        "adds to a boolean": update([1], ["+", 9, 1]),
        "adds to nil": update([1], ["+", 10, 1]),
        "adds a string": update([1], ["+", 1, "1"]),
        "adds nil": update([1], ["+", 1, None]),
        "adds a boolean": update([1], ["+", 1, True]),
        "adds an array": update([1], ["-", 1, [1]]),
        "adds a UUID": update([1], ["+", 1, UUID(int=1)]),
        "adds to an absent field": update([1], ["+", 12, 1]),
        "adds by a negative position": update([1], ["+", -1, 1]),
        "adds by the first negative position": update([1], ["+", -11, 1]),
        "adds by a position before the first": update([1], ["+", -13, 1]),
        "adds zero": update([1], ["+", 1, 0]),
        "adds a number in a signed head": update([1], ["+", 1, raw("d0 05")]),
        "shrinks the encoding": update([1], ["-", 11, 2**63 - 1]),
    },
)

bits = group(
    "bitwise",
    SPACE,
    {
        "and": update([1], ["&", 1, 0b0110]),
        "or": update([1], ["|", 1, 0b0101]),
        "exclusive or": update([1], ["^", 1, 0b1111]),
        "of 64 bits": update([1], ["|", 11, 2**64 - 1]),
        "and with zero": update([1], ["&", 1, 0]),
        "a negative field": update([1], ["&", 2, 1]),
        "a negative argument": update([1], ["&", 1, -1]),
        "a double argument": update([1], ["|", 1, 1.0]),
        "a string field": update([1], ["^", 6, 1]),
        "a string argument": update([1], ["^", 1, "1"]),
        "a decimal field": update([1], ["&", 5, 1]),
        "an absent field": update([1], ["|", 12, 1]),
    },
)

splice = group(
    "splice",
    SPACE,
    {
        "replaces in the middle": update([1], [":", 6, 1, 3, "ipp"]),
        "inserts at the start": update([1], [":", 6, 0, 0, "oh "]),
        "appends at the end": update([1], [":", 6, 5, 0, "!"]),
        "beyond the end appends": update([1], [":", 6, 100, 1, "!"]),
        "cuts more than there is": update([1], [":", 6, 2, 100, ""]),
        "offset -1 is behind the last character": update([1], [":", 6, -1, 0, "!"]),
        "offset -2 is before the last character": update([1], [":", 6, -2, 1, "0"]),
        "offset -6 is the start": update([1], [":", 6, -6, 1, "H"]),
        "offset -7 is outside": update([1], [":", 6, -7, 1, "H"]),
        "a negative cut length leaves the end": update([1], [":", 6, 1, -2, "_"]),
        "a negative cut length beyond the start": update([1], [":", 6, 1, -100, "_"]),
        "with base 1 offset 1 is the start": update([1], [":", 7, 1, 1, "J"], base=1),
        "with base 1 offset 0 is outside": update([1], [":", 7, 0, 1, "J"], base=1),
        "a paste with a zero byte": update([1], [":", 6, 1, 1, "\0"]),
        "of a number": update([1], [":", 1, 0, 0, "x"]),
        "of an array": update([1], [":", 7, 0, 0, "x"]),
        "of an absent field": update([1], [":", 12, 0, 0, "x"]),
        "a paste that is no string": update([1], [":", 6, 0, 0, 1]),
        "a paste of bytes": update([1], [":", 6, 0, 0, b"x"]),
        "an offset that is no number": update([1], [":", 6, "0", 0, "x"]),
        "an offset that is a double": update([1], [":", 6, 0.0, 0, "x"]),
        "a length that is no number": update([1], [":", 6, 0, "0", "x"]),
        "an offset above 32 bits": update([1], [":", 6, 2**32, 0, "x"]),
        "a length above 32 bits": update([1], [":", 6, 0, 2**32, "x"]),
        "too few arguments": update([1], [":", 6, 0, 0]),
        "too many arguments": update([1], [":", 6, 0, 0, "x", 1]),
        "twice": update([1], [":", 6, 0, 1, "J"], [":", 6, 4, 1, "y"]),
    },
)

assignment = group(
    "assignment",
    SPACE,
    {
        "of another type": update([1], ["=", 1, "ten"]),
        "of nil": update([1], ["=", 1, None]),
        "of nested data": update([1], ["=", 6, {"k": [1, {}, []]}]),
        "keeps the encoding it is given": update([1], ["=", 1, raw("cf 0000000000000001")]),
        "right behind the last field appends": update([1], ["=", 12, "new"]),
        "two behind the last field": update([1], ["=", 13, "new"]),
        "append twice": update([1], ["=", 12, "a"], ["=", 13, "b"]),
        "by -1": update([1], ["=", -1, "last"]),
        "by -12": update([1], ["=", -12, 1]),
        "by -13": update([1], ["=", -13, 1]),
        "twice to one field": update([1], ["=", 1, "a"], ["=", 1, "b"]),
        "then an addition": update([1], ["=", 1, 1], ["+", 1, 1]),
        "after an addition": update([1], ["+", 1, 1], ["=", 1, 1]),
        "of the primary key": update([1], ["=", 0, 2]),
        "of the primary key by itself": update([1], ["=", 0, 1]),
        "of the primary key by a wrong type": update([1], ["=", 0, "1"]),
        "with base 1": update([1], ["=", 2, "ten"], base=1),
        "position 0 with base 1": update([1], ["=", 0, "x"], base=1),
        "too few arguments": update([1], ["=", 1]),
        "too many arguments": update([1], ["=", 1, 2, 3]),
        "a double as position": update([1], ["=", 1.0, 2]),
        "nil as position": update([1], ["=", None, 2]),
        "with no operation": update([1]),
        "of an absent tuple": update([7], ["=", 1, 2]),
        "of an absent tuple by a wrong operation": update([7], ["?", 1, 2]),
        "of an absent tuple at an impossible field": update([7], ["+", 100, "x"]),
    },
)

insertion = group(
    "insertion",
    SPACE,
    {
        "before a field": update([1], ["!", 1, "new"]),
        "before the last by -1 is behind it": update([1], ["!", -1, "new"]),
        "by -2": update([1], ["!", -2, "new"]),
        "by -13 is the start": update([1], ["!", -13, 1]),
        "by -14 is outside": update([1], ["!", -14, 1]),
        "at the end": update([1], ["!", 12, "new"]),
        "beyond the end": update([1], ["!", 13, "new"]),
        "at the start moves the key": update([1], ["!", 0, 5]),
        "at the start of an equal key": update([1], ["!", 0, 1]),
        "shifts what follows": update([1], ["!", 1, "new"], ["+", 2, 1]),
        "twice at one place": update([1], ["!", 1, "first"], ["!", 1, "second"]),
        "too few arguments": update([1], ["!", 1]),
    },
)

deletion = group(
    "deletion",
    SPACE,
    {
        "of one field": update([1], ["#", 1, 1]),
        "of several": update([1], ["#", 6, 3]),
        "of more than there are": update([1], ["#", 6, 100]),
        "of none": update([1], ["#", 1, 0]),
        "of a negative count": update([1], ["#", 1, -1]),
        "by -1": update([1], ["#", -1, 1]),
        "by -2 of two": update([1], ["#", -2, 2]),
        "behind the end": update([1], ["#", 12, 1]),
        "by a position before the first": update([1], ["#", -13, 1]),
        "of the primary key": update([1], ["#", 0, 1]),
        "of everything": update([1], ["#", 0, 12]),
        "a count that is no number": update([1], ["#", 1, "1"]),
        "a count that is a double": update([1], ["#", 1, 1.0]),
        "shifts what follows": update([1], ["#", 1, 1], ["+", 1, 1]),
        "of a field changed before": update([1], ["+", 1, 1], ["#", 1, 1]),
        "of a field assigned before": update([1], ["=", 12, 1], ["#", 12, 1]),
        "then its insertion": update([1], ["#", 1, 1], ["!", 1, "again"]),
    },
)

shape = group(
    "operation",
    SPACE,
    {
        "unknown": update([1], ["?", 1, 2]),
        "of two characters": update([1], ["==", 1, 2]),
        "empty name": update([1], ["", 1, 2]),
        "that is a number": update([1], [1, 1, 2]),
        "that is no array": update([1], "=12"),
        "that is a map": update([1], {"op": "="}),
        "that is empty": update([1], []),
        "that is only a name": update([1], ["="]),
        "list that is a map": request(4, space_id=512, key=[1], tuple={}),
        "list of 4000": update([1], *[["+", 1, 1]] * 4000),
        "list of 4001": update([1], *[["+", 1, 1]] * 4001),
        "that fails undoes the ones before": update([1], ["+", 1, 1], ["+", 6, 1]),
        "base 2": update([1], ["=", 3, 9], base=2),
        "base of 32 bits": update([1], ["=", 1, 9], base=2**32 - 1),
        "key missing": request(4, space_id=512, tuple=[["=", 1, 2]]),
        "tuple missing": request(4, space_id=512, key=[1]),
        "key empty": update([], ["=", 1, 2]),
        "key too long": update([1, 2], ["=", 1, 2]),
        "key of a wrong type": update(["1"], ["=", 1, 2]),
        "many on one field": update([1], ["+", 1, 1], ["-", 1, 3], ["&", 1, 12], ["|", 1, 3]),
        "mixed arithmetic on one field": update([1], ["+", 1, 1], ["+", 1, 0.5], ["+", 1, Decimal("0.25")]),
    },
)

FORMATTED = Space(
    [PRIMARY, tree((2, "string"), name="by_name")],
    [[1, 10, "one", 1.5], [2, 20, "two", 2.5]],
    format=[
        column("id", "unsigned"),
        column("count", "integer"),
        column("name", "string"),
        column("weight", "number", is_nullable=True),
    ],
)

formatted = group(
    "formatted update",
    FORMATTED,
    {
        "by name": update([1], ["+", "count", 1]),
        "by an unknown name": update([1], ["+", "counts", 1]),
        "by an empty name": update([1], ["=", "", 1]),
        "against the format": update([1], ["=", "count", "x"]),
        "nil into a field that takes none": update([1], ["=", "count", None]),
        "nil into a nullable field": update([1], ["=", "weight", None]),
        "a double into an integer": update([1], ["+", "count", 0.5]),
        "removes a needed field": update([1], ["#", "name", 2]),
        "removes a nullable field": update([1], ["#", "weight", 1]),
        "into the key of another tuple": update([1], ["=", "name", "two"]),
        "by the unique secondary": update(["two"], ["+", 1, 5], index=1),
        "moves the secondary key": update(["two"], ["=", 2, "deux"], index=1),
        "changes the primary key by the secondary": update(["two"], ["=", 0, 9], index=1),
        "names with base 1": update([1], ["+", "count", 1], base=1),
        "splices by name": update([1], [":", "name", 0, 1, "O"]),
        "inserts by name": update([1], ["!", "count", 5]),
        "appends a field beyond the format": update([1], ["=", 4, "extra"]),
    },
)

CASES = [*arithmetic, *bits, *splice, *assignment, *insertion, *deletion, *shape, *formatted]
