"""`flowstone backup`: a consistent copy of a running member or of an archive, with a list of its files.

Parses the options and reports the result; the work is done by `archive/backup.py`.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from flowstone.cli.console import OK, UsageError, say
from flowstone.cli.logs.play import PASSWORD_HELP, USERNAME_VARIABLE, address

if TYPE_CHECKING:
    from flowstone.archive.backup import ArchiveBackup

EXAMPLE = (
    "Example: `TT_CLI_USERNAME=replicator TT_CLI_PASSWORD=secret flowstone backup db1:3301 /backup/2026-05-01`\n\n"
    "A copy of an archive, which may be running: `flowstone backup /backup/db1 /offsite/db1-may`\n\n"
    "Check a backup: `flowstone backup --check /offsite/db1-may`"
)

EXIT_CODES = """Exit codes: 0 the backup is complete, or unchanged; 1 the server is unreachable or rejects the backup,
or a file is damaged or has changed; 2 the command line is wrong, or the directory exists. Unless the exit code is 0, no
backup is left."""


def backup(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="Address of a running member, or the directory of an archive.")
    ],
    directory: Annotated[
        str | None, typer.Argument(metavar="DIR", help="Directory of the backup; must not exist.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Check that the files of the backup SOURCE are unchanged; write nothing.")
    ] = False,
    username: Annotated[
        str | None, typer.Option("--username", "-u", help=f"User to replicate as. Default: {USERNAME_VARIABLE}.")
    ] = None,
    password: Annotated[str | None, typer.Option("--password", "-p", help=PASSWORD_HELP)] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the list of files as JSON (docs/reference/archive.md).")
    ] = False,
) -> int:
    """Write a consistent copy of a running member or of an archive, read back, synced, with checksums.

    The backup is an archive: a Tarantool starts from a copy of it, and `restore` and `verify` read it. Of a member, the
    backup has its data now, received as a replica receives it; the user needs the role `replication`. Of an archive, it
    has the whole history. Nothing is overwritten.
    """
    from flowstone.archive.backup import BackupExists, back_up_archive, back_up_member, check_backup
    from flowstone.archive.manifest import NotAnArchive
    from flowstone.cli import event_loop
    from flowstone.outside import production

    disk = production().disk
    if check:
        if directory is not None:
            raise UsageError("--check writes nothing", hint="give the directory of the backup only")
        return _tell(check_backup(disk, source), f"{source} is unchanged", as_json)
    if directory is None:
        raise UsageError("DIR is missing", hint="give the directory of the backup")
    try:
        if os.path.isdir(source):
            made = back_up_archive(disk, source, directory)
        else:
            made = event_loop.run(back_up_member(address(source, username, password), directory))
    except (BackupExists, NotAnArchive) as error:
        raise UsageError(error.message, hint=error.hint) from error
    finally:
        with suppress(OSError):  # renamed, or not empty because another backup runs
            os.rmdir(os.path.realpath(directory) + ".inprogress")
    return _tell(made, f"backed up {source} to {directory}", as_json)


def _tell(made: ArchiveBackup, what: str, as_json: bool) -> int:
    if as_json:
        import msgspec

        print(msgspec.json.encode(made).decode())
    else:
        print(f"{what}: {len(made.files)} files, {made.size} bytes, settled up to {made.settled}")
        if made.settled != made.position:
            say("flowstone: note: transactions at the end wait for their quorum; restore leaves them out")
    return OK
