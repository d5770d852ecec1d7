"""A spool: an archive that buffers rows for a reader, starts at any position, and follows any available member.

Unlike an `Archive`, a spool has several members and switches to the next one if one fails. It may start in the middle
of the log, treats missing rows as an error unless the caller allows data loss, and takes no snapshots by interval.
`spool_files.py` handles the files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Literal

from flowstone.archive.archive import RETRY_SECONDS, Archive
from flowstone.archive.archive_sink import Intake
from flowstone.archive.definitions_file import DefinitionRow, check_rows
from flowstone.archive.events import ArchiveEvent
from flowstone.archive.manifest import GAP
from flowstone.archive.refusals import RowsMissing, UpstreamLostTail, is_gap
from flowstone.archive.spool_files import WAL_MAX_SIZE, SpoolStore
from flowstone.archive.upstream_query import UpstreamFacts, ask_facts
from flowstone.client.connection import ConnectionFailed
from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from flowstone.iproto.uri import Uri
from flowstone.node.upstream.applier import Applier
from flowstone.node.upstream.members import UpstreamMembers
from flowstone.outside import Outside
from flowstone.replication.applier.states import ApplierState, ConnectionLost
from flowstone.replication.vclock import VClock
from flowstone.xlog.errors import WriteFailed

Beginning = Literal["snapshot", "latest"] | VClock
"""The start of a spool: a snapshot, the upstream's current position, or a given position."""

GATHER_SECONDS: Final = 0.02
"""Rows that arrive within this time are written and synced together: a sync costs as much as a thousand rows."""

ROUNDS_AT_START: Final = 3
"""Number of attempts with every member before the start of a new spool fails."""


