"""Several operations on one document: their final positions, and conflicts.

The real server agrees: on errors here, and in `test_update.py` on random documents.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flowstone.box.update.operation import decode_operations
from flowstone.box.update.update import update_raw, upsert_raw
from flowstone.iproto import errors
from flowstone.iproto.msgpack import pack, unpack
from tests.box import raw_client
from tests.box.raw_client import RawClient

DOCUMENT = {"a": {"x": 1, "y": 2}, "b": (1, 2, 3), "c": "text", "d": 4}


def run(*operations: tuple[Any, ...], document: Any = DOCUMENT) -> Any:
    """Return the document, with maps as pairs to show their order."""
    changed = unpack(update_raw(pack((1, document)), decode_operations(operations)))[1]
    return list(changed.items()) if isinstance(changed, dict) else changed


def test_single_operation_keeps_the_order_of_keys() -> None:
    assert [key for key, _ in run(("=", "[2].c", 0))] == ["a", "b", "c", "d"]
    assert [key for key, _ in run(("#", "[2].b", 1))] == ["a", "c", "d"]
    assert [key for key, _ in run(("!", "[2].e", 0))] == ["e", "a", "b", "c", "d"]


def test_several_operations_move_their_keys_to_the_front() -> None:
    assert run(("=", "[2].c", 0), ("=", "[2].b", 0)) == [("b", 0), ("c", 0), ("d", 4), ("a", {"x": 1, "y": 2})]
    assert [key for key, _ in run(("=", "[2].d", 0), ("=", "[2].e", 5))] == ["e", "d", "a", "b", "c"]


def test_operations_on_different_paths_of_a_document_combine() -> None:
    changed = run(("+", "[2].a.x", 10), ("+", "[2].a.y", 20), ("!", "[2].b[1]", 0), ("#", "[2].b[4]", 1))
    assert dict(changed) == {"a": {"x": 11, "y": 22}, "b": (0, 1, 2), "c": "text", "d": 4}
    assert run(("=", "[2][1][2]", 9), ("=", "[2][1][1]", 8), document=((1, 2), 3)) == ((8, 9), 3)


def test_positions_in_an_array_shift_with_insertions_and_deletions() -> None:
    assert run(("!", "[2][1]", 0), ("!", "[2][2]", -1), document=(1, 2)) == (0, -1, 1, 2)
    assert run(("#", "[2][1]", 1), ("+", "[2][2]", 5), document=(1, 2, 3)) == (2, 8)
    assert run(("#", "[2][3]", 9), ("=", "[2][1]", 5), ("=", "[2][3]", 6), document=(1, 2, 3)) == (5, 2, 6)


def test_number_in_a_path_finds_an_equal_map_key() -> None:
    assert run(("=", "[2][7]", 0), document={7: 1, "a": 2}) == [(7, 0), ("a", 2)]


MISMATCHES = [
    ([("+", "[2].d", 1), ("+", "[2].d", 1)], "Field '[2].d' UPDATE error: double update of the same field"),
    ([("=", "[2].d", 1), ("=", "[2].d", 1)], "Field '[2].d' UPDATE error: double update of the same field"),
    ([("!", "[2].b[1]", 1), ("!", "[2].b[1]", 1)], "Field '[2].b[1]' UPDATE error: double update of the same field"),
    ([("=", "[2].a.x", 1), ("=", "[2].a", 1)], "Field '[2].a' UPDATE error: can not update map by non-string key"),
    ([("=", "[2].a.x", 1), ("=", "[2][1]", 1)], "Field '[2][1]' UPDATE error: can not update map by non-string key"),
    ([("=", "[2].b[1]", 1), ("=", "[2].b.x", 1)],
     "Field '[2].b.x' UPDATE error: can not update array by non-integer index"),
    ([("=", "[2].a[1]", 1)], "Field '[2].a[1]' UPDATE error: can not access by index a non-array field"),
    ([("=", "[2].b.x", 1)], "Field '[2].b.x' UPDATE error: can not access by key a non-map field"),
    ([("!", "[2].a", 1)], "Field '[2].a' UPDATE error: the key exists already"),
    ([("#", "[2].a", 2)], "Field '[2].a' UPDATE error: can delete only 1 field from a map in a row"),
    ([("=", "[2].b[5]", 1)], "Field ''[2].b[5]'' was not found in the tuple"),
    ([("=", "[2].x.y", 1)], "Field ''[2].x.y'' was not found in the tuple"),
    ([("+", "[2].a.x", 1), ("+", "[2].e", 1)], "Field ''[2].e'' was not found in the tuple"),
    ([("=", "[2].a[", 1)], "Field '[2].a[' UPDATE error: invalid JSON in position 6"),
    ([("=", "[2].b[*]", 1)], "Field '[2].b[*]' UPDATE error: invalid JSON in position 7"),
]  # fmt: skip


@pytest.mark.parametrize(("operations", "message"), MISMATCHES)
def test_conflicting_operations_are_rejected(operations: list[tuple[Any, ...]], message: str) -> None:
    with pytest.raises(errors.TarantoolError) as error:
        run(*operations)
    assert error.value.message == message


def test_assignment_to_a_container_overrides_changes_inside() -> None:
    changed = update_raw(pack((1, DOCUMENT)), decode_operations((("=", "[2].d", 1), ("=", 1, 5))))
    assert unpack(changed) == (1, 5)
    with pytest.raises(errors.UpdateField, match="double update"):
        run(("=", "[2].d", 1), ("+", 1, 5))


def test_upsert_continues_after_a_failed_operation() -> None:
    operations = decode_operations((("+", "[2].c", 1), ("+", "[2].d", 1), ("+", "[2].nothing", 1)))
    assert unpack(upsert_raw(pack((1, DOCUMENT)), operations))[1] == {**DOCUMENT, "d": 5}


def test_large_containers_have_longer_headers() -> None:
    for size in 15, 16, 65535, 65536:
        many = tuple(range(size))
        assert run(("!", "[2][1]", "x"), document=many) == ("x", *many)
        assert run(("#", "[2][1]", 1), document=many) == many[1:]
        keys: dict[Any, None] = dict.fromkeys(many)
        assert dict(run(("=", "[2].x", 1), document=keys)) == {**keys, "x": 1}


@pytest.mark.real
def test_conflicting_operations_have_the_errors_of_the_real_server(tarantool: ModuleType, tmp_path: Path) -> None:
    setup = "box.schema.space.create('t', {id=512}):create_index('pk')"
    with tarantool.serve(tmp_path, setup=setup, cfg="wal_mode='none'") as server, RawClient(server.port) as client:
        client.ask([raw_client.insert(512, pack((1, DOCUMENT)))])
        answers = client.ask([raw_client.update(512, pack((1,)), pack(operations)) for operations, _ in MISMATCHES])
    assert [answer.message for answer in answers] == [message for _, message in MISMATCHES]
