"""The change tables of a mirror, by the names of their spaces: they get the changes of a batch before the tables do.

A batch is appended to a change table in one commit, with markers for what happens to the whole table (truncated,
dropped, renamed). A change table that lacks changes of its table, because the table was loaded from a snapshot or was
mirrored without changes for a time, gets a `reset`.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Final

import pyarrow as pa

from flowstone.lake.change_table import CHANGES, ChangeTable, TableMarker
from flowstone.lake.masks import SpaceMask
from flowstone.lake.misfits import MisfitRows
from flowstone.lake.row_changes import NO_STATES
from flowstone.lake.table_schema import LakeSchema
from flowstone.replication.vclock import VClock
from flowstone.spark.lake import Lake, directory_of
from flowstone.spark.mirror.batch import FoldedTable, Truncation, at, behind, shown_states

NO_TUPLES: Final = pa.array([], pa.binary())


class ChangeTables:
    """The change tables of a lake. Markers wait for the next commit to their table, or for `finish`."""

    def __init__(self, lake: Lake) -> None:
        self._lake = lake
        self._open: dict[str, ChangeTable] = {}
        self._markers: dict[str, list[TableMarker]] = {}

    def of(self, name: str) -> ChangeTable:
        """Return the change table of a space; it may not exist yet."""
        found = self._open.get(name)
        if found is None:
            path = f"{self._lake.path}/{CHANGES}/{directory_of(name)}"
            found = ChangeTable.open(path, name, self._lake.storage_options, self._lake.keep_hours)
            self._open[name] = found
        return found

    def mark(self, name: str, marker: TableMarker) -> None:
        """Keep a marker for the table of a space. A reset makes earlier ones needless."""
        earlier = [] if marker.change_type == "reset" else self._markers.get(name, [])
        self._markers[name] = [*earlier, marker]

    def has_markers(self, name: str) -> bool:
        """Return True if markers of the table wait for a commit."""
        return name in self._markers

    def follow(
        self, schema: LakeSchema, uuid: str, position: VClock, reason: str, time: datetime | None = None
    ) -> bool:
        """Let the changes continue from `position`, unless the change table has that position already.

        Return True if a change table that existed got a reset.
        """
        table = self.of(schema.space.name)
        own, existed = table.position(uuid), table.exists
        if own is not None and position <= own:
            return False
        self._markers.pop(schema.space.name, None)
        reset = TableMarker("reset", position.signature, time, detail=reason)
        table.append(table.rows(schema, uuid, NO_STATES, NO_TUPLES, markers=[reset]), uuid, position)
        return existed

    def append(
        self,
        schema: LakeSchema,
        folded: FoldedTable | None,
        uuid: str,
        position: VClock,
        mask: SpaceMask | None,
        truncation: Truncation | None,
    ) -> None:
        """Append the changes of a batch that ends at `position`, and the markers of the table."""
        table = self.of(schema.space.name)
        markers = self._markers.pop(schema.space.name, [])
        if truncation is not None:
            time = at(truncation.time)
            markers.append(TableMarker("truncate", truncation.version, time, truncation.replica_id, truncation.lsn))
        states, before = NO_STATES, NO_TUPLES
        if folded is not None and folded.before is not None:
            is_new = behind(table.position(uuid) or VClock(), folded.states["replica_id"], folded.states["lsn"])
            states, before = shown_states(folded, mask).filter(is_new), folded.before.combine_chunks().filter(is_new)
        # In a lake without a quarantine, a value that does not fit its column is an error.
        misfits = None if self._lake.quarantine is None else MisfitRows()
        # Even without rows: a change table with a lower position than its table would get a reset.
        table.append(table.rows(schema, uuid, states, before, markers=markers, misfits=misfits), uuid, position)

    def finish(self, uuid: str, position: VClock) -> None:
        """Append the markers of tables that got no other rows in this batch."""
        for name, markers in self._markers.items():
            self.of(name).mark(markers, uuid, position)
        self._markers.clear()

    def compact(self, names: Collection[str]) -> None:
        for name in names:
            self.of(name).compact()

    def vacuum(self, keep_hours: int) -> None:
        for table in self._open.values():
            table.vacuum(keep_hours)
