"""Rows as a table for people: one line per row, with a bracket around the rows of a transaction.

Uses `body_parts` for strips of rows, and `records` for rows with rare content. Writes no colours and does not query the
terminal: the caller passes width and height. On a screen, every screenful has a head and column widths of its own.
Without a screen there is one head, the widths are those of the first screenful, nothing is truncated, and no cell of
the leading columns is empty or contains a blank, so that other programs can split the lines.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import zip_longest
from typing import Any

import numpy as np

from flowstone.errors import FlowstoneError
from flowstone.history.log_reading import Piece
from flowstone.history.records import Record, Records, strips, transaction_numbers
from flowstone.iproto import scan as rows_of
from flowstone.iproto.constants import RequestType, type_name
from flowstone.iproto.scan import Cells
from flowstone.text.flow_shapes import SEPARATOR, Shape
from flowstone.text.yaml_rows import body_parts, yaml_key, yaml_value


class UnknownColumn(FlowstoneError):
    """A requested column does not exist."""


SCREENFUL = 40
"""Default height of a screen, in lines."""

CELL_MIN = 8
"""Minimum width of a column that is squeezed, even if lines get longer than the screen."""

NOTHING = "-"
"""An empty cell in output for programs, which split lines by blanks."""

_HEAD = ("", "lsn", "time", "replica", "type", "space")
_Line = tuple[str, ...]
_Lines = Iterator[tuple[_Line, list[_Line]]]


def table_text(
    records: Records,
    *,
    fields: bool = False,
    wanted: Sequence[str] | None = None,
    width: int | None = None,
    height: int = SCREENFUL,
) -> Iterator[str]:
    """Yield the table: one screenful of `width` and `height` at a time, or without `width` a stream of lines.

    With `fields`, all rows belong to one space, whose fields are the columns. `wanted` selects columns by name.
    """
    lines = (_limited(head, part, wanted, brackets=width is not None) for head, part in _lines(records, fields))
    return _streamed(lines, height) if width is None else _fitted(lines, width, height)


def _fitted(parts: _Lines, width: int, height: int) -> Iterator[str]:
    head: _Line = ()
    lines: list[_Line] = []
    for new_head, part in parts:
        if lines and new_head != head:
            yield _screen(head, lines, width)
            lines = []
        head = new_head
        lines += part
        while len(lines) >= height:
            yield _screen(head, lines[:height], width)
            lines = lines[height:]
    if lines:
        yield _screen(head, lines, width)


def _streamed(parts: _Lines, height: int) -> Iterator[str]:
    head: _Line = ()
    lines: list[_Line] = []
    layout = ""
    for new_head, part in parts:
        if new_head != head:
            if lines:
                yield _stream_start(head, lines)[1]
            head, lines, layout = new_head, [], ""
        if layout:
            yield _stream(layout, part)
            continue
        lines += part
        if len(lines) >= height:
            layout, text = _stream_start(head, lines, height)
            lines = []
            yield text
    if lines:
        yield _stream_start(head, lines)[1]


def _stream_start(head: _Line, lines: list[_Line], height: int | None = None) -> tuple[str, str]:
    """Return the layout, computed from the first `height` lines, and the text of the head and all lines."""
    filled = [_filled(line) for line in lines[:height]]
    widths, right = _measured(head, filled)
    layout = " ".join(f"%{'' if is_right else '-'}{size}s" for size, is_right in zip(widths, right, strict=True))
    # The column `more` has a title only if one of these lines uses it.
    top = (*head[:-1], "") if head[-1] == "more" and not any(line[-1] for line in lines[:height]) else head
    return layout, (layout % top).rstrip() + "\n" + _stream(layout, lines)


def _stream(layout: str, lines: list[_Line]) -> str:
    return "".join([(layout % _filled(line)).rstrip() + "\n" for line in lines])


def _filled(line: _Line) -> _Line:
    # The last cell may be empty or contain blanks: it is the rest of the line.
    return (*[cell if cell and cell != " " else NOTHING for cell in line[:-1]], line[-1])


def _limited(
    head: _Line, lines: list[_Line], wanted: Sequence[str] | None, *, brackets: bool
) -> tuple[_Line, list[_Line]]:
    if wanted is None:
        return head, lines
    unknown = sorted(set(wanted) - set(head))
    if unknown:
        raise UnknownColumn(f"no column {unknown[0]!r}", hint=f"known columns: {', '.join(filter(None, head))}")
    places = [*([0] if brackets else []), *(head.index(name) for name in wanted)]
    return tuple(head[at] for at in places), [tuple(line[at] for at in places) for line in lines]


def _lines(records: Records, fields: bool) -> _Lines:
    """Yield the lines of one strip at a time, with their common head."""
    slab, number = None, -1
    waiting: tuple[_Line, bool, _Line] | None = None
    for strip in strips(records.pieces):
        head, lines = _field_lines(strip) if fields else _plain_lines(strip)
        of_slab = transaction_numbers(strip.slab)
        numbers = of_slab[strip.rows]
        same = (np.diff(numbers) == 0).tolist()
        opened = strip.slab is slab and number == numbers[0]
        if waiting is not None:
            yield waiting[0], [(_MARKS[waiting[1], opened], *waiting[2])]
            waiting = None
        marks = [_MARKS[pair] for pair in zip([opened, *same], [*same, False], strict=True)]
        slab, number = strip.slab, int(numbers[-1])
        marked = [(mark, *line) for mark, line in zip(marks, lines, strict=True)]
        # Whether the bracket closes with the last row depends on the next strip.
        if number in of_slab[strip.rows[-1] + 1 : strip.rows[-1] + 2]:
            waiting = head, [opened, *same][-1], lines[-1]
            marked.pop()
        yield head, marked
    if waiting is not None:
        yield waiting[0], [(_MARKS[waiting[1], False], *waiting[2])]


_MARKS = {(False, False): " ", (False, True): "┌", (True, True): "│", (True, False): "└"}
"""Brackets by whether the previous and the next row belong to the same transaction."""


def _plain_lines(strip: Piece) -> tuple[_Line, list[_Line]]:
    cells = strip.slab.cells[:, strip.rows]
    parts = body_parts(strip, cells, Shape.MAP)
    texts: list[_Line] = [
        (" ".join([part for part in row if part]) if row[0] or row[2] else row[1],)
        for row in zip(parts.key, parts.tuple, parts.operations, strict=True)
    ]
    return (*_HEAD, "data"), _completed(strip, cells, texts, parts.rare, lambda record: (data_text(record),))


def _field_lines(strip: Piece) -> tuple[_Line, list[_Line]]:
    cells = strip.slab.cells[:, strip.rows]
    parts = body_parts(strip, cells, Shape.CELLS)
    space = strip.schema.get(int(cells[rows_of.SPACE_ID, 0]))
    names = space.field_names if space is not None else ()
    # A row without a tuple shows its key, in the columns of the key's fields.
    no_tuple = np.fromiter((not text for text in parts.tuple), np.bool_, len(parts.tuple))
    rare = np.union1d(parts.rare, np.flatnonzero(no_tuple)) if names else np.arange(len(strip.rows))
    texts = [
        _field_cells(len(names), values, operations)
        for values, operations in zip(parts.tuple, parts.operations, strict=True)
    ]
    return (*_HEAD, *names, "more"), _completed(strip, cells, texts, rare, _field_line)


def _field_cells(count: int, values: str, operations: str) -> _Line:
    texts = values.split(SEPARATOR)
    extra = [f"{number}: {text}" for number, text in enumerate(texts[count:], count + 1)]
    more = " ".join([*extra, operations]) if operations else " ".join(extra)
    return (*map(_unquoted, texts[:count]), *[""] * (count - len(texts)), more)


def _unquoted(text: str) -> str:
    """Return a quoted string without quotes if it is not empty and all its characters are printable."""
    if text[:1] != '"' or text == '""':
        return text
    value: str = text[1:-1] if "\\" not in text else json.loads(text)
    return value if value.isprintable() else text


def _completed(
    strip: Piece, cells: Cells, texts: list[_Line], rare: Cells, line: Callable[[Record], _Line]
) -> list[_Line]:
    """Return the lines with their leading columns; lines of rare rows are made from their records."""
    for at, record in zip(rare.tolist(), Records([replace(strip, rows=strip.rows[rare])]), strict=True):
        texts[at] = line(record)
    return [(*start, *text) for start, text in zip(_starts(strip, cells), texts, strict=True)]


def _starts(strip: Piece, cells: Cells) -> Iterator[_Line]:
    space_ids = np.where(cells[rows_of.TYPE] == RequestType.RAFT, -1, cells[rows_of.SPACE_ID])
    spaces = {-1: ""}
    for space_id in np.unique(space_ids[space_ids >= 0]).tolist():
        space = strip.schema.get(space_id)
        spaces[space_id] = space.name if space is not None else str(space_id)
    types = {kind: type_name(kind) for kind in np.unique(cells[rows_of.TYPE]).tolist()}
    return zip(
        map(str, cells[rows_of.LSN].tolist()),
        map(_time, np.ascontiguousarray(cells[rows_of.TIMESTAMP]).view(np.float64).tolist()),
        map(_origin, cells[rows_of.REPLICA_ID].tolist(), cells[rows_of.GROUP_ID].tolist()),
        map(types.__getitem__, cells[rows_of.TYPE].tolist()),
        map(spaces.__getitem__, space_ids.tolist()),
        strict=True,
    )


def _origin(replica_id: int, group_id: int) -> str:
    return str(replica_id) if replica_id else "local" if group_id else ""


@lru_cache(maxsize=1024)
def _time(timestamp: float) -> str:
    try:
        moment = datetime.datetime.fromtimestamp(timestamp, datetime.UTC)
    except (ValueError, OverflowError, OSError):
        return str(timestamp)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}" if timestamp else ""


def data_text(record: Record) -> str:
    """Return the text of the column `data`: key, tuple and operations with field names."""
    body = record.named_body()
    if record.space_id is None:
        return ", ".join(f"{key}: {yaml_value(value)}" for key, value in body.items())
    parts = (body.get("key"), body.get("tuple"), body.get("operations"))
    return " ".join(yaml_value(part) for part in parts if part is not None)


def _field_line(record: Record) -> _Line:
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
    return (*cells, more)


def _cell(value: Any) -> str:
    return value if isinstance(value, str) and value and value.isprintable() else yaml_value(value)


def _screen(head: _Line, lines: Sequence[_Line], width: int) -> str:
    # Drop the column `more` if it is empty.
    if head[-1] == "more" and all(not line[-1] for line in lines):
        head, lines = head[:-1], [line[:-1] for line in lines]
    widths, right = _measured(head, lines)
    if sum(widths) + len(widths) - 1 > width:
        head, lines, data = _narrowed(head, lines)
        widths, right = _measured(head, lines)
        _squeeze(data, widths, width)
    return "".join(_padded(line, widths, right) for line in (head, *lines))


def _measured(head: _Line, lines: Sequence[_Line]) -> tuple[list[int], list[bool]]:
    """Return the width of each column, and whether it contains only numbers."""
    columns = list(zip_longest(head, *lines, fillvalue=""))
    return [max(map(len, column)) for column in columns], [all(map(_is_number, column[1:])) for column in columns]


def _is_number(cell: str) -> bool:
    return not cell or cell == NOTHING or cell.lstrip("-").replace(".", "", 1).isdecimal()


def _narrowed(head: _Line, lines: Sequence[_Line]) -> tuple[_Line, list[_Line], list[int]]:
    """Remove what all rows have in common: move the date to the head, drop the column of a common origin.

    Also return the numbers of the columns that may be squeezed.
    """
    # A field may have the same name as a leading column, which is found first.
    ours = {name: head.index(name) for name in _HEAD[:-1] if name in head}
    table = {at: list(column) for at, column in enumerate(zip(head, *lines, strict=True))}
    if "time" in ours:
        cells = table[ours["time"]][1:]
        days = sorted({cell[:10] for cell in cells if cell})
        table[ours["time"]] = [days[0] if len(days) == 1 else "time", *(cell[11:] for cell in cells)]
    if "replica" in ours and len({*table[ours["replica"]][1:]}) == 1:
        del table[ours["replica"]]
    narrow = list(zip(*table.values(), strict=True))
    return narrow[0], narrow[1:], [place for place, at in enumerate(table) if at not in ours.values()]


def _squeeze(data: Sequence[int], widths: list[int], width: int) -> None:
    """Shrink the widest data column repeatedly until a line fits."""
    while (excess := sum(widths) + len(widths) - 1 - width) > 0:
        order = sorted(data, key=widths.__getitem__, reverse=True)
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
