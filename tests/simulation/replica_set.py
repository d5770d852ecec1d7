"""The replica set of a run: formation, inspection, and an operator that keeps it running.

Members are unmodified nodes on simulated machines, and they may change. Frequent queries (`ready`, `leader`) read the
memory of nodes, because `info()` would take most of the time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from flowstone.errors import FlowstoneError
from tests import served_node
from tests.simulation.cluster import all_follow_all, converge
from tests.simulation.disk import ROOM
from tests.simulation.plan import Plan
from tests.simulation.simulation import BLOCKING_SECONDS, Crashed, Simulation

NAMES: Final = "abcdefg"
ANONYMOUS_NAMES: Final = "xyz"

START_ATTEMPTS_MAX: Final = 40
RETRY_SECONDS: Final = (0.2, 2.0)

POLL_SECONDS: Final = 0.1

PROMOTE_SECONDS: Final = 10.0
"""How long an operator waits for a promotion before trying another member, not counting its wait for the queue."""

CONNECT_SECONDS: Final = 3.0
"""How long a starting node waits for peers and for sync; the defaults suit people."""


@dataclass(frozen=True)
class Space:
    """A space used by the clients of a run."""

    id: int
    name: str
    fields: tuple[tuple[str, str], ...]
    is_sync: bool
    by_second: bool = False
    """True if there is a unique index of the second field, too."""


SPACES: Final = {
    space.name: space
    for space in (
        Space(512, "register", (("key", "unsigned"), ("value", "unsigned")), is_sync=True, by_second=True),
        Space(513, "append", (("key", "unsigned"), ("values", "array")), is_sync=True),
        Space(514, "set", (("key", "unsigned"), ("process", "unsigned")), is_sync=True),
        Space(515, "bank", (("account", "unsigned"), ("balance", "integer")), is_sync=True),
        Space(517, "savings", (("account", "unsigned"), ("balance", "integer")), is_sync=True),
        Space(516, "notes", (("key", "unsigned"), ("text", "string")), is_sync=False),
    )
}
"""By name; the names are those of workloads. A bank has two spaces."""


class ReplicaSet:
    """Call `form()` first. `members` are the voting members, oldest first; `anonymous` are anonymous replicas."""

    def __init__(self, sim: Simulation, plan: Plan) -> None:
        self.sim = sim
        self.plan = plan
        self.members: list[str] = list(NAMES[: plan.size])
        self.anonymous: list[str] = list(ANONYMOUS_NAMES[: plan.anonymous])
        self.departed: list[str] = []
        """Expelled members; their directories are left unchanged, and some of them still run."""
        self.configured: list[str] = []
        """Expelled members that are still listed in `replication`."""
        self.violations: list[str] = []
        """Starts and stops that failed although the disk was healthy."""
        self._random = Random(f"{sim.seed}/replica set")
        self._joined_count = 0
        self._operating: asyncio.Task[None] | None = None

    # --- members ---

    @property
    def names(self) -> list[str]:
        """All nodes, voting or anonymous."""
        return [*self.members, *self.anonymous]

    @property
    def majority(self) -> int:
        return len(self.members) // 2 + 1

    def ready(self) -> list[str]:
        """Members that have completed their start."""
        return [name for name in self.members if self.sim.is_ready(name)]

    def leader(self) -> str | None:
        """The member that a client would write to."""
        possible = self.members if self.plan.has_elections else self.members[:1]
        leading = [(term, name) for name in possible if (term := self._term_led(name)) is not None]
        return max(leading)[1] if leading else None

    def leads(self, name: str) -> bool:
        """Return True if this node, a present or former member, accepts writes."""
        return self._term_led(name) is not None

    def deposed(self) -> list[str]:
        """Return the members that accept writes although another one leads in a newer term."""
        leader = self.leader() if self.plan.has_elections else None
        if leader is None:
            return []
        return [name for name in self.members if name != leader and self._term_led(name) is not None]

    def _term_led(self, name: str) -> int | None:
        """Return the term in which this member accepts synchronous transactions now; 0 without terms."""
        if not self.sim.is_ready(name):
            return None
        instance = self.sim.node(name)._instance
        if instance.is_read_only:
            return None
        if self.plan.dialect == "2.6":
            return 0
        return instance.queue.limbo.term if instance.queue.limbo.is_owner else None

    async def until(
        self, condition: Callable[[], object], *, seconds: float = 60.0, what: str = "", every: float = POLL_SECONDS
    ) -> None:
        """As `Simulation.until`, for conditions that are too slow to be evaluated at every step."""
        deadline = self.sim.now + seconds
        while not condition():
            if self.sim.now >= deadline:
                raise TimeoutError(f"not within {seconds:g} s: {what}")
            await self.sim.sleep(every)

    # --- the beginning ---

    async def form(self) -> None:
        """Start all nodes and create the spaces of all workloads; return when all nodes have them."""
        sim = self.sim
        await asyncio.gather(*(sim.start(name, **self.options(name)) for name in self.members))
        await self.until(lambda: all_follow_all(sim, self.members), what="all members follow each other")
        self._operating = asyncio.ensure_future(self._operate())
        await self.until(self.leader, what="a leader exists")
        leader = self.leader()
        assert leader is not None
        for space in SPACES.values():
            await self._make_space(leader, space)
        await asyncio.gather(*(sim.start(name, **self.options(name)) for name in self.anonymous))
        await converge(sim, self.names)

    async def _make_space(self, leader: str, space: Space) -> None:
        client = await self.sim.client(leader)
        options = {"is_sync": True} if space.is_sync else {}
        indexes = [("pk", True, [(0, space.fields[0][1])])]
        if space.by_second:
            indexes.append(("second", True, [(1, space.fields[1][1])]))
        await served_node.create_space(client, space.id, space.name, space.fields, *indexes, options=options)
        await client.close()

    def options(self, name: str) -> dict[str, Any]:
        """Return the initial options of a node of the set."""
        plan = self.plan
        options: dict[str, Any] = {
            "dialect": plan.dialect,
            "replication": [self.sim.uri(name) for name in self.members],
            "wal_mode": plan.wal_mode,
            "wal_max_size": plan.wal_max_size,
            "checkpoint_interval": plan.checkpoint_interval,
            "replication_timeout": plan.replication_timeout,
            "replication_synchro_timeout": plan.synchro_timeout,
            "replication_connect_timeout": CONNECT_SECONDS,
            "replication_sync_timeout": CONNECT_SECONDS,
        }
        if name in ANONYMOUS_NAMES:
            options |= {"replication_anon": True, "read_only": True}
        return options | (self._options_2_6(name) if plan.dialect == "2.6" else self._options_2_11(name))

    def _options_2_6(self, name: str) -> dict[str, Any]:
        options: dict[str, Any] = {
            "replication_synchro_quorum": self.majority,
            "replication_connect_quorum": self.majority,
        }
        if not self.plan.has_masters and name != self.members[0]:
            # While the queue has entries, rows of other originators are rejected, such as one that registers a member.
            options["read_only"] = True
        return options

    def _options_2_11(self, name: str) -> dict[str, Any]:
        options: dict[str, Any] = {"election_timeout": self.plan.election_timeout}
        if name not in ANONYMOUS_NAMES:
            is_voter = self.plan.has_voter and name == NAMES[self.plan.size - 1]
            mode = "voter" if is_voter else self.plan.election_mode
            options |= {"election_mode": mode, "election_fencing_mode": self.plan.fencing_mode}
        return options

    # --- actions of the operator ---

    async def _operate(self) -> None:
        """Promote a member whenever there is no leader, if members do not elect one themselves."""
        if self.plan.dialect == "2.6" or self.plan.election_mode == "candidate":
            return
        while True:
            if self.leader() is None:
                possible = self.ready() if self.plan.has_elections else self.members[:1]
                await self._promote(self._random.choice(possible or self.members))
            await self.sim.sleep(self._random.uniform(*RETRY_SECONDS))

    async def _promote(self, name: str) -> None:
        if self.sim.is_ready(name):
            with suppress(FlowstoneError, Crashed, TimeoutError):
                async with asyncio.timeout(PROMOTE_SECONDS + 3 * self.plan.synchro_timeout):
                    await self.sim.on(name, self.sim.node(name).promote())

    async def restart(self, name: str) -> bool:
        """Start a node that is down, and retry if it gives up. Return False if it dies again or never starts."""
        for _ in range(START_ATTEMPTS_MAX):
            if name not in self.names:  # it was expelled while it was down
                return False
            if self.sim.is_running(name):
                return True
            failure_count = self.sim.storage(name).failure_count
            try:
                await self.sim.restart(name)
                return True
            except Crashed:
                return False
            except (FlowstoneError, OSError) as error:
                self.judge(name, f"does not start: {error}", failure_count)
            await self.sim.sleep(self._random.uniform(*RETRY_SECONDS))
        return False

    def judge(self, name: str, what: str, failure_count: int) -> None:
        """Check a failed start or stop of a node.

        It is allowed if its disk is rotten, or has failed more than `failure_count` times.
        """
        self.sim.trace.note(name, what)
        storage = self.sim.storage(name)
        if storage.failure_count == failure_count and not storage.is_rotten:
            self.violations.append(f"{name} {what}; nothing is wrong with its disk")

    def new_name(self) -> str:
        """Return a name for a new machine."""
        self._joined_count += 1
        return f"n{self._joined_count}"

    # --- the end of all faults ---

    async def heal(self) -> None:
        """Heal all links, disks, clocks and machines, and start all nodes."""
        self.sim.heal()
        for name in self.names:
            machine = self.sim.machine(name)
            machine.storage.broken.clear()
            machine.storage.room = ROOM
            machine.storage.spare()
            self.sim.thaw(name)
            machine.wall_skew = 0.0
            machine.blocking_seconds = BLOCKING_SECONDS
        await asyncio.gather(*(self.restart(name) for name in self.names))

    def rest(self) -> None:
        """Stop promoting members."""
        if self._operating is not None:
            self._operating.cancel()
