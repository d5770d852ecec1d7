"""The command line: one module per command, and the exit code for each error.

Exit codes: 0 success; 1 a damaged or unreadable log, a rejected row, a lost server; 2 the command line or a path on it
is wrong; 3 success with --force, but something was skipped; 130 interrupted. An error is one line on stderr. Other
packages do the work of the commands; a command imports them when it runs, so that it never loads the libraries of
another command.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from flowstone.cli import completion, console
from flowstone.cli.command import App
from flowstone.cli.demo import demo
from flowstone.cli.lake import mirror, restore, verify
from flowstone.cli.limestone import commands as limestone
from flowstone.cli.logs import archive, backup, cat, play
from flowstone.cli.node import serve
from flowstone.cli.output import quiet
from flowstone.cli.replica_set import (
    call,
    config,
    dashboard,
    expel,
    explain,
    members,
    promote,
    rebootstrap,
    snapshot,
    status,
)

EXIT_CODES = """Exit codes: 0 done; 1 the log is damaged or unreadable, or a server rejected a row or is unreachable;
2 the command line or a path on it is wrong; 3 done with --force, but something was skipped; 130 interrupted."""

SERVE_EXIT_CODES = """Exit codes: 0 stopped by a signal; 1 cannot start: the directory is in use or damaged, or the
address is taken; 2 the command line, the environment, the file or a path in them is wrong, or does not go with the data
that is there."""

app = App(
    name="flowstone",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Read, convert and replay the logs of Tarantool replica sets and of Limestone, and serve their data. "
    "Neither is needed.",
    epilog="Example: `flowstone cat --format table /var/lib/tarantool/instance`",
)


app.command("cat", epilog=f"{cat.EXAMPLE}\n\n{EXIT_CODES}")(quiet(cat.cat))
app.command("play", epilog=f"{play.EXAMPLE}\n\n{EXIT_CODES}")(quiet(play.play))
app.command("serve", cls=serve.PlainHelp, epilog=f"{serve.EXAMPLE}\n\n{SERVE_EXIT_CODES}")(quiet(serve.serve))
app.command("archive", epilog=f"{archive.EXAMPLE}\n\n{archive.EXIT_CODES}")(quiet(archive.archive))
app.command("backup", epilog=f"{backup.EXAMPLE}\n\n{backup.EXIT_CODES}")(quiet(backup.backup))
app.command("status", epilog=f"{status.EXAMPLE}\n\n{status.EXIT_CODES}")(quiet(status.status))
app.command("explain", epilog=f"{explain.EXAMPLE}\n\n{explain.EXIT_CODES}")(quiet(explain.explain))
app.command("promote", epilog=f"{promote.PROMOTE_EXAMPLE}\n\n{members.EXIT_CODES}")(quiet(promote.promote))
app.command("demote", epilog=f"{promote.DEMOTE_EXAMPLE}\n\n{members.EXIT_CODES}")(quiet(promote.demote))
app.command("expel", epilog=f"{expel.EXAMPLE}\n\n{members.EXIT_CODES}")(quiet(expel.expel))
app.command("call", context_settings=call.PASSED_ON, epilog=f"{call.EXAMPLE}\n\n{call.EXIT_CODES}")(quiet(call.call))
app.command("config", epilog=f"{config.EXAMPLE}\n\n{members.EXIT_CODES}")(quiet(config.config))
app.command("snapshot", epilog=f"{snapshot.EXAMPLE}\n\n{members.EXIT_CODES}")(quiet(snapshot.snapshot))
app.command("rebootstrap", epilog=f"{rebootstrap.EXAMPLE}\n\n{rebootstrap.EXIT_CODES}")(quiet(rebootstrap.rebootstrap))
app.command("dashboard", epilog=f"{dashboard.EXAMPLE}\n\n{dashboard.EXIT_CODES}")(quiet(dashboard.dashboard))
app.command("restore", epilog=f"{restore.EXAMPLE}\n\n{restore.EXIT_CODES}")(quiet(restore.restore))
app.command("verify", epilog=f"{verify.EXAMPLE}\n\n{verify.EXIT_CODES}")(quiet(verify.verify))
app.command("mirror", epilog=f"{mirror.EXAMPLE}\n\n{mirror.EXIT_CODES}")(quiet(mirror.mirror))
app.command("demo", epilog=demo.EXAMPLE)(quiet(demo.demo))
app.add_typer(limestone.app, name="limestone")
app.command("completion", epilog=completion.EXAMPLE)(quiet(completion.completion))


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"flowstone {version('flowstone')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> NoReturn:
    """The entry point of the `flowstone` command."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code. Errors are reported, never raised."""
    serve.declare_options(every="serve" in arguments or "completion" in arguments)
    try:
        code = app(args=list(arguments), prog_name="flowstone", standalone_mode=False)
    except KeyboardInterrupt:
        return console.INTERRUPTED
    except Exception as error:
        return console.fail(error)
    return code if isinstance(code, int) else console.OK
