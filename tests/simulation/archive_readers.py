"""Readers of an archive: rows from `flowstone.read_logs`, and rows selected by the block index.

Both omit rows that were rolled back, by the code under test. Their output is compared with the outcome of each row in
the logs of the nodes (`final_history.py`), which shares no code with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from flowstone.archive.block_index import Blocks, read_blocks
from flowstone.archive.manifest import Gap, Lsns, load
from flowstone.archive.settled_tracker import Range
from flowstone.history.files import find_logs
from flowstone.history.log_reading import Reading
from flowstone.history.selection import Selection
from flowstone.iproto.row import Row
from flowstone.outside import production
from flowstone.xlog.directory import scan_directory
from tests.simulation.disk import SimulatedDisk, Storage
from tests.simulation.final_history import FinalHistory
from tests.simulation.logs import CONTROL, NOP, NodeLog, Position
from tests.simulation.loop import Life


def check_readers(log: NodeLog, storage: Storage, history: FinalHistory, *, is_whole: bool) -> list[str]:
    """Check that readers get only committed rows, each once, in log order; all of them if the archive `is_whole`.

    The index may lag its log if the archive was killed. Transactions that are pending before a gap never get a verdict.
    """
    disk = SimulatedDisk(storage, Life("reader"))
    manifest = load(disk, f"/{log.name}")
    gaps = manifest.gaps if manifest is not None else []
    expected = [position for position, row, _ in log.positions() if position in history.rows and _is_data(row)]
    by_log, by_index = _by_log(log.name, disk, gaps), _by_index(log, disk, gaps)
    delivered = dict.fromkeys(by_log)
    missing = [position for position in expected if position not in delivered] if is_whole and not gaps else []
    return [
        *_misled(f"{log.name}, by its log,", by_log, expected, history),
        *_misled(f"{log.name}, by its index,", by_index, expected, history),
        *([f"{log.name}, by its log, does not deliver {missing[:5]}"] if missing else []),
    ]


def _misled(who: str, found: list[Position], expected: list[Position], history: FinalHistory) -> list[str]:
    if rolled_back := [position for position in found if position in history.withdrawn]:
        return [f"{who} delivers {rolled_back[:5]}, which were rolled back"]
    if invented := [position for position in found if position not in history.rows]:
        return [f"{who} delivers {invented[:5]}, which never happened"]
    delivered = dict.fromkeys(found)
    in_order = [position for position in expected if position in delivered]
    return [f"{who} delivers rows twice, or in another order than they have there"] if found != in_order else []


def _by_log(name: str, disk: SimulatedDisk, gaps: Sequence[Gap]) -> list[Position]:
    paths = find_logs(disk, [f"/{name}"])
    outside, selection = replace(production(), disk=disk), Selection(show_system=True)
    reading = Reading(outside, paths, selection=selection, settled=True, force=bool(gaps), workers=0)
    return [
        (row.replica_id, row.lsn)
        for piece in reading.pieces()
        for row in piece.slab.rows(piece.rows)
        if row.replica_id and _is_data(row)
    ]


def _by_index(log: NodeLog, disk: SimulatedDisk, gaps: Sequence[Gap]) -> list[Position]:
    """Return the rows settled at the end of their part of the log, without withdrawn ones."""
    stretches: list[tuple[Lsns, Lsns]] = []
    withdrawn: list[Range] = []
    untils = [gap.until for gap in gaps]
    for blocks in _indexes(log.name, disk):
        if not stretches or blocks.header.vclock in untils:
            stretches.append((blocks.header.vclock, blocks.header.vclock))
        for run in blocks.runs:
            stretches[-1] = stretches[-1][0], run.settled
            withdrawn += run.rolled_back

    def is_delivered(position: Position) -> bool:
        replica_id, lsn = position
        is_withdrawn = any(origin == replica_id and first <= lsn <= last for origin, first, last in withdrawn)
        is_settled = any(start.get(replica_id, 0) < lsn <= end.get(replica_id, 0) for start, end in stretches)
        return is_settled and not is_withdrawn

    return [position for position, row, _ in log.positions() if _is_data(row) and is_delivered(position)]


def _indexes(name: str, disk: SimulatedDisk) -> Iterator[Blocks]:
    for listed in scan_directory(disk, f"/{name}").logs:
        if (blocks := read_blocks(disk, listed.path)) is not None:
            yield blocks


def _is_data(row: Row) -> bool:
    return row.type != NOP and row.type not in CONTROL
