"""Checks of received rows, before any of them is applied, stored or forwarded.

A stream of valid packets may still contain rows that no master sends. The checks are pure, and the same for the node,
`follow` and the archive. When a row is applied, it is also checked against the data.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from flowstone.errors import RemoteProtocolError
from flowstone.iproto import scan
from flowstone.iproto.constants import GROUP_LOCAL, Flag, RequestType, type_name
from flowstone.iproto.scan import Cells
from flowstone.iproto.slab import Slab
from flowstone.replication.vclock import VClock
from flowstone.xlog.transactions import CONTROL_TYPES

HINT: Final = "check that instance, then restart replication from it"

_FEW: Final = 32
"""Up to this number of rows, checking them one by one is faster than vectorized checks."""

_COMMIT: Final = Flag.COMMIT.value
_CONTROL: Final = frozenset(int(kind) for kind in CONTROL_TYPES) - {RequestType.RAFT.value}
"""Control rows that are part of the log. RAFT rows are not: peers send them between transactions."""

_TUPLE, _KEY = (scan.TUPLE_AT, "a tuple"), (scan.KEY_AT, "a key")
_PARTS: Final[dict[int, tuple[tuple[int, str], ...]]] = {
    RequestType.INSERT.value: (_TUPLE,),
    RequestType.REPLACE.value: (_TUPLE,),
    RequestType.UPDATE.value: (_KEY, (scan.TUPLE_AT, "operations")),
    RequestType.DELETE.value: (_KEY,),
    RequestType.UPSERT.value: (_TUPLE, (scan.OPS_AT, "operations")),
}
"""The parts that the body of a change must have, besides its space."""

_TYPES_END: Final = 1 + max((*_PARTS, *_CONTROL, RequestType.NOP.value))


class RowRefused(RemoteProtocolError):
    """A peer sent a row that no master sends."""


class OwnRowRefused(RowRefused):
    """A peer sent a row with our id that we do not know. A retry may help.

    We may have lost the row, and the peer may just have got it from a third member: its next answer to SUBSCRIBE shows
    that.
    """


def check_rows(slab: Slab) -> None:
    """Raise RowRefused for the first invalid row of these whole transactions."""
    cells = slab.cells
    if cells.shape[1] > _FEW and not _may_be_wrong(cells):
        return
    what = _first_wrong(cells)
    if what is not None:
        raise RowRefused(f"{slab.path} sent invalid {what}", hint=HINT)


def check_name(peer: str, replica_id: int, own_id: int) -> None:
    """Raise RowRefused if `peer` answers SUBSCRIBE with the id of this instance; 0 stands for any anonymous replica."""
    if replica_id and replica_id == own_id:
        raise RowRefused(
            f"{peer} claims replica id {replica_id}, which is the id of this instance",
            hint="check that _cluster is the same on both instances, then restart replication from the peer",
        )


def check_own_rows(slab: Slab, own_id: int, known_lsn: int) -> None:
    """Raise OwnRowRefused if there is a row of this instance, `own_id`, after `known_lsn`, its last known row."""
    cells = slab.cells
    if cells.shape[1] <= _FEW and own_id not in cells[scan.REPLICA_ID].tolist():
        return
    is_new = (cells[scan.REPLICA_ID] == own_id) & (cells[scan.LSN] > known_lsn)
    if is_new.any():
        lsn = int(cells[scan.LSN, int(np.argmax(is_new))])
        raise OwnRowRefused(
            f"{slab.path} sent row {lsn} of replica {own_id}, which is this instance: its last row is {known_lsn}",
            hint=f"check whether another instance writes as replica {own_id}, then restart replication",
        )


def goes_on(slab: Slab, vclock: VClock) -> bool:
    """Return True if no row between `vclock` and these rows is missing."""
    replica_ids, lsns = slab.cells[scan.REPLICA_ID], slab.cells[scan.LSN]
    # At or below is fine: known rows are sent again after a reconnect, and skipped.
    return all(
        int(lsns[replica_ids == number].min()) <= vclock.get(number) + 1 for number in np.unique(replica_ids).tolist()
    )


# --- row by row -----------------------------------------------------------------------------------------------------


def _first_wrong(cells: Cells) -> str | None:
    newest: dict[int, int] = {}
    is_first = True
    for number in range(cells.shape[1]):
        row = cells[:, number].tolist()
        replica_id, lsn = row[scan.REPLICA_ID], row[scan.LSN]
        is_last = bool(row[scan.FLAGS] & _COMMIT)
        what = _what_is_wrong(row, is_alone=is_first and is_last)
        # Between transactions an LSN may repeat (rows arrive again after a reconnect), inside one it must grow.
        if what is None and lsn <= newest.get(replica_id, 0):
            what = f"out of order after row {newest[replica_id]} of the same transaction"
        if what is not None:
            return f"row {lsn} of replica {replica_id}: {what}"
        newest[replica_id] = lsn
        if is_last:
            newest = {}
        is_first = is_last
    return None


def _what_is_wrong(row: list[int], *, is_alone: bool) -> str | None:
    kind = row[scan.TYPE]
    if row[scan.REPLICA_ID] == 0:
        return "no member has this id"
    if row[scan.GROUP_ID] == GROUP_LOCAL:
        return "local rows are not replicated"
    # A verdict must take effect at a transaction boundary: it decides about whole transactions.
    if kind in _CONTROL:
        return None if is_alone else f"{type_name(kind)} inside a transaction"
    if kind == RequestType.NOP:
        return None
    if kind not in _PARTS:
        return f"unsupported type {type_name(kind)}"
    if row[scan.SPACE_ID] < 0:
        return f"{type_name(kind)} without a space"
    missing = next((name for line, name in _PARTS[kind] if row[line] < 0), None)
    return None if missing is None else f"{type_name(kind)} without {missing}"


# --- vectorized -----------------------------------------------------------------------------------------------------


def _flags_of(types: frozenset[int]) -> NDArray[np.bool_]:
    """Return a table of flags by row type; the last entry is for all larger types."""
    return np.array([kind in types for kind in range(_TYPES_END + 1)])


_IS_ORDINARY: Final = _flags_of(frozenset((*_PARTS, RequestType.NOP.value)))
_IS_CHANGE: Final = _flags_of(frozenset(_PARTS))
_NEEDS: Final = [
    (line, _flags_of(frozenset(kind for kind, parts in _PARTS.items() if line in dict(parts))))
    for line in (scan.TUPLE_AT, scan.KEY_AT, scan.OPS_AT)
]


def _may_be_wrong(cells: Cells) -> bool:
    """Return False if all rows are certainly valid, which is the common case; True if each row must be checked."""
    kinds = np.minimum(cells[scan.TYPE], _TYPES_END)
    if not _IS_ORDINARY[kinds].all() or (cells[scan.GROUP_ID] == GROUP_LOCAL).any():
        return True
    if (cells[scan.REPLICA_ID] == 0).any() or (_IS_CHANGE[kinds] & (cells[scan.SPACE_ID] < 0)).any():
        return True
    if any((needs[kinds] & (cells[line] < 0)).any() for line, needs in _NEEDS):
        return True
    is_inside = cells[scan.FLAGS, :-1] & _COMMIT == 0
    is_straight = (np.diff(cells[scan.LSN]) > 0) & (np.diff(cells[scan.REPLICA_ID]) == 0)
    return bool((is_inside & ~is_straight).any())
