"""Parse and check the options of the data sources, which have the names that Kafka users expect.

Pure. Spark passes options as text, with names in any case. A wrong option raises WrongOption before anything is
opened, connected or written. Checks that need the source, such as whether a space or a column exists, happen there.
"""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Final, Literal, TypeVar

from flowstone.columns.arrow_columns import ColumnOptions
from flowstone.columns.debezium_contract import CONNECTOR
from flowstone.columns.image_rows import Images
from flowstone.errors import FlowstoneError
from flowstone.iproto.uri import Uri, parse_uri
from flowstone.replication.vclock import VClock, VClockError
from flowstone.spark.sources.offsets import Named, parse_offsets

Starting = Named | dict[str | None, VClock]
T = TypeVar("T")

Envelope = Literal["none", "debezium"]
"""The form of changes: columns, or keys and values of messages."""

LOOPBACK: Final = "127.0.0.1"


class WrongOption(FlowstoneError):
    """An option of a data source is missing, unknown, or has an invalid value."""


@dataclass(frozen=True, slots=True)
class AsOf:
    """A moment in the past: a time (seconds since 1970), a position, or an LSN of the log's only originator."""

    time: float | None = None
    vclock: VClock | None = None
    lsn: int | None = None


@dataclass(frozen=True, slots=True)
class SchemaAt:
    """The position at which a stream resumes, which determines its columns: the directory of a checkpoint, or
    positions."""

    checkpoint: str | None = None
    positions: dict[str | None, VClock] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChangeOptions:
    """The options that all change sources share."""

    space: int | str | None = None
    wanted: tuple[str, ...] | None = None
    images: Images = "ops"
    columns: ColumnOptions = field(default_factory=ColumnOptions)
    show_system: bool = False
    show_secrets: bool = False
    starting: Starting | None = None
    ending: Starting | None = None
    max_rows: int | None = None
    max_bytes: int | None = None
    fail_on_data_loss: bool = True
    envelope: Envelope = "none"
    topic_prefix: str = CONNECTOR


@dataclass(frozen=True, slots=True)
class XlogOptions:
    """The options of source `xlog`."""

    paths: tuple[str, ...]
    changes: ChangeOptions
    mode: Literal["changes", "state"] = "changes"
    as_of: AsOf | None = None
    schema_at: SchemaAt | None = None


@dataclass(frozen=True, slots=True)
class TarantoolOptions:
    """The options of source `tarantool`. `members` has one tuple per replica set; `spool_location` is for streams."""

    members: tuple[tuple[Uri, ...], ...]
    changes: ChangeOptions
    spool_location: str | None = None
    transport: Literal["auto", "file", "inline", "tcp"] = "auto"
    register: bool = False
    read_mode: Literal["snapshot", "select"] = "snapshot"
    transport_address: str = LOOPBACK


@dataclass(frozen=True, slots=True)
class LimestoneOptions:
    """The options of source `limestone`. Offsets are epoch numbers."""

    path: str
    mode: Literal["changes", "state"] = "changes"
    as_of: int | None = None
    storages: tuple[int, ...] | None = None
    wanted: tuple[str, ...] | None = None
    unsigned_as: Literal["int64", "decimal"] = "int64"
    starting: Named | int = "earliest"
    ending: int | None = None
    max_rows: int | None = None
    max_bytes: int | None = None
    fail_on_data_loss: bool = True
    table: str | None = None


@dataclass(frozen=True, slots=True)
class WriterOptions:
    """The options of writer `tarantool`."""

    uri: Uri
    space: int | str
    on_conflict: Literal["replace", "insert", "skip"] = "replace"


