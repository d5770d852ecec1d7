"""INSERT, REPLACE, DELETE and UPDATE: duplicates, secondary indexes, formats, exact counts, unknown ids, odd values."""

from __future__ import annotations

from decimal import Decimal
from uuid import UUID

from tests.conformance.case import (
    PRIMARY,
    SPACE,
    Space,
    column,
    delete,
    group,
    hashed,
    insert,
    part,
    replace,
    request,
    select,
    tree,
    update,
    upsert,
)
from tests.conformance.wire import raw

INDEXED = Space(
    [
        PRIMARY,
        tree((1, "string"), name="name"),
        tree((2, "integer"), name="group", unique=False),
        hashed((3, "unsigned"), name="code"),
    ],
    [[1, "one", 7, 100], [2, "two", 7, 200], [3, "three", -7, 300]],
)

duplicates = group(
    "duplicate",
    INDEXED,
    {
        "INSERT of an existing primary key": insert([1, "uno", 0, 101]),
        "INSERT of an existing secondary key": insert([4, "two", 0, 400]),
        "INSERT of an existing hash key": insert([4, "four", 0, 300]),
        "INSERT of existing keys everywhere": insert([1, "one", 7, 100]),
        "INSERT beside equal non-unique keys": insert([4, "four", 7, 400]),
        "REPLACE of one tuple": replace([1, "uno", 8, 101]),
        "REPLACE by an equal tuple": replace([1, "one", 7, 100]),
        "REPLACE of a new tuple": replace([4, "four", 0, 400]),
        "REPLACE with another's secondary key": replace([1, "two", 0, 101]),
        "REPLACE with another's hash key": replace([1, "uno", 0, 300]),
        "REPLACE of a new tuple with another's secondary key": replace([4, "two", 0, 400]),
        "UPDATE to another's hash key": update([1], ["=", 3, 200]),
        "what failed changed nothing": [insert([4, "four", 0, 300]), select(["four"], index=1), select([0], index=2)],
    },
)

by_index = group(
    "by index",
    INDEXED,
    {
        "DELETE by the primary key": delete([1]),
        "DELETE of an absent key": delete([9]),
        "DELETE by the unique secondary": delete(["two"], index=1),
        "DELETE by the unique hash": delete([300], index=3),
        "DELETE by a non-unique index": delete([7], index=2),
        "DELETE by a partial key": delete([]),
        "DELETE with too long a key": delete([1, 2]),
        "DELETE with a wrong type": delete(["one"]),
        "DELETE with nil": delete([None]),
        "DELETE by an unknown index": delete([1], index=9),
        "DELETE from an unknown space": delete([1], space=999),
        "DELETE twice": [delete([1]), delete([1])],
        "UPDATE by the unique hash": update([300], ["=", 1, "tres"], index=3),
        "UPDATE by a non-unique index": update([7], ["=", 1, "x"], index=2),
        "UPDATE by an unknown index": update([1], ["=", 1, "x"], index=9),
        "UPDATE in an unknown space": update([1], ["=", 1, "x"], space=999),
        "UPSERT into an unknown space": upsert([1], ["=", 1, "x"], space=999),
        "INSERT into an unknown space": insert([1], space=999),
        "REPLACE into an unknown space": replace([1], space=999),
        "SELECT from an unknown space": select([1], space=999),
        "SELECT by an unknown index": select([1], index=9),
        "SELECT by an index id of 32 bits": select([1], index=2**32 - 1),
        "SELECT by a missing index id below the largest": select([7], index=2),
        "INSERT into space 0": insert([1], space=0),
    },
)

no_primary = group(
    "space without indexes",
    Space([]),
    {
        "INSERT": insert([1]),
        "REPLACE": replace([1]),
        "SELECT": select([]),
        "DELETE": delete([1]),
        "UPDATE": update([1], ["=", 1, 1]),
        "UPSERT": upsert([1], ["=", 1, 1]),
        "SELECT by a secondary": select([], index=1),
    },
)

FORMATTED = Space(
    [PRIMARY],
    [[1, "a", 1, True]],
    format=[
        column("id", "unsigned"),
        column("text", "string"),
        column("number", "number"),
        column("flag", "boolean"),
        column("maybe", "integer", is_nullable=True),
        column("list", "array", is_nullable=True),
        column("doc", "map", is_nullable=True),
        column("bytes", "varbinary", is_nullable=True),
        column("scalar", "scalar", is_nullable=True),
        column("decimal", "decimal", is_nullable=True),
        column("uuid", "uuid", is_nullable=True),
        column("double", "double", is_nullable=True),
        column("any", "any", is_nullable=True),
    ],
)
NILS = [None] * 8
START = [2, "b", 1.5, False]

