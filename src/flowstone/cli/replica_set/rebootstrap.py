"""`flowstone rebootstrap`: remove the data of a stopped member, so that it rejoins its replica set.

Changes nothing before it has checked that no instance runs in the directory and that other members have its rows.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from flowstone.cli.console import INTERRUPTED, OK, UsageError, say
from flowstone.cli.replica_set.members import Json, Password, Uris, Username, Yes, addresses, consent, surveyed
from flowstone.errors import FlowstoneError

if TYPE_CHECKING:
    from flowstone.iproto.uri import Uri
    from flowstone.observation.findings.overlap import Overlap
    from flowstone.observation.log_directory import Directory
    from flowstone.observation.replica_set import ReplicaSet
    from flowstone.observation.report import VClock
    from flowstone.outside import Lock, Outside

EXAMPLE = (
    "Example: `TT_CLI_USERNAME=admin TT_CLI_PASSWORD=secret flowstone rebootstrap /var/lib/tarantool/c 127.0.0.1:3301`"
)

EXIT_CODES = """Exit codes: 0 done; 1 an instance is running in the directory, the directory has rows that no other
member has (with --delete: or may have such rows), or no member answers; 2 the command line or a path on it is wrong, or
--yes is missing and stdin is not a terminal; 130 not confirmed."""

ASIDE: Final = "before-rebootstrap-"
MANIFEST: Final = "manifest.json"
_SNAPSHOT: Final = re.compile(r"\d{20}\.snap(\.inprogress)?")
_DATA: Final = re.compile(r"\d{20}\.(snap|xlog|vylog)(\.inprogress)?")
_VINYL_SPACE: Final = re.compile(r"\d+")
"""The vinyl engine has a directory for each space, named by the space id."""


def rebootstrap(
    directory: Annotated[
        str, typer.Argument(metavar="DIR", help="Directory of the stopped member's snapshots and logs.")
    ],
    uris: Uris,
    wal_dir: Annotated[
        str | None, typer.Option("--wal-dir", metavar="DIR", help="Directory of its logs, if it is another one.")
    ] = None,
    delete: Annotated[
        bool, typer.Option("--delete", help=f"Delete the files instead of moving them into DIR/{ASIDE}….")
    ] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="Proceed even if rows are lost or the directory belongs to another replica set."),
    ] = False,
    yes: Yes = False,
    username: Username = None,
    password: Password = None,
    as_json: Json = False,
) -> int:
    """Remove the snapshots and logs of a stopped member, so that it rejoins its replica set at the next start.

    URIs name members that have the data; one is enough if it follows the others. The command refuses to continue if an
    instance is running in the directory, or if the directory has rows that no answering member has; the error lists
    them. The newest rows are compared with the rows of the same LSNs on the members, which requires a user with the
    role `replication`; without that comparison, --delete requires --force. The files are moved to a subdirectory
    `before-rebootstrap-…`, which can be deleted once the member has joined; --delete deletes them instead. Start the
    member with the printed `instance_uuid` to keep its identity.
    """
    from flowstone.cli import event_loop
    from flowstone.outside import production

    outside = production()
    places = list(dict.fromkeys(map(os.path.realpath, (directory, wal_dir or directory))))
    with ExitStack() as locks:
        for path in places:
            _check(path)
            locks.enter_context(_locked(outside, path))
        found = _read(outside, places)
        known = event_loop.run(_compare(outside, addresses(uris, username, password), found, force))
        if not force:
            _refuse_loss(found, known, delete)
        for sentence in _consequences(found, known, delete):
            say(f"flowstone: {sentence}")
        if not consent(f"{'delete' if delete else 'move aside'} the data of {' and '.join(places)}?", yes=yes):
            return INTERRUPTED
        kept = _empty(outside, places, delete)
    _tell(found, known, kept, as_json)
    return OK


# --- checks ---


@dataclass(frozen=True)
class Found:
    """The contents of the directories."""

    places: Sequence[str]
    uuid: str
    replicaset_uuid: str | None
    vclock: VClock
    files: int
    looks: Sequence[Directory]


@dataclass(frozen=True)
class Known:
    """The rows of the stopped member that the live members have and lack."""

    replica_id: int
    lost: dict[int, tuple[int, int]]
    """Rows that no live member has: the first and the last LSN, by replica id."""

    overlap: Overlap
    """The comparison of the rows that the stopped and the live members have under the same LSNs."""

    answered: Sequence[str]


def _check(path: str) -> None:
    if not os.path.isdir(path):
        raise UsageError(f"{path}: no such directory")
    if os.path.exists(os.path.join(path, MANIFEST)):
        raise UsageError(f"{path}: is an archive", hint="specify the data directory of a stopped member")


def _locked(outside: Outside, path: str) -> Lock:
    from flowstone.outside import AlreadyLocked

    try:
        return outside.disk.lock(path)
    except AlreadyLocked as error:
        raise AlreadyLocked(f"an instance is running in {path}", hint="stop it first") from error


def _read(outside: Outside, places: Sequence[str]) -> Found:
    from flowstone.observation.log_directory import look_into
    from flowstone.observation.replica_set import furthest

    looks = [look_into(outside, path) for path in places]
    uuids = {look.instance_uuid for look in looks if look.instance_uuid is not None}
    if len(uuids) != 1:
        where = " and ".join(places)
        raise FlowstoneError(f"{where}: cannot tell which instance these files belong to (none, or more than one)")
    (uuid,) = uuids
    return Found(
        places=places,
        uuid=uuid,
        replicaset_uuid=next((look.replicaset_uuid for look in looks if look.replicaset_uuid), None),
        vclock=furthest(look.end.to_mapping() for look in looks),
        files=sum(1 for path in places for _ in _data(path)),
        looks=looks,
    )


async def _compare(outside: Outside, uris: Sequence[Uri], found: Found, force: bool) -> Known:
    from flowstone.observation.findings.overlap import overlap
    from flowstone.observation.replica_set import rows_alone
    from flowstone.replication.vclock import VClock

    async with surveyed(uris) as (survey, sets):
        one = _home(sets, found, force)
        itself = one.member(found.uuid)
        if itself is not None and itself.report is not None:
            raise FlowstoneError(f"instance {found.uuid} is running at {itself.label}", hint="stop it first")
        others = [member for member in one.members if member.report is not None]
        asked = [(member, survey.asking(member).uri) for member in others]
        same = await overlap(outside, found.looks, VClock(found.vclock).without_zero(), asked)
    lost = rows_alone(found.vclock, (member.vclock for member in others))
    return Known(itself.id if itself is not None else 0, lost, same, [member.label for member in others])


def _home(sets: Sequence[ReplicaSet], found: Found, force: bool) -> ReplicaSet:
    """Return the replica set that the member belongs or belonged to; with `force`, any set that answered."""
    from flowstone.observation.health import complaints

    answered = [one for one in sets if any(member.report is not None for member in one.members)]
    if not answered:
        raise FlowstoneError("; ".join(text for one in sets for text in complaints(one)))
    home = [one for one in answered if one.member(found.uuid) is not None or one.uuid == found.replicaset_uuid]
    if not home and not force:
        names = ", ".join(one.label for one in answered)
        raise FlowstoneError(
            f"{found.places[0]} belongs to replica set {found.replicaset_uuid}, not to {names}",
            hint="specify members of its own replica set, or use --force to join another one",
        )
    return (home or answered)[0]


def _refuse_loss(found: Found, known: Known, delete: bool) -> None:
    """Raise FlowstoneError if rows would be lost; with `delete`, also if their contents could not be compared."""
    from flowstone.observation.expulsion import alone_text

    asked = ", ".join(known.answered)
    if known.lost:
        raise FlowstoneError(
            f"{found.places[0]} has rows that are missing at {asked}: {alone_text(known.lost)}",
            hint=f"{_shown(found, known.lost)}; specify members that have these rows, "
            "or use --force to discard the rows",
        )
    unlike = known.overlap.unlike
    if unlike:
        raise FlowstoneError(
            f"{found.places[0]} has rows whose LSNs belong to different rows at {asked}: {alone_text(unlike)}",
            hint=f"{_shown(found, unlike)}; save them, then use --force to discard them here",
        )
    if delete and not known.overlap.compared:
        raise FlowstoneError(
            f"{found.places[0]}: rows have the same LSNs as at {asked}, but were not compared: {_unread(known)}",
            hint="omit --delete to move the files aside, or use --force",
        )


def _shown(found: Found, rows: dict[int, tuple[int, int]]) -> str:
    replica_id, (first, _) = next(iter(rows.items()))
    return f"`flowstone cat --show-system --replica {replica_id} --from {first} {found.places[-1]}` prints them"


def _unread(known: Known) -> str:
    return "; ".join(known.overlap.unread) or "no rows to compare"


def _consequences(found: Found, known: Known, delete: bool) -> Iterator[str]:
    from flowstone.observation.expulsion import alone_text
    from flowstone.observation.findings.wording import position

    role = f"replica {known.replica_id}" if known.replica_id else "no longer a member; it will join as a new one"
    yield f"{found.places[0]} belongs to instance {found.uuid} ({role}), at {position(found.vclock)}"
    asked, same = ", ".join(known.answered), known.overlap
    if known.lost:
        yield f"LOST: {alone_text(known.lost)}"
    if same.unlike:
        yield f"LOST: {alone_text(same.unlike)}, whose LSNs belong to different rows at {asked}"
    elif not known.lost and same.compared:
        yield f"rows have the same LSNs as at {asked}; the newest {same.compared} were compared and are equal"
    elif not known.lost:
        yield f"rows have the same LSNs as at {asked}, but were not compared: {_unread(known)}"
    yield f"files to {'delete' if delete else 'move aside'}: {found.files}"


# --- changes ---


def _data(path: str) -> Iterator[str]:
    """Yield the names of the files that a member recovers from, snapshots first.

    If the command dies halfway, no snapshot is left, so the member cannot start from part of its data.
    """
    names = sorted(os.listdir(path), key=lambda name: (_SNAPSHOT.fullmatch(name) is None, name))
    for name in names:
        is_space = _VINYL_SPACE.fullmatch(name) is not None and os.path.isdir(os.path.join(path, name))
        if _DATA.fullmatch(name) or is_space:
            yield name


def _empty(outside: Outside, places: Sequence[str], delete: bool) -> list[str]:
    """Delete the data, or move it aside; return the directories that it was moved to."""
    from flowstone.outside.disk import DIRECTORY_MODE

    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    kept = []
    for path in places:
        names = list(_data(path))
        aside = os.path.join(path, f"{ASIDE}{stamp}")
        if names and not delete:
            os.mkdir(aside, DIRECTORY_MODE)
            kept.append(aside)
        for name in names:
            source = os.path.join(path, name)
            if not delete:
                os.rename(source, os.path.join(aside, name))
            elif os.path.isdir(source):
                shutil.rmtree(source)
            else:
                os.unlink(source)
        outside.disk.sync_directory(path)
    return kept


def _tell(found: Found, known: Known, kept: Sequence[str], as_json: bool) -> None:
    if as_json:
        print(json.dumps(told(found, known, kept)))
        return
    emptied = f"the snapshots and logs of {' and '.join(found.places)}"
    if kept:
        print(f"moved {emptied} to {' and '.join(kept)}, which can be deleted once the member has joined")
    else:
        print(f"deleted {emptied}")
    ways = f"flowstone serve --instance-uuid {found.uuid}, or box.cfg{{instance_uuid = '{found.uuid}'}} in Tarantool"
    print(f"to rejoin, start the member with instance_uuid {found.uuid} ({ways})")


def told(found: Found, known: Known, kept: Sequence[str]) -> dict[str, Any]:
    """Return the object that `--json` prints."""
    return {
        "directories": list(found.places),
        "instance_uuid": found.uuid,
        "replicaset_uuid": found.replicaset_uuid,
        "id": known.replica_id,
        "vclock": found.vclock,
        "lost": known.lost,
        "unlike": known.overlap.unlike,
        "compared": known.overlap.compared,
        "files": found.files,
        "kept_in": list(kept),
    }
