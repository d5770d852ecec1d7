"""A table of the lake: the state of one space, or its history, and the position it holds.

`LakeTable` is what a mirror works with; who commits (delta-rs in `lake_table_embedded.py`, Spark in
`lake_table_spark.py`) is all that differs.
Every change of rows is one commit, which carries the vclock of the replica set in Delta's application transactions: a
replay is skipped, and of two writers the one that comes late fails.
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
from flowstone.replication.vclock import VClock
from flowstone.spark.lake_files import PinnedTable
from flowstone.spark.lake_schema import LakeError, LakeSchema

KEEP_HOURS: Final = 168
"""How long files of former versions stay unless somebody says otherwise: seven days, as Delta's own default."""


class AnotherWriter(LakeError):
    """Somebody else changed the table meanwhile; what this writer read is no longer what the table holds."""


@dataclass(frozen=True, slots=True)
class Moment:
    """When something happened: `_commit_version` and `_commit_timestamp` of its transaction."""

    version: int
    timestamp: datetime


@dataclass(frozen=True, slots=True)
class Merged:
    """What one commit did. `version` is the table's behind it; a replay changes nothing and has `is_replay`."""

    version: int
    upserts: int = 0
    deletes: int = 0
    files_added: int = 0
    files_removed: int = 0
    is_replay: bool = False


class LakeTable(Protocol):
    """One table. It stands at the version that it was opened at or last wrote; `refresh` goes to the newest.

    All that change rows go against `version`: if another writer has committed behind it, they raise AnotherWriter, and
    the table is as that other one left it. `position` is the settled vclock of replica set `uuid` behind what is given;
    where the table is there already, the call is a replay and does nothing: so one call per table and position. Keys
    here are plain sort keys: what a lake of several sets puts before them is the table's own business.
    """

    path: str
    schema: LakeSchema
    """Its columns and what is noted about it: `schema.space` is the definition in force."""

    @property
    def version(self) -> int: ...
    @property
    def positions(self) -> dict[str, VClock]:
        """Of each replica set whose rows are here, up to where its log is in them. As of `version`."""
        ...

    @property
    def row_count(self) -> int:
        """Rows, of a history the former states among them."""
        ...

    def refresh(self) -> None:
        """To the newest version."""
        ...

    def files(self, version: int | None = None) -> list[str]:
        """Paths of the data files of a version, relative to `path`."""
        ...

    def pin(self, uuid: str) -> PinnedTable:
        """The current rows of one replica set at `version`, for `PinnedTable.lookup(keys)` in executors."""
        ...

    def merge(
        self, folded: pa.Table, definition: SpaceDefinition, position: VClock, uuid: str, *, replace: bool = False
    ) -> Merged:
        """What `fold` gives (`sort_key` once each; `tuple`, null where it is gone), upserted and deleted in one commit.

        With `replace`, the set's rows are then exactly these (a truncation, or a new snapshot behind a gap). A
        `definition` with other columns or another primary key than the table's writes all rows anew, in the same
        commit; keys in `folded` are then still those of the former one. An empty `folded` moves the position only.
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
        """What `fold(every_state=True)` gives, added to a history, in one commit; ends the states current till then.

        With `replace`, all current states of the set that are not touched end at that moment.
        """
        ...

    def truncate(self, position: VClock, uuid: str, moment: Moment) -> Merged:
        """No rows of the set any more; in a history all current states end at `moment`."""
        ...

    def rewrite(self, definition: SpaceDefinition, position: VClock, uuid: str) -> Merged:
        """The columns of another definition (fields, primary key), made of `_tuple`, in one commit.

        Where nothing that the table shows has changed, only the note is.
        """
        ...

    def drop(self, position: VClock, uuid: str, moment: Moment) -> Merged:
        """The space is gone: the table stays as it was, marked (`schema.dropped`); current states of a history end."""
        ...

    def compact(self) -> Merged:
        """Small files into larger ones; no row and no position changes."""
        ...

    def vacuum(self, keep_hours: int | None = None) -> list[str]:
        """Removes files that no version of the last hours needs (None: KEEP_HOURS), and orphans of that age."""
        ...


# --- positions in Delta's log -------------------------------------------------------------------------------------


def application(uuid: str, replica_id: int | None = None) -> str:
    """The application id under which the LSN of an origin is kept; without one, that of the vclock's signature."""
    return f"flowstone/{uuid}" if replica_id is None else f"flowstone/{uuid}/{replica_id}"


def transactions_of(position: VClock, uuid: str) -> list[tuple[str, int]]:
    """What a commit says about the position behind it. The signature is there always and rises always."""
    return [(application(uuid), position.signature)] + [(application(uuid, number), lsn) for number, lsn in position]


def user_metadata(positions: Mapping[str, VClock]) -> str:
    """The same for people, and for engines whose commits take one application only."""
    said = {uuid: {str(number): lsn for number, lsn in position} for uuid, position in positions.items()}
    return json.dumps({"positions": said})


def position_in(
    transaction_version: Callable[[str], int | None], history: Callable[[], Iterable[Any]], uuid: str
) -> VClock | None:
    """The position of a replica set; None: the table has none of it. `history` are commits, the newest first."""
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
        f"the table's log says that it is at {signature} of replica set {uuid}, and no commit which vclock that is",
        hint="delete the table's directory and mirror it anew",
    )


def is_replay(path: str, own: VClock | None, position: VClock) -> bool:
    """Whether a table at `own` has everything up to `position`; a position that leads nowhere else is an error."""
    if own is None or (own <= position and own != position):
        return False
    if position <= own:
        return True
    raise LakeError(
        f"{path} is at {own}, and what shall be written ends at {position}, which is neither before nor behind it",
        hint="the source has lost rows that the table has, or is another one: mirror into a new lake",
    )