formats = group(
    "format",
    FORMATTED,
    {
        "the needed fields only": insert(START),
        "one needed field too few": insert(START[:3]),
        "only the key": insert([2]),
        "all nullable fields nil": insert([*START, *NILS, None]),
        "fields beyond the format": insert([*START, *NILS, 1, "beyond", [1]]),
        "nil for a string": insert([2, None, 1, True]),
        "a number for a string": insert([2, 5, 1, True]),
        "bytes for a string": insert([2, b"b", 1, True]),
        "a string for a number": insert([2, "b", "1", True]),
        "a decimal for a number": insert([2, "b", Decimal("1.0"), True]),
        "a boolean for a number": insert([2, "b", False, True]),
        "a number for a boolean": insert([2, "b", 1, 0]),
        "a double for an integer": insert([*START, 1.0]),
        "the largest integer": insert([*START, 2**64 - 1]),
        "a map for an array": insert([*START, 1, {}]),
        "an array for a map": insert([*START, 1, [], []]),
        "a string for bytes": insert([*START, 1, [], {}, "b"]),
        "an array for a scalar": insert([*START, 1, [], {}, b"", []]),
        "a map for a scalar": insert([*START, 1, [], {}, b"", {}]),
        "an integer for a decimal": insert([*START, 1, [], {}, b"", 1, 1]),
        "text for a UUID": insert([*START, 1, [], {}, b"", 1, Decimal(1), "x"]),
        "an integer for a double": insert([*START, 1, [], {}, b"", 1, Decimal(1), UUID(int=1), 1]),
        "a float for a double": insert([*START, 1, [], {}, b"", 1, Decimal(1), UUID(int=1), raw("ca 3fc00000")]),
        "everything set": insert([*START, -1, [[]], {"a": {}}, b"\0", True, Decimal("1.1"), UUID(int=1), 1.5, {}]),
        "an extension for any": insert([*START, *NILS, raw("d4 63 01")]),
        "two faults, the first one named": insert(["x", 1, "x"]),
        "a fault before a missing field": insert([2, 5]),
        "UPDATE to a fault": update([1], ["=", 3, 1]),
        "UPDATE removes a needed field": update([1], ["#", 3, 1]),
    },
)

exact_count = group(
    "exact field count",
    Space([PRIMARY, tree((2, "string"))], [[1, 2, "3"]], field_count=3),
    {
        "too few": insert([2, 2]),
        "too many": insert([2, 2, "x", 4]),
        "exact": insert([2, 2, "x"]),
        "REPLACE too many": replace([1, 2, "x", 4]),
        "UPDATE to more": update([1], ["=", 3, 4]),
        "UPDATE to fewer": update([1], ["#", -1, 1]),
        "UPDATE in place": update([1], ["=", 1, 4]),
        "a wrong type and a wrong count": insert(["x", 2]),
    },
)

nullable = Space(
    [
        PRIMARY,
        tree(part(1, "string", is_nullable=True), name="unique"),
        tree(part(2, "integer", is_nullable=True), name="many", unique=False),
        tree(part(1, "string", is_nullable=True), part(3, "unsigned", is_nullable=True), name="both"),
    ],
    [[1], [2, None], [3, "a", None, 1], [4, "b", 5, None], [5, None, 5, 1], [6, None, -1]],
)

nullables = group(
    "nullable part",
    nullable,
    {
        "all in order": select([], index=1),
        "nil": select([None], index=1),
        "nil backwards": select([None], 1, index=1),
        "above nil": select([None], 6, index=1),
        "from nil": select([None], 5, index=1),
        "below nil": select([None], 3, index=1),
        "up to nil": select([None], 4, index=1),
        "below a string": select(["b"], 3, index=1),
        "nil in a non-unique index": select([None], index=2),
        "above nil in a non-unique index": select([None], 6, index=2),
        "a nil prefix": select([None], index=3),
        "two nils": select([None, None], index=3),
        "a string and nil": select(["b", None], index=3),
        "nil and a number": select([None, 1], index=3),
        "INSERT of one more nil": insert([7, None, None, None]),
        "INSERT without the field": insert([7]),
        "INSERT of a duplicate": insert([7, "a"]),
        "INSERT of a duplicate with a nil second part": insert([7, "b", 1]),
        "INSERT of a wrong type": insert([7, 1]),
        "DELETE by nil": delete([None], index=1),
        "DELETE by a string": delete(["a"], index=1),
        "UPDATE by nil": update([None], ["=", 2, 1], index=1),
        "UPDATE to nil": update([3], ["=", 1, None]),
        "UPDATE from nil": update([2], ["=", 1, "z"]),
        "UPDATE from nil to a duplicate": update([2], ["=", 1, "a"]),
        "REPLACE of a nil": replace([2, "c"]),
        "REPLACE to nil": replace([3]),
    },
)