CHANGE_OPTIONS: Final = tuple(
    (
        "space columns images unsignedAs decimalScale stringsAs showSystem showSecrets startingOffsets endingOffsets "
        "maxRowsPerTrigger maxBytesPerTrigger failOnDataLoss envelope topicPrefix"
    ).split()
)
XLOG_OPTIONS: Final = ("path", "mode", "asOf", "schemaAt", *CHANGE_OPTIONS)
TARANTOOL_OPTIONS: Final = (
    "uri",
    "readMode",
    "spoolLocation",
    "transport",
    "transportAddress",
    "register",
    *CHANGE_OPTIONS,
)
LIMESTONE_OPTIONS: Final = tuple(
    (
        "path mode asOf storage table columns unsignedAs startingOffsets endingOffsets maxRowsPerTrigger "
        "maxBytesPerTrigger failOnDataLoss"
    ).split()
)
WRITER_OPTIONS: Final = ("uri", "space", "onConflict", "checkpointLocation")
"""`checkpointLocation` is Spark's own option, which it also passes to stream writers."""

_SIZES: Final = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3}
_SIZE: Final = re.compile(r"(\d+)\s*([kmg]?)b?", re.ASCII)
_NAMED: Final[tuple[Named, ...]] = ("earliest", "latest", "snapshot")
_NUMBER: Final = re.compile(r"\d+", re.ASCII)
_SECONDS: Final = re.compile(r"\d+\.\d+", re.ASCII)
_AGO: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|d|(?:second|minute|hour|day)s?)\s+ago", re.ASCII | re.IGNORECASE)
_UNITS: Final = {"second": 1, "minute": 60, "hour": 3600, "day": 86400}
"""Seconds of each unit of a duration; the first letter of a unit is enough."""

_OF_CHANGES: Final = tuple(
    (
        "images envelope topicPrefix startingOffsets endingOffsets failOnDataLoss transport transportAddress register"
    ).split()
)
"""Options that a batch query of `tarantool` rejects: it reads a state, not changes."""

_OF_COLUMNS: Final = ("columns", "images", "unsignedAs", "decimalScale", "stringsAs")
"""Options that messages reject: they have no columns of fields, and always both images."""

_STREAM_ONLY: Final = ("maxRowsPerTrigger", "maxBytesPerTrigger", "schemaAt", "spoolLocation")


def xlog_options(given: Mapping[str, str], *, streaming: bool | None = False) -> XlogOptions:
    """Parse the options of source `xlog`. `streaming` is None if not known yet, as when Spark asks for the schema."""
    options = _Options(given, XLOG_OPTIONS, "xlog", streaming)
    mode: Literal["changes", "state"] = options.choice("mode", "changes", ("changes", "state"))
    as_of = options.read("asOf", parse_as_of)
    if as_of is not None and mode != "state":
        raise WrongOption("asOf needs mode=state", hint="to limit changes, use endingOffsets")
    if mode == "state" and streaming:
        raise WrongOption("mode=state cannot be streamed", hint="use mode=changes, or spark.read")
    if mode == "state" and options.space() is None:
        raise WrongOption("mode=state needs a space", hint="set option space")
    changes = _changes(options)
    if streaming is False and changes.starting == "snapshot":
        raise WrongOption(
            "startingOffsets=snapshot does not apply to a batch query",
            hint="use it with spark.readStream; to read the state, use mode=state",
        )
    if mode == "state" and (changes.starting is not None or changes.ending is not None):
        raise WrongOption("offsets do not apply to mode=state", hint="to choose the moment of the state, use asOf")
    if mode == "state" and changes.envelope != "none":
        raise WrongOption("envelope does not apply to mode=state", hint="omit envelope, or use mode=changes")
    if mode == "state" and changes.images != "ops":
        raise WrongOption(
            f"images={changes.images} does not apply to mode=state", hint="omit images, or use mode=changes"
        )
    schema_at = options.read("schemaAt", _schema_at)
    return XlogOptions(_listed(options.required("path")), changes, mode, as_of, schema_at)


