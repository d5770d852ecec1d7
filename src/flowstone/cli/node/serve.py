"""`flowstone serve`: the command line of a node.

It has the options of `node/configuration.py`, spelled with dashes. `settings.py` merges them with the environment and
the file, and `process.py` runs the node.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from flowstone.cli.command import Command
from flowstone.cli.console import UsageError

if TYPE_CHECKING:
    from flowstone.node.option import Option

EXAMPLE = (
    "Example: `FLOWSTONE_USER=app:secret flowstone serve --listen 127.0.0.1:3301 --work-dir data --wal-mode fsync`"
)

DEFAULTS: Final = {"listen": "127.0.0.1:3301", "work_dir": "data"}
"""Defaults that differ from `box.cfg`: without options, the command starts a node on loopback."""

METAVARS: Final = {
    "http_listen": "HOST:PORT",
    "procedures": "MODULE[:NAMES]",
    "listen": "URI",
    "file": "FILE",
    "dir": "DIR",
    "uuid": "UUID",
    "mode": "MODE",
}
"""Metavars by the name of an option, or by the last word of the name."""

NO: Final = "no_"
CHECK: Final = "check"


def serve(**arguments: Any) -> int:
    """Run a node that any Tarantool client can talk to.

    Options override the environment, which overrides the file. The log goes to stderr; the line `ready` marks the end
    of the start. SIGTERM and SIGINT stop the node. SIGHUP reloads the file and applies all changes, or no change if any
    of them needs a restart. SIGUSR1 takes a snapshot.
    """
    wants_check = arguments.pop(CHECK, None)
    chosen = {
        name: ",".join(value) if isinstance(value, list) else value
        for name, value in arguments.items()
        if value not in (None, []) and not name.startswith(NO)
    }
    for name in arguments:
        if name.startswith(NO) and arguments[name]:
            option = name.removeprefix(NO)
            if option in chosen:
                dashed = option.replace("_", "-")
                raise UsageError(f"both --{dashed} and --no-{dashed} are given", hint="use only one of them")
            chosen[option] = False
    if wants_check:
        from flowstone.cli.node.serve_check import check

        return check(chosen, os.environ, DEFAULTS)
    from flowstone.cli import event_loop
    from flowstone.cli.node.process import Process

    return event_loop.run(Process(chosen, DEFAULTS).run())


# --- the command line ----------------------------------------------------------------------------------------


class PlainHelp(Command):
    """Prints help as plain text: on 80 columns, a table would truncate the long names of Tarantool's options."""

    def __init__(self, name: str | None, **settings: Any) -> None:
        super().__init__(name, **(settings | {"rich_markup_mode": None}))


def declare_options(*, every: bool) -> None:
    """Declare the options of the command; with `every` false, only the first ones.

    The others come from modules that take long to import, and other commands do not need them.
    """
    parameters = _first_parameters()
    if every:
        from flowstone.cli.node.settings import EVERY_OPTION

        parameters += [parameter for option in EVERY_OPTION.values() for parameter in _option_parameters(option)]
    serve.__signature__ = inspect.Signature(parameters, return_annotation=int)  # type: ignore[attr-defined]


def _first_parameters() -> list[inspect.Parameter]:
    config = typer.Option("--config", metavar="FILE", help="TOML file with options, spelled as in box.cfg.")
    user = typer.Option(
        "--user",
        metavar="NAME:PASSWORD",
        help="First user, with all privileges; created with the data. Prefer FLOWSTONE_USER: command lines can be "
        "seen by others.",
    )
    check = typer.Option(
        "--check",
        help="Report what a start with these options would do and what would prevent it; start and write nothing.",
    )
    return [_parameter("config", str, config), _parameter("user", str, user), _parameter(CHECK, bool, check)]


def _option_parameters(option: Option) -> Iterator[inspect.Parameter]:
    if option.types == ("boolean",):
        off = option.dashed.replace("--", "--no-", 1)
        yield _parameter(option.name, bool, typer.Option(option.dashed, help=option.help))
        yield _parameter(f"{NO}{option.name}", bool, typer.Option(off, hidden=True))
        return
    default = DEFAULTS.get(option.name, option.default)
    text = option.help if default in (None, ()) else f"{option.help} Default: {_shown(default)}"
    other = "NUMBER" if option.types == ("number",) else "TEXT"
    metavar = METAVARS.get(option.name) or METAVARS.get(option.name.rpartition("_")[2], other)
    values = _values_of(option)
    is_list = "table" in option.types
    text = f"{text} May be repeated." if is_list else text
    declared = typer.Option(option.dashed, metavar=metavar, help=text, autocompletion=lambda: values)
    yield _parameter(option.name, list[str] if is_list else str, declared)


def _values_of(option: Option) -> list[str]:
    """Return the values for shell completion. The option itself checks its value, with Tarantool's error texts."""
    from flowstone.node import configuration
    from flowstone.node.option_checks import LOG_LEVELS

    known = {
        "wal_mode": configuration.WAL_MODES,
        "dialect": configuration.DIALECTS,
        "log_format": configuration.LOG_FORMATS,
        "log_level": LOG_LEVELS,
        "bootstrap_strategy": configuration.STRATEGIES,
        "election_mode": configuration.ELECTION_MODES,
        "election_fencing_mode": configuration.FENCING_MODES,
    }
    return list(known.get(option.name, ()))


def _shown(default: Any) -> str:
    return f"{default:.10g}".replace("e+", "e") if isinstance(default, int | float) else str(default)


def _parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    annotation: Any = Annotated[kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
