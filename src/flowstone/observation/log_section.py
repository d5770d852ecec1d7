"""Reads a section of a running server's log once: the transactions after a position.

Reads as an anonymous replica, for which the user needs the role `replication`. It acknowledges only its start position,
so it never counts for a quorum. Size and time are limited: sections serve diagnosis, not the transfer of data.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from flowstone.archive.upstream_query import UpstreamFacts, ask_facts
from flowstone.box.dialect import from_greeting
from flowstone.box.schema import Schema
from flowstone.errors import FlowstoneError
from flowstone.iproto.slab import Slab
from flowstone.iproto.uri import Uri
from flowstone.node.upstream.applier import Applier
from flowstone.observation.anonymous_sink import AnonymousSink, schema_of, version_of
from flowstone.outside import Outside
from flowstone.replication.applier.states import FAILED, ApplierState
from flowstone.replication.vclock import VClock
from flowstone.xlog.transactions import LogTransaction, group

TRANSACTIONS_MAX: Final = 1000
SECONDS_MAX: Final = 3.0


class SectionUnread(FlowstoneError):
    """The server does not send this part of its log."""


@dataclass(frozen=True)
class LogSection:
    """Transactions in log order, and the schema for their names."""

    transactions: tuple[LogTransaction, ...]
    schema: Schema
    is_whole: bool
    """True if the section reaches the requested end; False if a limit was reached first."""


async def read_section(
    outside: Outside,
    uri: Uri,
    after: VClock,
    until: VClock,
    *,
    transactions_max: int = TRANSACTIONS_MAX,
    seconds: float = SECONDS_MAX,
    name: UUID | None = None,
) -> LogSection:
    """Return the transactions of the server at `uri` after `after`, up to `until`.

    `name` is the replica UUID to read under, a random one by default. Raises SectionUnread if the server refuses.
    """
    try:
        async with asyncio.timeout(seconds):
            facts = await ask_facts(outside, uri)
    except TimeoutError as error:
        raise SectionUnread(f"{uri.address} did not report its position within {seconds:g} s") from error
    except FlowstoneError as error:
        raise SectionUnread(error.message, hint=error.hint) from error
    sink = _SectionSink(name or outside.random.uuid(), facts, after, until, transactions_max)
    if not sink.is_whole:
        await _fill(outside, uri, sink, seconds)
    return LogSection(tuple(sink.transactions), schema_of(facts).schema, sink.is_whole)


async def _fill(outside: Outside, uri: Uri, sink: _SectionSink, seconds: float) -> None:
    def state_changed(applier: Applier) -> None:
        if applier.state in FAILED:
            sink.done.set()

    applier = Applier(outside, uri, sink, on_state=state_changed)
    applier.start()
    try:
        async with asyncio.timeout(seconds):
            await applier.resume_to(ApplierState.SYNC, is_patient=False)
            applier.resume()
            await sink.done.wait()
    except TimeoutError:
        return  # the transactions received so far may be enough
    except FlowstoneError as error:
        raise SectionUnread(error.message, hint=error.hint) from error
    finally:
        await applier.stop()
    if applier.error is not None and not sink.transactions:
        raise SectionUnread(applier.error.message, hint=applier.error.hint)


class _SectionSink(AnonymousSink):
    """A `Sink` that collects transactions up to a position or a number."""

    def __init__(self, uuid: UUID, facts: UpstreamFacts, after: VClock, until: VClock, transactions_max: int) -> None:
        super().__init__(uuid)
        self.replicaset_uuid = UUID(facts.replicaset_uuid)
        self.version_id = from_greeting(version_of(facts)).version_id
        self.vclock = after.without_zero()
        self.done = asyncio.Event()
        self.transactions: list[LogTransaction] = []
        self._until = until.without_zero()
        self._reached = self.vclock
        self._transactions_max = transactions_max

    @property
    def is_whole(self) -> bool:
        return self._until <= self._reached

    async def apply(self, slab: Slab) -> None:
        room = self._transactions_max - len(self.transactions)
        come = list(group(slab.rows()))
        self.transactions += come[:room]
        if len(come) <= room:
            self._reached = self._reached.merged(VClock(slab.newest()).without_zero())
        if self.is_whole or len(come) >= room:
            self.done.set()
