"""`flowstone call`: call a function on a live server and print its results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from flowstone.cli.console import OK, UsageError
from flowstone.cli.output import destination
from flowstone.cli.replica_set.members import Json, OneUri, Password, Username, addresses
from flowstone.errors import FlowstoneError

if TYPE_CHECKING:
    from flowstone.iproto.errors import TarantoolError
    from flowstone.iproto.packet import Response
    from flowstone.iproto.uri import Uri

EXAMPLE = (
    "Example: `TT_CLI_USERNAME=admin TT_CLI_PASSWORD=secret flowstone call 127.0.0.1:3301 box.space.orders:insert "
    "'[1, \"Ada\", 30]'`"
)

EXIT_CODES = """Exit codes: 0 the function returned; 1 the server or the function raised an error, or the server does
not answer; 2 the command line is wrong."""

TIMEOUT_SECONDS: Final = 60.0

PASSED_ON: Final = {"ignore_unknown_options": True}
"""Settings of the command: negative numbers are arguments. `_argument` rejects unknown options."""

OUTCOME_UNKNOWN: Final = "the function may have run, or may still be running: check its effect before calling it again"


def call(
    uri: OneUri,
    function: Annotated[
        str,
        typer.Argument(metavar="FUNCTION", help="Function of the server, such as `box.info` or `box.space.NAME:get`."),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ARGUMENT]...",
            help="Arguments of the function. Text that is valid JSON is passed as its value, other text as a string.",
            show_default=False,
        ),
    ] = None,
    strings: Annotated[
        bool, typer.Option("--strings", "-s", help="Pass every argument as a string, even if it is valid JSON.")
    ] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=0.1, help="Timeout for the call.")
    ] = TIMEOUT_SECONDS,
    username: Username = None,
    password: Password = None,
    as_json: Json = False,
) -> int:
    """Call a function of a node or of a Tarantool server, and print what it returns.

    Arguments are JSON: `5` is a number, `null` is nil, `[1, "a"]` an array, `{"limit": 10}` a map. Anything else is a
    string: `Ada` needs no quotes. To pass the string 5, write `'"5"'`, or use --strings. The results are printed as a
    YAML list, one item for each. A server's error is printed with its name and code.

    A node has the functions of its program, built-in functions with Tarantool's names, and stored functions in Lua if
    the extra flowstone[lua] is installed. The command asks for no confirmation, even if the function changes data.
    """
    from flowstone.cli import event_loop

    (wanted,) = addresses([uri], username, password)
    values = [_argument(text, strings) for text in arguments or ()]
    response = event_loop.run(_call(wanted, function, values, timeout))
    text = json_result(wanted, function, response) if as_json else yaml_result(response)
    with destination(None) as output:
        output.write(text.encode("utf-8", "backslashreplace"))
    return OK


def _argument(text: str, strings: bool) -> Any:
    """Return the value of an argument. Raise UsageError if `text` is an unknown option."""
    value = text if strings else json_or_text(text)
    if text.startswith("-") and len(text) > 1 and json_or_text(text) is text:
        raise UsageError(
            f"unknown option {text}", hint=f"""to pass it as a string, write '"{text}"', without --strings"""
        )
    return value


def json_or_text(text: str) -> Any:
    """Return the value of `text` if it is JSON, else `text` itself. NaN and Infinity are not JSON."""

    def reject(word: str) -> None:
        raise ValueError(word)

    try:
        return json.loads(text, parse_constant=reject)
    except (ValueError, RecursionError):
        return text


async def _call(uri: Uri, function: str, arguments: Sequence[Any], timeout: float) -> Response:
    from flowstone.client.connection import CONNECT_SECONDS, Connection, ConnectionFailed
    from flowstone.iproto.constants import Key, RequestType
    from flowstone.iproto.errors import TarantoolError
    from flowstone.iproto.msgpack import pack
    from flowstone.observation.report import printable
    from flowstone.outside import production

    try:
        body = pack({Key.FUNCTION_NAME: function, Key.TUPLE: list(arguments)})
    except FlowstoneError as error:
        raise UsageError(f"arguments cannot be sent: {error.message}", hint="pass them as strings") from None
    async with await Connection.open(production(), uri, timeout=min(timeout, CONNECT_SECONDS)) as connection:
        try:
            response = await connection.answer(connection.send(RequestType.CALL, body), timeout=timeout)
        except ConnectionFailed as error:
            raise ConnectionFailed(error.message, hint=OUTCOME_UNKNOWN) from error
        try:
            connection.values(response)
        except TarantoolError as error:
            error.message = printable(error.message)  # a function may raise any text
            error.hint = _right_to_call(error, uri, function) or error.hint
            raise
        return response


def _right_to_call(error: TarantoolError, uri: Uri, function: str) -> str | None:
    """Return the hint if the right to call `function` is missing; None for any other error."""
    from flowstone.client import rights
    from flowstone.iproto.errors import AccessDenied

    is_denied = isinstance(error, AccessDenied) and error.message.startswith("Execute access")
    return rights.to_call(uri.user, function) if is_denied else None


def yaml_result(response: Response) -> str:
    """Return the results as a YAML list."""
    from flowstone.iproto.constants import Key
    from flowstone.text.yaml_values import yaml_list

    return yaml_list(response.values().get(Key.DATA) or ())


def json_result(uri: Uri, function: str, response: Response) -> str:
    """Return the object that `--json` prints. Values have the form of `flowstone cat --format json`."""
    from flowstone.iproto.constants import Key
    from flowstone.text.json_plain import json_pairs

    results = dict(json_pairs(response.body)).get(str(Key.DATA.value), "[]")
    return f'{{"address": {json.dumps(uri.address)}, "function": {json.dumps(function)}, "results": {results}}}\n'
