"""The live tail of a replica set's log: what is being written now, from whichever member can be followed.

Follows as an anonymous replica from about where the server is, without a snapshot; names come from the server's
definitions and from the rows that change them. When a member is gone, another one is asked to go on from there.
`tail_sink.py` is what becomes of the rows. The user needs the role `replication`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Final
from uuid import UUID

from flowstone.errors import FlowstoneError
from flowstone.iproto.errors import AccessDenied, CredsMismatch, Loading, NoSuchUser
from flowstone.iproto.uri import Uri
from flowstone.node import rights
from flowstone.node.applier import Applier
from flowstone.node.archive_upstream import NotBooted, UpstreamFacts, ask_facts
from flowstone.node.connection import ConnectionFailed
from flowstone.observation.anonymous_sink import schema_of, version_of
from flowstone.observation.asking import Asking
from flowstone.observation.live_transaction import LiveTransaction
from flowstone.observation.report import Unreachable, printable
from flowstone.observation.tail_sink import TailSink, TooMuchWaits
from flowstone.outside import Outside
from flowstone.replication.applier import FAILED, ApplierState, ConnectionLost
from flowstone.replication.vclock import VClock

LOG = logging.getLogger("flowstone.observation")

ASK_SECONDS: Final = 5.0
"""A server that needs longer to say where it is, is left for another one."""

PAUSE_SECONDS: Final = 1.0
PAUSE_SECONDS_MAX: Final = 10.0
"""Between two rounds in which no member could be followed; each is twice as long as the one before."""

ACKS_ARE_HARMLESS: Final = (2, 10, 0)
"""From this version on anonymous replicas never count for a quorum."""

ROWS_BEFORE: Final = 1000
"""Rows that are read again of who writes, so that what waits for a quorum already is seen."""

NOBODY: Final = "no member's log can be followed: none answers, or none is named with a user"

_REFUSALS: Final = (AccessDenied, NoSuchUser, CredsMismatch)
_PASSING: Final = (*_REFUSALS, ConnectionLost, ConnectionFailed, Loading, NotBooted)
"""Errors after which the same position can still be asked for."""


class TailStatus(StrEnum):
    """How it goes: nobody is followed yet, somebody is, nobody lets us, nobody can be reached."""

    OFF = "off"
    FOLLOWING = "following"
    REFUSED = "refused"
    LOST = "lost"


class Tail:
    """Runs from `start` to `stop`. `members` says whom to follow, best first, each time somebody is looked for."""

    def __init__(
        self,
        outside: Outside,
        members: Callable[[], Sequence[Uri]],
        *,
        on_shown: Callable[[LiveTransaction], None] = lambda transaction: None,
        on_leader: Callable[[int, int, float], None] = lambda term, replica_id, at: None,
        replication_timeout: float = 1.0,
    ) -> None:
        self._outside = outside
        self._members = members
        self._replication_timeout = replication_timeout
        self._task: asyncio.Task[None] | None = None
        self._is_over = asyncio.Event()
        self._pause = PAUSE_SECONDS
        self.sink = TailSink(outside.clock, outside.random.uuid(), on_shown=on_shown, on_leader=on_leader)
        self.status = TailStatus.OFF
        self.followed: Uri | None = None
        """Whom it follows, or followed last."""
        self.message: str | None = None
        """Why nobody is followed, and what to do about it."""

    def start(self) -> None:
        assert self._task is None, "it runs already"
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self.status = TailStatus.OFF

    def move(self) -> None:
        """Leaves who is followed now, and asks `members` anew: another one has what this one does not get."""
        self._is_over.set()

    async def _run(self) -> None:
        while True:
            members = self._members()
            if not members:
                self.message = NOBODY
            for uri in members:
                await self._try(uri)
            await self._outside.clock.sleep(self._pause)
            self._pause = min(2 * self._pause, PAUSE_SECONDS_MAX)

    async def _try(self, uri: Uri) -> None:
        """Follows `uri` for as long as that goes, and says why no longer."""
        try:
            async with asyncio.timeout(ASK_SECONDS):
                facts = await ask_facts(self._outside, uri)
                rewound = await self._rewound(uri, facts)
            had_position = self._prepare(facts, rewound)
            try:
                await self._follow(uri)
            except FlowstoneError:
                if had_position or not self.sink.has_position:
                    raise
                await self._follow(uri)  # the first connection was for the position
        except TimeoutError:
            self._fail(uri, ConnectionLost(f"{uri.address} did not say where it is within {ASK_SECONDS:g} s"))
        except FlowstoneError as error:
            self._fail(uri, error)
        except Exception as error:
            LOG.exception("the tail of %s", uri.address)
            self._fail(uri, FlowstoneError(f"{type(error).__name__}: {error}"))

    async def _rewound(self, uri: Uri, facts: UpstreamFacts) -> VClock:
        """A position some rows before where the server is: of those that wait there some may be older than we are.

        Whose rows, only `box.info` tells: of who owns the queue, or of the server itself. Where a user may not ask, or
        our acknowledgements would count, it is where the server is.
        """
        theirs = facts.ballot.vclock.without_zero()
        if self.sink.has_position or version_of(facts) < ACKS_ARE_HARMLESS:
            return theirs
        asking = Asking(self._outside, uri)
        try:
            report = await asking.ask()
        finally:
            await asking.close()
        if isinstance(report, Unreachable):
            return theirs
        origin = report.queue.owner if report.queue is not None and report.queue.owner else report.id
        lsns = theirs.to_mapping()
        return VClock(lsns | {origin: max(0, lsns.get(origin, 0) - ROWS_BEFORE)})

    def _prepare(self, facts: UpstreamFacts, rewound: VClock) -> bool:
        """Finds out where to begin; False: the server has to be asked for a position at which nothing waits."""
        schema, sink = schema_of(facts), self.sink
        theirs = facts.ballot.vclock.without_zero()
        if sink.has_position and not sink.vclock <= theirs:
            sink.forget_position()  # it has less than we had: it would give the same numbers to other rows
        version = version_of(facts)
        sink.meet(UUID(facts.replicaset_uuid), version, schema)
        if not sink.has_position and (version >= ACKS_ARE_HARMLESS or not schema.schema.synchronous):
            sink.start_at(rewound, live_from=theirs)
        return sink.has_position

    async def _follow(self, uri: Uri) -> None:
        """Returns never, but for an error of the connection."""
        self._is_over.clear()
        applier = Applier(
            self._outside,
            uri,
            self.sink,
            replication_timeout=self._replication_timeout,
            on_state=self._state_changed,
        )
        applier.start()
        try:
            await applier.resume_to(ApplierState.SYNC, is_patient=False)
            self.status, self.followed, self.message = TailStatus.FOLLOWING, uri, None
            self._pause = PAUSE_SECONDS
            applier.resume()
            await self._is_over.wait()
            raise applier.error or ConnectionLost(f"{uri.address} is left for another member")
        finally:
            await applier.stop()

    def _state_changed(self, applier: Applier) -> None:
        if applier.state in FAILED:
            self._is_over.set()

    def _fail(self, uri: Uri, error: FlowstoneError) -> None:
        is_refused = isinstance(error, _REFUSALS)
        if self.status is not TailStatus.REFUSED or is_refused:
            self.status = TailStatus.REFUSED if is_refused else TailStatus.LOST
        hint = _hint(uri, error)
        self.message = printable(f"{error.message}; {hint}" if hint else error.message)
        if isinstance(error, TooMuchWaits):
            self.sink.forget_position()
        elif not isinstance(error, _PASSING):
            self.sink.pass_gap()  # it has no more what comes next


def _hint(uri: Uri, error: FlowstoneError) -> str | None:
    if isinstance(error, AccessDenied):
        return rights.to_replicate(uri.user)
    return "check user and password of the URI" if isinstance(error, _REFUSALS) else error.hint
