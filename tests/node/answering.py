"""Members in memory that follow an instance and answer when a test requests it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from uuid import UUID

from flowstone.box.engine import statements
from flowstone.box.system import CLUSTER_ID
from flowstone.iproto.msgpack import pack
from flowstone.node.instance import Instance
from flowstone.replication.vclock import VClock


class Answering:
    """`followers` of an instance in a replica set of `members`; its quorum is `N / 2 + 1`, or as given."""

    def __init__(self, instance: Instance, *, members: int, quorum: int | None = None) -> None:
        self.on_answer: list[Callable[[int, int, VClock], None]] = []
        self.numbers: dict[int, int] = {}
        """Number of the newest heartbeat, by id."""
        self._instance = instance
        for replica_id in range(2, members + 1):
            row = pack((replica_id, str(UUID(int=replica_id))))
            statements.replace(instance.box.begin(), instance.box.space(CLUSTER_ID), row)
            self.numbers[replica_id] = 7
        instance.queue.configure(quorum=quorum or members // 2 + 1)
        instance.followers = self

    def synchronize(self) -> Mapping[int, int]:
        self.numbers = {replica_id: number + 1 for replica_id, number in self.numbers.items()}
        return dict(self.numbers)

    def answer(self, replica_id: int, vclock: VClock | None = None, *, number: int | None = None) -> None:
        """Let the member acknowledge `vclock`, by default the instance's own, after the heartbeat with this number."""
        told = number if number is not None else self.numbers.get(replica_id, 1)
        for tell in list(self.on_answer):
            tell(replica_id, told, vclock if vclock is not None else self._instance.vclock)
