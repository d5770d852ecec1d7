"""Options and output formats that the commands for Limestone's data directories share."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from flowstone.cli.console import UsageError, say

if TYPE_CHECKING:
    from flowstone.limestone.format.entries import EntryType
    from flowstone.limestone.tools.inspection import InspectedFile

Directory = Annotated[
    str, typer.Argument(metavar="DIR", help="Data directory, with limestone-manifest.json in it.", show_default=False)
]
Epoch = Annotated[
    int | None,
    typer.Option("--epoch", metavar="N", min=0, help="Use this epoch as the durable one."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only report what would be done.")]
MakeBackup = Annotated[
    bool,
    typer.Option(
        "--make-backup/--no-backup",
        help="Keep a backup of the directory as DIR.backup_XXXXXX; unchanged files are hard links.",
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print the result as one JSON object (docs/reference/limestone-tools.md).")
]

FINDINGS_SHOWN: Final = 20
"""Findings printed per file: one cause can have thousands."""

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
"""Names of entry types, as in the source of the original."""


def plain(directory: str) -> str:
    """Return the directory without trailing slashes, so that a suffix or a file name can be added."""
    return directory.rstrip("/") or "/"


def data_directory(directory: str) -> str:
    """Return the directory as `plain` does; raise UsageError if it is a file."""
    if os.path.isfile(directory):
        raise UsageError(f"{directory} is a file", hint="specify its data directory")
    return plain(directory)


def quoted(path: str) -> str:
    """Return a path as tglogutil prints it."""
    return '"' + path.replace("&", "&&").replace('"', '&"') + '"'


def counts_by_name(counts: dict[EntryType, int]) -> dict[str, int]:
    return {NAMES[kind]: count for kind, count in counts.items()}


def file_object(file: InspectedFile) -> dict[str, Any]:
    """Return the JSON object that describes a log file."""
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


def tell_findings(files: Iterable[InspectedFile]) -> None:
    """Print the first findings of each log file, one line each. JSON output has all of them."""
    for file in files:
        for finding in file.findings[:FINDINGS_SHOWN]:
            say(f"{file.name}: at byte {finding.offset}: {finding.what}")
        if len(file.findings) > FINDINGS_SHOWN:
            say(f"{file.name}: {len(file.findings) - FINDINGS_SHOWN} more findings (--json prints all)")


def as_text(fields: dict[str, Any]) -> str:
    return json.dumps(fields, ensure_ascii=False)
