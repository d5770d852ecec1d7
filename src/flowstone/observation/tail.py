"""The live tail of a replica set's log: the rows written now, from any member that can be followed.

Follows as an anonymous replica from shortly before the server's position, without a snapshot. Names come from the
server's definitions and from the rows that change them. When a member is lost, the tail continues at another one.
`tail_sink.py` processes the rows. The user needs the role `replication`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Final
from uuid import UUID

from flowstone.archive.upstream_query import NotBooted, UpstreamFacts, ask_facts
from flowstone.client import rights
from flowstone.client.connection import ConnectionFailed
from flowstone.errors import FlowstoneError
from flowstone.iproto.errors import AccessDenied, CredsMismatch, Loading, NoSuchUser
from flowstone.iproto.uri import Uri
from flowstone.node.upstream.applier import Applier
from flowstone.observation.anonymous_sink import schema_of, version_of
from flowstone.observation.live_transaction import LiveTransaction
from flowstone.observation.query import Asking
from flowstone.observation.report import Unreachable, printable
from flowstone.observation.tail_sink import TailSink, TooMuchWaits
from flowstone.outside import Outside
from flowstone.replication.applier.states import FAILED, ApplierState, ConnectionLost
from flowstone.replication.vclock import VClock

LOG = logging.getLogger("flowstone.observation")

ASK_SECONDS: Final = 5.0
"""Timeout of the query for a server's position; after it, the next member is tried."""

PAUSE_SECONDS: Final = 1.0
PAUSE_SECONDS_MAX: Final = 10.0
"""Pause after a round in which no member could be followed; it doubles up to the maximum."""

ACKS_ARE_HARMLESS: Final = (2, 10, 0)
"""From this version on, anonymous replicas never count for a quorum."""

ROWS_BEFORE: Final = 1000
"""Number of older rows of the writer that are read, so that transactions already pending are seen."""

NOBODY: Final = "no log to follow: no member answers, or no URI has a user"

_REFUSALS: Final = (AccessDenied, NoSuchUser, CredsMismatch)
_PASSING: Final = (*_REFUSALS, ConnectionLost, ConnectionFailed, Loading, NotBooted)
"""Errors after which the position is still valid."""


class TailStatus(StrEnum):
    """`off`: not started; `following`: connected; `refused`: access denied; `lost`: no member can be followed."""

    OFF = "off"
    FOLLOWING = "following"
    REFUSED = "refused"
    LOST = "lost"


class LiveTail:
    """Follows a log from `start` to `stop`. `members` returns the members to try, best first, before each round."""

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
        """The member that is followed, or was followed last."""
        self.message: str | None = None
        """Why no member is followed, and what to do about it."""

    def start(self) -> None:
        assert self._task is None, "already started"
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self.status = TailStatus.OFF

    def move(self) -> None:
        """Disconnect from the current member and try `members` again: another one has rows that this one lacks."""
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
        """Follow the member at `uri` until the connection fails, and record why."""
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
                await self._follow(uri)  # the first connection only determined the position
        except TimeoutError:
            self._fail(uri, ConnectionLost(f"{uri.address} did not report its position within {ASK_SECONDS:g} s"))
        except FlowstoneError as error:
            self._fail(uri, error)
        except Exception as error:
            LOG.exception("live tail of %s failed", uri.address)
            self._fail(uri, FlowstoneError(f"{type(error).__name__}: {error}"))

    async def _rewound(self, uri: Uri, facts: UpstreamFacts) -> VClock:
        """Return a position ROWS_BEFORE rows before the server's, so that transactions already pending are seen.

        These are rows of the owner of the queue, or of the server itself, as `box.info` reports. If the user may not
        query it, or our acknowledgements would count for a quorum, return the server's position.
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
        """Choose the start position; return False if the server must first send one at which nothing is pending."""
        schema, sink = schema_of(facts), self.sink
        theirs = facts.ballot.vclock.without_zero()
        if sink.has_position and not sink.vclock <= theirs:
            sink.forget_position()  # it has fewer rows than we saw: it may assign their LSNs to other rows
        version = version_of(facts)
        sink.meet(UUID(facts.replicaset_uuid), version, schema)
        if not sink.has_position and (version >= ACKS_ARE_HARMLESS or not schema.schema.synchronous):
            sink.start_at(rewound, live_from=theirs)
        return sink.has_position

    async def _follow(self, uri: Uri) -> None:
        """Run until the connection fails; always raises."""
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
            raise applier.error or ConnectionLost(f"switching from {uri.address} to another member")
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
            self.sink.pass_gap()  # the server no longer has the next rows


def _hint(uri: Uri, error: FlowstoneError) -> str | None:
    if isinstance(error, AccessDenied):
        return rights.to_replicate(uri.user)
    return "check user and password in the URI" if isinstance(error, _REFUSALS) else error.hint
