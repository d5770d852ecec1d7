"""Pieces as JSON lines, written by a kernel; with field names, tuples are converted to objects.

The format is that of `tarantoolctl cat --format=json` with additions (`docs/reference/json-output.md`). Pieces are
formatted independently of each other, so workers can format several at the same time.
"""

from __future__ import annotations

import json
import re
from typing import Any

from flowstone.errors import RemoteProtocolError
from flowstone.history.log_reading import Piece
from flowstone.history.records import name_fields
from flowstone.iproto import scan as rows_of
from flowstone.text.json_rows import json_lines
from flowstone.xlog.errors import DamagedLog

_SURROGATE = re.compile("[\ud800-\udfff]")


def json_text(piece: Piece, *, names: bool = False) -> memoryview:
    """Return one line per row, each with a newline at its end."""
    space_names = {space.id: space.name for space in piece.schema}
    try:
        lines = json_lines(piece.slab.buf, piece.slab.cells, piece.rows, space_names)
    except RemoteProtocolError as error:
        block = piece.slab.cells[rows_of.SPAN, piece.rows[0]]
        # The kernel does not say which row failed; the offset is that of the first block of the piece.
        what = f"in this block or a later one: {error}"
        raise DamagedLog(piece.slab.path, int(piece.slab.offsets[block]), what) from error
    if not names:
        return lines
    text = str(lines, "utf-8")
    return memoryview("".join(_named(line, piece) + "\n" for line in text.split("\n") if line).encode())


def _named(line: str, piece: Piece) -> str:
    row = json.loads(line)
    body = row.get("BODY", {})
    space = piece.schema.get(body["space_id"]) if "space_id" in body else None
    if space is not None and row["HEADER"]["type"] != "UPDATE" and isinstance(body.get("tuple"), list):
        body["tuple"] = _as_object(space.field_names, body["tuple"])
    text = json.dumps(row, ensure_ascii=False, separators=(",", ":"))
    # A byte that is not UTF-8 is a lone surrogate \udcXX here, which cannot be encoded as UTF-8: keep the escape.
    return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _as_object(names: tuple[str, ...], values: list[Any]) -> dict[str | int, Any]:
    return name_fields(names, values)
