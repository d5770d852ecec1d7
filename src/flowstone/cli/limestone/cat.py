"""`flowstone limestone cat`: print the entries or the rows of a data directory as text or JSON lines."""

from __future__ import annotations

import base64
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from flowstone.cli.console import FAILED, OK, UsageError, say
from flowstone.cli.limestone import options as options
from flowstone.cli.output import destination

if TYPE_CHECKING:
    from flowstone.limestone.errors import BadMetadata
    from flowstone.limestone.format.entries import Entry
    from flowstone.limestone.tools.listing import Listed
    from flowstone.limestone.tsurugi.definitions import SqlTable
    from flowstone.limestone.tsurugi.row_reader import Value
    from flowstone.outside import Disk

EXAMPLE = "Example: `flowstone limestone cat --storage 3 --epoch 100-120 --durable --json /var/lib/tsurugi/log`"

EXIT_CODES = """Exit codes: 0 done; 1 a file is damaged (log entries before the damage are printed); 2 the command line
or a path on it is wrong."""

WRITE_LINES = 4096

_EPOCHS = re.compile(r"(\d+)?(-)?(\d+)?", re.ASCII)


class Encoding(StrEnum):
    hex = "hex"
    text = "text"
    base64 = "base64"


@dataclass(frozen=True, slots=True)
class EntryOptions:
    """Which entries to print, and how."""

    storages: frozenset[int]
    epochs: tuple[int, int]
    durable: bool
    markers: bool
    encode: Callable[[bytes], str]
    as_json: bool
    tables: frozenset[str] | None = None
    """Tables to show with columns and types; an empty set shows all tables, None shows raw entries."""

    def takes_storage(self, storage_id: int) -> bool:
        return not self.storages or storage_id in self.storages

    def takes(self, listed: Listed) -> bool:
        from flowstone.limestone.format.entries import Entry, Marker

        token = listed.token
        if isinstance(token, Entry) and not self.takes_storage(token.storage_id):
            return False
        if isinstance(token, Marker) and not self.markers:
            return False
        if isinstance(token, Entry | Marker):
            if self.durable and not listed.is_durable:
                return False
            return listed.epoch is None or self.epochs[0] <= listed.epoch <= self.epochs[1]
        return True