class Spooling(Archive):
    """The spool in `directory`, of the replica set with `members`; `begin` is the start of a new spool.

    With `snapshot`, the spool has a snapshot once it has started. With a position, an existing spool that has this
    position continues; otherwise the spool starts again there, with `definitions` (default: the current ones of the
    server). `is_anew`: no reader relies on the existing files; with `latest`, they are deleted. `guard` is held while
    files change that an index may have read.
    """

    _store_type = SpoolStore

    def __init__(
        self,
        members: Sequence[Uri],
        directory: str,
        *,
        begin: Beginning,
        is_anew: bool = False,
        definitions: Sequence[DefinitionRow] | None = None,
        fail_on_data_loss: bool = True,
        register: bool = False,
        wal_max_size: int = WAL_MAX_SIZE,
        replication_timeout: float = 1.0,
        on_event: Callable[[ArchiveEvent], None] = lambda event: None,
        on_durable: Callable[[], None] = lambda: None,
        guard: AbstractContextManager[Any] | None = None,
        outside: Outside | None = None,
    ) -> None:
        super().__init__(
            members[0],
            directory,
            register=register,
            snapshot_interval=0,
            wal_max_size=wal_max_size,
            replication_timeout=replication_timeout,
            on_event=on_event,
            outside=outside,
        )
        self._members = UpstreamMembers(members)
        self._beginning = begin
        self._is_anew = is_anew
        self._definitions = check_rows(definitions) if definitions is not None else None
        self._fails_on_data_loss = fail_on_data_loss
        self._on_durable = on_durable
        self._guard = guard if guard is not None else nullcontext()
        self._attempts = 0
        self._is_right_place = self._is_joining = False
        self.generation = 0
        """Increases when the files no longer continue the earlier files. Readers must then open the index again."""

    @property
    def is_begun(self) -> bool:
        """True if there is a log with the requested start and, for a spool that registers, the join is complete."""
        has_log = self._store is not None and self._store.log is not None
        return has_log and self._is_right_place and (self._has_followed or not self._is_joining)

    @property
    def lag(self) -> float | None:
        """Seconds between the write of the newest row on the server and in the spool; None if unknown."""
        applier = self._applier
        is_following = self.state in (ApplierState.SYNC, ApplierState.FOLLOW)
        return applier.lag if applier is not None and is_following and applier.lag < 1e9 else None

    def _note_written(self) -> None:
        super()._note_written()
        self._on_durable()

    async def collect(self, position: VClock) -> None:
        """Delete the files that have no rows after `position`, up to which the reader has read."""
        store, intake = self._spool()
        if store.log is not None:
            await intake.alone(store.collect, position)

    # --- starting ---

    async def _begin(self, *, is_anonymous: bool) -> None:
        store, intake = self._spool()
        if is_anonymous:  # a member must acknowledge at once: commits may wait for it
            intake.gather_seconds = GATHER_SECONDS
        begin = self._beginning
        if isinstance(begin, VClock):
            # Otherwise, the spool already has the rows, from an earlier run.
            if store.log is None or not store.earliest <= begin:
                await self._begin_at(begin)
        elif begin == "latest" and (store.log is None or self._is_anew):
            await self._begin_at(None)
        elif begin == "snapshot" and store.log is not None and not store.manifest.snapshots:
            # The snapshot was deleted, so a reader cannot start with the remaining files.
            await self._begin_from_snapshot(GAP, "a new reader needs a snapshot")
        else:
            await super()._begin(is_anonymous=is_anonymous)
        self._is_joining = store.log is None
        self._is_right_place = True

    async def _begin_at(self, position: VClock | None) -> None:
        """Start the log at `position`, without a snapshot; None: at the current position of the server."""
        store, intake = self._spool()
        while True:
            facts = await self._ask()
            start = position if position is not None else facts.ballot.vclock.without_zero()
            problem = self._unfit(facts, start)
            verdict = await self._next_member(problem) if problem is not None else None
            if problem is None or isinstance(verdict, RowsMissing):
                break
            if verdict is not None:
                raise verdict
        # A member that can be followed ends the round: earlier failures of other members no longer count.
        self._members.accepted()
        definitions = self._definitions if self._definitions is not None else facts.definitions
        # The definitions are those at `start`: without a snapshot, nothing else tells which spaces exist.
        await intake.alone(store.begin_at, start, facts, definitions)
        intake.begin_anew()
        self.generation += 1
        if isinstance(verdict, RowsMissing):
            await self._pass_over(verdict)
        self._tell_opened()

    def _unfit(self, facts: UpstreamFacts, start: VClock) -> FlowstoneError | None:
        """Return the error if a member cannot be followed from `start`; None if it can."""
        here, oldest = facts.ballot.vclock.without_zero(), facts.ballot.gc_vclock.without_zero()
        if not oldest <= start:
            return RowsMissing(self._uri.address, "the server deleted these logs", start, oldest)
        return None if start <= here else UpstreamLostTail(self._uri.address, here, start)

    async def _ask(self) -> UpstreamFacts:
        known = self._spool()[0].manifest.replicaset_uuid
        while True:
            try:
                facts = await ask_facts(self._outside, self._uri)
            except FlowstoneError as error:
                lost = ConnectionLost(error.message, hint=error.hint) if isinstance(error, ConnectionFailed) else error
                await self._wait_before_retry(lost)
                continue
            if known is not None and known != facts.replicaset_uuid:
                raise self._explained(errors.ReplicasetUuidMismatch(facts.replicaset_uuid))
            return facts

    # --- members ---

    async def _next_member(self, error: FlowstoneError) -> FlowstoneError | None:
        """Switch to the next member. Return the error to report if no member can be followed."""
        self._pass_on(error, is_final=True)
        verdict = self._members.verdict(self._outside.clock.monotonic())
        if verdict is None and self._members.is_round_complete:
            await self._outside.clock.sleep(RETRY_SECONDS * self._replication_timeout)
        return verdict

    def _pass_on(self, error: FlowstoneError, *, is_final: bool) -> None:
        self._members.failed(error, self._outside.clock.monotonic(), is_final=is_final)
        self._uri = self._members.current
        if self._applier is not None:
            # Takes effect with the next attempt; the connection to the former member has ended.
            self._applier.uri = self._uri

    async def _wait_before_retry(self, error: FlowstoneError) -> None:
        if isinstance(error, WriteFailed | UpstreamLostTail):
            raise self._explained(error) from error  # the reader of the spool handles it
        await super()._wait_before_retry(error)
        self._attempts += 1
        # A wrong address at the start is reported; later, the members are retried for ever.
        if not self._has_followed and self._attempts >= ROUNDS_AT_START * len(self._members):
            raise self._explained(error)
        self._pass_on(error, is_final=False)

    def _subscribed(self, applier: Applier) -> None:
        super()._subscribed(applier)
        if self._sink is not None and self._sink.refusal is None:
            self._members.accepted()

    def _failed(self, error: FlowstoneError) -> None:
        super()._failed(error)
        if self._ended is not None and not self._ended.done():
            self._pass_on(error, is_final=False)

    async def _overcome(self, error: FlowstoneError) -> None:
        store, intake = self._spool()
        await self._drain()
        assert self._sink is not None
        self._sink.refusal = None
        # A member has acknowledged these rows, and a quorum may rely on that; an anonymous replica counts for none.
        if isinstance(error, UpstreamLostTail) and self._sink.is_anonymous and store.settled <= error.theirs:
            # No reader has seen rows that are not settled, and the new leader's log has other rows there.
            await intake.alone(self._take_back)
            intake.begin_anew()
            return
        if is_gap(error):
            ballot = self._applier.ballot if self._applier is not None else None
            oldest = ballot.gc_vclock.without_zero() if ballot is not None else None
            error = RowsMissing(self._uri.address, error.message, intake.submitted, oldest)
        verdict = await self._next_member(error)
        if isinstance(verdict, RowsMissing):
            await self._pass_over(verdict)
        elif verdict is not None:
            raise self._explained(verdict) from verdict

    def _take_back(self) -> None:
        store, _ = self._spool()
        # Readers of the index must not see files that are being truncated.
        with self._guard:
            store.take_back()
            self.generation += 1

    async def _pass_over(self, missing: RowsMissing) -> None:
        """Continue with a new snapshot after rows that no member has any more, if data loss is allowed."""
        # A new reader has missed nothing.
        if self._fails_on_data_loss and not self._is_anew:
            raise missing
        self._members.accepted()
        await self._begin_from_snapshot(GAP, missing.message)
        self._on_durable()

    def _spool(self) -> tuple[SpoolStore, Intake]:
        store, intake = self._open_store()
        assert isinstance(store, SpoolStore)
        return store, intake
