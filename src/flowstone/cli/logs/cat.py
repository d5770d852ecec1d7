"""`flowstone cat`: print rows of log files as YAML, JSON, Lua, a table, CSV or Parquet.

Checks the options and writes the output. `history/` reads and selects the rows, `text/` formats YAML, JSON, Lua and
tables; for CSV and Parquet, `columns/` decodes the rows into Arrow batches, which this module writes.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated, BinaryIO, Literal

import typer

from flowstone.cli import extras
from flowstone.cli.console import UsageError, progress_bar
from flowstone.cli.logs import row_options as options
from flowstone.cli.output import check_output, destination

if TYPE_CHECKING:
    import pyarrow as pa

    from flowstone.history.log_reading import Piece, Reading
    from flowstone.outside import Outside

EXAMPLE = "Example: `flowstone cat --space users --from 1000 --settled --format table /var/lib/tarantool/instance`"

WRITE_SIZE = 256 * 1024
"""Characters of text that are collected before they are written."""

ROW_GROUP_ROWS = 128 * 1024
"""Minimum number of rows in a row group of a Parquet file; the last group may be smaller."""


class Format(StrEnum):
    yaml = "yaml"
    json = "json"
    lua = "lua"
    table = "table"
    csv = "csv"
    parquet = "parquet"


COLUMNAR = (Format.csv, Format.parquet)


@dataclass(frozen=True, slots=True)
class Style:
    """The output format of the rows."""

    format: Format
    names: bool
    show_secrets: bool
    output: str | None
    columns: tuple[str, ...] | None
    unsigned_as: Literal["int64", "decimal", "double"]
    decimal_scale: int | None
    strings_as: Literal["string", "binary"]


def cat(
    paths: options.Paths,
    from_lsn: options.From = None,
    to_lsn: options.To = None,
    timestamp: options.Timestamp = None,
    space: options.Spaces = None,
    replica: options.Replicas = None,
    show_system: options.ShowSystem = False,
    recursive: options.Recursive = False,
    format: Annotated[Format, typer.Option("--format", help="How to write the rows.")] = Format.yaml,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write to this file, not to stdout; required for parquet."),
    ] = None,
    settled: Annotated[
        bool | None,
        typer.Option(
            "--settled/--no-settled",
            help="Leave out rows that were rolled back or are still pending. Default: yes for lua, else no.",
        ),
    ] = None,
    force: options.Force = False,
    names: Annotated[
        bool | None,
        typer.Option(
            "--names/--no-names", help="Print tuples as maps by field name. Default: yes for yaml, no for json."
        ),
    ] = None,
    columns: Annotated[
        str | None, typer.Option("--columns", metavar="A,B", help="Print only these columns (table, csv, parquet).")
    ] = None,
    unsigned_as: Annotated[
        Literal["int64", "decimal", "double"],
        typer.Option("--unsigned-as", help="Column type of unsigned fields (csv, parquet with one --space)."),
    ] = "int64",
    decimal_scale: options.DecimalScale = None,
    strings_as: Annotated[
        Literal["string", "binary"],
        typer.Option("--strings-as", help="Column type of string fields; binary also holds values that are not UTF-8."),
    ] = "string",
    show_secrets: Annotated[
        bool, typer.Option("--show-secrets", help="Show password hashes of users, which are hidden by default.")
    ] = False,
) -> int:
    """Print the rows of log files (.xlog, .snap), with the names that spaces and fields had at each row.

    Rows of system spaces are skipped unless selected with --show-system or --space. --to and --timestamp are exclusive
    bounds, as in `tt cat`. With one --space, csv, parquet and table have a column per field. Lua output that contains
    VARBINARY needs Tarantool 3.0 or newer to be read back.
    """
    # A server executes Lua output, so by default it has settled rows only, and it includes truncations.
    for_server = format is Format.lua
    selection = options.make_selection(from_lsn, to_lsn, timestamp, space, replica, show_system, truncates=for_server)
    wanted = options.RowOptions(paths, selection, for_server if settled is None else settled, recursive, force)
    wanted_columns = tuple(name.strip() for name in columns.split(",")) if columns is not None else None
    default_names = format in (Format.yaml, Format.table)
    style = Style(
        format,
        default_names if names is None else names,
        show_secrets,
        output,
        wanted_columns,
        unsigned_as,
        decimal_scale,
        strings_as,
    )
    _check(style)
    with options.advice(force=force):
        return show(wanted, style)


def _check(style: Style) -> None:
    if style.format in COLUMNAR:
        extras.need("arrow", f"--format {style.format.value}")
    if style.format is Format.parquet and style.output is None:
        raise UsageError("parquet cannot be written to stdout", hint="specify a file with --output FILE")
    if style.columns is not None and style.format not in (Format.table, *COLUMNAR):
        raise UsageError(f"--columns does not apply to {style.format.value}", hint="use it with table, csv or parquet")
    types = (style.unsigned_as, style.decimal_scale, style.strings_as)
    if style.format not in COLUMNAR and types != ("int64", None, "string"):
        raise UsageError(
            f"--unsigned-as, --decimal-scale and --strings-as do not apply to {style.format.value}",
            hint="use them with csv or parquet",
        )
    if style.names and style.format in (Format.lua, *COLUMNAR):
        raise UsageError(f"--names does not apply to {style.format.value}", hint="use it with yaml or json")


def show(wanted: options.RowOptions, style: Style) -> int:
    """Write the selected rows and return the exit code."""
    from flowstone.outside import production

    if style.output is not None:
        check_output(style.output)
    outside = production()
    files = wanted.files(outside)
    # On a terminal, a progress bar would be drawn between the rows.
    rows_on_screen = style.output is None and sys.stdout is not None and sys.stdout.isatty()
    with progress_bar(sum(map(outside.disk.size, files)), hidden=rows_on_screen) as bar:
        reading = wanted.reading(outside, files, bar.advance)
        with destination(style.output) as sink:
            if style.format in COLUMNAR:
                _write_columns(outside, reading, wanted, files, style, sink)
            else:
                _write_text(outside, reading, style, sink, len(wanted.selection.spaces) == 1)
    return options.finish(reading.report)


def _shown(pieces: Iterable[Piece], style: Style) -> Iterator[Piece]:
    from flowstone.history.secrets import hide_secrets

    return iter(pieces) if style.show_secrets else hide_secrets(pieces)


def _write_text(outside: Outside, reading: Reading, style: Style, sink: BinaryIO, one_space: bool) -> None:
    pieces = _shown(reading.pieces(), style)
    if style.format is Format.json:
        from flowstone.text.json_lines import json_text

        sink.writelines(outside.blocking.map(partial(json_text, names=style.names), pieces))
        return
    from flowstone.history.records import records

    if style.format is Format.lua:
        from flowstone.text.lua_rows import lua_statements

        _write_all(lua_statements(records(_without_counters(pieces))), sink)
        return
    rows = records(pieces)
    if style.format is Format.yaml:
        from flowstone.text.yaml_rows import yaml_documents

        _write_all(yaml_documents(rows, names=style.names), sink)
    else:
        from flowstone.text.row_table import SCREENFUL, table_text

        is_screen = style.output is None and sys.stdout.isatty()
        size = shutil.get_terminal_size()
        width, height = (size.columns, max(size.lines - 2, 5)) if is_screen else (None, SCREENFUL)
        text = table_text(rows, fields=one_space, wanted=style.columns, width=width, height=height)
        _write_all(text, sink)


def _without_counters(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Drop the rows of `_truncate` from snapshots.

    They count past truncations; executed as statements, they would truncate the spaces again.
    """
    from flowstone.box.system import TRUNCATE_ID
    from flowstone.iproto.scan import SPACE_ID
    from flowstone.xlog.meta import FileType

    for piece in pieces:
        if piece.meta.file_type is FileType.SNAP:
            rows = piece.rows[piece.slab.cells[SPACE_ID, piece.rows] != TRUNCATE_ID]
            if len(rows):
                yield replace(piece, rows=rows)
        else:
            yield piece


