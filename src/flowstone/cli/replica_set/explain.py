"""`flowstone explain`: report why a replica is stopped or lagging, and what to do about it.

Prints the findings of `observation/` about servers and directories. Changes nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from flowstone.cli import extras
from flowstone.cli.console import FAILED, OK, UsageError, output
from flowstone.cli.replica_set.members import Password, Username, addresses

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from flowstone.iproto.uri import Uri
    from flowstone.observation.findings.finding import Finding
    from flowstone.observation.log_directory import Directory
    from flowstone.observation.replica_set import ReplicaSet

EXAMPLE = (
    "Example: `TT_CLI_USERNAME=admin TT_CLI_PASSWORD=secret flowstone explain 127.0.0.1:3301`\n\n"
    "Example: `flowstone explain /var/lib/tarantool/a /var/lib/tarantool/b` shows where two histories diverge."
)

EXIT_CODES = """Exit codes: 0 no problems found; 1 problems found; 2 the command line or a path on it is wrong."""

WHERE_HELP = (
    "Servers as [user[:password]@]host:port, unix/:/path or a port; directories with .xlog and .snap files; lakes of "
    "`flowstone mirror`. One member is enough if it follows the others; they are queried as the same user."
)

_MARKS: Final = {"stopped": ("✗", "bold red"), "behind": ("▲", "bold yellow"), "warning": ("!", "bold cyan")}


def explain(
    where: Annotated[list[str], typer.Argument(metavar="URI|DIR...", help=WHERE_HELP, show_default=False)],
    evidence: Annotated[bool, typer.Option("--evidence", "-e", help="Show the evidence for each finding.")] = False,
    username: Username = None,
    password: Password = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as one JSON object (docs/reference/json-output.md).")
    ] = False,
) -> int:
    """Explain why a replica is stopped or lagging, and what to do about it.

    The command queries nodes and any Tarantool server, and reads directories of log files and lakes. For several
    directories of log files, it shows where their histories diverge and which rows only one of them has. It changes
    nothing. The user needs the right to call `box.info` and, to see the rows of a conflict, the role `replication`.
    """
    from flowstone.cli import event_loop

    directories = [one for one in where if is_path(one)]
    uris = addresses([one for one in where if one not in directories], username, password)
    lakes = [one for one in directories if os.path.isdir(os.path.join(one, "_flowstone"))]
    looked, findings = event_loop.run(_look(uris, [one for one in directories if one not in lakes], lakes))
    if as_json:
        print(json.dumps(told(findings, *looked)))
    else:
        _print(output(), findings, looked, evidence=evidence)
    return FAILED if findings else OK


def is_path(text: str) -> bool:
    """Return True if `text` is a directory or can only be a path; raise UsageError if it names a file."""
    from flowstone.iproto.uri import means_a_path

    if os.path.isfile(text) and (means_a_path(text) or text.endswith((".xlog", ".snap"))):
        directory = os.path.dirname(text) or "."
        hint = f"specify its directory, {directory}; to see the rows of the file, use flowstone cat"
        raise UsageError(f"{text} is a file", hint=hint)
    return os.path.isdir(text) or means_a_path(text)


Looked = tuple[Sequence["ReplicaSet"], Sequence["Directory"], Sequence[str]]
"""Replica sets, directories of logs, and lakes."""


async def _look(uris: Sequence[Uri], paths: Sequence[str], lakes: Sequence[str]) -> tuple[Looked, tuple[Finding, ...]]:
    from flowstone.observation.explanation import in_order
    from flowstone.observation.investigation import Investigation
    from flowstone.observation.survey import Survey
    from flowstone.outside import production

    outside = production()
    found: list[Finding] = []
    directories: list[Directory] = []
    if paths:
        from flowstone.observation.findings.directory_findings import compare, directory_findings
        from flowstone.observation.findings.expelled_directory import expulsion_findings
        from flowstone.observation.log_directory import look_into

        directories = [look_into(outside, path) for path in paths]
        found += [finding for one in directories for finding in directory_findings(one)]
        found += [finding for one in directories for finding in await expulsion_findings(outside, one)]
        found += compare(outside, directories)
    if lakes:
        extras.need("spark", "flowstone explain of a lake")
        from flowstone.lake.misfit_findings import misfit_findings
        from flowstone.lake.quarantine import Quarantine

        found += [finding for one in lakes for finding in misfit_findings(one, Quarantine(one, {}))]
    survey = Survey(outside, uris)
    try:
        sets = await survey.look() if uris else ()
        found += await Investigation(outside, survey).findings(sets)
    finally:
        await survey.close()
    return (sets, directories, lakes), in_order(found)


# --- text output ---


def _print(console: Console, findings: Iterable[Finding], looked: Looked, *, evidence: bool) -> None:
    from rich.padding import Padding
    from rich.text import Text

    is_well = True
    for finding in findings:
        is_well = False
        mark, style = _MARKS[finding.severity.value]
        console.print(Text.assemble((f"{mark} {finding.what}", style), (f"  [{finding.kind.value}]", "dim")))
        for head, text in _parts(finding, evidence=evidence):
            console.print(Padding(_part(head, text), (0, 0, 0, 2), expand=False))
        console.print()
    if is_well:
        console.print(Text("✓ no problems found", "bold green"))
    for line in looked_at(*looked):
        console.print(Text(line, "dim"))


def _parts(finding: Finding, *, evidence: bool) -> Iterator[tuple[str, str]]:
    yield "why:", finding.why
    yield "what to do:", finding.advice
    if evidence:
        for line in finding.evidence:
            yield "evidence:", line


def _part(head: str, text: str) -> Text:
    from rich.text import Text

    return Text.assemble((f"{head} ", "bold"), text)


def looked_at(sets: Sequence[ReplicaSet], directories: Sequence[Directory], lakes: Sequence[str] = ()) -> Iterator[str]:
    """Yield one line per replica set, directory and lake that was checked."""
    from flowstone.observation.findings.wording import position

    for one in sets:
        asked = [member for member in one.members if member.report is not None]
        counted = [member for member in one.members if member.id] or one.members
        answered = sum(member.report is not None for member in counted)
        lag = sum(link.lag_lsn or 0 for link in one.links)
        members = ", ".join(f"{member.label} ({member.mode}, {position(member.vclock)})" for member in asked)
        unknown = [each.label for each in one.members if each.id and each.report is None and each.address is None]
        unasked = f"; not queried (address unknown): {', '.join(unknown)}" if unknown else ""
        term = f", term {one.term}" if one.term is not None else ""
        yield (
            f"checked replica set {one.name or one.uuid or 'unknown'}{term}: {answered} of {len(counted)} "
            f"members answered{': ' if members else ''}{members}; {len(one.links)} links, total lag {lag} rows"
            f"{unasked}"
        )
    for directory in directories:
        running = ", in use by a process" if directory.is_in_use else ""
        queue = f", term {directory.term}, queue owned by replica {directory.owner_id}" if directory.term else ""
        yield (
            f"checked {directory.path}: instance {directory.instance_uuid}, {len(directory.listing.snapshots)} "
            f"snapshots, {len(directory.listing.logs)} logs, rows from {position(directory.start.to_mapping())} to "
            f"{position(directory.end.to_mapping())}{queue}{running}"
        )
    for lake in lakes:
        yield f"checked lake {lake}"


# --- JSON output ---


def told(
    findings: Sequence[Finding],
    sets: Sequence[ReplicaSet],
    directories: Sequence[Directory],
    lakes: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the object that `--json` prints."""
    import msgspec

    return {
        "findings": [msgspec.to_builtins(finding) for finding in findings],
        "replicasets": [
            {
                "uuid": one.uuid,
                "term": one.term,
                "members": [
                    {
                        "uuid": member.uuid,
                        "id": member.id,
                        "label": member.label,
                        "address": member.address,
                        "answered": member.report is not None,
                        "vclock": {str(number): lsn for number, lsn in member.vclock.items()},
                    }
                    for member in one.members
                ],
            }
            for one in sets
        ],
        "lakes": list(lakes),
        "directories": [
            {
                "path": one.path,
                "instance_uuid": one.instance_uuid,
                "replicaset_uuid": one.replicaset_uuid,
                "start": {str(number): lsn for number, lsn in one.start},
                "end": {str(number): lsn for number, lsn in one.end},
                "term": one.term,
                "owner": one.owner_id,
                "is_in_use": one.is_in_use,
                "free_bytes": one.free_space,
            }
            for one in directories
        ],
    }
