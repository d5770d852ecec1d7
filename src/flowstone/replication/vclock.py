"""Vector clocks: positions in the logs of all members of a replica set.

`VClock` is immutable, and may be shared and used as a key. `VClockBuilder` has one user, advances in place and returns
`VClock`s. Both classes omit zero LSNs. Component 0 counts the local rows of one instance: peers omit it, so comparisons
between instances use `ignore_zero=True`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum

from flowstone.errors import FlowstoneError
from flowstone.iproto.constants import VCLOCK_MAX
from flowstone.xlog.meta import LSN_MAX, format_vclock, parse_vclock


class VClockError(FlowstoneError):
    """A value is not a vclock, or a component would move backwards."""


class Order(Enum):
    """The order of one vclock relative to another."""

    BEFORE = "before"
    EQUAL = "equal"
    AFTER = "after"
    INCOMPARABLE = "incomparable"


class VClock:
    """A position: replica id → LSN. Immutable; a partial order under `<=`.

    Args:
        lsns: The components, in any order. Zeros are dropped.

    Raises:
        VClockError: An id or LSN is out of range.

    Example:
        position = flowstone.VClock({1: 500, 2: 7})
        print(position.get(1), position <= flowstone.VClock({1: 501, 2: 7}), position.to_mapping())
    """

    __slots__ = ("_lsns",)
    _lsns: dict[int, int]

    def __init__(self, lsns: Mapping[int, int] | None = None) -> None:
        checked: dict[int, int] = {}
        for replica_id, lsn in sorted((lsns or {}).items()):
            _check(replica_id, lsn)
            if lsn:
                checked[replica_id] = lsn
        self._lsns = checked

    @classmethod
    def _trusted(cls, lsns: dict[int, int]) -> VClock:
        """Take ownership of `lsns`, which must be sorted, checked and without zeros."""
        vclock = cls.__new__(cls)
        vclock._lsns = lsns
        return vclock

    @classmethod
    def parse(cls, text: str) -> VClock:
        """Parse a vclock written as `{1: 10, 2: 3}`, the form in file headers.

        Raises:
            VClockError: The text is not a vclock.
        """
        try:
            return cls._trusted(parse_vclock(text))
        except ValueError as error:
            raise VClockError(str(error), hint="write it as {1: 10, 2: 3}") from None

    def get(self, replica_id: int) -> int:
        """Return the LSN of `replica_id`; 0 if it has none."""
        return self._lsns.get(replica_id, 0)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Iterate over the components in the order of their ids."""
        return iter(self._lsns.items())

    def __len__(self) -> int:
        """Return the number of components that are not zero."""
        return len(self._lsns)

    def __bool__(self) -> bool:
        """Return False for `{}`, the position before all rows."""
        return bool(self._lsns)

    def to_mapping(self) -> dict[int, int]:
        """Return a copy as a dict, in the order of ids."""
        return dict(self._lsns)

    @property
    def signature(self) -> int:
        """The sum of all components, including component 0: the number in a file name."""
        return sum(self._lsns.values())

    def without_zero(self) -> VClock:
        """Return this position as other instances see it: without the local component."""
        if 0 not in self._lsns:
            return self
        return VClock._trusted({replica_id: lsn for replica_id, lsn in self._lsns.items() if replica_id})

    def advanced(self, replica_id: int, lsn: int) -> VClock:
        """Return the position that follows this one by row `lsn` of `replica_id`.

        Raises:
            VClockError: The position is already at or after that row.
        """
        _check_follows(replica_id, self._lsns.get(replica_id, 0), lsn)
        lsns = dict(self._lsns)
        is_new = replica_id not in lsns
        lsns[replica_id] = lsn
        return VClock._trusted(dict(sorted(lsns.items())) if is_new else lsns)

    def merged(self, other: VClock) -> VClock:
        """Return the smallest position that is at or after both."""
        lsns = dict(self._lsns)
        for replica_id, lsn in other._lsns.items():
            if lsn > lsns.get(replica_id, 0):
                lsns[replica_id] = lsn
        return VClock._trusted(lsns if len(lsns) == len(self._lsns) else dict(sorted(lsns.items())))

    def common(self, other: VClock) -> VClock:
        """Return the largest position that is at or before both."""
        theirs = other._lsns
        return VClock._trusted(
            {replica_id: min(lsn, theirs[replica_id]) for replica_id, lsn in self._lsns.items() if replica_id in theirs}
        )

    def missing_rows(self, end: VClock) -> tuple[tuple[int, int, int], ...]:
        """Return the rows after this position and up to `end`: replica id, first and last LSN of each originator."""
        ours = self._lsns
        return tuple(
            (replica_id, ours.get(replica_id, 0) + 1, lsn)
            for replica_id, lsn in end._lsns.items()
            if replica_id and lsn > ours.get(replica_id, 0)
        )

    def compare(self, other: VClock, *, ignore_zero: bool = False) -> Order:
        """Compare component by component; `ignore_zero` excludes the local component."""
        if ignore_zero:
            return self.without_zero().compare(other.without_zero())
        before, after = self <= other, self >= other
        if before:
            return Order.EQUAL if after else Order.BEFORE
        return Order.AFTER if after else Order.INCOMPARABLE

    def __le__(self, other: VClock) -> bool:
        theirs = other._lsns
        for replica_id, lsn in self._lsns.items():  # noqa: SIM110 - a generator is slower, and each ACK compares
            if lsn > theirs.get(replica_id, 0):
                return False
        return True

    def __ge__(self, other: VClock) -> bool:
        return other <= self

    def __lt__(self, other: VClock) -> bool:
        return self._lsns != other._lsns and self <= other

    def __gt__(self, other: VClock) -> bool:
        return other < self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VClock) and self._lsns == other._lsns

    def __hash__(self) -> int:
        return hash(tuple(self._lsns.items()))

    def __str__(self) -> str:
        return format_vclock(self._lsns)

    def __repr__(self) -> str:
        return f"VClock({self})"


