"""`flowstone promote` and `flowstone demote`: change the leader of a replica set manually."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Final

from flowstone.cli.console import INTERRUPTED, OK
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
    from flowstone.observation.query import Asking
    from flowstone.observation.replica_set import Member, ReplicaSet
    from flowstone.observation.report import Report

PROMOTE_EXAMPLE = "Example: `TT_CLI_USERNAME=admin TT_CLI_PASSWORD=secret flowstone promote 127.0.0.1:3302`"
DEMOTE_EXAMPLE = "Example: `TT_CLI_USERNAME=admin TT_CLI_PASSWORD=secret flowstone demote --yes 127.0.0.1:3302`"

LOOKS_MAX, LOOK_SECONDS = 60, 0.05
"""Maximum number of queries until a promoted member leads, and the pause between two queries: 3 s in total."""

READ_ONLY_HINTS: Final = {
    "orphan": "start the upstreams that it waits for, or remove them from its `replication`",
    "config": "let it accept writes: `flowstone config {address} read_only=false`",
}
"""Advice for a promoted member that is read-only, by the reason it reports; `{address}` is replaced by its address."""


def promote(
    uri: OneUri, yes: Yes = False, username: Username = None, password: Password = None, as_json: Json = False
) -> int:
    """Promote a member to leader (by election, or by taking over the synchronous queue if elections are off).

    The member takes over the pending transactions, so it must have them: the confirmation shows how many rows of other
    members it lacks. The former leader becomes read-only. If the member does not lead afterwards, for example because
    it is an orphan, the exit code is 1 and the message gives the reason. Requires `box.ctl.promote` on the server: 2.8
    or newer.
    """
    from flowstone.cli import event_loop

    (wanted,) = addresses([uri], username, password)
    return event_loop.run(_change(wanted, "promote", yes, as_json))


def demote(
    uri: OneUri, yes: Yes = False, username: Username = None, password: Password = None, as_json: Json = False
) -> int:
    """Demote the leader.

    With elections, the members elect a new leader, which may be the same one. Without elections, the synchronous queue
    has no owner afterwards. Requires `box.ctl.demote` on the server: 2.8 or newer.
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
    """Return the member's report once it leads, is writable and owns the queue, or after LOOKS_MAX queries.

    A newly elected leader takes over the queue a moment after the election.
    """
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
    hint = (
        "set read_only on the old master (`flowstone config URI read_only=true`), then call "
        "box.ctl.clear_synchro_queue() on the new master"
    )
    return FlowstoneError(
        f"{report.address} cannot {action}: {report.package} {report.version} has no box.ctl.{action}", hint=hint
    )


def _no_member(report: Report) -> FlowstoneError:
    why = "not a member of its replica set (expelled, or an anonymous replica)"
    return FlowstoneError(f"{report.address} cannot lead: {why}", hint="promote a member")


def leads(report: Report) -> bool:
    """Return True if the member is the elected leader, or a writable owner of the queue."""
    by_election = report.election is not None and report.election.leader == report.id
    owns_queue = report.queue is not None and report.queue.owner == report.id
    return bool(report.id) and (by_election or (owns_queue and not report.ro))


def _objection(before: Report, after: Report, action: str) -> FlowstoneError | None:
    """Return an error if the server accepted `action` without the expected effect; None if it took effect."""
    from flowstone.observation.findings.wording import for_command

    if leads(after) is (action == "promote"):
        return None
    if action == "demote":
        # The same member may have been elected again.
        return None if is_changed(before, after) else FlowstoneError(_state(after), hint=_look_hint(after))
    why = after.why_read_only
    owns_queue = after.queue is not None and bool(after.id) and after.queue.owner == after.id
    though = ", although it owns the synchronous queue" if owns_queue else ""
    reason = f": it is read-only ({why})" if why is not None else f": its status is {after.status}"
    hint = READ_ONLY_HINTS.get(why or "", _look_hint(after)).replace("{address}", for_command(after.address))
    return FlowstoneError(f"{_state(after)}{though}{reason}", hint=hint)


def _look_hint(report: Report) -> str:
    from flowstone.observation.findings.wording import for_command

    return f"run `flowstone explain {for_command(report.address)}` for details"


def is_changed(before: Report, after: Report) -> bool:
    """Return True if the term, the leader or the owner of the queue differs."""
    return _leadership(before) != _leadership(after)


def _leadership(report: Report) -> tuple[int, ...]:
    assert report.election is not None
    queue = (report.queue.owner, report.queue.term) if report.queue is not None else (0, 0)
    return (report.election.term, report.election.leader, *queue)


def _question(one: ReplicaSet, member: Member, action: str) -> str:
    from flowstone.observation.findings.wording import rows_text
    from flowstone.observation.replica_set import missing_row_count

    if action == "demote":
        return f"demote {member.label}?"
    leader = next((each.label for each in one.members if each.is_leader), None)
    lacks = missing_row_count(one.vclock, member.vclock)
    instead = f" in place of {leader}" if leader is not None else ""
    lag = f", although it lacks {rows_text(lacks)} of other members" if lacks else ""
    return f"promote {member.label}{instead}{lag}?"


def _state(report: Report) -> str:
    assert report.election is not None
    return f"{report.address} {'leads' if leads(report) else 'does not lead'} in term {report.election.term}"


def _tell(before: Report, after: Report, as_json: bool) -> None:
    if as_json:
        print(json.dumps(told(before, after)))
        return
    takes_none = f", but is read-only ({after.why_read_only})" if leads(after) and after.ro else ""
    print(f"{_state(after)}{takes_none}" + ("" if is_changed(before, after) else "; nothing to do"))


def told(before: Report, after: Report) -> dict[str, Any]:
    """Return the object that `--json` prints."""
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