def tarantool_options(given: Mapping[str, str], *, streaming: bool | None = False) -> TarantoolOptions:
    """Parse the options of source `tarantool`. In `uri`, `,` separates members and `;` separates replica sets."""
    options = _Options(given, TARANTOOL_OPTIONS, "tarantool", streaming)
    members = options.read("uri", _members) or ()
    if not members:
        options.required("uri")
    if not all(members):
        raise WrongOption("invalid uri: replica set without members", hint="use a:3301,b:3301;c:3301")
    spool = options.read("spoolLocation", str)
    options.refuse(("readMode",) if streaming or spool is not None else (), "a stream", "use it with spark.read")
    options.refuse(_OF_CHANGES if streaming is False else (), "a batch query", "use it with spark.readStream")
    read_mode: Literal["snapshot", "select"] = options.choice("readMode", "snapshot", ("snapshot", "select"))
    if read_mode == "select" and options.space() is None:
        raise WrongOption("readMode=select needs a space", hint="set option space")
    if streaming and spool is None:
        raise WrongOption(
            "option spoolLocation is missing",
            hint="specify a directory that survives the driver, such as one next to the checkpoint",
        )
    transport: Literal["auto", "file", "inline", "tcp"] = options.choice(
        "transport", "auto", ("auto", "file", "inline", "tcp")
    )
    register = options.flag("register", default=False)
    address = options.read("transportAddress", str.strip) or LOOPBACK
    return TarantoolOptions(members, _changes(options), spool, transport, register, read_mode, address)


def limestone_options(given: Mapping[str, str], *, streaming: bool | None = False) -> LimestoneOptions:
    """Parse the options of source `limestone`."""
    options = _Options(given, LIMESTONE_OPTIONS, "limestone", streaming)
    mode: Literal["changes", "state"] = options.choice("mode", "changes", ("changes", "state"))
    as_of = options.read("asOf", _number)
    if as_of is not None and mode != "state":
        raise WrongOption("asOf needs mode=state", hint="to limit changes, use endingOffsets")
    if mode == "state" and streaming:
        raise WrongOption(
            "mode=state cannot be streamed", hint="stream mode=changes with startingOffsets=snapshot, or use spark.read"
        )
    if mode == "state":
        options.refuse(("startingOffsets", "endingOffsets"), "a state", "use asOf")
    starting: Named | int | None = options.read("startingOffsets", _epoch_or_name)
    ending: Named | int | None = options.read("endingOffsets", _epoch_or_name)
    if ending is not None and streaming:
        raise WrongOption(
            "endingOffsets does not apply to a stream",
            hint="endingOffsets is only for spark.read; a stream ends by its trigger",
        )
    if ending in ("earliest", "snapshot"):
        raise WrongOption(f"endingOffsets is {ending!r}", hint="use latest or an epoch")
    if streaming is False and starting == "snapshot":
        raise WrongOption(
            "startingOffsets=snapshot does not apply to a batch query",
            hint="use it with spark.readStream; to read the state, use mode=state",
        )
    unsigned_as: Literal["int64", "decimal"] = options.choice("unsignedAs", "int64", ("int64", "decimal"))
    table = options.read("table", str)
    if table is not None:
        options.refuse(("storage", "unsignedAs"), "a table", "omit it")
    return LimestoneOptions(
        options.required("path"),
        mode,
        as_of,
        options.read("storage", _numbers_listed),
        options.read("columns", _columns),
        unsigned_as,
        "earliest" if starting is None else starting,
        ending if isinstance(ending, int) else None,
        options.read("maxRowsPerTrigger", _positive),
        options.read("maxBytesPerTrigger", _size),
        options.flag("failOnDataLoss", default=True),
        table,
    )


def writer_options(given: Mapping[str, str]) -> WriterOptions:
    """Parse the options of writer `tarantool`."""
    options = _Options(given, WRITER_OPTIONS, "tarantool", False)
    space = options.space()
    if space is None:
        raise WrongOption("option space is missing", hint="specify the space to write to")
    on_conflict: Literal["replace", "insert", "skip"] = options.choice(
        "onConflict", "replace", ("replace", "insert", "skip")
    )
    return WriterOptions(parse_uri(options.required("uri")), space, on_conflict)