class VClockBuilder:
    """A vclock that advances in place. It must not be shared; readers use `vclock()`."""

    __slots__ = ("_frozen", "_lsns")

    def __init__(self, start: VClock | None = None) -> None:
        self._frozen: VClock | None = start or VClock()
        self._lsns: dict[int, int] = self._frozen.to_mapping()

    def get(self, replica_id: int) -> int:
        return self._lsns.get(replica_id, 0)

    def follow(self, replica_id: int, lsn: int) -> None:
        """Advance `replica_id` to `lsn`; raise VClockError if that is not later."""
        # The checks of _check_follows, inline: this runs once per row of a log.
        if lsn <= self._lsns.get(replica_id, 0) or not 0 <= replica_id < VCLOCK_MAX or lsn > LSN_MAX:
            _check_follows(replica_id, self._lsns.get(replica_id, 0), lsn)
        self._lsns[replica_id] = lsn
        self._frozen = None

    def merge(self, other: VClock) -> None:
        """Advance every component to the component of `other`, if the latter is higher."""
        for replica_id, lsn in other:
            if lsn > self._lsns.get(replica_id, 0):
                self._lsns[replica_id] = lsn
                self._frozen = None

    def vclock(self) -> VClock:
        """Return the current position; cached until the next change."""
        if self._frozen is None:
            self._frozen = VClock._trusted(dict(sorted(self._lsns.items())))
        return self._frozen


def _check(replica_id: int, lsn: int) -> None:
    if type(replica_id) is not int or not 0 <= replica_id < VCLOCK_MAX:
        raise VClockError(f"{replica_id!r} is not a replica id: ids are 0..{VCLOCK_MAX - 1}")
    if type(lsn) is not int or not 0 <= lsn <= LSN_MAX:
        raise VClockError(f"{lsn!r} is not an LSN of replica {replica_id}: LSNs are 0..2^63-1")


def _check_follows(replica_id: int, current: int, lsn: int) -> None:
    _check(replica_id, lsn)
    if lsn <= current:
        raise VClockError(f"LSN of replica {replica_id} goes backwards: {lsn} comes after {current}")