def cat(
    directory: Annotated[
        str, typer.Argument(metavar="DIR|FILE", help="A data directory, or a file in one.", show_default=False)
    ],
    storage: Annotated[
        list[int] | None,
        typer.Option("--storage", metavar="ID", min=0, help="Only entries of this storage. May be repeated."),
    ] = None,
    epoch: Annotated[
        str | None,
        typer.Option("--epoch", metavar="N|N-M", help="Only entries of epoch N, or of epochs N to M, N- or -M."),
    ] = None,
    file: Annotated[
        list[str] | None,
        typer.Option(
            "--file",
            metavar="NAME",
            help="Only entries of this file, which may also be epoch or data/snapshot. May be repeated.",
        ),
    ] = None,
    durable: Annotated[
        bool, typer.Option("--durable", help="Only entries of durable epochs that are not marked as void.")
    ] = False,
    markers: Annotated[
        bool | None,
        typer.Option(
            "--markers/--no-markers", help="Print the markers of sessions. Default: no with --storage, else yes."
        ),
    ] = None,
    rows: Annotated[
        bool, typer.Option("--rows", help="Print the rows that result from the durable entries, in key order.")
    ] = False,
    encoding: Annotated[
        Encoding, typer.Option("--encoding", help="Encoding of keys and values; text escapes bytes that are not text.")
    ] = Encoding.hex,
    typed: Annotated[
        bool,
        typer.Option("--typed", help="Print the rows of Tsurugi's tables, by name, with columns and types."),
    ] = False,
    table: Annotated[
        list[str] | None,
        typer.Option("--table", metavar="NAME", help="Only rows of this table; implies --typed. May be repeated."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per line (docs/reference/limestone-tools.md).")
    ] = False,
) -> int:
    """Print the entries of log files in file order, with their offsets and the epochs of their sessions.

    The command takes no lock and changes nothing, so it can also read the directory of a running datastore.
    """
    from flowstone.outside import production

    disk = production().disk
    shown = not storage if markers is None else markers
    tables = frozenset(table or ()) if typed or table else None
    wanted = EntryOptions(frozenset(storage or ()), _epochs(epoch), durable, shown, ENCODERS[encoding], as_json, tables)
    place, chosen = _place(directory, file or [])
    if not chosen:
        _refuse_others(disk, place)
    if rows:
        if chosen or epoch is not None:
            raise UsageError("--rows covers all files and epochs", hint="omit --file and --epoch")
        _write(_row_lines(disk, place, wanted) if tables is None else _table_lines(disk, place, wanted))
        return OK
    return _entries(disk, place, chosen, wanted)


def _place(path: str, files: list[str]) -> tuple[str, list[str]]:
    """Return the directory, and the names of the files in it that were selected."""
    if os.path.isfile(path):
        if files:
            raise UsageError(f"{path} is a file", hint="omit --file, or specify its directory")
        return os.path.dirname(path) or ".", [os.path.basename(path)]
    if not os.path.isdir(path):
        raise UsageError(f"{path}: no such file or directory", hint="specify a data directory, or a file in one")
    place = options.plain(path)
    for name in files:
        if not os.path.isfile(f"{place}/{name}"):
            raise UsageError(f"{place} has no file {name}")
    return place, files


def _refuse_others(disk: Disk, place: str) -> None:
    """Raise UsageError if the directory has neither a manifest nor log files. Log files alone can be printed."""
    from flowstone.limestone.format import names
    from flowstone.limestone.store import offline_directory as offline
    from flowstone.limestone.tools import listing

    if not os.path.isfile(f"{place}/{names.MANIFEST}") and not listing.files(disk, place):
        error = offline.no_directory(place)
        raise UsageError(error.message, hint=error.hint)


def _epochs(text: str | None) -> tuple[int, int]:
    largest = (1 << 64) - 1
    if text is None:
        return 0, largest
    match = _EPOCHS.fullmatch(text.strip())
    if match is None or not (match[1] or match[3]):
        raise UsageError(f"--epoch {text!r} is not an epoch or a range", hint="write 5, 5-9, 5- or -9")
    first = int(match[1] or 0)
    last = int(match[3]) if match[3] else largest if match[2] else first
    if first > last:
        raise UsageError(f"--epoch {text} is an empty range", hint="write the smaller epoch first")
    return first, last


def _entries(disk: Disk, place: str, chosen: list[str], wanted: EntryOptions) -> int:
    from flowstone.limestone.errors import DamagedFile
    from flowstone.limestone.format import epoch_file
    from flowstone.limestone.format.entries import Torn, Unknown
    from flowstone.limestone.tools import listing
    from flowstone.limestone.tools.table_entries import TableEntries

    try:
        durable_epoch = epoch_file.read(disk, place).durable
    except DamagedFile as error:
        if wanted.durable:
            raise
        say(f"warning: {error.message}")
        durable_epoch = 0
    damage: list[str] = []
    tables = None if wanted.tables is None else TableEntries(disk, place, durable_epoch)

    def lines() -> Iterator[str]:
        for name in chosen or listing.files(disk, place):
            for listed in listing.listing(disk, place, name, durable_epoch):
                if isinstance(listed.token, Torn):
                    damage.append(f"{name}: incomplete entry at byte {listed.offset}")
                elif isinstance(listed.token, Unknown):
                    damage.append(f"{name}: invalid entry at byte {listed.offset}")
                elif wanted.takes(listed) and tables is None:
                    yield _line(listed, wanted)
                elif wanted.takes(listed) and tables is not None:
                    yield from _typed_line(listed, tables.table_of(listed), wanted)

    _write(lines())
    for line in damage:
        say(f"flowstone: {line}")
    return FAILED if damage else OK


def _row_lines(disk: Disk, place: str, wanted: EntryOptions) -> Iterator[str]:
    from flowstone.limestone.format import epoch_file
    from flowstone.limestone.store.recovery import recover_live

    # Read the epoch first: entries that are written later have later epochs, so file sizes need not be known.
    durable_epoch = epoch_file.read(disk, place).durable
    snapshot = recover_live(disk, place, durable_epoch, dict).snapshot
    try:
        for row in snapshot.cursor():
            if not wanted.storages or row.storage_id in wanted.storages:
                fields = _entry_fields(row, wanted)
                yield json.dumps(fields) if wanted.as_json else _text(fields)
    finally:
        snapshot.close()


def _write(lines: Iterable[str]) -> None:
    waiting: list[str] = []
    with destination(None) as sink:
        for line in lines:
            waiting.append(line)
            if len(waiting) == WRITE_LINES:
                _flush(sink, waiting)
                waiting = []
        _flush(sink, waiting)


def _flush(sink: BinaryIO, lines: list[str]) -> None:
    if lines:
        sink.write(("\n".join(lines) + "\n").encode("utf-8", "surrogateescape"))


def _table_lines(disk: Disk, place: str, wanted: EntryOptions) -> Iterator[str]:
    from flowstone.limestone.tsurugi.table_reader import schema_of, snapshot_at

    with snapshot_at(disk, place, None) as snapshot:
        schema = schema_of(snapshot)
        for error in schema.unreadable.values():
            say(f"warning: {error.message}")
        chosen = [schema.table(name) for name in sorted(wanted.tables or schema.tables)]
        for table in chosen:
            for entry in snapshot.scan(table.storage_id) if wanted.takes_storage(table.storage_id) else ():
                fields = {"table": table.name, **_typed_fields(entry, table, wanted)}
                yield json.dumps(fields, ensure_ascii=False) if wanted.as_json else _typed_text(fields)


def _typed_line(listed: Listed, table: SqlTable | BadMetadata | None, wanted: EntryOptions) -> Iterator[str]:
    """Yield the line of an entry if it is about a row of a table; entries of unreadable tables are shown raw."""
    from flowstone.limestone.errors import BadMetadata
    from flowstone.limestone.format.entries import STORAGE_TYPES, Entry

    entry = listed.token
    if not isinstance(entry, Entry) or table is None or entry.type in STORAGE_TYPES:
        return
    if isinstance(table, BadMetadata):
        if not wanted.tables:
            yield _shown(listed, {**_entry_fields(entry, wanted), "problem": table.message}, wanted)
    elif not wanted.tables or table.name in wanted.tables:
        yield _shown(listed, {"table": table.name, **_typed_fields(entry, table, wanted)}, wanted)


def _typed_fields(entry: Entry, table: SqlTable, wanted: EntryOptions) -> dict[str, Any]:
    """Return the columns of a row, or of the key of a removed row; what does not fit is shown raw, with the problem."""
    from flowstone.limestone.errors import BadRow
    from flowstone.limestone.format.entries import EntryType
    from flowstone.limestone.tsurugi.row_reader import read_key, read_row

    try:
        if entry.type is EntryType.REMOVE:
            names, values = table.key_names, tuple(read_key(table, entry.key))
        else:
            names, values = table.column_names, read_row(table, entry.key, entry.value)
    except BadRow as error:
        return {**_entry_fields(entry, wanted), "problem": error.message}
    return {"row": {name: _plain(value, wanted) for name, value in zip(names, values, strict=True)}}


def _plain(value: Value, wanted: EntryOptions) -> Any:
    """Return a value for JSON: bytes encoded, blobs as numbers, and numbers that JSON lacks as text."""
    from flowstone.limestone.tsurugi.row_reader import LobId

    if isinstance(value, bytes):
        return wanted.encode(value)
    if isinstance(value, LobId):
        return value.blob_id
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return str(value)


def _typed_text(fields: dict[str, Any]) -> str:
    row = fields.pop("row", {})
    words = [f"{name}={_value_word(value)}" for name, value in row.items()]
    return " ".join([_text(fields), *words])


def _value_word(value: Any) -> str:
    """Return NULL as null, and the text null in quotes."""
    return json.dumps(value) if value is None or value == "null" else _word(value)


def _line(listed: Listed, wanted: EntryOptions) -> str:
    from flowstone.limestone.format.entries import Entry

    return _shown(listed, _entry_fields(listed.token, wanted) if isinstance(listed.token, Entry) else {}, wanted)


def _shown(listed: Listed, more: dict[str, Any], wanted: EntryOptions) -> str:
    from flowstone.limestone.format.entries import Entry, Marker

    token = listed.token
    assert isinstance(token, Entry | Marker)
    fields: dict[str, Any] = {
        "file": listed.file,
        "offset": listed.offset,
        "type": options.NAMES[token.type],
        "epoch": listed.epoch,
        "durable": listed.is_durable,
        **more,
    }
    if wanted.as_json:
        return json.dumps(fields)
    head = f"{fields.pop('file')} {fields.pop('offset')} {fields.pop('type')}"
    if not fields.pop("durable"):
        head += " void"
    return f"{head} {_typed_text(fields)}"


def _entry_fields(entry: Entry, wanted: EntryOptions) -> dict[str, Any]:
    from flowstone.limestone.format.entries import STORAGE_TYPES, EntryType

    fields: dict[str, Any] = {"storage": entry.storage_id, "version": list(entry.version)}
    if entry.type not in STORAGE_TYPES:
        fields["key"] = wanted.encode(entry.key)
        if entry.type is not EntryType.REMOVE:
            fields["value"] = wanted.encode(entry.value)
    if entry.blob_ids:
        fields["blobs"] = list(entry.blob_ids)
    return fields


def _text(fields: dict[str, Any]) -> str:
    """Return `name=value` for each field that is not None; lists are joined by commas, text with spaces or
    control characters is quoted."""
    return " ".join(f"{name}={_word(value)}" for name, value in fields.items() if value is not None)


def _word(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    if isinstance(value, str) and (" " in value or '"' in value or not value.isprintable()):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def _as_text(data: bytes) -> str:
    """Return printable text without backslashes unchanged, and other data with the escapes of a Python literal."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = "\\"
    return text if text.isprintable() and "\\" not in text else repr(data)[2:-1]


ENCODERS: dict[Encoding, Callable[[bytes], str]] = {
    Encoding.hex: bytes.hex,
    Encoding.text: _as_text,
    Encoding.base64: lambda data: base64.b64encode(data).decode(),
}