def _changes(options: _Options) -> ChangeOptions:
    envelope: Envelope = options.choice("envelope", "none", ("none", "debezium"))
    is_message = envelope != "none"
    options.refuse(_OF_COLUMNS if is_message else (), f"envelope={envelope}", "messages have JSON of all fields")
    images: Images = options.choice("images", "full" if is_message else "ops", ("ops", "post", "full"))
    prefix = options.read("topicPrefix", str.strip)
    if prefix is not None and not is_message:
        raise WrongOption("topicPrefix needs an envelope", hint="set envelope=debezium, or omit topicPrefix")
    starting, ending = options.read("startingOffsets", parse_offsets), options.read("endingOffsets", parse_offsets)
    if ending is not None and options.streaming:
        raise WrongOption(
            "endingOffsets does not apply to a stream",
            hint="endingOffsets is only for spark.read; a stream ends by its trigger",
        )
    if ending in ("earliest", "snapshot"):
        raise WrongOption(f"endingOffsets is {ending!r}", hint="use latest or a vclock")
    return ChangeOptions(
        options.space(),
        options.read("columns", _columns),
        images,
        options.column_options(),
        options.flag("showSystem", default=False),
        options.flag("showSecrets", default=False),
        starting,
        ending,
        options.read("maxRowsPerTrigger", _positive),
        options.read("maxBytesPerTrigger", _size),
        options.flag("failOnDataLoss", default=True),
        envelope,
        prefix or CONNECTOR,
    )


class _Options:
    """The given options by name, which is case-insensitive. Unknown names raise WrongOption."""

    def __init__(self, given: Mapping[str, str], known: tuple[str, ...], source: str, streaming: bool | None) -> None:
        names = {name.lower(): name for name in known}
        self.streaming = streaming
        self._values: dict[str, str] = {}
        for name, value in given.items():
            if name.lower() not in names:
                near = get_close_matches(name.lower(), names, n=1)
                hint = f"did you mean {names[near[0]]}?" if near else f"known options: {', '.join(sorted(known))}"
                raise WrongOption(f"source {source!r} has no option {name!r}", hint=hint)
            self._values[names[name.lower()]] = str(value)
        self.refuse(_STREAM_ONLY if streaming is False else (), "a batch query", "use it with spark.readStream")

    def refuse(self, names: tuple[str, ...], what: str, hint: str) -> None:
        for name in names:
            if name in self._values:
                raise WrongOption(f"{name} does not apply to {what}", hint=hint)

    def read(self, name: str, reader: Callable[[str], T]) -> T | None:
        """Return the value parsed by `reader`, or None if not given. Errors of the reader name the option."""
        if name not in self._values:
            return None
        try:
            return reader(self._values[name])
        except WrongOption:
            raise
        except FlowstoneError as error:
            raise WrongOption(f"{name}: {error.message}", hint=error.hint) from None
        except ValueError as error:
            raise WrongOption(f"{name} is {self._values[name]!r}", hint=str(error)) from None

    def required(self, name: str) -> str:
        value = self._values.get(name, "").strip()
        if not value:
            raise WrongOption(f"option {name} is missing")
        return value

    def choice(self, name: str, default: str, choices: tuple[str, ...]) -> Any:
        value = self._values.get(name, default).strip().lower()
        if value not in choices:
            raise WrongOption(
                f"{name} is {self._values[name]!r}", hint=f"use {', '.join(choices[:-1])} or {choices[-1]}"
            )
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        return bool(self.choice(name, str(default).lower(), ("true", "false")) == "true")

    def space(self) -> int | str | None:
        """Return the space: a number is an id, anything else a name. Quotes turn digits into a name."""
        text = self._values.get("space")
        if text is None:
            return None
        if not text:
            raise WrongOption("space is empty", hint="use a name or an id, or omit it for all spaces")
        if len(text) > 2 and text[0] == text[-1] == '"':
            return text[1:-1]
        return int(text) if _NUMBER.fullmatch(text) else text

    def column_options(self) -> ColumnOptions:
        unsigned_as: Literal["int64", "decimal", "double"] = self.choice(
            "unsignedAs", "int64", ("int64", "decimal", "double")
        )
        strings_as: Literal["string", "binary"] = self.choice("stringsAs", "string", ("string", "binary"))
        return ColumnOptions(unsigned_as, self.read("decimalScale", _scale), strings_as)


