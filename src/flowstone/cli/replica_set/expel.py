"""`flowstone expel`: remove a member from its replica set.

Asks for confirmation and deletes the member's row of `_cluster`; `observation/expulsion.py` finds the consequences.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from flowstone.cli.console import INTERRUPTED, OK, say
from flowstone.cli.replica_set.members import (
    Json,
    OneUri,
    Password,
    Username,
    Yes,
    addresses,
    consent,
    member_at,
    surveyed,
)
from flowstone.errors import FlowstoneError

if TYPE_CHECKING:
    from flowstone.iproto.uri import Uri
    from flowstone.observation.expulsion import Expulsion
    from flowstone.observation.replica_set import Member, ReplicaSet
    from flowstone.observation.survey import Survey

EXAMPLE = "Example: `TT_CLI_USERNAME=admin TT_CLI_PASSWORD=secret flowstone expel 127.0.0.1:3301 3`"

UUID_INDEX: Final = 1
"""The index of `_cluster` by UUID. Index 0 is by id, and ids are reissued."""


def expel(
    uri: OneUri,
    member: Annotated[str, typer.Argument(metavar="MEMBER", help="Member to expel: its id, UUID, name or address.")],
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Expel even the leader or the member at URI (another member deletes the row), and even if rows are "
            "lost or no quorum is left.",
        ),
    ] = False,
    yes: Yes = False,
    username: Username = None,
    password: Password = None,
    as_json: Json = False,
) -> int:
    """Remove a member from its replica set: delete its row of `_cluster`, so that no logs are kept for it any more.

    The command first shows the consequences: whether the member runs, which rows no other member has, and whether a
    quorum is left. If rows would be lost, or no quorum is left, --force is required. The row is deleted on the leader,
    or on another writable member, whichever member URI names. The member keeps its data: stop it and delete the data
    before it joins again.
    """
    from flowstone.cli import event_loop

    (wanted,) = addresses([uri], username, password)
    # MEMBER may be a URI: errors show the name, so it must not contain the login or the parameters.
    name = member.rpartition("@")[2].partition("?")[0]
    return event_loop.run(_expel(wanted, name, force, yes, as_json))


async def _expel(uri: Uri, wanted: str, force: bool, yes: bool, as_json: bool) -> int:
    from flowstone.box.system import CLUSTER_ID
    from flowstone.observation.expulsion import NoSuchMember, plan
    from flowstone.observation.findings.queue_findings import lost_quorum

    async with surveyed([uri]) as (survey, sets):
        one, asked = member_at(sets, uri)
        place = _place(wanted, uri) if one.find(wanted) is None else None
        if place is not None:
            wanted = await _identified(survey, one, place, wanted)
            one, asked = member_at(await survey.look(), uri)
        planned = plan(one, asked, wanted)
        if planned.alone:  # members answer one after another: rows written in between may be replicated by now
            one, asked = member_at(await survey.look(), uri)
            planned = plan(one, asked, planned.member.uuid, before=planned.member.vclock)
        objections = list(planned.objections())
        if objections and not force:
            raise FlowstoneError(" and ".join(objections), hint="use --force to expel it anyway")
        member = planned.member
        for sentence in (f"{_name(member)}, {member.uuid}, will be removed from {one.label}", *planned.consequences()):
            say(f"flowstone: {sentence}")
        if not consent(f"delete {_name(member)} from _cluster on {planned.by.label}?", yes=yes):
            return INTERRUPTED
        try:
            # Delete by UUID: the id may have been reissued while the question was open.
            row = await survey.asking(planned.by).delete(CLUSTER_ID, UUID_INDEX, [member.uuid])
        except FlowstoneError as error:
            lost = lost_quorum(one)
            error.hint = lost.advice if lost is not None else error.hint
            raise
    if row is None:
        gone = f"{_name(member)}, {member.uuid}, is no longer a member of {one.label}"
        raise NoSuchMember(gone, hint="nothing was changed")
    if as_json:
        print(json.dumps(told(planned)))
    else:
        print(f"{_name(member)} is no longer a member of {one.label}")
    say(f"flowstone: {planned.afterwards()}")
    return OK


def _place(wanted: str, uri: Uri) -> Uri | None:
    """Return the URI, with the login of `uri`, if `wanted` is an address; None if it is an id, a UUID or a name."""
    from flowstone.iproto.uri import UriError, parse_uri

    try:
        place = parse_uri(wanted)
    except UriError:
        return None
    return None if wanted.isdecimal() else replace(uri, host=place.host, port=place.port)


async def _identified(survey: Survey, one: ReplicaSet, place: Uri, wanted: str) -> str:
    """Return the UUID of the member at an address that no other member lists; raise NoSuchMember if none is there."""
    from flowstone.observation.expulsion import no_such_member
    from flowstone.observation.report import Report

    answer = await survey.identify(place)
    if not isinstance(answer, Report):
        raise no_such_member(one, wanted, f"no member lists this address, and it does not answer: {answer.reason}")
    member = one.member(answer.uuid)
    if member is None:
        raise no_such_member(
            one, wanted, f"the server at this address has instance UUID {answer.uuid}, which is not a member"
        )
    if member.report is None:
        survey.include(place, member.uuid)
    return member.uuid


def _name(member: Member) -> str:
    """Return the member's id and its label, or only the id if the label says no more."""
    number = f"replica {member.id}"
    return number if member.label == number else f"{number} ({member.label})"


def told(planned: Expulsion) -> dict[str, Any]:
    """Return the object that `--json` prints."""
    member = planned.member
    return {
        "id": member.id,
        "uuid": member.uuid,
        "name": member.name,
        "address": member.address,
        "was_alive": member.report is not None,
        "vclock": member.vclock,
        "lost": planned.alone,
        "members_left": planned.members_left,
        "alive_left": planned.alive_left,
        "quorum_left": planned.quorum_left,
        "deleted_at": planned.by.address,
    }
