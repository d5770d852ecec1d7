"""`flowstone rebootstrap`: takes the data of a stopped member out of its way, so that it joins its replica set anew.

Nothing is touched before it is clear that nobody runs there, and that the others have what it holds.
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

from flowstone.cli.console import INTERRUPTED, OK, UsageError, note_compilation, say
from flowstone.cli.members import Json, Password, Uris, Username, Yes, addresses, consent, surveyed
from flowstone.errors import FlowstoneError

if TYPE_CHECKING:
    from flowstone.iproto.uri import Uri
    from flowstone.observation.directory import Directory
    from flowstone.observation.overlap import Overlap
    from flowstone.observation.replica_set import ReplicaSet
    from flowstone.observation.report import VClock
    from flowstone.outside import Lock, Outside

EXAMPLE = (
    "Example: `TT_CLI_USERNAME=admin TT_CLI_PASSWORD=secret flowstone rebootstrap /var/lib/tarantool/c 127.0.0.1:3301`"
)

EXIT_CODES = """Exit codes: 0 done; 1 somebody runs in the directory, it holds rows that nobody else has, or may have
where they would be deleted, or no member answers; 2 the command line or a path on it is wrong, or stdin is not a
terminal and --yes is missing; 130 the answer was no."""

ASIDE: Final = "before-rebootstrap-"
MANIFEST: Final = "manifest.json"
_SNAPSHOT: Final = re.compile(r"\d{20}\.snap(\.inprogress)?")
_DATA: Final = re.compile(r"\d{20}\.(snap|xlog|vylog)(\.inprogress)?")
_VINYL_SPACE: Final = re.compile(r"\d+")
"""The vinyl engine has a directory for each space, named by its number."""


def rebootstrap(
    directory: Annotated[
        str, typer.Argument(metavar="DIR", help="Where the stopped member has its snapshots and logs.")
    ],
    uris: Uris,
    wal_dir: Annotated[
        str | None, typer.Option("--wal-dir", metavar="DIR", help="Where its logs are, if not there.")
    ] = None,
    delete: Annotated[
        bool, typer.Option("--delete", help=f"Delete the files instead of moving them into DIR/{ASIDE}….")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Even if rows are lost, or the directory is of another replica set.")
    ] = False,
    yes: Yes = False,
    username: Username = None,
    password: Password = None,
    as_json: Json = False,
) -> int:
    """Take snapshots and logs of a stopped member out of its directory, so that it joins its replica set anew when it
    is started next.

    URIs are of members that have the data; one is enough where it follows the others. Refuses where somebody runs in
    the directory, and where it holds rows that no member that answers has: it names them. Its newest rows are compared
    with what members have by the same numbers, where their logs can be read (by a user with the role `replication`);
    where they cannot, --delete needs --force. The files are moved into a directory `before-rebootstrap-…` inside,
    unless --delete is given; it may be deleted when the member has joined. Start the member with the `instance_uuid`
    that is printed: then it is the same member as before.
    """
    from flowstone.cli import event_loop
    from flowstone.outside import production

    outside = production()
    places = list(dict.fromkeys(map(os.path.realpath, (directory, wal_dir or directory))))
    note_compilation()
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
        if not consent(f"{'delete' if delete else 'move away'} the data of {' and '.join(places)}?", yes=yes):
            return INTERRUPTED
        kept = _empty(outside, places, delete)
    _tell(found, known, kept, as_json)
    return OK


# --- what is there ---


@dataclass(frozen=True)
class Found:
    """What the directories hold."""

    places: Sequence[str]
    uuid: str
    replicaset_uuid: str | None
    vclock: VClock
    files: int
    looks: Sequence[Directory]


@dataclass(frozen=True)
class Known:
    """What the live members know of it."""

    replica_id: int
    lost: dict[int, tuple[int, int]]
    """Rows that none of them has: by replica id the first and the last LSN."""

    overlap: Overlap
    """Whether the rows that they have by these numbers are the same."""

    answered: Sequence[str]


def _check(path: str) -> None:
    if not os.path.isdir(path):
        raise UsageError(f"{path}: there is no such directory")
    if os.path.exists(os.path.join(path, MANIFEST)):
        raise UsageError(f"{path}: this is an archive", hint="name the directory of a member that is to join anew")


def _locked(outside: Outside, path: str) -> Lock:
    from flowstone.outside import AlreadyLocked

    try:
        return outside.disk.lock(path)
    except AlreadyLocked as error:
        raise AlreadyLocked(f"an instance is running in {path}", hint="stop it first") from error


def _read(outside: Outside, places: Sequence[str]) -> Found:
    from flowstone.observation.directory import look_into
    from flowstone.observation.replica_set import furthest

    looks = [look_into(outside, path) for path in places]
    uuids = {look.instance_uuid for look in looks if look.instance_uuid is not None}
    if len(uuids) != 1:
        raise FlowstoneError(f"{' and '.join(places)}: no file says whose they are, or they are of two instances")
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
    from flowstone.observation.overlap import overlap
    from flowstone.observation.replica_set import rows_alone
    from flowstone.replication.vclock import VClock

    async with surveyed(uris) as (survey, sets):
        one = _home(sets, found, force)
        itself = one.member(found.uuid)
        if itself is not None and itself.report is not None:
            raise FlowstoneError(f"{itself.label} answers, and is {found.uuid} itself", hint="stop it first")
        others = [member for member in one.members if member.report is not None]
        asked = [(member, survey.asking(member).uri) for member in others]
        same = await overlap(outside, found.looks, VClock(found.vclock).without_zero(), asked)
    lost = rows_alone(found.vclock, (member.vclock for member in others))
    return Known(itself.id if itself is not None else 0, lost, same, [member.label for member in others])


def _home(sets: Sequence[ReplicaSet], found: Found, force: bool) -> ReplicaSet:
    """The replica set that it belongs to, or belonged to."""
    from flowstone.observation.health import complaints

    answered = [one for one in sets if any(member.report is not None for member in one.members)]
    if not answered:
        raise FlowstoneError("; ".join(text for one in sets for text in complaints(one)))
    home = [one for one in answered if one.member(found.uuid) is not None or one.uuid == found.replicaset_uuid]
    if not home and not force:
        names = ", ".join(one.label for one in answered)
        raise FlowstoneError(
            f"{found.places[0]} is of the replica set {found.replicaset_uuid}, not of {names}",
            hint="name members of its own set, or give --force to let it join another one",
        )
    return (home or answered)[0]


def _refuse_loss(found: Found, known: Known, delete: bool) -> None:
    from flowstone.observation.expulsion import alone_text

    asked = ", ".join(known.answered)
    if known.lost:
        raise FlowstoneError(
            f"{found.places[0]} holds what nobody has of {asked}: {alone_text(known.lost)}",
            hint=f"{_shown(found, known.lost)}; ask members that have them, too, or give --force to lose them",
        )
    unlike = known.overlap.unlike
    if unlike:
        raise FlowstoneError(
            f"{found.places[0]} holds rows whose numbers stand for others at {asked}: {alone_text(unlike)}",
            hint=f"{_shown(found, unlike)}; save them, then give --force to lose them here",
        )
    if delete and not known.overlap.compared:
        raise FlowstoneError(
            f"{found.places[0]}: that its rows are at {asked} is known by their numbers only: {_unread(known)}",
            hint="leave out --delete, and its files are moved aside; or give --force",
        )


def _shown(found: Found, rows: dict[int, tuple[int, int]]) -> str:
    replica_id, (first, _) = next(iter(rows.items()))
    return f"`flowstone cat --show-system --replica {replica_id} --from {first} {found.places[-1]}` shows them"


def _unread(known: Known) -> str:
    return "; ".join(known.overlap.unread) or "there is none to compare"


def _consequences(found: Found, known: Known, delete: bool) -> Iterator[str]:
    from flowstone.observation.expulsion import alone_text
    from flowstone.observation.wording import position

    who = f"replica {known.replica_id}" if known.replica_id else "which is no member any more, and will be a new one"
    yield f"{found.places[0]} is at {position(found.vclock)} and of {found.uuid}, {who}"
    asked, same = ", ".join(known.answered), known.overlap
    if known.lost:
        yield f"LOST: {alone_text(known.lost)}"
    if same.unlike:
        yield f"LOST: {alone_text(same.unlike)}, whose numbers stand for other rows at {asked}"
    elif not known.lost and same.compared:
        yield f"all of its rows are at {asked} (by their numbers; the newest {same.compared} were compared)"
    elif not known.lost:
        yield f"by their numbers, its rows are at {asked}; they were not compared: {_unread(known)}"
    yield f"{found.files} files are {'deleted' if delete else 'moved aside'}"


# --- what is done ---


def _data(path: str) -> Iterator[str]:
    """Names of what a member recovers from, snapshots first: who dies in between must leave nothing to start from."""
    names = sorted(os.listdir(path), key=lambda name: (_SNAPSHOT.fullmatch(name) is None, name))
    for name in names:
        is_space = _VINYL_SPACE.fullmatch(name) is not None and os.path.isdir(os.path.join(path, name))
        if _DATA.fullmatch(name) or is_space:
            yield name


def _empty(outside: Outside, places: Sequence[str], delete: bool) -> list[str]:
    """Gives the directories that the files are in now."""
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
    where = f"were moved to {' and '.join(kept)}, which may be deleted when the member has joined"
    print(
        f"no snapshots or logs are left in {' and '.join(found.places)}; they {where if kept else 'have been deleted'}"
    )
    ways = f"flowstone serve --instance-uuid {found.uuid}, or box.cfg{{instance_uuid = '{found.uuid}'}} of a Tarantool"
    print(f"start it with instance_uuid {found.uuid} ({ways}): it joins anew")


def told(found: Found, known: Known, kept: Sequence[str]) -> dict[str, Any]:
    """What `--json` prints."""
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
