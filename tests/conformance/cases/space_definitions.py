"""Definitions of spaces: valid and invalid ways to create, alter and drop them by rows of `_space`."""

from __future__ import annotations

from tests.conformance.case import (
    ALL,
    PRIMARY,
    Space,
    alter_space,
    column,
    create_index,
    create_space,
    delete,
    drop_index,
    drop_space,
    group,
    insert,
    replace,
    select,
    tree,
    truncate,
    update,
    upsert,
)

ID = column("id", "unsigned")

create = group(
    "create a space",
    [],
    {
        "plainly": [create_space(), create_index([[0, "unsigned"]]), insert([1, 2]), select([])],
        "with a format": create_space(format=[ID, column("name", "string", is_nullable=True)]),
        "temporary": [create_space(flags={"temporary": True}), create_index([[0, "unsigned"]]), insert([1])],
        "local": [create_space(flags={"group_id": 1}), create_index([[0, "unsigned"]]), insert([1])],
        "synchronous": create_space(flags={"is_sync": True}),
        "synchronous and local": create_space(flags={"is_sync": True, "group_id": 1}),
        "temporary and synchronous": create_space(flags={"is_sync": True, "temporary": True}),
        "with the largest id": create_space(2**31 - 1),
        "with an id too large": create_space(2**31),
        "with the id of a system space": create_space(400),
        "with id 0": create_space(0),
        "with an id that is no number": create_space("x"),
        "with a taken id": [create_space(), create_space(name="other")],
        "with a taken name": [create_space(), create_space(513)],
        "without a name": create_space(name=""),
        "with a name of 65000 characters": create_space(name="n" * 65000),
        "with a name of 65001 characters": create_space(name="n" * 65001),
        "with spaces and quotes in the name": create_space(name="a 'b' \"c\""),
        "with a line break in the name": create_space(name="a\nb"),
        "with a name that is no UTF-8": insert([512, 1, b"\xff".decode("latin-1"), "memtx", 0, {}, []], space=280),
        "in an unknown engine": create_space(engine="stone"),
        "in the engine blackhole": [create_space(engine="blackhole"), insert([1]), select([])],
        "in the engine sysview": create_space(engine="sysview"),
        "with an engine that is no text": create_space(engine=1),
        "for an unknown owner": create_space(owner=999),
        "for guest": create_space(owner=0),
        "with too few fields": insert([512, 1, "test"], space=280),
        "with a field too many": insert([512, 1, "test", "memtx", 0, {}, [], "more"], space=280),
        "with an exact count": create_space(field_count=3),
        "with a negative count": create_space(field_count=-1),
        "with a count below the format": create_space(field_count=1, format=[ID, column("b")]),
        "with a huge count": create_space(field_count=2**31),
        "with flags that are no map": create_space(flags="temporary"),
        "with an unknown flag": create_space(flags={"colour": "blue"}),
        "with a flag of a wrong type": create_space(flags={"temporary": "yes"}),
        "with an unknown group": create_space(flags={"group_id": 2}),
        "as a view without a query": create_space(flags={"view": True}),
        "with a format that is no array": create_space(format={"a": 1}),
        "with a format field that is no map": create_space(format=["id"]),
        "with a format field without a name": create_space(format=[{"type": "unsigned"}]),
        "with an empty field name": create_space(format=[column("")]),
        "with a field name twice": create_space(format=[column("a"), column("a", "string")]),
        "with an unknown field type": create_space(format=[column("a", "stone")]),
        "with a field type in capitals": create_space(format=[column("a", "UNSIGNED")]),
        "with an old field type": create_space(format=[column("a", "num"), column("b", "str")]),
        "with the field type *": create_space(format=[column("a", "*")]),
        "with a field without a type": create_space(format=[{"name": "a"}]),
        "with an unknown key in a field": create_space(format=[{"name": "a", "type": "any", "colour": "blue"}]),
        "with is_nullable that is no boolean": create_space(format=[{"name": "a", "type": "any", "is_nullable": 1}]),
        "with nullable_action none": create_space(format=[{"name": "a", "nullable_action": "none"}]),
        "with an unknown nullable_action": create_space(format=[{"name": "a", "nullable_action": "perhaps"}]),
        "with conflicting nullability": create_space(
            format=[{"name": "a", "is_nullable": True, "nullable_action": "abort"}]
        ),
        "with a field name that is no text": create_space(format=[{"name": 5}]),
        "with a very long format": create_space(format=[column(f"f{number}") for number in range(300)]),
        "by UPSERT": upsert([512, 1, "test", "memtx", 0, {}, []], ["=", 2, "x"], space=280),
    },
)

FILLED = Space(
    [PRIMARY, tree((1, "string"), name="name")],
    [[1, "one", 1.5], [2, "two"]],
    format=[ID, column("name", "string")],
)

