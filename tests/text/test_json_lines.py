"""JSON lines of pieces: names of spaces, and tuples as objects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flowstone.history.log_reading import Reading
from flowstone.iproto.constants import RequestType
from flowstone.iproto.limits import NESTING_MAX
from flowstone.outside import production
from flowstone.text.json_lines import json_text
from flowstone.xlog.errors import DamagedLog
from tests.history.logs import Log


def lines(log: Log, *, names: bool = False) -> list[Any]:
    log.writer.close()
    pieces = Reading(production(), [log.path]).pieces()
    text = b"".join(json_text(piece, names=names) for piece in pieces)
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def log(tmp_path: Path) -> Log:
    log = Log(tmp_path)
    log.create_space(512, "t", ("id", "unsigned"), ("text", "string"))
    return log


def test_space_name_follows_its_id(log: Log) -> None:
    log.insert(512, 1, "x")
    (row,) = lines(log)
    assert row["BODY"] == {"space_id": 512, "space": "t", "tuple": [1, "x"]}


def test_names_turn_tuples_into_objects_but_not_operations(log: Log) -> None:
    log.insert(512, 1, "é\udcff", 2.5)
    log.write((RequestType.UPDATE, {0x10: 512, 0x20: (1,), 0x21: (("=", 1, "y"),)}))
    log.insert(999, 1)
    inserted, updated, unknown = lines(log, names=True)
    assert inserted["BODY"]["tuple"] == {"id": 1, "text": "é\udcff", "3": 2.5}
    assert updated["BODY"]["tuple"] == [["=", 1, "y"]]
    assert unknown["BODY"] == {"space_id": 999, "tuple": [1]}


def test_excessive_nesting_is_reported_as_damage(log: Log) -> None:
    deep: Any = 1
    for _ in range(NESTING_MAX + 1):
        deep = [deep]
    log.insert(512, deep)
    with pytest.raises(DamagedLog, match="nest"):
        lines(log)
