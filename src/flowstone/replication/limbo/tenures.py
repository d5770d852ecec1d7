"""Tenures: the former owners of the synchronous queue, their terms, and their committed and void transactions.

A Tarantool log is never truncated, so a PROMOTE that no other member had read when the next leader was elected stays in
the log of its author. Two questions decide whether such histories can be merged: was anything committed that the other
side does not know (`former`), and does the originator of a late transaction keep it (`keeps`)? 2.11 and 3.8 do not ask:
they treat the first case as a split brain always, and let the data diverge without an error in the second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Owner = tuple[int, int]
"""An owner of the queue, and the LSN up to which its transactions are committed; (0, 0) if there was no owner."""


class Tenures:
    """The tenures known to one instance.

    A tenure starts with a PROMOTE, or with a DEMOTE, which leaves no owner, and ends with the next of these rows.
    """

    def __init__(self, promote_terms: Mapping[int, int], former: Sequence[Owner], voids: Mapping[int, int]) -> None:
        self.promote_terms = dict(promote_terms)
        """Per instance, the newest term of a PROMOTE or DEMOTE that it wrote."""
        self._former = list(former)
        self._voids = dict(voids)

    @property
    def former(self) -> tuple[Owner, ...]:
        """The owners before the present one after which nothing was committed. A leader elected without knowing the
        tenures after one of them has missed nothing, and may take over from there."""
        return tuple(self._former)

    @property
    def voids(self) -> dict[int, int]:
        """Per former owner, its first synchronous LSN that was rolled back, if any. The dict is a copy."""
        return dict(self._voids)

    def note_async_commit(self) -> None:
        """Record a commit in the present tenure: it can no longer be ignored."""
        self._former.clear()

    def hand_over(self, owner: Owner, *, by: int, term: int, first_void: int) -> None:
        """End the tenure of `owner`: `by` wrote PROMOTE or DEMOTE in `term`.

        `first_void` is the first LSN of `owner` that was rolled back; 0 if there is none.
        """
        self._former.append(owner)
        self.promote_terms[by] = term
        # Per tenure: what was void in an earlier one is decided, and its LSNs are below the new ones.
        self._voids.pop(owner[0], None)
        if first_void:
            self._voids[owner[0]] = first_void

    def overtake(self, base: Owner, owner: Owner) -> None:
        """Record a late transfer from `base` to `owner`, from which a later leader may take over as well."""
        if base in self._former:
            self._former.append(owner)

    def note_void(self, origin_id: int, lsn: int) -> None:
        """Record a late synchronous transaction of a former owner, which is void."""
        # The first one counts: everything after it is void as well.
        self._voids.setdefault(origin_id, lsn)

    def keeps(self, origin_id: int) -> bool:
        """Return True if a former owner keeps an asynchronous transaction after its last committed one.

        It keeps the transaction unless one of its synchronous transactions is void.
        """
        return origin_id not in self._voids