alter = group(
    "alter a space",
    FILLED,
    {
        "rename": [alter_space(name="renamed"), insert([1, "x"])],
        "rename to itself": alter_space(),
        "rename to a taken name": [create_space(513, "other"), alter_space(name="other")],
        "rename to nothing": alter_space(name=""),
        "change its engine": alter_space(engine="vinyl"),
        "change its owner": alter_space(owner=0),
        "make it temporary": alter_space(flags={"temporary": True}),
        "make it local": alter_space(flags={"group_id": 1}),
        "make it synchronous": alter_space(flags={"is_sync": True}),
        "add a nullable field": [
            alter_space(format=[ID, column("name", "string"), column("more", "number", is_nullable=True)]),
            insert([3, "three"]),
            insert([4, "four", "x"]),
        ],
        "add a field the data lacks": alter_space(format=[ID, column("name", "string"), column("more", "number")]),
        "add a field the data breaks": alter_space(
            format=[ID, column("name", "string"), column("more", "string", is_nullable=True)]
        ),
        "change a type against an index": alter_space(format=[ID, column("name", "unsigned")]),
        "change a type within the index's": alter_space(format=[ID, column("name", "scalar")]),
        "widen the key's type": alter_space(format=[column("id", "integer"), column("name", "string")]),
        "forget the format": [alter_space(format=[]), insert([5, "five"]), insert([6, 6])],
        "rename a field": [
            alter_space(format=[ID, column("title", "string")]),
            update([1], ["=", "title", "uno"]),
            update([1], ["=", "name", "uno"]),
        ],
        "an exact count that fits not": alter_space(field_count=2),
        "an exact count below the key": alter_space(field_count=1),
        "nullable against an index": [
            alter_space(format=[ID, column("name", "string", is_nullable=True)]),
            insert([3, None]),
        ],
        "change its id by UPDATE": update([512], ["=", 0, 513], space=280),
        "rename by UPDATE": update([512], ["=", 2, "renamed"], space=280),
        "rename by a named UPDATE": update([512], ["=", "name", "renamed"], space=280),
        "format by UPDATE": update([512], ["=", "format", []], space=280),
        "an empty format field": alter_space(format=[{}]),
    },
)

exact = group(
    "alter an empty space",
    Space([PRIMARY, tree((1, "string"))]),
    {
        "an exact count": [alter_space(field_count=2), insert([1, "a", 3]), insert([1, "a"])],
        "an exact count below an index": alter_space(field_count=1),
        "its engine": alter_space(engine="blackhole"),
        "temporary": alter_space(flags={"temporary": True}),
        "a type against an index": alter_space(format=[ID, column("b", "array")]),
    },
)

drop = group(
    "drop a space",
    FILLED,
    {
        "with indexes": drop_space(),
        "with its primary index only": [drop_index(1), drop_space()],
        "after its indexes": [drop_index(1), drop_index(0), drop_space(), select([])],
        "that is truncated": [truncate(), drop_index(1), drop_index(0), drop_space()],
        "that does not exist": drop_space(999),
        "of the system": drop_space(280),
        "of the system, a view": drop_space(281),
    },
)

truncation = group(
    "truncate",
    FILLED,
    {
        "by its row": [truncate(), select([], ALL), insert([1, "one"]), select(["one"], index=1)],
        "twice": [truncate(), insert([7, "seven"]), truncate(count=2), select([])],
        "by the same count": [truncate(), insert([7, "seven"]), truncate(), select([])],
        "by UPSERT": [upsert([512, 1], ["+", 1, 1], space=330), select([])],
        "an unknown space": truncate(999),
        "a system space": truncate(280),
        "an id that is no number": insert(["x", 1], space=330),
        "and forget the row": [truncate(), insert([7, "seven"]), delete([512], space=330), select([])],
    },
)

system = group(
    "system space",
    [],
    {
        "alter the format of _schema": replace(
            [272, 1, "_schema", "memtx", 0, {}, [column("key", "string")]], space=280
        ),
        "rename _schema": update([272], ["=", 2, "schema"], space=280),
        "insert into a view": insert([512, 1, "test", "memtx", 0, {}, []], space=281),
        "delete from a view": delete([280], space=281),
        "update a view": update([280], ["=", 2, "x"], space=281),
        "set a key of _schema": [insert(["note", 1, 2], space=272), select(["note"], space=272)],
        "set the cluster's UUID": replace(["cluster", "00000000-0000-0000-0000-000000000001"], space=272),
        "set the version": replace(["version", "two"], space=272),
        "delete the version": delete(["version"], space=272),
        "delete the cluster's UUID": delete(["cluster"], space=272),
        "insert into _cluster": insert([40, "00000000-0000-0000-0000-000000000001"], space=320),
        "insert no UUID into _cluster": insert([2, "x"], space=320),
        "insert an empty UUID into _cluster": insert([2, ""], space=320),
        "insert id 0 into _cluster": insert([0, "00000000-0000-0000-0000-000000000001"], space=320),
        "change the own UUID": update([1], ["=", 1, "00000000-0000-0000-0000-000000000001"], space=320),
        "delete oneself from _cluster": delete([1], space=320),
        "register and forget": [
            insert([2, "00000000-0000-0000-0000-000000000001"], space=320),
            delete([2], space=320),
        ],
        "a row of _space of wrong types": insert([512, 1, "test", "memtx", "0", {}, []], space=280),
        "a row of _index that lacks fields": insert([512, 0, "pk"], space=288),
        "SELECT by name": select(["_index"], space=280, index=2),
        "SELECT by owner, the last": select([1], 1, space=280, index=1, limit=1),
        "SELECT of _space's first": select([], space=280, limit=3),
        "SELECT of all indexes of _space": select([280], space=288),
        "SELECT by an index that is not there": select([], space=280, index=5),
    },
)

CASES = [*create, *alter, *exact, *drop, *truncation, *system]
