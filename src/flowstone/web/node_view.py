"""A replica set from the point of view of one of its nodes, for the dashboard inside `flowstone serve`.

The node is queried in this process, so that its dashboard works without a user who may call `box.info`. Its peers are
queried through the URIs in `replication`, whose users may have fewer rights; the node's own report fills the gaps.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowstone.iproto.uri import Uri
from flowstone.node.node import Node, NotRunning
from flowstone.observation.own_report import own_report
from flowstone.observation.places import place_of
from flowstone.observation.query import Asking, ask_all
from flowstone.observation.replica_set import Member, ReplicaSet, replica_sets
from flowstone.observation.report import Report, Unreachable
from flowstone.outside import Outside


class NodeView:
    """`feed.Observed` for a node and the members at `uris`, which may include the node itself."""

    def __init__(self, outside: Outside, node: Node, uris: Sequence[Uri]) -> None:
        self._node = node
        self._askings = [Asking(outside, uri) for uri in uris]

    async def look(self) -> tuple[ReplicaSet, ...]:
        own = await self._own_report()
        answers = await ask_all(self._askings)
        others = [answer for answer in answers if own is None or not _is_about(own, answer)]
        return replica_sets([own, *others] if own is not None else others)

    async def _own_report(self) -> Report | None:
        """Return the node's report; None while it starts or stops."""
        try:
            return await own_report(self._node)
        except NotRunning:
            return None

    def asking(self, member: Member) -> Asking | None:
        places = [place_of(member.address)] if member.address is not None else []
        return next((asking for asking in self._askings if place_of(asking.uri.address) in places), None)

    async def close(self) -> None:
        for asking in self._askings:
            await asking.close()


def _is_about(own: Report, answer: Report | Unreachable) -> bool:
    """Return True if the answer came from the node itself over the network: its own report is more complete."""
    if isinstance(answer, Report):
        return answer.uuid == own.uuid
    return place_of(answer.address) == place_of(own.address)
