"""The errors that an archive retries: temporary errors, and errors that an operator can fix while the archive runs.

These are an upstream that cannot write its own log, a disk that refuses a snapshot, the manifest or the index, and an
upstream that is still catching up with the archive. A snapshot and the manifest are replaced as a whole, so a failed
write leaves nothing unfinished; readers ignore an index from its first damaged line on.
`replication/applier/states.py` classifies errors of connections; `refusals.py` explains errors to operators.
"""

from __future__ import annotations

from typing import Final

from flowstone.archive.refusals import FOR_OPERATORS, UpstreamLostTail
from flowstone.archive.upstream_query import ask_id
from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from flowstone.iproto.uri import Uri
from flowstone.outside import Outside
from flowstone.replication.applier.states import ApplierState, code_of, reaction
from flowstone.replication.vclock import VClock
from flowstone.xlog.errors import WriteFailed

CATCH_UP_SECONDS: Final = 60.0
"""Time in which an upstream that lacks rows of the archive must receive some of them; after that they count as lost.
Longer than a member needs to detect the loss of a peer and to connect to another one."""

CATCH_UP_RETRIES: Final = 5
"""Retry intervals between two attempts to follow an upstream that is catching up: each failed one is logged."""

PASSING: Final = frozenset(
    {errors.WalIo.code, errors.CascadeRollback.code, errors.WalQueueFull.code, errors.MemoryIssue.code}
)
"""Errors of the upstream about its own resources; it may accept the same request later."""


class Patience:
    """Decides whether an archive tries again after an error. Tracks the progress of a lagging upstream."""

    def __init__(self, outside: Outside) -> None:
        self._outside = outside
        self._theirs: VClock | None = None
        self._since = 0.0

    def reset(self) -> None:
        """Record that the upstream has all rows of the archive."""
        self._theirs = None

    def intervals(self, error: FlowstoneError) -> int:
        """Return how many retry intervals to wait before the next attempt."""
        return CATCH_UP_RETRIES if isinstance(error, UpstreamLostTail) else 1

    async def outlasts(self, error: FlowstoneError, uri: Uri, *, has_begun: bool, is_once: bool) -> bool:
        """Return whether to try again.

        `has_begun`: there is a log to continue. Before that, an error that an operator has to fix ends the archive at
        once, because the operator has just started it; the same holds if the archive is to run once (`is_once`).
        """
        after = reaction(error, is_2_6=False)
        # The applier would retry; an archive tells an operator when only an operator can help.
        if after is ApplierState.LOADING:
            return code_of(error) not in FOR_OPERATORS
        if is_once:
            return False
        if isinstance(error, WriteFailed):
            return has_begun
        if isinstance(error, UpstreamLostTail):
            return self._is_in_time(error) and not await self._has_lost_its_own(error, uri)
        return after is ApplierState.DISCONNECTED or code_of(error) in PASSING

    def _is_in_time(self, error: UpstreamLostTail) -> bool:
        now = self._outside.clock.monotonic()
        missing = [number for number, _, _ in error.missing]
        before = self._theirs
        # Any progress restarts the time limit: a lagging member may have a long way to catch up.
        if before is None or any(error.theirs.get(number) > before.get(number) for number in missing):
            self._theirs, self._since = error.theirs, now
        return now - self._since < CATCH_UP_SECONDS

    async def _has_lost_its_own(self, error: UpstreamLostTail, uri: Uri) -> bool:
        """Return whether rows are missing that the upstream wrote itself.

        The upstream assigns their LSNs to new rows; once it has written as many, the loss can no longer be detected.
        """
        try:
            own_id = await ask_id(self._outside, uri)
        except FlowstoneError:
            return False  # the next attempt asks again
        return any(number == own_id for number, _, _ in error.missing)
