"""Reads the options of a node from the command line, the environment and a TOML file, in this order of precedence.

Errors name the place where a value was given, and never show passwords. `node/configuration.py` defines the options and
checks their values.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

from flowstone.cli.console import UsageError, UsageErrors
from flowstone.cli.node.process_options import PROCESS_OPTIONS, ProcessOptions
from flowstone.iproto.errors import TarantoolError
from flowstone.node.configuration import OPTIONS, configure
from flowstone.node.option import Option

EVERY_OPTION: Final = {**OPTIONS, **PROCESS_OPTIONS}

PREFIX: Final = "FLOWSTONE_"
USER: Final = "user"
CONFIG_VARIABLE: Final = f"{PREFIX}CONFIG"
USER_VARIABLE: Final = f"{PREFIX}USER"
OTHER_VARIABLES: Final = frozenset((CONFIG_VARIABLE, USER_VARIABLE, f"{PREFIX}INTERPRETED", f"{PREFIX}SCALE"))
"""Variables with the prefix that are not options of a node."""

_NAMED: Final = re.compile(r"option '(\w+)'")
"""Matches the option that an error text of Tarantool names."""


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """The options of a node, and the name and password of its first user, if one was given."""

    options: Mapping[str, Any]
    user: tuple[str, str] | None
    strangers: tuple[str, ...]
    """Environment variables that have the prefix of options but do not name an option."""

    process: ProcessOptions = field(default_factory=ProcessOptions)
    """Options of the process, not of the node."""


def read_settings(
    arguments: Mapping[str, Any], environment: Mapping[str, str], defaults: Mapping[str, Any]
) -> NodeSettings:
    """Return the settings from the command line `arguments`, the environment and the TOML file that `config` names.

    `defaults` override the defaults of the options. Raise UsageError for a single problem, UsageErrors for several.
    """
    problems: list[UsageError] = []
    path = config_path(arguments, environment)
    file = read_file(path, problems) if path else {}
    chosen: dict[str, Any] = {}
    places: dict[str, str] = {}
    for name, option in EVERY_OPTION.items():
        value, place = None, option.dashed
        if name in arguments:
            value = _parsed(option, arguments[name])
        elif option.variable in environment:
            value, place = _parsed(option, environment[option.variable]), option.variable
        elif name in file:
            value, place = file[name], f"{name} in {path}"
        elif name in defaults:
            value = defaults[name]
        else:
            continue
        with _noting(problems):
            chosen[name] = _accepted(option, value, place)
        places[name] = place
    options = {name: value for name, value in chosen.items() if name in OPTIONS}
    user, process = None, ProcessOptions()
    with _noting(problems):
        user = _user(arguments, environment, file, path)
    if not problems:  # only valid values can be checked against each other
        with _noting(problems):
            process = _check_together(options, chosen, places)
    if problems:
        raise problems[0] if len(problems) == 1 else UsageErrors(problems)
    return NodeSettings(options, user, _strangers(environment), process)


@contextmanager
def _noting(problems: list[UsageError]) -> Iterator[None]:
    """Collect a UsageError in `problems`, so that all problems are reported at once."""
    try:
        yield
    except UsageError as error:
        problems.append(error)


def log_format_of(arguments: Mapping[str, Any], environment: Mapping[str, str]) -> str | None:
    """Return the requested log format, even if other settings are invalid: their errors are logged in that format."""
    option = OPTIONS["log_format"]
    asked = arguments.get(option.name) or environment.get(option.variable)
    path = config_path(arguments, environment)
    if not asked and path:
        with suppress(UsageError, OSError):
            asked = read_file(path, []).get(option.name)
    return asked if isinstance(asked, str) else None


def config_path(arguments: Mapping[str, Any], environment: Mapping[str, str]) -> str | None:
    """Return the path of the TOML file, if one was given."""
    return arguments.get("config") or environment.get(CONFIG_VARIABLE)


def read_file(path: str, problems: list[UsageError]) -> dict[str, Any]:
    """Return the keys and values of a TOML file; append an error to `problems` for each unknown key."""
    try:
        with open(path, "rb") as file:
            found = tomllib.load(file)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}", hint="use TOML, one option per line: wal_mode = 'fsync'") from None
    unknown = [name for name in found if name not in EVERY_OPTION and name != USER]
    problems += [UsageError(f"{path}: unknown option {name}", hint=_hint(name)) for name in unknown]
    return found


def _hint(name: str) -> str:
    near = difflib.get_close_matches(name.replace("-", "_").lower(), [*EVERY_OPTION, USER], 1)
    return f"did you mean {near[0]}?" if near else "see flowstone serve --help"


def _parsed(option: Option, value: Any) -> Any:
    """Parse a value from the command line or the environment; only switches are not text."""
    return option.parse(value) if isinstance(value, str) else value


def _accepted(option: Option, value: Any, place: str) -> Any:
    try:
        return option.accept(value)
    except TarantoolError as error:
        raise UsageError(f"{error.message} (given as {place})", hint=error.hint) from None


def _check_together(options: Mapping[str, Any], chosen: Mapping[str, Any], places: Mapping[str, str]) -> ProcessOptions:
    try:
        configure(options)
        return ProcessOptions.of(chosen)
    except TarantoolError as error:
        named = _NAMED.search(error.message)
        place = places.get(named[1]) if named is not None else None
        message = f"{error.message} (given as {place})" if place is not None else error.message
        raise UsageError(message, hint=error.hint) from None


def _user(
    arguments: Mapping[str, Any], environment: Mapping[str, str], file: Mapping[str, Any], path: str | None
) -> tuple[str, str] | None:
    text: Any = arguments.get(USER)
    place = "--user"
    if text is None and USER_VARIABLE in environment:
        text, place = environment[USER_VARIABLE], USER_VARIABLE
    if text is None and USER in file:
        text, place = file[USER], f"{USER} in {path}"
    if text is None or text == "":
        return None
    name, colon, password = text.partition(":") if isinstance(text, str) else ("", "", "")
    if not name or not colon or not password:
        raise UsageError(f"invalid user (given as {place})", hint="use NAME:PASSWORD")
    return name, password


def _strangers(environment: Mapping[str, str]) -> tuple[str, ...]:
    known = {option.variable for option in EVERY_OPTION.values()} | OTHER_VARIABLES
    return tuple(sorted(name for name in environment if name.startswith(PREFIX) and name not in known))
