"""Rows as a table for people: one line per row, a bracket around the rows of a transaction, widths per screenful.

Relies on `records`. Nothing is coloured and nothing is asked of the terminal: how wide and how high a screen is, the
caller says. The head is repeated where a new screenful begins, because its widths are its own.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from flowstone.errors import FlowstoneError
from flowstone.history.records import Record
from flowstone.history.text_yaml import yaml_key, yaml_value
from flowstone.iproto.constants import type_name


class UnknownColumn(FlowstoneError):
    """A column was asked for that the table does not have."""


SCREENFUL = 40
CELL_MIN = 8
"""A column is not squeezed below this, even if lines then get longer than the screen."""

_HEAD = ("", "lsn", "time", "replica", "type", "space")
_Line = tuple[str, ...]


def table_text(
    records: Iterable[Record],
    *,
    fields: bool = False,
    wanted: Sequence[str] | None = None,
    width: int | None = None,
    height: int = SCREENFUL,
) -> Iterator[str]:
    """The table, a screenful of `height` rows at a time.

    `fields`: all rows are of one space, whose fields are the columns. `wanted` limits the columns by name.
    """
    head: _Line = ()
    lines: list[_Line] = []
    for mark, record in _bracketed(records):
        new_head, line = _field_line(record) if fields else _plain_line(record)
        if lines and (len(lines) >= height or new_head != head):
            yield _laid_out(*_limited(head, lines, wanted), width)
            lines = []
        head = new_head
        lines.append((mark, *_start(record), *line))
    if lines:
        yield _laid_out(*_limited(head, lines, wanted), width)


def _limited(head: _Line, lines: list[_Line], wanted: Sequence[str] | None) -> tuple[_Line, list[_Line]]:
    if wanted is None:
        return head, lines
    unknown = sorted(set(wanted) - set(head))
    if unknown:
        raise UnknownColumn(f"no column {unknown[0]!r}", hint=f"there are: {', '.join(filter(None, head))}")
    places = [0, *(head.index(name) for name in wanted)]
    return tuple(head[at] for at in places), [tuple(line[at] for at in places) for line in lines]


def _bracketed(records: Iterable[Record]) -> Iterator[tuple[str, Record]]:
    """Each record with the piece of bracket at its side."""
    before: Record | None = None
    opened = False
    for record in records:
        if before is not None:
            goes_on = before.transaction == record.transaction
            yield _MARKS[opened, goes_on], before
            opened = goes_on
        before = record
    if before is not None:
        yield _MARKS[opened, False], before


_MARKS = {(False, False): " ", (False, True): "┌", (True, True): "│", (True, False): "└"}
"""By whether the row before and the row behind belong to the same transaction."""


def _start(record: Record) -> _Line:
    row, space = record.row, record.space
    space_id = "" if record.space_id is None else str(record.space_id)
    replica = str(row.replica_id) if row.replica_id else "local" if row.group_id else ""
    return str(row.lsn), _time(row.timestamp), replica, type_name(row.type), space.name if space else space_id


def _time(timestamp: float) -> str:
    try:
        moment = datetime.datetime.fromtimestamp(timestamp, datetime.UTC)
    except (ValueError, OverflowError, OSError):
        return str(timestamp)
    return moment.strftime("%Y-%m-%d %H:%M:%S.") + f"{moment.microsecond // 1000:03d}" if timestamp else ""


def _plain_line(record: Record) -> tuple[_Line, _Line]:
    body = record.named_body()
    if record.space_id is None:
        data = ", ".join(f"{key}: {yaml_value(value)}" for key, value in body.items())
    else:
        parts = (body.get("key"), body.get("tuple"), body.get("operations"))
        data = " ".join(yaml_value(part) for part in parts if part is not None)
    return (*_HEAD, "data"), (data,)


def _field_line(record: Record) -> tuple[_Line, _Line]:
    names = record.space.field_names if record.space is not None else ()
    values: Mapping[str | int, Any] = {}
    body = record.named_body()
    given = body.get("tuple", body.get("key"))
    if isinstance(given, Mapping):
        values = given
    cells = [_cell(values[name]) if name in values else "" for name in names]
    known = set(names)
    extra = [f"{yaml_key(key)}: {yaml_value(value)}" for key, value in values.items() if key not in known]
    if not isinstance(given, Mapping) and given is not None:
        extra.append(yaml_value(given))
    operations = body.get("operations")
    more = " ".join([*extra, *([yaml_value(operations)] if operations is not None else [])])
    return (*_HEAD, *names, "more"), (*cells, more)


def _cell(value: Any) -> str:
    return value if isinstance(value, str) and value.isprintable() else yaml_value(value)


def _laid_out(head: _Line, lines: Sequence[_Line], width: int | None) -> str:
    # An empty last column is none.
    if head[-1] == "more" and all(not line[-1] for line in lines):
        head, lines = head[:-1], [line[:-1] for line in lines]
    columns = list(zip_longest(head, *lines, fillvalue=""))
    widths = [max(map(len, column)) for column in columns]
    if width is not None:
        _squeeze(widths, width)
    right = [all(_is_number(cell) for cell in column[1:]) for column in columns]
    return "".join(_padded(line, widths, right) for line in (head, *lines))


def _is_number(cell: str) -> bool:
    return not cell or cell.lstrip("-").replace(".", "", 1).isdecimal()


def _squeeze(widths: list[int], width: int) -> None:
    """Takes from the widest column of data, again and again, until a line fits."""
    while (excess := sum(widths) + len(widths) - 1 - width) > 0:
        order = sorted(range(min(len(_HEAD), len(widths) - 1), len(widths)), key=widths.__getitem__, reverse=True)
        if not order or widths[order[0]] <= CELL_MIN:
            return
        second = widths[order[1]] if len(order) > 1 else CELL_MIN
        size = widths[order[0]]
        widths[order[0]] = max(CELL_MIN, size - excess, min(second, size - 1))


def _padded(line: _Line, widths: Sequence[int], right: Sequence[bool]) -> str:
    cells = []
    for cell, size, is_right in zip(line, widths, right, strict=True):
        cell = cell if len(cell) <= size else cell[: size - 1] + "…"
        cells.append(cell.rjust(size) if is_right else cell.ljust(size))
    return " ".join(cells).rstrip() + "\n"
