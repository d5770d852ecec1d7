"""The choice of the member that a spool or a replica follows, and the error when no member can be followed.

A member that is unreachable, no longer has the next rows, or does not have our last rows is skipped for the next one.
A member without our last rows may only be lagging, so this is an error only after LAG_SECONDS.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from flowstone.errors import FlowstoneError
from flowstone.iproto.uri import Uri

LAG_SECONDS: Final = 10.0
"""Time for members to receive our rows from each other; after that the rows count as lost."""


class MemberLacksRows(FlowstoneError):
    """A member lacks rows that we have. `missing` lists them: replica id, first and last LSN."""

    missing: tuple[tuple[int, int, int], ...] = ()


class UpstreamMembers:
    """The members, in the order given. `current` is the one to follow."""

    def __init__(self, uris: Sequence[Uri]) -> None:
        self._uris = tuple(uris)
        self._number = 0
        self._answers: dict[int, tuple[FlowstoneError, bool]] = {}
        self._since = 0.0

    def __len__(self) -> int:
        return len(self._uris)

    def __iter__(self) -> Iterator[Uri]:
        return iter(self._uris)

    @property
    def current(self) -> Uri:
        return self._uris[self._number]

    def accepted(self) -> None:
        """Record that the current member is being followed, and forget earlier errors."""
        self._answers.clear()

    def failed(self, error: FlowstoneError, now: float, *, is_final: bool) -> None:
        """Record the error of the current member and select the next one. `is_final`: a retry cannot help."""
        if not self._answers:
            self._since = now
        self._answers[self._number] = error, is_final
        self._number = (self._number + 1) % len(self._uris)

    @property
    def is_round_complete(self) -> bool:
        """True if every member has failed since the last success."""
        return len(self._answers) == len(self._uris)

    @property
    def have_all_refused(self) -> bool:
        """True if a retry can help with no member: each has failed since the last success, with a final error."""
        return self.is_round_complete and all(is_final for _, is_final in self._answers.values())

    @property
    def errors(self) -> list[FlowstoneError]:
        """The last error of each member that has failed since the last success."""
        return [error for error, _ in self._answers.values()]

    def verdict(self, now: float) -> FlowstoneError | None:
        """Return the error to report if no member can be followed; None if another attempt may succeed."""
        final = [error for error, is_final in self._answers.values() if is_final]
        lost = [error for error in final if isinstance(error, MemberLacksRows)]
        may_change = len(final) < len(self) or (len(self) > 1 and bool(lost))
        if not final or not self.is_round_complete or (may_change and now - self._since < LAG_SECONDS):
            return None
        # Report the member that lacks the fewest rows.
        return min(lost, key=lambda error: sum(last - first + 1 for _, first, last in error.missing), default=final[0])
