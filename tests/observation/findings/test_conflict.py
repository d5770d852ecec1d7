"""The conflicting row is found among the incoming rows, by any unique index."""

from __future__ import annotations

import asyncio

import pytest

from flowstone.iproto.uri import parse_uri
from flowstone.observation.findings.conflict import Conflict, find_conflict
from flowstone.observation.log_section import LogSection, SectionUnread, read_section
from flowstone.observation.query import Asking
from flowstone.outside import production
from flowstone.replication.vclock import VClock
from tests.interop import workload
from tests.interop.cluster import Cluster
from tests.interop.member import SECONDS, Member, eventually
from tests.observation.situations import make

PEOPLE = 710


def _define(member: Member) -> VClock:
    workload.run(
        member,
        [
            ["call", "box.schema.space.create", ["people", {"id": PEOPLE}]],
            ["call", "box.space.people:create_index", ["id", {"parts": [1, "unsigned"]}]],
            ["call", "box.space.people:create_index", ["mail", {"parts": [2, "string"]}]],
        ],
    )
    return VClock(member.vclock())


def _section(master: Member, after: VClock) -> LogSection | None:
    """Return the rest of the master's log; None if it was too slow to send all of it."""
    end = VClock(master.vclock())
    try:
        section = asyncio.run(read_section(production(), parse_uri(master.address), after, end, seconds=SECONDS))
    except SectionUnread:
        return None
    return section if section.is_whole else None


def _conflict(master: Member, follower: Member, after: VClock, index: str) -> Conflict | None:
    section = eventually("the section is read", lambda: _section(master, after))

    async def look() -> Conflict | None:
        asking = Asking(production(), parse_uri(follower.address), timeout=SECONDS)
        try:
            return await find_conflict(asking, section, "people", index)
        finally:
            await asking.close()

    return asyncio.run(look())


@pytest.mark.parametrize(("master_kind", "follower_kind"), [("real", "ours"), ("ours", "real")])
def test_existing_tuple_is_found_by_the_violated_index(cluster: Cluster, master_kind: str, follower_kind: str) -> None:
    master, follower = make(cluster, master_kind, "master"), make(cluster, follower_kind, "follower")
    _define(follower)
    after = _define(master)
    follower.client.insert(PEOPLE, 9, "a@example.org")
    master.client.insert(PEOPLE, 1, "z@example.org")
    assert _conflict(master, follower, after, "id") is None
    master.client.replace(PEOPLE, 2, "a@example.org")
    assert _conflict(master, follower, after, "id") is None
    found = _conflict(master, follower, after, "mail")
    assert found is not None
    assert found.row == f"1:{master.vclock()[1]}"
    assert found.comes == 'REPLACE [2, "a@example.org"]'
    assert found.there == '[9, "a@example.org"]'
    assert found.remove == "box.space['people']:delete({9})"
    master.client.insert(PEOPLE, 9, "n@example.org")
    by_id = _conflict(master, follower, after, "id")
    assert by_id is not None
    assert by_id.comes == 'INSERT [9, "n@example.org"]'
    assert _conflict(master, follower, after, "no such index") is None
