"""`flowstone limestone`: commands for data directories of Limestone, the log of Tsurugi. One module each.

`inspect`, `repair` and `compact` correspond to `tglogutil` and have its output lines and exit codes: they exit with 64
if they cannot do their work for any reason, including a wrong command line.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Final, ParamSpec

import typer

from flowstone.cli import console
from flowstone.cli.command import App, Command
from flowstone.cli.limestone import cat as limestone_cat
from flowstone.cli.limestone import compact as limestone_compact
from flowstone.cli.limestone import inspect as limestone_inspect
from flowstone.cli.limestone import repair as limestone_repair
from flowstone.cli.limestone import replica as limestone_replica
from flowstone.cli.output import quiet
from flowstone.errors import FlowstoneError

P = ParamSpec("P")

CANNOT: Final = 64
"""The exit code of tglogutil if it cannot process a directory."""

app = App(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Inspect, repair, compact, print and replicate data directories of Limestone, the log of Tsurugi. "
    "Neither has to be installed.",
    epilog="Example: `flowstone limestone inspect /var/lib/tsurugi/log`",
)


class Tool(Command):
    """A command that exits with 64 if the command line is wrong: its lower exit codes have other meanings."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        try:
            return super().make_context(info_name, args, parent, **extra)
        except Exception as error:
            if not hasattr(error, "format_message"):  # every usage error has this attribute
                raise
            console.fail(error)
            raise typer.Exit(CANNOT) from None


def tool(command: Callable[P, int]) -> Callable[P, int]:
    """Wrap `command` so that an error is reported in one line and the exit code is 64."""

    @wraps(command)
    def run_command(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return command(*args, **kwargs)
        except BrokenPipeError:
            raise
        except (FlowstoneError, OSError) as error:
            console.fail(error)
            return CANNOT

    return quiet(run_command)


def _add(name: str, command: Callable[..., int], epilog: str) -> None:
    app.command(name, cls=Tool, epilog=epilog)(tool(command))


_add("inspect", limestone_inspect.inspect, f"{limestone_inspect.EXAMPLE}\n\n{limestone_inspect.EXIT_CODES}")
_add("repair", limestone_repair.repair, f"{limestone_repair.EXAMPLE}\n\n{limestone_repair.EXIT_CODES}")
_add("compact", limestone_compact.compact, f"{limestone_compact.EXAMPLE}\n\n{limestone_compact.EXIT_CODES}")
app.command("cat", epilog=f"{limestone_cat.EXAMPLE}\n\n{limestone_cat.EXIT_CODES}")(quiet(limestone_cat.cat))
app.command("replica", epilog=f"{limestone_replica.EXAMPLE}\n\n{limestone_replica.EXIT_CODES}")(
    quiet(limestone_replica.replica)
)
