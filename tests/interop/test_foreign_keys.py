"""Foreign keys in replica sets of nodes and real servers: joined in any order, checked by appliers on both sides."""

from __future__ import annotations

import pytest

from flowstone.iproto.constants import Key, RequestType
from tests.box.constraint_programs import delete, field, index, insert, nullable_index, refers, space
from tests.interop.cluster import Cluster
from tests.interop.member import Member, eventually
from tests.interop.versions import fits

CHILD, PARENT = 600, 700
"""The order of a snapshot: children come before the tuples that they refer to."""

FAMILY = (
    space(PARENT, field("id")),
    index(PARENT, 0, 0),
    space(CHILD, field("id"), field("parent", is_nullable=True, **refers("f1", PARENT, "id"))),
    index(CHILD, 0, 0),
    nullable_index(CHILD, 1, 1),
)
MISSING = "Foreign key constraint 'f1' failed for field '2 (parent)': foreign tuple was not found"


def run(member: Member, *steps: tuple[int, dict[int, object]]) -> None:
    for type, body in steps:
        member.client.request(RequestType(type), {Key(key): value for key, value in body.items()})


@fits(">=2.11")
@pytest.mark.parametrize(("master_kind", "replica_kind"), [("real", "ours"), ("ours", "real")])
def test_rows_join_in_any_order_and_an_applier_stops_at_a_missing_parent(
    cluster: Cluster, master_kind: str, replica_kind: str
) -> None:
    master: Member = getattr(cluster, master_kind)("master")
    run(master, *FAMILY, insert(PARENT, 1), insert(PARENT, 2), insert(CHILD, 1, 1), insert(CHILD, 2, 2))
    replica: Member = getattr(cluster, replica_kind)("replica", replication=[master.uri])
    replica.wait_writable()
    run(master, delete(CHILD, 2), delete(PARENT, 2), insert(PARENT, 3), insert(CHILD, 3, 3))
    replica.catch_up(master)
    assert replica.call("box.space.s600:get", [3]) == (3, 3)
    run(replica, delete(CHILD, 3), delete(PARENT, 3))
    run(master, insert(CHILD, 4, 3))

    def is_stopped() -> bool:
        upstream = replica.upstream(1)
        return upstream.get("status") == "stopped" and MISSING in upstream["message"]

    eventually("a missing parent stops the replica", is_stopped)
