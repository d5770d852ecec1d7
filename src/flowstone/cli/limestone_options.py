"""What the commands on Limestone's data directories share: options, and how a directory is named in their output."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from flowstone.cli.console import UsageError, say

if TYPE_CHECKING:
    from flowstone.limestone.entries import EntryType
    from flowstone.limestone.inspection import LogFile

Directory = Annotated[
    str, typer.Argument(metavar="DIR", help="A data directory: where limestone-manifest.json is.", show_default=False)
]
Epoch = Annotated[
    int | None,
    typer.Option("--epoch", metavar="N", min=0, help="Take this epoch for the durable one."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]
MakeBackup = Annotated[
    bool,
    typer.Option(
        "--make-backup/--no-backup",
        help="Keep the directory as it was beside it, as DIR.backup_XXXXXX; files that do not change are shared.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object (docs/reference/limestone-tools.md).")]

FINDINGS_SHOWN: Final = 20
"""Of each file."""

NAMES = {
    1: "normal_entry",
    2: "marker_begin",
    3: "marker_end",
    4: "marker_durable",
    5: "remove_entry",
    6: "marker_invalidated_begin",
    7: "clear_storage",
    8: "add_storage",
    9: "remove_storage",
    10: "normal_with_blob",
}
"""Of entry types, as the original's source spells them."""


def plain(directory: str) -> str:
    """The directory without slashes behind it, so that names can be put beside it."""
    return directory.rstrip("/") or "/"


def data_directory(directory: str) -> str:
    """As `plain`, of what is to be a data directory and not a file of one."""
    if os.path.isfile(directory):
        raise UsageError(f"{directory} is a file", hint="name the data directory that it is in")
    return plain(directory)


def quoted(path: str) -> str:
    """A path as tglogutil prints it."""
    return '"' + path.replace("&", "&&").replace('"', '&"') + '"'


def counts_by_name(counts: dict[EntryType, int]) -> dict[str, int]:
    return {NAMES[kind]: count for kind, count in counts.items()}


def file_object(file: LogFile) -> dict[str, Any]:
    """What the JSON outputs say of a log file."""
    return {
        "name": file.name,
        "bytes": file.size,
        "verdict": file.verdict.name.lower(),
        "max_epoch": file.max_epoch,
        "sessions": file.sessions,
        "entries": counts_by_name(file.counts),
        "is_detached": file.is_detached,
        "is_superfluous": file.is_superfluous,
        "findings": [
            {"verdict": found.verdict.name.lower(), "offset": found.offset, "what": found.what}
            for found in file.findings
        ],
    }


def tell_findings(files: Iterable[LogFile]) -> None:
    """What is wrong with log files, a line each; of one cause there may be thousands, which JSON has all of."""
    for file in files:
        for finding in file.findings[:FINDINGS_SHOWN]:
            say(f"{file.name}: at byte {finding.offset}: {finding.what}")
        if len(file.findings) > FINDINGS_SHOWN:
            say(f"{file.name}: and {len(file.findings) - FINDINGS_SHOWN} more (--json has all)")


def as_text(fields: dict[str, Any]) -> str:
    return json.dumps(fields, ensure_ascii=False)
