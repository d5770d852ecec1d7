"""The log of a process that runs for long: lines on stderr, plain or as JSON, one per event whatever it is made of.

The names of JSON fields are Tarantool's where it has them (time, level, message, pid, cord_name, file, line), and
`logger`; events bring more: peer, replica_id, connection, sync, request_id. What comes from peers, and is part of a
message, can neither begin a line nor move a cursor.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from flowstone.cli import console

if TYPE_CHECKING:
    from msgspec import Struct

VERBOSE: Final = logging.INFO - 5

SEVERITIES: Final = {
    "fatal": logging.CRITICAL,
    "syserror": logging.ERROR,
    "error": logging.ERROR,
    "crit": logging.ERROR,
    "warn": logging.WARNING,
    "info": logging.INFO,
    "verbose": VERBOSE,
    "debug": logging.DEBUG,
}

NAMES: Final = {
    logging.CRITICAL: "FATAL",
    logging.ERROR: "ERROR",
    logging.WARNING: "WARN",
    logging.INFO: "INFO",
    VERBOSE: "VERBOSE",
    logging.DEBUG: "DEBUG",
}
"""Tarantool's names of levels."""

CALLER: Final = 4
"""Frames up to who has something to say: `_line`, two that it goes through, of which one is `console.say`, and that."""

PLAIN: Final = "plain"
JSON: Final = "json"

LogFormat = Annotated[
    Literal["plain", "json"],
    typer.Option("--log-format", help="How lines on stderr look: json is an object per line, for programs."),
]

_GRAVE: Final = frozenset(("disconnected", "snapshot_failed", "gap", "data_loss"))
"""Events that somebody should look at."""

_OWN: Final = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
"""What every record has; whatever else one has was given to it by whoever logged it."""

_CONTROLS: Final = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))} | {
    ord("\n"): "\\n",
    ord("\r"): "\\r",
    ord("\t"): "\t",
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}


def escaped(text: str) -> str:
    """The text on one line, with nothing in it that a terminal would obey."""
    return text.translate(_CONTROLS)


class PlainFormatter(logging.Formatter):
    """Time, level, message. Where a bug's trace follows, its lines are indented, so that none looks like an event."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        line = f"{moment}.{int(record.msecs):03d} {record.levelname} {escaped(record.getMessage())}"
        trace = self.formatException(record.exc_info).split("\n") if record.exc_info else []
        return "\n".join([line, *(f"    {escaped(each)}" for each in trace)])


class JsonFormatter(logging.Formatter):
    """One object per record."""

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = {
            "time": _rfc3339(record.created),
            "level": NAMES.get(record.levelno, record.levelname),
            "message": record.getMessage(),
            "logger": record.name,
            "pid": record.process,
            "cord_name": "main" if record.threadName == "MainThread" else record.threadName,
            "file": record.filename,
            "line": record.lineno,
        }
        told |= {name: value for name, value in record.__dict__.items() if name not in _OWN}
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told, default=str)


def _rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def start_log(format: str = PLAIN) -> None:
    """From now on the log goes to stderr, and what the command says beside it has the same form."""
    handler = logging.StreamHandler(sys.stderr)
    log = logging.getLogger("flowstone")
    log.handlers = [handler]
    log.propagate = False
    set_format(format)


def set_format(format: str) -> None:
    """From now on lines are `plain` or `json`."""
    formatter = JsonFormatter() if format == JSON else PlainFormatter()
    for handler in logging.getLogger("flowstone").handlers:
        handler.setFormatter(formatter)
    console.write_lines_as(_said if format == JSON else None)


def _said(line: str, error: BaseException | None) -> str:
    """What is no event of a logger as one. The place of an error is where it was raised."""
    return _line(logging.INFO if error is None else logging.ERROR, line, "flowstone", error)


def say_event(event: Struct, logger: str) -> None:
    """An event of a job as a line of JSON on stderr: its sentence is the message, what it holds is in `event`."""
    import msgspec

    shown = msgspec.to_builtins(event)
    level = logging.WARNING if shown.get("event") in _GRAVE else logging.INFO
    line = _line(level, str(event), logger, event=shown)
    with suppress(OSError, ValueError):  # nobody may listen
        print(line, file=sys.stderr, flush=True)


def _line(level: int, message: str, name: str, error: BaseException | None = None, **extra: Any) -> str:
    """A line of JSON as a logger of that name would write it, for whoever called who calls this."""
    logger = logging.getLogger(name)
    file, number, function, _ = logger.findCaller(stacklevel=CALLER)
    if error is not None and error.__traceback__ is not None:
        place = traceback.extract_tb(error.__traceback__, limit=-1)[0]
        file, number, function = place.filename, place.lineno or 0, place.name
    record = logger.makeRecord(name, level, file, number, message, (), None, function, extra)
    return JsonFormatter().format(record)


def set_level(options: Mapping[str, Any]) -> None:
    """From now on what is less grave than `log_level` is not logged."""
    from flowstone.node.option_checks import LOG_LEVELS

    level = options.get("log_level", "info")
    name = LOG_LEVELS[int(level)] if level.isdecimal() else level
    logging.getLogger("flowstone").setLevel(SEVERITIES[name])
