"""`flowstone serve`: the command line of a node.

The options are those of `node/configuration.py`, spelled with dashes; how they are weighed is in `settings.py`, and
the process that runs the node in `process.py`.
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
"""Where the command's defaults are not those of `box.cfg`: who starts it with no option gets a node on loopback."""

METAVARS: Final = {
    "http_listen": "HOST:PORT",
    "listen": "URI",
    "file": "FILE",
    "dir": "DIR",
    "uuid": "UUID",
    "mode": "MODE",
}
"""By an option's name, or its last word."""

NO: Final = "no_"
CHECK: Final = "check"


def serve(**arguments: Any) -> int:
    """Run a node that any Tarantool client can talk to.

    Options weigh more than the environment, that more than the file. The log goes to stderr and ends the start with
    the line `ready`. SIGTERM and SIGINT stop the node, SIGHUP reads the file again and applies what has changed, or
    nothing where some of it needs a restart, SIGUSR1 makes a snapshot.
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
                raise UsageError(f"both --{dashed} and --no-{dashed} are given", hint="leave one of them out")
            chosen[option] = False
    if wants_check:
        from flowstone.cli.serve_check import check

        return check(chosen, os.environ, DEFAULTS)
    from flowstone.cli import event_loop
    from flowstone.cli.process import Process

    return event_loop.run(Process(chosen, DEFAULTS).run())


# --- the command line ----------------------------------------------------------------------------------------


class PlainHelp(Command):
    """Help as plain text: a table would cut the long names of Tarantool's options on a terminal of 80 columns."""

    def __init__(self, name: str | None, **settings: Any) -> None:
        super().__init__(name, **(settings | {"rich_markup_mode": None}))


def declare_options(*, every: bool) -> None:
    """Gives the command its options; who runs another one need not load what most of them are made from."""
    parameters = _first_parameters()
    if every:
        from flowstone.cli.settings import EVERY_OPTION

        parameters += [parameter for option in EVERY_OPTION.values() for parameter in _option_parameters(option)]
    serve.__signature__ = inspect.Signature(parameters, return_annotation=int)  # type: ignore[attr-defined]


def _first_parameters() -> list[inspect.Parameter]:
    config = typer.Option("--config", metavar="FILE", help="TOML file with options, spelled as in box.cfg.")
    user = typer.Option(
        "--user",
        metavar="NAME:PASSWORD",
        help="First user, who may do everything; made with new data only. Better in FLOWSTONE_USER: "
        "command lines can be seen by others.",
    )
    check = typer.Option(
        "--check",
        help="Say what a start would do with these options, and what would keep it from that; start and write nothing.",
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
    """What shells complete. Whether a value is one of them is for the option itself to say, in Tarantool's words."""
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
