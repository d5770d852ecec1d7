"""The log of a long-running command: lines on stderr, plain or JSON, exactly one per event.

JSON fields have Tarantool's names where it has them (time, level, message, pid, cord_name, file, line), and `logger`;
events add others: peer, replica_id, connection, sync, request_id. Messages may contain text from peers: it is escaped,
so that it can neither start a line nor control a terminal.
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
"""Tarantool's names of the levels."""

CALLER: Final = 4
"""Stack level of the code that reports an event: above it are `_line` and two callers, such as `console.say`."""

PLAIN: Final = "plain"
JSON: Final = "json"

LogFormat = Annotated[
    Literal["plain", "json"],
    typer.Option("--log-format", help="Format of the lines on stderr; json prints one object per line."),
]

_GRAVE: Final = frozenset(("disconnected", "snapshot_failed", "gap", "data_loss", "misfits"))
"""Events that need attention; they are logged as warnings."""

_OWN: Final = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
"""Attributes of every record; all others were passed as `extra` by the code that logged it."""

_CONTROLS: Final = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))} | {
    ord("\n"): "\\n",
    ord("\r"): "\\r",
    ord("\t"): "\t",
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}
"""Escapes of control characters and line separators; tabs are kept."""


def escaped(text: str) -> str:
    """Return the text as one line, without characters that control a terminal."""
    return text.translate(_CONTROLS)


class PlainFormatter(logging.Formatter):
    """Time, level and message. Lines of a traceback are indented, so that none looks like an event."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        line = f"{moment}.{int(record.msecs):03d} {record.levelname} {escaped(record.getMessage())}"
        trace = self.formatException(record.exc_info).split("\n") if record.exc_info else []
        return "\n".join([line, *(f"    {escaped(each)}" for each in trace)])


class JsonFormatter(logging.Formatter):
    """One JSON object per record."""

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
    """Send the log to stderr, and give the command's other messages the same format."""
    handler = logging.StreamHandler(sys.stderr)
    log = logging.getLogger("flowstone")
    log.handlers = [handler]
    log.propagate = False
    set_format(format)


def set_format(format: str) -> None:
    """Set the format of the lines on stderr: `plain` or `json`."""
    formatter = JsonFormatter() if format == JSON else PlainFormatter()
    for handler in logging.getLogger("flowstone").handlers:
        handler.setFormatter(formatter)
    console.write_lines_as(_said if format == JSON else None)


def _said(line: str, error: BaseException | None) -> str:
    """Return a message of the command as a line of the JSON log. The place of an error is where it was raised."""
    return _line(logging.INFO if error is None else logging.ERROR, line, "flowstone", error)


def say_event(event: Struct, logger: str) -> None:
    """Print an event of a job as a JSON line on stderr: `message` is its text, `event` has its fields."""
    import msgspec

    shown = msgspec.to_builtins(event)
    level = logging.WARNING if shown.get("event") in _GRAVE else logging.INFO
    line = _line(level, str(event), logger, event=shown)
    with suppress(OSError, ValueError):  # stderr may be closed
        print(line, file=sys.stderr, flush=True)


def _line(level: int, message: str, name: str, error: BaseException | None = None, **extra: Any) -> str:
    """Return a JSON line as the logger `name` writes it, with the place of the code at stack level CALLER."""
    logger = logging.getLogger(name)
    file, number, function, _ = logger.findCaller(stacklevel=CALLER)
    if error is not None and error.__traceback__ is not None:
        place = traceback.extract_tb(error.__traceback__, limit=-1)[0]
        file, number, function = place.filename, place.lineno or 0, place.name
    record = logger.makeRecord(name, level, file, number, message, (), None, function, extra)
    return JsonFormatter().format(record)


def set_level(options: Mapping[str, Any]) -> None:
    """Set the level of the log to the option `log_level`; the default is info."""
    from flowstone.node.option_checks import LOG_LEVELS

    level = options.get("log_level", "info")
    name = LOG_LEVELS[int(level)] if level.isdecimal() else level
    logging.getLogger("flowstone").setLevel(SEVERITIES[name])
