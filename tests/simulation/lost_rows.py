"""Rows that a follower has and the set lacks: was the set free to lose them?

Rows that only expelled members had are lost with them (docs/explanation/reliability.md). No other row may be lost: no
row of a current member, none that reached one, and no committed transaction. Pure: it judges by the directories of all
nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from flowstone.iproto.row import Row
from tests.simulation.final_history import FinalHistory
from tests.simulation.logs import CONTROL, NOP, NodeLog, Position


def wrongly_lost(
    missing: Iterable[tuple[int, int, int]], logs: Sequence[NodeLog], departed: Sequence[NodeLog], history: FinalHistory
) -> list[str]:
    """Return, for each row of `missing` (replica id, first and last LSN) that the set must not have lost, the reason as
    text.

    `logs` are those of the nodes that ran to the end, `departed` those of former members, from their start, including
    everything that was lost with them.
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
        # `check_logs` compares the decisions of lost verdicts with those of all others.
        elif fact is not None and fact.type not in CONTROL and _is_one_of(fact, written):
            found.append(f"{position} was a fact")
    return found


def _positions(missing: Iterable[tuple[int, int, int]]) -> Iterator[Position]:
    return ((replica_id, lsn) for replica_id, first, last in missing for lsn in range(first, last + 1))


def _rows_at(log: NodeLog, position: Position) -> list[Row]:
    return [row for at, row, _ in log.positions() if at == position]


def _had(log: NodeLog, position: Position, written: Sequence[Row], *, is_inherited: bool) -> bool:
    """Return True if a node had the row or knew that it was undone.

    `is_inherited`: a later member has the id of the writer, and may have reused the LSN.
    """
    if log.snapshot_vclock.get(position[0], 0) >= position[1] and not is_inherited:
        return True
    return any(row.type == NOP or _is_one_of(row, written) for row in _rows_at(log, position))


def _is_one_of(row: Row, written: Sequence[Row]) -> bool:
    return any((row.type, row.body) == (each.type, each.body) for each in written)
