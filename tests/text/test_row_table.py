"""Tables: brackets, screenfuls, widths, and columns of one space."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowstone.history.log_reading import Reading
from flowstone.history.records import records
from flowstone.history.selection import Selection
from flowstone.iproto.constants import RequestType
from flowstone.outside import production
from flowstone.text.row_table import UnknownColumn, table_text
from tests.history.logs import Log


@pytest.fixture
def log(tmp_path: Path) -> Log:
    log = Log(tmp_path)
    log.create_space(512, "t", ("id", "unsigned"), ("text", "string"))
    return log


def screens(log: Log, width: int | None = 500, **options: Any) -> list[list[str]]:
    selection = Selection(spaces=(512,)) if options.get("fields") else Selection()
    pieces = Reading(production(), [log.path], selection=selection).pieces()
    return [text.splitlines() for text in table_text(records(pieces), width=width, **options)]


def test_brackets_enclose_transactions_of_several_rows(log: Log) -> None:
    insert = (RequestType.INSERT, {0x10: 512, 0x21: (1, "x")})
    for count in (1, 3, 2):
        log.write(*[insert] * count)
    (lines,) = screens(log)
    assert "".join(line[0] for line in lines[1:]) == " ┌│└┌└"


def test_each_screenful_has_its_own_header_and_widths(log: Log) -> None:
    for text in ("x", "x", "a long text", "x"):
        log.insert(512, 1, text)
    first, second = screens(log, fields=True, height=2)
    assert first[0].split() == second[0].split() == ["lsn", "time", "replica", "type", "space", "id", "text"]
    assert len(second[1]) > len(first[1])


def test_lines_are_truncated_to_the_screen_with_a_mark(log: Log) -> None:
    log.insert(512, 1, "x" * 500)
    (lines,) = screens(log, width=100)
    assert all(len(line) <= 100 for line in lines)
    assert lines[1].endswith("…")
    (whole,) = screens(log, width=None)
    assert "x" * 500 in whole[1]


def test_narrow_screen_shows_the_day_once_and_omits_the_origin_when_all_rows_share_it(log: Log) -> None:
    for number in range(2):
        log.insert(512, number, "x" * 500)
    (lines,) = screens(log, width=80)
    assert lines[0].split() == ["lsn", "1970-01-01", "type", "space", "data"]
    assert lines[1].split()[:4] == ["3", "00:16:43.000", "INSERT", "t"]
    assert len(lines[1]) == 80
    assert lines[1].index("{") <= 32


def test_narrow_screen_shrinks_wide_columns(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.create_space(512, "t", ("time", "string"), ("replica", "string"), ("id", "unsigned"))
    log.insert(512, "w" * 100, "x" * 100, 7)
    (lines,) = screens(log, fields=True, width=80)
    assert lines[0].split() == ["lsn", "1970-01-01", "type", "space", "time", "replica", "id"]
    wide, other, number = lines[1].split()[-3:]
    assert abs(len(wide) - len(other)) <= 1
    assert (wide[0], other[0], number, len(lines[1])) == ("w", "x", "7", 80)


def test_output_without_a_screen_has_one_header_and_all_cells(log: Log) -> None:
    for text in ("x", "x", "a_long_text", "x"):
        log.insert(512, 1, text)
    log.insert(512, 2)
    log.confirm(1)
    lines = [line for part in screens(log, width=None, height=2) for line in part]
    assert [line.split()[1] for line in lines[1:]] == ["3", "4", "5", "6", "7", "8"]
    assert [line.split()[5] for line in lines[1:]] == ["t"] * 5 + ["-"]
    lines = [line for part in screens(log, width=None, height=2, fields=True) for line in part]
    assert len(lines) == 6
    assert [line.split()[-1] for line in lines[1:]] == ["x", "x", "a_long_text", "x", "-"]


def test_strings_are_quoted_only_where_necessary(log: Log) -> None:
    for text in ('say "hi" \\', "", "two\nlines", "\udcff", "é"):
        log.insert(512, 1, text)
    (lines,) = screens(log, fields=True)
    start = lines[0].index("text")
    shown = [line[start:] for line in lines[1:]]
    assert shown == ['say "hi" \\', '""', '"two\\nlines"', '!!binary "/w=="', "é"]


def test_bracket_continues_across_strips(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowstone.history.records.STRIP_ROWS", 2)
    log.write(*[(RequestType.INSERT, {0x10: 512, 0x21: (1, "x")})] * 5)
    log.insert(512, 1, "x")
    (lines,) = screens(log)
    assert "".join(line[0] for line in lines[1:]) == "┌│││└ "


def test_values_without_a_column_are_in_the_last_column(log: Log) -> None:
    log.insert(512, 1, "x", 7)
    log.write((RequestType.UPDATE, {0x10: 512, 0x20: (1,), 0x21: (("=", 1, "y"),)}))
    (lines,) = screens(log, fields=True)
    assert lines[0].split()[-1] == "more"
    assert lines[1].endswith("3: 7")
    assert lines[2].endswith('[["=", "text", "y"]]')


def test_columns_are_selected_and_unknown_ones_rejected(log: Log) -> None:
    log.insert(512, 1, "x")
    (lines,) = screens(log, fields=True, wanted=["text", "lsn"])
    assert [line.split() for line in lines] == [["text", "lsn"], ["x", "3"]]
    with pytest.raises(UnknownColumn, match=r"no column 'nope'; known columns: lsn, time, "):
        screens(log, wanted=["nope"])


def test_changed_format_starts_a_new_header(log: Log) -> None:
    log.insert(512, 1, "x")
    log.write((RequestType.REPLACE, {0x10: 280, 0x21: (512, 1, "t", "memtx", 0, {}, [{"name": "number"}])}))
    log.insert(512, 2)
    before, after = screens(log, fields=True)
    assert before[0].split()[-2:] == ["id", "text"]
    assert after[0].split()[-1] == "number"


def test_no_rows_print_no_table(log: Log) -> None:
    assert screens(log) == []
