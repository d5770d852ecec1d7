"""Who has owned the synchronous queue, and what is left of it: terms, LSNs that stand, and LSNs that are void.

A log of Tarantool is never cut back, so a PROMOTE that nobody had read when the next leader was elected stays where it
was written. Two questions decide whether such histories can still become one: has anything become a fact that the
other side cannot know (`former`), and does the originator of a late transaction keep it or not (`keeps`)?
Servers 2.11 and 3.8 do not ask: they call the first a split brain in any case, and part silently in the second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Owner = tuple[int, int]
"""An owner of the queue, and the LSN up to which its transactions stand; (0, 0) while nobody owns it."""


class Tenures:
    """What one instance knows. A tenure begins with a PROMOTE (or DEMOTE: nobody's) and ends with the next one."""

    def __init__(self, promote_terms: Mapping[int, int], former: Sequence[Owner], voids: Mapping[int, int]) -> None:
        self.promote_terms = dict(promote_terms)
        """Per instance, the newest term of a PROMOTE or DEMOTE that it wrote."""
        self._former = list(former)
        self._voids = dict(voids)

    @property
    def former(self) -> tuple[Owner, ...]:
        """Owners before the present one, since when nothing has become a fact: a leader that was elected without
        having read what came after one of them has missed nothing, and may take over from there."""
        return tuple(self._former)

    @property
    def voids(self) -> dict[int, int]:
        """Per former owner, its first synchronous LSN that was rolled back, where one was. The caller's own."""
        return dict(self._voids)

    def made_fact(self) -> None:
        """The present owner has made something a fact: nobody may ignore its tenure from now on."""
        self._former.clear()

    def hand_over(self, owner: Owner, *, by: int, term: int, first_void: int) -> None:
        """`by` has taken the queue over, or given it to nobody; `first_void` is 0 where nothing was rolled back."""
        self._former.append(owner)
        self.promote_terms[by] = term
        self._voids.pop(owner[0], None)
        if first_void:
            self._voids[owner[0]] = first_void

    def overtake(self, base: Owner, owner: Owner) -> None:
        """A transfer from `base` to `owner` has come too late. If it turns out that ours was too early, it counts."""
        if base in self._former:
            self._former.append(owner)

    def note_void(self, origin_id: int, lsn: int) -> None:
        """A synchronous transaction of a former owner has come too late."""
        self._voids.setdefault(origin_id, lsn)

    def keeps(self, origin_id: int) -> bool:
        """Whether a former owner keeps an asynchronous transaction that comes behind all that stands of it.

        It does if that waited behind one that stands, and not behind one that is void.
        """
        return origin_id not in self._voids
