"""Checks of option values for the table in `configuration.py`, with the error texts of Tarantool.

A check takes a value of the right type and returns the problem, which becomes the end of error 59, or None.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, Final

from flowstone.iproto.constants import VCLOCK_MAX
from flowstone.iproto.uri import UriError, parse_uri
from flowstone.replication.membership.quorum import Quorum

LOG_LEVELS: Final = ("fatal", "syserror", "error", "crit", "warn", "info", "verbose", "debug")
"""Names of the log levels; the index is the number of the level."""

INTEGER_MAX: Final = 2**31 - 1
UPSTREAMS_MAX: Final = VCLOCK_MAX - 1

Check = Callable[[Any], str | None]
"""Returns what is wrong with a value; None if it is allowed."""


def below(minimum: float, problem: str) -> Check:
    return lambda value: problem if value < minimum else None


def not_above(bound: float, problem: str) -> Check:
    return lambda value: problem if value <= bound else None


def outside(minimum: float, maximum: float, problem: str) -> Check:
    return lambda value: None if minimum <= value <= maximum else problem


def not_among(names: tuple[str, ...], problem: str | None = None) -> Check:
    """Allow `names` only. Without `problem` the text is the value itself, as in Tarantool."""
    return lambda value: None if value in names else problem or str(value)


def no_mode_of(names: tuple[str, ...]) -> Check:
    return not_among(names, f"the value must be one of the following strings: {', '.join(map(repr, names))}")


def no_upstreams(value: tuple[str, ...]) -> str | None:
    if len(value) > UPSTREAMS_MAX:
        return "too many replicas"
    for text in value:
        try:
            parse_uri(text)
        except UriError as error:
            return error.message if "?" in text else "expected host:service or /unix.socket"
    return None


def no_uuid(value: str) -> str | None:
    try:
        parsed = uuid.UUID(value)
    except ValueError:
        return value
    if str(parsed) != value.lower():
        return value
    return "nil UUID is reserved" if parsed.int == 0 else None


def no_log_level(value: str) -> str | None:
    if value in LOG_LEVELS or (value.isdecimal() and int(value) < len(LOG_LEVELS)):
        return None
    return f"expected one of {', '.join(LOG_LEVELS)}, or 0 to {len(LOG_LEVELS) - 1}"


def no_quorum(value: int | str) -> str | None:
    """Raise the error of an invalid number or formula. It is a complete error, with the name of the option."""
    Quorum(value)
    return None
