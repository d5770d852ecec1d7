"""Parts that the commands on live members share: options, addresses, the survey, and the confirmation prompt."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from flowstone.cli.console import UsageError, say
from flowstone.cli.logs.play import PASSWORD_HELP, URI_HELP, USERNAME_VARIABLE, address
from flowstone.errors import FlowstoneError

if TYPE_CHECKING:
    from flowstone.iproto.uri import Uri
    from flowstone.observation.replica_set import Member, ReplicaSet
    from flowstone.observation.survey import Survey

OneUri = Annotated[str, typer.Argument(metavar="URI", help=URI_HELP)]
Uris = Annotated[list[str], typer.Argument(metavar="URI...", help=URI_HELP, show_default=False)]
Username = Annotated[
    str | None, typer.Option("--username", "-u", help=f"User to connect as. Default: {USERNAME_VARIABLE}.")
]
Password = Annotated[str | None, typer.Option("--password", "-p", help=PASSWORD_HELP)]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Skip the confirmation.")]

EXIT_CODES = """Exit codes: 0 done, or nothing to do; 1 a server rejects the request or does not answer; 2 the command
line is wrong, or --yes is missing and stdin is not a terminal; 130 not confirmed."""


def addresses(uris: Sequence[str], username: str | None, password: str | None) -> list[Uri]:
    """Parse `uris`, with the credentials from the options or the environment."""
    return [address(uri, username, password) for uri in uris]


def consent(question: str, *, yes: bool) -> bool:
    """Return True if the user confirms `question` on the terminal, or if `yes` is set.

    Raise UsageError if stdin is not a terminal: a script that forgets --yes must not hang.
    """
    if yes:
        return True
    if sys.stdin is None or not sys.stdin.isatty():
        raise UsageError("stdin is not a terminal", hint="use --yes to skip the confirmation")
    print(f"{question} (y/N) ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    say("flowstone: nothing was changed")
    return False


@asynccontextmanager
async def surveyed(uris: Sequence[Uri]) -> AsyncIterator[tuple[Survey, tuple[ReplicaSet, ...]]]:
    """Yield the survey of the servers at `uris`, for further queries, and the replica sets that it found."""
    from flowstone.observation.survey import Survey
    from flowstone.outside import production

    survey = Survey(production(), uris)
    try:
        yield survey, await survey.look()
    finally:
        await survey.close()


def member_at(sets: Sequence[ReplicaSet], uri: Uri) -> tuple[ReplicaSet, Member]:
    """Return the replica set and the member at `uri`; raise FlowstoneError if the member did not answer."""
    for one in sets:
        for member in one.members:
            if member.address == uri.address and member.report is not None:
                return one, member
            if member.address == uri.address and member.unreachable is not None:
                raise FlowstoneError(member.unreachable.reason, hint=member.unreachable.hint)
    raise FlowstoneError(f"cannot identify the instance at {uri.address}")
