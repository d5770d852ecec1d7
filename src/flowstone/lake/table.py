"""A table of the lake: the state of one space, or its history, and its position.

`LakeTable` is the interface for a mirror; implementations differ in the engine that commits (delta-rs in
`embedded_table.py`, Spark in `spark/mirror/spark_table.py`). Every change of rows is one commit, which carries the
vclock of the replica set in Delta's application transactions: replays are skipped, and the later of two concurrent
writers fails.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Protocol

import pyarrow as pa

from flowstone.box.definitions import SpaceDefinition
from flowstone.iproto.constants import VCLOCK_MAX
from flowstone.lake.table_files import PinnedTable
from flowstone.lake.table_schema import LakeError, LakeSchema
from flowstone.replication.vclock import VClock

KEEP_HOURS: Final = 168
"""Default retention of files of former versions: seven days, as in Delta itself."""


class AnotherWriter(LakeError):
    """Another writer changed the table after this writer read it."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The moment of a change: `_commit_version` and `_commit_timestamp` of its transaction."""

    version: int
    timestamp: datetime


@dataclass(frozen=True, slots=True)
class Merged:
    """The result of one commit. `version` is the table's version after it; a replay changes nothing (`is_replay`)."""

    version: int
    upserts: int = 0
    deletes: int = 0
    files_added: int = 0
    files_removed: int = 0
    is_replay: bool = False


class LakeTable(Protocol):
    """One table, at the version that was opened or last written; `refresh` moves it to the newest version.

    All methods that change rows do so against `version`: if another writer has committed a later version, they raise
    AnotherWriter, and the table stays as the other writer left it. `position` is the settled vclock of replica set
    `uuid` after the given rows. If the table is already at this position, the call is a replay and does nothing; so
    make one call per table and position. Keys are plain sort keys: the table itself adds the prefix in a lake of
    several sets.
    """

    path: str
    schema: LakeSchema
    """The columns and the note of the table; `schema.space` is the definition in force."""

    @property
    def version(self) -> int: ...
    @property
    def positions(self) -> dict[str, VClock]:
        """The position of each replica set with rows in the table, as of `version`."""
        ...

    @property
    def row_count(self) -> int:
        """The number of rows; in a history, former states included."""
        ...

    def refresh(self) -> None:
        """Move to the newest version."""
        ...

    def files(self, version: int | None = None) -> list[str]:
        """Return the paths of a version's data files, relative to `path`."""
        ...

    def pin(self, uuid: str) -> PinnedTable:
        """Return the current rows of one replica set at `version`, for `PinnedTable.lookup(keys)` in executors."""
        ...

    def merge(
        self, folded: pa.Table, definition: SpaceDefinition, position: VClock, uuid: str, *, replace: bool = False
    ) -> Merged:
        """Upsert and delete the result of `fold` in one commit: `sort_key` once each; `tuple`, null for a deletion.

        With `replace`, these rows become the only rows of the set (for a truncation, or a new snapshot after a gap). If
        `definition` has other columns or another primary key than the table, the same commit rewrites all rows;
        `folded` then still has keys of the former definition. An empty `folded` only moves the position.
        """
        ...

    def append_history(
        self,
        states: pa.Table,
        definition: SpaceDefinition,
        position: VClock,
        uuid: str,
        *,
        replace: Moment | None = None,
    ) -> Merged:
        """Add the result of `fold(every_state=True)` to a history in one commit, and end the states they supersede.

        With `replace`, all other current states of the set end at that moment.
        """
        ...

    def truncate(self, position: VClock, uuid: str, moment: Moment) -> Merged:
        """Remove all rows of the set; in a history, end all its current states at `moment`."""
        ...

    def rewrite(self, definition: SpaceDefinition, position: VClock, uuid: str) -> Merged:
        """Rebuild the columns from `_tuple` for another definition (fields, primary key), in one commit.

        If the definition changes no column and no key, only the note is written.
        """
        ...

    def retype(self, types: tuple[tuple[str, str], ...]) -> Merged:
        """Rebuild the columns from `_tuple` for other declared types (field name, type), in one commit.

        Positions do not change.
        """
        ...

    def drop(self, position: VClock, uuid: str, moment: Moment) -> Merged:
        """Mark the table of a dropped space (`schema.dropped`) and keep its rows. In a history, current states end."""
        ...

    def compact(self) -> Merged:
        """Merge small files into larger ones; rows and positions do not change."""
        ...

    def vacuum(self, keep_hours: int | None = None) -> list[str]:
        """Remove files that no version of the last hours needs (None: KEEP_HOURS), and orphans of that age."""
        ...


# --- positions in Delta's log -------------------------------------------------------------------------------------


def application(uuid: str, replica_id: int | None = None) -> str:
    """Return the application id for the LSN of an originator, or for the vclock's signature without `replica_id`."""
    return f"flowstone/{uuid}" if replica_id is None else f"flowstone/{uuid}/{replica_id}"


def transactions_of(position: VClock, uuid: str) -> list[tuple[str, int]]:
    """Return the application transactions for a position. The signature is always included and always increases."""
    return [(application(uuid), position.signature)] + [(application(uuid, number), lsn) for number, lsn in position]


def user_metadata(positions: Mapping[str, VClock]) -> str:
    """Return positions as JSON, for people and for engines whose commits carry only one application transaction."""
    said = {uuid: {str(number): lsn for number, lsn in position} for uuid, position in positions.items()}
    return json.dumps({"positions": said})


def position_in(
    transaction_version: Callable[[str], int | None], history: Callable[[], Iterable[Any]], uuid: str
) -> VClock | None:
    """Return the position of a replica set, or None if the table has none. `history` yields commits, newest first."""
    signature = transaction_version(application(uuid))
    if signature is None:
        return None
    lsns = {number: transaction_version(application(uuid, number)) or 0 for number in range(VCLOCK_MAX)}
    position = VClock(lsns)
    if position.signature == signature:
        return position
    for commit in history():
        said = json.loads(commit.get("userMetadata") or "{}").get("positions", {})
        if uuid in said:
            return VClock({int(number): lsn for number, lsn in said[uuid].items()})
    raise LakeError(
        f"table is at signature {signature} of replica set {uuid}, but no commit has the vclock",
        hint="delete the table's directory and mirror it again",
    )


def is_replay(path: str, own: VClock | None, position: VClock) -> bool:
    """Return True if a table at `own` has everything up to `position`; raise LakeError if they are incomparable."""
    if own is None or (own <= position and own != position):
        return False
    if position <= own:
        return True
    raise LakeError(
        f"{path} is at {own}, but the new rows end at {position}, which is neither before nor after that",
        hint="the source has lost rows that the table has, or belongs to another replica set; mirror into a new lake",
    )
