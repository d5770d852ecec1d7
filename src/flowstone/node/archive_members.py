"""The members of a replica set that an archive may follow: which one now, and when there is nobody left to ask.

Whoever cannot be reached, has no longer what comes next, or has not come as far as we are is passed over for the next
one. That a member lacks our last rows means nothing while another one may have them, or while it may just be behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from flowstone.errors import FlowstoneError
from flowstone.iproto.uri import Uri
from flowstone.node.archive_refusals import UpstreamLostTail

LAG_SECONDS: Final = 10.0
"""How long members may take to get what we have from each other, before rows count as lost."""


class Members:
    """In the order in which they were named; `current` is followed."""

    def __init__(self, uris: Sequence[Uri]) -> None:
        self._uris = tuple(uris)
        self._number = 0
        self._answers: dict[int, tuple[FlowstoneError, bool]] = {}
        self._since = 0.0

    def __len__(self) -> int:
        return len(self._uris)

    @property
    def current(self) -> Uri:
        return self._uris[self._number]

    def accepted(self) -> None:
        """The current one is being followed: what others said is of yesterday."""
        self._answers.clear()

    def failed(self, error: FlowstoneError, now: float, *, is_final: bool) -> None:
        """The current one cannot be followed, now or, `is_final`, at all; the next one is to be asked."""
        if not self._answers:
            self._since = now
        self._answers[self._number] = error, is_final
        self._number = (self._number + 1) % len(self._uris)

    @property
    def is_round_complete(self) -> bool:
        """All have been asked, to no avail."""
        return len(self._answers) == len(self._uris)

    def verdict(self, now: float) -> FlowstoneError | None:
        """What is to be told to somebody, when no other member can help; None: go on asking."""
        final = [error for error, is_final in self._answers.values() if is_final]
        lost = [error for error in final if isinstance(error, UpstreamLostTail)]
        may_change = len(final) < len(self) or (len(self) > 1 and bool(lost))
        if not final or not self.is_round_complete or (may_change and now - self._since < LAG_SECONDS):
            return None
        # Who lacks least is nearest to having it.
        return min(lost, key=lambda error: sum(last - first + 1 for _, first, last in error.missing), default=final[0])
