"""`flowstone config`: show the options of a running member, and set them.

Asks for confirmation before it changes anything; `observation/live_options.py` reads and checks the options.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from flowstone.cli.console import INTERRUPTED, OK, UsageError, UsageErrors, output, say
from flowstone.cli.replica_set.members import Json, OneUri, Password, Username, Yes, addresses, consent
from flowstone.errors import FlowstoneError

if TYPE_CHECKING:
    from flowstone.iproto.uri import Uri
    from flowstone.observation.live_options import LiveOptions, OptionChange
    from flowstone.observation.query import Asking

EXAMPLE = "Example: `TT_CLI_USERNAME=admin TT_CLI_PASSWORD=secret flowstone config 127.0.0.1:3301 read_only=false`"

TIMEOUT_SECONDS: Final = 120.0
"""Default for a change. A member that sets `replication` first waits for its upstreams, 30 s by default."""

OUTCOME_UNKNOWN: Final = "the options may have been set: run the command again without values to see them"
UNTIL_RESTART: Final = "the change lasts until the member restarts: make it in the member's configuration, too"

_LOGIN: Final = re.compile(r":[^\s:@,'\"]*@")


def config(
    uri: OneUri,
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[OPTION[=VALUE]]...",
            help="Option to show, or option and new value. OPTION= sets the default, OPTION=@FILE reads the value from "
            "a file, and OPTION=@- from stdin: command lines can be seen by others.",
            show_default=False,
        ),
    ] = None,
    reconnect: Annotated[
        bool,
        typer.Option(
            "--reconnect",
            help="Set `replication` again to its current value: the member retries upstreams that it has given up.",
        ),
    ] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=0.1, help="Timeout for the change.")
    ] = TIMEOUT_SECONDS,
    yes: Yes = False,
    username: Username = None,
    password: Password = None,
    as_json: Json = False,
) -> int:
    """Show the options (`box.cfg`) of a running member, or set some of them.

    Values are written as in the environment of a node: `read_only=true`, `replication=URI,URI`. The options are checked
    like a configuration file before anything is sent. If an option cannot be changed at run time, the command fails and
    changes no option. A node applies all options or none. A change lasts until the member restarts.

    Passwords are never shown. A node keeps the password of an upstream that is given without one; a Tarantool server
    does not. To show the options of a Tarantool server, the user needs `execute` on the universe.
    """
    from flowstone.cli import event_loop

    (wanted,) = addresses([uri], username, password)
    names, values = _settings(settings or ())
    if reconnect and (names or values):
        raise UsageError("both --reconnect and options are given", hint="use one")
    if reconnect:
        return event_loop.run(_with_options(wanted, _Reconnection(timeout, yes, as_json)))
    if values:
        return event_loop.run(_with_options(wanted, _Setting(values, timeout, yes, as_json)))
    return event_loop.run(_with_options(wanted, _Showing(names, as_json)))


def _settings(texts: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the names of options to show and the values of options to set: one of the two is empty."""
    names = [text for text in texts if "=" not in text]
    values: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if equals and name in values:
            raise UsageError(f"option {name} is given twice", hint="give it once")
        if equals:
            values[name] = _from_file(value[1:]) if value.startswith("@") else value
    if names and values:
        raise UsageError(f"option {names[0]} has no value, but others have", hint="write OPTION=VALUE, or only names")
    return names, values


def _from_file(path: str) -> str:
    """Return the text of a file, or of stdin for `-`, without the line break at its end."""
    try:
        if path == "-":
            return sys.stdin.read().strip() if sys.stdin is not None else ""
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not a text file") from None


async def _with_options(uri: Uri, action: _Showing | _Setting | _Reconnection) -> int:
    """Read the options of the member at `uri`, and run the action with them."""
    from flowstone.client import rights
    from flowstone.iproto.errors import AccessDenied
    from flowstone.observation.live_options import read_options
    from flowstone.observation.query import Asking
    from flowstone.outside import production

    asking = Asking(production(), uri)
    try:
        try:
            options = await read_options(asking)
        except AccessDenied as error:
            error.hint = rights.to_watch(uri.user)
            raise
        return await action.run(asking, options)
    finally:
        await asking.close()


class _Showing:
    """Prints options."""

    def __init__(self, names: Sequence[str], as_json: bool) -> None:
        self._names = names
        self._as_json = as_json

    async def run(self, asking: Asking, options: LiveOptions) -> int:
        from flowstone.observation.live_options import OptionRefused, may_not_read

        if options.values is None:
            raise may_not_read(asking)
        try:
            shown = options.shown(self._names)
        except OptionRefused as error:
            raise UsageError(error.message, hint=error.hint) from None
        if self._as_json:
            print(json.dumps({"address": asking.uri.address, "options": shown}, default=str))
        else:
            _print_table(("option", "value"), [(name, _text(value)) for name, value in shown.items()])
        return OK


