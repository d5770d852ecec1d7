"""Rows that a follower has and the set has not: whether the set was free to lose them.

Rows that only expelled members had are lost with them, as docs/explanation/reliability.md says. Nothing else may be
lost: no row of a member that is still there, none that came to such a member, and no transaction that was a fact.
Pure: judges by the directories that all nodes have left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from flowstone.iproto.row import Row
from tests.simulation.final_history import FinalHistory
from tests.simulation.logs import CONTROL, NOP, NodeLog, Position


def wrongly_lost(
    missing: Iterable[tuple[int, int, int]], logs: Sequence[NodeLog], departed: Sequence[NodeLog], history: FinalHistory
) -> list[str]:
    """Of each row of `missing` (replica id, first and last LSN) that the set must not have lost: why, in words.

    `logs` are those of all who were there to the end, `departed` those of the others, from their beginnings on,
    with all that was lost with them.
    """
    found = []
    for position in _positions(missing):
        written = [row for log in departed if log.replica_id == position[0] for row in _rows_at(log, position)]
        is_inherited = sum(log.replica_id == position[0] for log in (*logs, *departed)) > 1
        holders = [log.name for log in logs if _had(log, position, written, is_inherited=is_inherited)]
        fact = history.rows.get(position)
        if not written:
            found.append(f"no member that has gone has written {position}")
        elif holders:
            found.append(f"{', '.join(holders)} had {position}")
        # What a lost verdict has decided is compared with the verdicts of all others elsewhere (`check_logs`).
        elif fact is not None and fact.type not in CONTROL and _is_one_of(fact, written):
            found.append(f"{position} was a fact")
    return found


def _positions(missing: Iterable[tuple[int, int, int]]) -> Iterator[Position]:
    return ((replica_id, lsn) for replica_id, first, last in missing for lsn in range(first, last + 1))


def _rows_at(log: NodeLog, position: Position) -> list[Row]:
    return [row for at, row, _ in log.positions() if at == position]


def _had(log: NodeLog, position: Position, written: Sequence[Row], *, is_inherited: bool) -> bool:
    """Whether a node had the row, or knew that it is nothing. `is_inherited`: another member has got the number of who
    wrote it, and may have used its LSN."""
    if log.snapshot_vclock.get(position[0], 0) >= position[1] and not is_inherited:
        return True
    return any(row.type == NOP or _is_one_of(row, written) for row in _rows_at(log, position))


def _is_one_of(row: Row, written: Sequence[Row]) -> bool:
    return any((row.type, row.body) == (each.type, each.body) for each in written)
