"""`flowstone promote` and `flowstone demote`: who leads, by hand."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Final

from flowstone.cli.console import INTERRUPTED, OK
from flowstone.cli.members import Json, OneUri, Password, Username, Yes, addresses, consent, member_at, surveyed
from flowstone.errors import FlowstoneError

if TYPE_CHECKING:
    from flowstone.iproto.uri import Uri
    from flowstone.observation.asking import Asking
    from flowstone.observation.replica_set import Member, ReplicaSet
    from flowstone.observation.report import Report

PROMOTE_EXAMPLE = "Example: `TT_CLI_USERNAME=admin TT_CLI_PASSWORD=secret flowstone promote 127.0.0.1:3302`"
DEMOTE_EXAMPLE = "Example: `TT_CLI_USERNAME=admin TT_CLI_PASSWORD=secret flowstone demote --yes 127.0.0.1:3302`"

LOOKS_MAX, LOOK_SECONDS = 60, 0.05

READ_ONLY_HINTS: Final = {
    "orphan": "it has not caught up with whom it must: bring those back, or take them out of its `replication`",
    "config": "set its read_only to false",
}
"""What to do about a reason for which a member that was promoted takes no writes."""


def promote(
    uri: OneUri, yes: Yes = False, username: Username = None, password: Password = None, as_json: Json = False
) -> int:
    """Let a member lead: by an election, or, where elections are off, as owner of the synchronous queue.

    It takes over what waits there, so it has to have it: the question says what it lacks of what others have. Who led
    before becomes read-only. Where the member does not lead afterwards, as an orphan does not, the exit code is 1, and
    the reason is said. Needs a server that has terms (`box.ctl.promote`, since 2.8); 2.6 has none.
    """
    from flowstone.cli import event_loop

    (wanted,) = addresses([uri], username, password)
    return event_loop.run(_change(wanted, "promote", yes, as_json))


def demote(
    uri: OneUri, yes: Yes = False, username: Username = None, password: Password = None, as_json: Json = False
) -> int:
    """Let a member lead no more.

    With elections another one is chosen, or the same again; without, nobody owns the synchronous queue any more. Needs
    a server that has terms (`box.ctl.demote`, since 2.8); 2.6 has none.
    """
    from flowstone.cli import event_loop

    (wanted,) = addresses([uri], username, password)
    return event_loop.run(_change(wanted, "demote", yes, as_json))


async def _change(uri: Uri, action: str, yes: bool, as_json: bool) -> int:
    async with surveyed([uri]) as (survey, sets):
        one, member = member_at(sets, uri)
        asking, before = survey.asking(member), member.report
        assert before is not None
        if before.election is None:
            raise _no_terms(before, action)
        if leads(before) is (action == "promote"):
            _tell(before, before, as_json)
            return OK
        if not before.id:
            raise _no_member(before)
        if not consent(_question(one, member, action), yes=yes):
            return INTERRUPTED
        await _call(asking, before, action)
        after = await (promoted(asking) if action == "promote" else asking.report())
        objection = _objection(before, after, action)
        if objection is None or as_json:
            _tell(before, after, as_json)
        if objection is not None:
            raise objection
    return OK


async def promoted(asking: Asking) -> Report:
    """Who is elected writes that the queue is its own a moment later: that is waited for, though not for ever."""
    report = await asking.report()
    for _ in range(LOOKS_MAX):
        if leads(report) and not report.ro and (report.queue is None or report.queue.owner == report.id):
            break
        await asyncio.sleep(LOOK_SECONDS)
        report = await asking.report()
    return report


async def _call(asking: Asking, report: Report, action: str) -> None:
    from flowstone.iproto.errors import NoSuchProc

    try:
        await asking.call(f"box.ctl.{action}")
    except NoSuchProc:
        raise _no_terms(report, action) from None


def _no_terms(report: Report, action: str) -> FlowstoneError:
    hint = "make the old master read_only; then call box.ctl.clear_synchro_queue() on the one that is to write"
    return FlowstoneError(
        f"{report.address} cannot {action}: {report.package} {report.version} has no box.ctl.{action}", hint=hint
    )


def _no_member(report: Report) -> FlowstoneError:
    why = "it is not a member of its replica set: it was expelled, or is an anonymous replica"
    return FlowstoneError(f"{report.address} cannot lead: {why}", hint="promote a member")


def leads(report: Report) -> bool:
    """By election, or, without, by owning the queue."""
    by_election = report.election is not None and report.election.leader == report.id
    owns_queue = report.queue is not None and report.queue.owner == report.id
    return bool(report.id) and (by_election or (owns_queue and not report.ro))


def _objection(before: Report, after: Report, action: str) -> FlowstoneError | None:
    """Why what was asked for has not come about, though the server did not refuse it; None where it has."""
    if leads(after) is (action == "promote"):
        return None
    if action == "demote":
        # Who resigned may have been elected again.
        return None if is_changed(before, after) else FlowstoneError(_state(after), hint=_look_hint(after))
    why = after.why_read_only
    owns_queue = after.queue is not None and bool(after.id) and after.queue.owner == after.id
    though = ", though the queue is its own" if owns_queue else ""
    reason = f": it is read-only ({why})" if why is not None else f": its status is {after.status}"
    hint = READ_ONLY_HINTS.get(why or "", _look_hint(after))
    return FlowstoneError(f"{_state(after)}{though}{reason}", hint=hint)


def _look_hint(report: Report) -> str:
    from flowstone.observation.wording import for_command

    return f"`flowstone explain {for_command(report.address)}` says more"


def is_changed(before: Report, after: Report) -> bool:
    """Whether anything is other than it was about who leads."""
    return _leadership(before) != _leadership(after)


def _leadership(report: Report) -> tuple[int, ...]:
    assert report.election is not None
    queue = (report.queue.owner, report.queue.term) if report.queue is not None else (0, 0)
    return (report.election.term, report.election.leader, *queue)


def _question(one: ReplicaSet, member: Member, action: str) -> str:
    from flowstone.observation.replica_set import missing_rows
    from flowstone.observation.wording import rows_text

    if action == "demote":
        return f"{member.label} is to lead no more; go on?"
    leader = next((each.label for each in one.members if each.is_leader), None)
    lacks = missing_rows(one.vclock, member.vclock)
    instead = f" instead of {leader}" if leader is not None else ""
    behind = f", and lacks {rows_text(lacks)} that others have" if lacks else ""
    return f"{member.label} is to lead{instead}{behind}; go on?"


def _state(report: Report) -> str:
    assert report.election is not None
    return f"{report.address} {'leads' if leads(report) else 'does not lead'} in term {report.election.term}"


def _tell(before: Report, after: Report, as_json: bool) -> None:
    if as_json:
        print(json.dumps(told(before, after)))
        return
    takes_none = f", but takes no writes: it is read-only ({after.why_read_only})" if leads(after) and after.ro else ""
    print(f"{_state(after)}{takes_none}" + ("" if is_changed(before, after) else "; nothing was to be done"))


def told(before: Report, after: Report) -> dict[str, Any]:
    """What `--json` prints."""
    assert after.election is not None
    return {
        "address": after.address,
        "uuid": after.uuid,
        "id": after.id,
        "is_changed": is_changed(before, after),
        "is_leader": leads(after),
        "term": after.election.term,
        "leader": after.election.leader,
        "queue_owner": after.queue.owner if after.queue is not None else None,
    }