class _Setting:
    """Sets options after a confirmation."""

    def __init__(self, values: Mapping[str, str], timeout: float, yes: bool, as_json: bool) -> None:
        self._values = values
        self._timeout = timeout
        self._yes = yes
        self._as_json = as_json

    async def run(self, asking: Asking, options: LiveOptions) -> int:
        from flowstone.observation.live_options import REPLICATION

        changes = _checked(options, self._values)
        # A node that gets its value of `replication` again reconnects: that is a change, too.
        due = [change for change in changes if change.is_new or change.name == REPLICATION]
        if due:
            for change in due:
                say(f"flowstone: {change.name} of {asking.uri.address}: {_text(change.before)} → {_text(change.after)}")
            if not consent(f"set {', '.join(change.name for change in due)}?", yes=self._yes):
                return INTERRUPTED
            await self._send(asking, options, due)
            say(f"flowstone: {UNTIL_RESTART}")
        _tell_changes(asking.uri, changes, await _after(asking, changes), self._as_json)
        return OK

    async def _send(self, asking: Asking, options: LiveOptions, due: Sequence[OptionChange]) -> None:
        """CALL `box.cfg` with the options; raise the member's error without passwords, with advice."""
        from flowstone.client import rights
        from flowstone.client.connection import ConnectionFailed
        from flowstone.iproto.errors import AccessDenied, Cfg, ReloadCfg, TarantoolError
        from flowstone.observation.live_options import NEEDS_RESTART

        try:
            await asking.call("box.cfg", {change.name: change.value for change in due}, timeout=self._timeout)
        except ConnectionFailed as error:
            raise ConnectionFailed(error.message, hint=OUTCOME_UNKNOWN) from error
        except TarantoolError as error:
            error.message = _LOGIN.sub("@", error.message)
            if isinstance(error, AccessDenied):
                error.hint = rights.to_call(asking.uri.user, "box.cfg") or error.hint
            elif isinstance(error, ReloadCfg):
                error.hint = NEEDS_RESTART
            elif isinstance(error, Cfg):
                unknown = next((change.name for change in due if f"'{change.name}'" in error.message), None)
                error.hint = options.near(unknown) if unknown and "unexpected option" in error.message else None
            raise


class _Reconnection:
    """Sets `replication` again after a confirmation."""

    def __init__(self, timeout: float, yes: bool, as_json: bool) -> None:
        self._timeout = timeout
        self._yes = yes
        self._as_json = as_json

    async def run(self, asking: Asking, options: LiveOptions) -> int:
        from flowstone.client.connection import ConnectionFailed
        from flowstone.observation.live_options import REPLICATION, OptionChange, may_not_read, replicate_again

        address = asking.uri.address
        if options.values is None:
            raise may_not_read(asking)
        upstreams = options.values.get(REPLICATION)
        if not upstreams:
            raise FlowstoneError(f"{address} has no upstreams: its replication is empty")
        if not consent(f"set replication of {address} again, to {_text(upstreams)}?", yes=self._yes):
            return INTERRUPTED
        try:
            await replicate_again(asking, options, timeout=self._timeout)
        except ConnectionFailed as error:
            raise ConnectionFailed(error.message, hint=OUTCOME_UNKNOWN) from error
        if self._as_json:
            change = OptionChange(REPLICATION, upstreams, upstreams, upstreams)
            _tell_changes(asking.uri, [change], await _after(asking, [change]), True)
        else:
            print(f"{address} replicates again from {_text(upstreams)}")
        return OK


def _checked(options: LiveOptions, values: Mapping[str, str]) -> list[OptionChange]:
    """Return the changes; raise the errors of all options at once."""
    from flowstone.observation.live_options import OptionRefused

    changes, problems = [], []
    for name, text in values.items():
        try:
            changes.append(options.change(name, text))
        except OptionRefused as error:
            problems.append(UsageError(error.message, hint=error.hint))
    if len(problems) > 1:
        raise UsageErrors(problems)
    if problems:
        raise problems[0]
    try:
        options.check(changes)
    except OptionRefused as error:
        raise UsageError(error.message, hint=error.hint) from None
    return changes


async def _after(asking: Asking, changes: Sequence[OptionChange]) -> dict[str, Any]:
    """Return the values that the member now shows; if the member does not show its options, return the wanted
    values."""
    from flowstone.observation.live_options import read_options

    wanted = {change.name: change.after for change in changes}
    try:
        options = await read_options(asking)
    except FlowstoneError:  # the options are set, whatever became of the connection
        return wanted
    return wanted if options.values is None else {name: options.values.get(name) for name in wanted}


def _tell_changes(uri: Uri, changes: Sequence[OptionChange], after: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        shown = {change.name: {"before": change.before, "after": after[change.name]} for change in changes}
        told = {"address": uri.address, "is_changed": any(change.is_new for change in changes), "options": shown}
        print(json.dumps(told, default=str))
        return
    for change in changes:
        same = "" if change.before != after[change.name] else "; unchanged"
        print(f"{change.name} = {_text(after[change.name])}{same}")


def _text(value: Any) -> str:
    """Return a value as it is written on a command line; `default` for an option that is not set."""
    from flowstone.observation.report import printable
    from flowstone.text.yaml_rows import yaml_value

    if value is None:
        return "default"
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return printable(",".join(value)) or "empty"
    return printable(value if isinstance(value, str) else yaml_value(value))


def _print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in head:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row)
    output().print(table)
