"""The judge's own UPDATE: fields by number, by name and by path, as real servers apply them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.judges.files import Unreadable
from tests.judges.tuples import updated

NAMES = {b"id": 0, b"doc": 1, b"list": 2, b"a.b": 3}
BEFORE = (1, {b"a": 1, b"deep": {b"x": 5}}, [10, 20, 30], 7)


@pytest.mark.parametrize(
    ("operation", "number", "value"),
    [
        ([b"=", 3, 8], 3, 8),
        ([b"+", b"id", 4], 0, 5),
        ([b"+", b"a.b", 1], 3, 8),  # a field whose name looks like a path
        ([b"=", b"doc.a", 2], 1, {b"a": 2, b"deep": {b"x": 5}}),
        ([b"-", b"doc.deep.x", 1], 1, {b"a": 1, b"deep": {b"x": 4}}),
        ([b"!", b'doc["new"]', 3], 1, {b"a": 1, b"deep": {b"x": 5}, b"new": 3}),
        ([b"#", b"[2].a", 1], 1, {b"deep": {b"x": 5}}),
        ([b"=", b"list[2]", 21], 2, [10, 21, 30]),
        ([b"!", b"[3][1]", 9], 2, [9, 10, 20, 30]),
        ([b"#", b"list[1]", 2], 2, [30]),
    ],
    ids=repr,
)
def test_operation_changes_one_field(operation: list[Any], number: int, value: Any) -> None:
    expected = list(BEFORE)
    expected[number] = value
    assert updated(BEFORE, [operation], 0, NAMES) == tuple(expected)
    assert BEFORE == (1, {b"a": 1, b"deep": {b"x": 5}}, [10, 20, 30], 7)


def test_upsert_skips_an_operation_that_cannot_be_applied() -> None:
    operations = [[b"=", b"id.a", 1], [b"+", b"id", 1]]
    assert updated(BEFORE, operations, 0, NAMES, is_upsert=True)[0] == 2
    with pytest.raises(Unreadable, match=r"cannot apply .*id\.a"):
        updated(BEFORE, operations, 0, NAMES)