def _write_all(texts: Iterable[str], sink: BinaryIO) -> None:
    """Write `texts` in large chunks; if iterating over them fails, write the texts before the error first."""
    waiting: list[str] = []
    size = 0
    try:
        for text in texts:
            waiting.append(text)
            size += len(text)
            if size >= WRITE_SIZE:
                sink.write("".join(waiting).encode("utf-8", "surrogateescape"))
                waiting, size = [], 0
    finally:
        sink.write("".join(waiting).encode("utf-8", "surrogateescape"))


def _write_columns(
    outside: Outside, reading: Reading, wanted: options.RowOptions, files: Sequence[str], style: Style, sink: BinaryIO
) -> None:
    from flowstone.columns.arrow_columns import ColumnOptions
    from flowstone.columns.log_batches import GenericShape, TypedShape

    pieces = _shown(reading.pieces(), style)
    batches: Iterator[pa.RecordBatch]
    if len(wanted.selection.spaces) == 1:
        typed = TypedShape(ColumnOptions(style.unsigned_as, style.decimal_scale, style.strings_as), style.columns)
        # A file has one schema, but the log may alter the space: read the whole log for its definitions first.
        schema = typed.schema(wanted.reading(outside, files, None).pieces())
        batches = typed.batches(pieces, schema)
    else:
        generic = GenericShape(style.columns)
        schema, batches = generic.schema(), generic.batches(pieces)
    write = _write_csv if style.format is Format.csv else _write_parquet
    write(batches, schema, sink)


def _write_csv(batches: Iterator[pa.RecordBatch], schema: pa.Schema, sink: BinaryIO) -> None:
    from pyarrow import csv

    from flowstone.columns.log_batches import text_batch, text_schema

    with csv.CSVWriter(sink, text_schema(schema)) as writer:
        for batch in batches:
            writer.write_batch(text_batch(batch))


def _write_parquet(batches: Iterator[pa.RecordBatch], schema: pa.Schema, sink: BinaryIO) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    with parquet.ParquetWriter(sink, schema) as writer:
        waiting: list[pa.RecordBatch] = []
        for batch in batches:
            waiting.append(batch)
            if sum(map(len, waiting)) >= ROW_GROUP_ROWS:
                writer.write_table(pa.Table.from_batches(waiting, schema))
                waiting = []
        writer.write_table(pa.Table.from_batches(waiting, schema))