missing_fields = group(
    "missing indexed field",
    Space([PRIMARY, tree((3, "string"), name="far", unique=False)], [[1, 2, 3, "four"]]),
    {
        "INSERT without it": insert([2]),
        "INSERT with fewer fields": insert([2, 3, 4]),
        "INSERT with nil": insert([2, 3, 4, None]),
        "INSERT of a wrong type": insert([2, 3, 4, 5]),
        "UPDATE away": update([1], ["#", 3, 1]),
        "INSERT with it": insert([2, None, None, "x"]),
    },
)

BIG = "x" * 100_000

values = group(
    "value",
    Space([PRIMARY]),
    {
        "a string of 100 kB": [insert([1, BIG]), select([1])],
        "bytes of 100 kB": [insert([1, BIG.encode()]), select([1])],
        "a string of zero bytes": [insert([1, "\0" * 40]), select([1])],
        "2000 fields": [
            insert([1, *range(2000)]),
            update([1], ["=", 2000, "last"]),
            update([1], ["=", 2001, "behind"]),
        ],
        "an array of 16 fields": insert([1, *["f"] * 15]),
        "an update across 16 fields": [insert([1, *["f"] * 14]), update([1], ["!", -1, 1]), update([1], ["!", -1, 1])],
        "an update down to 15 fields": [insert([1, *["f"] * 15]), update([1], ["#", -1, 1])],
        "a long array head": [insert(raw("dd 00000002 01 02")), select([1])],
        "a short array in a 16 bit head": [insert(raw("dc 0002 01 02")), select([1]), update([1], ["=", 1, 3])],
        "numbers in long heads": [insert([1, raw("cf 0000000000000001"), raw("d3 ffffffffffffffff")]), select([1])],
        "an unknown extension": [insert([1, raw("d4 63 01")]), select([1])],
        "extensions of every head": insert([1, raw("d5 09 0101"), raw("d6 09 01010101"), raw("c7 03 09 010101")]),
        "an interval, which 2.6 does not know": insert([1, raw("c7 03 06 01 00 05")]),
        "a datetime, which 2.6 does not know": insert([1, raw("d7 04 0000000000000000")]),
        "nested 30 levels": insert([1, raw("91" * 30 + "c0")]),
        "a map with keys of all kinds": insert([1, raw("84 01 c0 a161 02 c3 03 cb3ff0000000000000 04")]),
        "a map with a key twice": insert([1, raw("82 a161 01 a161 02")]),
        "floats of both widths": insert([1, raw("ca 3fc00000"), raw("cb 3ff8000000000000")]),
        "strings in every head": insert([1, raw("d9 01 61"), raw("da 0001 61"), raw("db 00000001 61")]),
        "two megabytes": insert([1, "x" * 2_000_000]),
        "an empty tuple": insert([]),
    },
)

requests_lacking = group(
    "request without",
    INDEXED,
    {
        "INSERT, a space": request(2, tuple=[1]),
        "INSERT, a tuple": request(2, space_id=SPACE),
        "INSERT, anything": request(2),
        "REPLACE, a tuple": request(3, space_id=SPACE),
        "DELETE, a key": request(5, space_id=SPACE),
        "DELETE, a space": request(5, key=[1]),
        "SELECT, a key": request(1, space_id=SPACE, limit=1),
        "SELECT, a limit": request(1, space_id=SPACE, key=[]),
        "SELECT, a space": request(1, key=[], limit=1),
        "SELECT, anything": request(1),
        "UPDATE, anything": request(4),
        "UPSERT, anything": request(9),
        "UPSERT, a space": request(9, tuple=[1], ops=[]),
        "INSERT, with an index id": request(2, space_id=SPACE, index_id=1, tuple=[4, "four", 0, 400]),
        "INSERT, with a key besides": request(2, space_id=SPACE, key=[9], tuple=[4, "four", 0, 400]),
    },
)

CASES = [
    *duplicates,
    *by_index,
    *no_primary,
    *formats,
    *exact_count,
    *nullables,
    *missing_fields,
    *values,
    *requests_lacking,
]
