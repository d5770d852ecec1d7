"""Where the options of a node come from: the command line, the environment, a TOML file, in this order of weight.

Each value remembers the place it was given at, so that a complaint can name it. What an option is and which values it
takes is `node/configuration.py`'s part. Passwords are kept out of complaints.
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
from flowstone.cli.process_options import PROCESS_OPTIONS, ProcessOptions
from flowstone.iproto.errors import TarantoolError
from flowstone.node.configuration import OPTIONS, configure
from flowstone.node.option import Option

EVERY_OPTION: Final = {**OPTIONS, **PROCESS_OPTIONS}

PREFIX: Final = "FLOWSTONE_"
USER: Final = "user"
CONFIG_VARIABLE: Final = f"{PREFIX}CONFIG"
USER_VARIABLE: Final = f"{PREFIX}USER"
OTHER_VARIABLES: Final = frozenset((CONFIG_VARIABLE, USER_VARIABLE, f"{PREFIX}KERNEL_CACHE", f"{PREFIX}SCALE"))
"""Variables of ours that are no options of a node."""

_NAMED: Final = re.compile(r"option '(\w+)'")
"""How errors of Tarantool name the option that they are about."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a node is to be told, and the first user, as name and password, where one was asked for."""

    options: Mapping[str, Any]
    user: tuple[str, str] | None
    strangers: tuple[str, ...]
    """Environment variables that look like options and are none."""

    process: ProcessOptions = field(default_factory=ProcessOptions)
    """What is not the node's business."""


def read_settings(
    arguments: Mapping[str, Any], environment: Mapping[str, str], defaults: Mapping[str, Any]
) -> Settings:
    """The settings that the command line `arguments` and the environment ask for, `config`, a TOML file, included.

    `defaults` stand in for the options' own.
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
    if not problems:  # whether values go together can be told of right ones only
        with _noting(problems):
            process = _check_together(options, chosen, places)
    if problems:
        raise problems[0] if len(problems) == 1 else UsageErrors(problems)
    return Settings(options, user, _strangers(environment), process)


@contextmanager
def _noting(problems: list[UsageError]) -> Iterator[None]:
    """Keeps what is refused until all has been looked at."""
    try:
        yield
    except UsageError as error:
        problems.append(error)


def log_format_of(arguments: Mapping[str, Any], environment: Mapping[str, str]) -> str | None:
    """How the log is to look, by the words of whoever has made a mistake elsewhere."""
    option = OPTIONS["log_format"]
    asked = arguments.get(option.name) or environment.get(option.variable)
    path = config_path(arguments, environment)
    if not asked and path:
        with suppress(UsageError, OSError):
            asked = read_file(path, []).get(option.name)
    return asked if isinstance(asked, str) else None


def config_path(arguments: Mapping[str, Any], environment: Mapping[str, str]) -> str | None:
    """The TOML file that was named, if one was."""
    return arguments.get("config") or environment.get(CONFIG_VARIABLE)


def read_file(path: str, problems: list[UsageError]) -> dict[str, Any]:
    """The keys of a TOML file, each of which must be an option, or `user`; those that are neither are `problems`."""
    try:
        with open(path, "rb") as file:
            found = tomllib.load(file)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}", hint="write it as TOML, an option per line: wal_mode = 'fsync'") from None
    unknown = [name for name in found if name not in EVERY_OPTION and name != USER]
    problems += [UsageError(f"{path}: there is no option {name}", hint=_hint(name)) for name in unknown]
    return found


def _hint(name: str) -> str:
    near = difflib.get_close_matches(name.replace("-", "_").lower(), [*EVERY_OPTION, USER], 1)
    return f"did you mean {near[0]}?" if near else "flowstone serve --help lists them"


def _parsed(option: Option, value: Any) -> Any:
    """Options of the command line are text, switches apart."""
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
        raise UsageError(f"{place} is no user", hint="write it as NAME:PASSWORD")
    return name, password


def _strangers(environment: Mapping[str, str]) -> tuple[str, ...]:
    known = {option.variable for option in EVERY_OPTION.values()} | OTHER_VARIABLES
    return tuple(sorted(name for name in environment if name.startswith(PREFIX) and name not in known))
