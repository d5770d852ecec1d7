"""Effects of changed rows on the box, their rollback, and the leniency of recovery."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowstone.box.box import Box
from flowstone.box.ddl import functions as ddl
from flowstone.box.dialect import Dialect
from flowstone.box.engine import statements
from flowstone.iproto import errors
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import pack, unpack, unpack_body
from flowstone.iproto.row import Row
from flowstone.outside.disk import SystemDisk
from flowstone.xlog.reader import LogFile
from tests.box.bootstrapped import bootstrapped, delete, insert, recover, rows, run
from tests.box.ddl.test_functions import STEPS
from tests.places import VECTORS


def state(box: Box) -> dict[str, Any]:
    """Return everything that DDL changes. Values of sequences are excluded: they are never rolled back."""
    return {
        "spaces": {number: space.definition for number, space in box.spaces.items()},
        "names": {name: space.id for name, space in box.names.items()},
        "numberings": {space.name: space.sequence for space in box.spaces.values() if space.sequence is not None},
        "tuples": {space.name: list(space.tuples()) for space in box.spaces.values() if space.id != 285},
        "sequences": {number: sequence.definition for number, sequence in box.sequences.items()},
        "functions": dict(box.functions),
        "collations": dict(box.collations),
        "users": box.access.users,
        "grants": {user.id: box.access.granted(user.id) for user in box.access.users},
    }


def test_every_change_can_be_rolled_back() -> None:
    box = bootstrapped()
    for step in STEPS:
        if step.function in ("insert", "replace", "delete"):
            continue
        before = state(box)
        for is_kept in (False, True):
            transaction = box.begin()
            try:
                getattr(ddl, step.function)(transaction, *step.arguments, **step.options)
            except errors.TarantoolError:
                is_kept = False
            if not is_kept:
                transaction.rollback()
                assert state(box) == before, step.lua


def test_rejected_row_has_no_effect() -> None:
    box = bootstrapped()
    before, version = state(box), box.schema_version
    transaction = box.begin()
    with pytest.raises(errors.CreateSpace):
        insert(transaction, "_space", 512, 1, "t", "memtx", 0, {}, [{"name": "a", "type": "colour"}])
    assert state(box) == before
    assert box.schema_version == version
    assert transaction.statements == []


def test_truncation_keeps_tuples_of_read_views_and_can_be_rolled_back() -> None:
    box = bootstrapped()
    run(box, ddl.create_space, "t")
    run(box, ddl.create_index, "t", "pk")
    run(box, insert, "t", 1, "x")
    version, view = box.schema_version, box.open_view()
    transaction = box.begin()
    ddl.truncate(transaction, "t")
    run(box, insert, "t", 2, "y")
    assert rows(box, "t") == [(2, "y")]
    assert box.schema_version == version
    seen = view.spaces[box.space("t").id]
    assert [unpack(raw) for raw in seen.tuples()] == [(1, "x")]
    view.close()
    statements.delete(transaction, box.space("t"), 0, pack((2,)))
    transaction.rollback()
    assert rows(box, "t") == [(1, "x")]


def test_truncation_of_a_local_space_is_a_local_row() -> None:
    box = bootstrapped()
    run(box, ddl.create_space, "here", is_local=True)
    transaction = box.begin()
    ddl.truncate(transaction, "here")
    assert [statement.is_local for statement in transaction.statements] == [True]


RECOVERED = [
    (280, (512, 1, "shapes", "memtx", 0, {"colour": "red"}, ())),
    (288, (512, 0, "pk", "tree", {"unique": True, "colour": "red"}, ((0, "unsigned"),))),
    (288, (512, 1, "place", "RTREE", {"unique": False, "dimension": 2}, ((1, "array"),))),
    (288, (512, 2, "bits", "bitset", {"unique": False}, ((2, "unsigned"),))),
    (288, (512, 3, "computed", "tree", {"unique": False, "func": 99}, ((0, "string"),))),
    (280, (513, 1, "disk", "vinyl", 0, {"defer_deletes": True}, ())),
    (288, (513, 0, "pk", "tree", {"unique": True}, ((0, "unsigned"),))),
    (372, (512, 3, 99)),
    (328, ("trigger", 512, {"sql": "…"})),
    (512, (1, (1, 2), 7, "more")),
    (513, (1,)),
]


def test_recovery_keeps_unsupported_definitions() -> None:
    box = bootstrapped()
    recover(box, [(space_id, pack(row)) for space_id, row in RECOVERED])
    shapes = box.space("shapes")
    assert [index.is_served for index in shapes.indexes.values()] == [True, False, False, False]
    assert rows(box, "shapes") == [(1, (1, 2), 7, "more")]
    assert rows(box, "_space", 512) == [RECOVERED[0][1]]
    assert rows(box, "_index", 512) == [row for _, row in RECOVERED[1:5]]
    assert box.space("disk").definition.engine == "vinyl"
    for index_id in (1, 2, 3):
        with pytest.raises(errors.Unsupported, match="Flowstone does not support"):
            statements.select(box.begin(), shapes, index_id)
    # They can still be dropped.
    run(box, ddl.drop_space, "shapes")
    assert "shapes" not in box.names


@pytest.mark.parametrize(
    ("kind", "parts", "message"),
    [
        ("rtree", [[2, "array"]], "Flowstone does not support RTREE indexes"),
        ("bitset", [[2, "unsigned"]], "Flowstone does not support BITSET indexes"),
    ],
)
def test_unsupported_definitions_cannot_be_created(kind: str, parts: Any, message: str) -> None:
    box = bootstrapped()
    run(box, ddl.create_space, "t")
    run(box, ddl.create_index, "t", "pk")
    with pytest.raises(errors.Unsupported, match=message):
        run(box, ddl.create_index, "t", "i", type=kind, parts=parts)
    with pytest.raises(errors.Unsupported, match="functional"):
        run(box, ddl.create_index, "t", "i", func=1, parts=[[1, "unsigned"]])


@pytest.mark.parametrize(
    ("space", "row"),
    [
        ("_trigger", ("t", 512, {})),
        ("_fk_constraint", ("f", 512, 512, False, "full", "restrict", "restrict", (0,), (0,))),
        ("_ck_constraint", (512, "c", False, "SQL", "1", True)),
        ("_func_index", (512, 1, 1)),
    ],
)
def test_sql_only_definitions_are_rejected(space: str, row: Any) -> None:
    with pytest.raises(errors.Unsupported, match="Flowstone does not support"):
        run(bootstrapped(), insert, space, *row)


def apply(box: Box, row: Row) -> None:
    """Apply a row of a log or snapshot as recovery does."""
    body = unpack_body(row.body) if row.type in (2, 3, 4, 5, 9) else {}
    if not body:
        return
    transaction, space = box.begin(), box.space(body[Key.SPACE_ID])
    index_id, base = body.get(Key.INDEX_ID, 0), body.get(Key.INDEX_BASE, 0)
    value = pack(body.get(Key.TUPLE))
    if row.type == RequestType.INSERT:
        statements.insert(transaction, space, value)
    elif row.type == RequestType.REPLACE:
        statements.replace(transaction, space, value)
    elif row.type == RequestType.UPDATE:
        statements.update(transaction, space, index_id, pack(body[Key.KEY]), value, base)
    elif row.type == RequestType.DELETE:
        statements.delete(transaction, space, index_id, pack(body[Key.KEY]))
    else:
        statements.upsert(transaction, space, value, pack(body[Key.OPS]), base)


def directories() -> list[Path]:
    return sorted({path.parent for path in VECTORS.glob("tarantool-*/*/files/*/*.snap")})


@pytest.mark.parametrize("directory", directories(), ids=lambda path: "/".join(path.parts[-4:]))
def test_recorded_directories_are_recovered(directory: Path) -> None:
    box = Box(Dialect.V2_11)
    box.is_recovering = True
    snapshot = min(directory.glob("*.snap"))
    logs = [path for path in sorted(directory.glob("*.xlog")) if path.stem >= snapshot.stem]
    for path in (snapshot, *logs):
        with LogFile.open(SystemDisk(), str(path)) as file:
            for row in file.rows():
                apply(box, row)
    names = {row[2] for row in rows(box, "_space")}
    assert names <= set(box.names)
    assert {row[2] for row in rows(box, "_user")} == {user.name for user in box.access.users}
    for space in box.spaces.values():
        assert {row[1] for row in rows(box, "_index", space.id)} == set(space.indexes)


def test_schema_downgrade_may_drop_only_system_spaces_of_newer_servers() -> None:
    box = bootstrapped(Dialect.V2_11)
    space = (388, 1, "_gc_consumers", "memtx", 0, {"group_id": 1}, ())
    recover(box, [(280, pack(space)), (288, pack((388, 0, "primary", "tree", {"unique": True}, ((0, "string"),))))])
    with pytest.raises(errors.LastDrop, match="primary key in a system space, space '_gc_consumers'"):
        run(box, delete, "_index", 388, 0)
    box.is_recovering = True
    run(box, delete, "_index", 388, 0)
    run(box, delete, "_space", 388)
    assert 388 not in box.spaces
    with pytest.raises(errors.LastDrop, match="space '_cluster'"):
        run(box, delete, "_index", 320, 0)
