"""Tables: brackets, screenfuls, widths, and the columns of one space."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowstone.history.reading import Reading
from flowstone.history.records import records
from flowstone.history.selection import Selection
from flowstone.history.tables import UnknownColumn, table_text
from flowstone.iproto.constants import RequestType
from flowstone.outside import production
from tests.history.logs import Log


@pytest.fixture
def log(tmp_path: Path) -> Log:
    log = Log(tmp_path)
    log.create_space(512, "t", ("id", "unsigned"), ("text", "string"))
    return log


def screens(log: Log, **options: Any) -> list[list[str]]:
    selection = Selection(spaces=(512,)) if options.get("fields") else Selection()
    pieces = Reading(production(), [log.path], selection=selection).pieces()
    return [text.splitlines() for text in table_text(records(pieces), **options)]


def test_brackets_hold_transactions_of_several_rows(log: Log) -> None:
    insert = (RequestType.INSERT, {0x10: 512, 0x21: (1, "x")})
    for count in (1, 3, 2):
        log.write(*[insert] * count)
    (lines,) = screens(log)
    assert "".join(line[0] for line in lines[1:]) == " ┌│└┌└"


def test_each_screenful_has_a_head_and_widths_of_its_own(log: Log) -> None:
    for text in ("x", "x", "a long text", "x"):
        log.insert(512, 1, text)
    first, second = screens(log, fields=True, height=2)
    assert first[0].split() == second[0].split() == ["lsn", "time", "replica", "type", "space", "id", "text"]
    assert len(second[1]) > len(first[1])


def test_lines_are_cut_to_the_screen_and_say_so(log: Log) -> None:
    log.insert(512, 1, "x" * 500)
    (lines,) = screens(log, width=100)
    assert all(len(line) <= 100 for line in lines)
    assert lines[1].endswith("…")
    (whole,) = screens(log)
    assert "x" * 500 in whole[1]


def test_what_has_no_column_stands_at_the_end(log: Log) -> None:
    log.insert(512, 1, "x", 7)
    log.write((RequestType.UPDATE, {0x10: 512, 0x20: (1,), 0x21: (("=", 1, "y"),)}))
    (lines,) = screens(log, fields=True)
    assert lines[0].split()[-1] == "more"
    assert lines[1].endswith("3: 7")
    assert lines[2].endswith('[["=", "text", "y"]]')


def test_columns_are_chosen_and_unknown_ones_refused(log: Log) -> None:
    log.insert(512, 1, "x")
    (lines,) = screens(log, fields=True, wanted=["text", "lsn"])
    assert [line.split() for line in lines] == [["text", "lsn"], ["x", "3"]]
    with pytest.raises(UnknownColumn, match=r"no column 'nope'; there are: lsn, time, "):
        screens(log, wanted=["nope"])


def test_a_new_format_gets_a_new_head(log: Log) -> None:
    log.insert(512, 1, "x")
    log.write((RequestType.REPLACE, {0x10: 280, 0x21: (512, 1, "t", "memtx", 0, {}, [{"name": "number"}])}))
    log.insert(512, 2)
    before, after = screens(log, fields=True)
    assert before[0].split()[-2:] == ["id", "text"]
    assert after[0].split()[-1] == "number"


def test_nothing_is_no_table(log: Log) -> None:
    assert screens(log) == []