def _members(text: str) -> tuple[tuple[Uri, ...], ...]:
    return tuple(tuple(map(parse_uri, _listed(part))) for part in text.split(";")) if text.strip() else ()


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _columns(text: str) -> tuple[str, ...]:
    names = _listed(text)
    twice = [name for number, name in enumerate(names) if name in names[:number]]
    if not names or twice:
        raise ValueError(f"duplicate column {twice[0]!r}" if twice else "use column names separated by commas")
    return names


def _positive(text: str) -> int:
    if not _NUMBER.fullmatch(text.strip()) or not int(text):
        raise ValueError("use a whole number above 0")
    return int(text)


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text.strip().lower())
    if match is None or not int(match[1]):
        raise ValueError("use a number of bytes above 0, such as 1048576, 64m or 1g")
    return int(match[1]) * _SIZES[match[2]]


def _number(text: str) -> int:
    if not _NUMBER.fullmatch(text.strip()):
        raise ValueError("use an epoch, a whole number")
    return int(text)


def _numbers_listed(text: str) -> tuple[int, ...]:
    names = _listed(text)
    if not names or not all(_NUMBER.fullmatch(name) and int(name) < 1 << 64 for name in names):
        raise ValueError("use ids of storages, whole numbers separated by commas")
    return tuple(map(int, names))


def _epoch_or_name(text: str) -> Named | int:
    word = text.strip().lower()
    for name in _NAMED:
        if word == name:
            return name
    if not _NUMBER.fullmatch(word):
        raise ValueError("use earliest, latest, snapshot or an epoch")
    return int(word)


def _scale(text: str) -> int:
    if not _NUMBER.fullmatch(text.strip()) or int(text) > 38:
        raise ValueError("use a number from 0 to 38")
    return int(text)


def _schema_at(text: str) -> SchemaAt:
    if not text.strip().startswith("{"):
        return SchemaAt(checkpoint=text.strip())
    found = parse_offsets(text)
    assert not isinstance(found, str)
    return SchemaAt(positions=found)


When = str | int | datetime.datetime | VClock
"""A moment as programs write it: the texts of `parse_as_of`, an LSN, a time with a zone, or a vclock."""


def as_of(when: When) -> AsOf:
    """Return the moment. The text of the ValueError lists the accepted forms."""
    if isinstance(when, VClock):
        return AsOf(vclock=when)
    if isinstance(when, int):
        return AsOf(lsn=when)
    return parse_as_of(when if isinstance(when, str) else when.isoformat())


def parse_as_of(text: str) -> AsOf:
    """Parse a moment as users write it. The text of the ValueError lists the accepted forms."""
    text = text.strip()
    if _NUMBER.fullmatch(text):
        return AsOf(lsn=int(text))
    if _SECONDS.fullmatch(text):
        return AsOf(time=float(text))
    if text.startswith("{"):
        try:
            return AsOf(vclock=VClock.parse(text.replace('"', "")))
        except VClockError as error:
            raise ValueError(str(error)) from None
    if ago := _AGO.fullmatch(text):
        unit = next(seconds for name, seconds in _UNITS.items() if name.startswith(ago[2][0].lower()))
        return AsOf(time=time.time() - float(ago[1]) * unit)
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise ValueError(
            "use a time with a time zone (2026-05-01T12:00:00Z), a duration (5 minutes ago), seconds with a fraction "
            "(1777636800.0), a vclock ({1: 500}) or an LSN"
        )
    return AsOf(time=moment.timestamp())
