"""The settled rows of recorded logs produce the next snapshot of the real server.

A snapshot, the logs after it, and the next snapshot, of servers 2.6.0, 2.11.9 and 3.8.0. The settled rows, applied to
the first snapshot, must produce the second: schema, update operations and verdicts together.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flowstone.box.schema import SchemaTracker
from flowstone.box.system import SCHEMA_SPACE_IDS, SPACE_ID, TRUNCATE_ID
from flowstone.box.update.update import decode_operations, update, upsert
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import unpack_body
from flowstone.iproto.row import Row
from flowstone.outside.disk import SystemDisk
from flowstone.replication.limbo.control_rows import Promote, decode_control
from flowstone.replication.settled_position import Decision, SettledTracker
from flowstone.replication.vclock import VClock
from flowstone.xlog.reader import LogFile
from flowstone.xlog.transactions import LogTransaction
from tests.places import VECTORS

DML = (RequestType.INSERT, RequestType.REPLACE, RequestType.UPDATE, RequestType.DELETE, RequestType.UPSERT)


def spans() -> list[tuple[Path, list[Path], Path]]:
    """Return consecutive snapshots, with the logs between them."""
    found = []
    for directory in sorted(VECTORS.glob("tarantool-*/*/files/*")):
        files = sorted(path for path in directory.iterdir() if path.suffix in (".snap", ".xlog"))
        for first, second in pairwise(path for path in files if path.suffix == ".snap"):
            logs = [path for path in files if path.suffix == ".xlog" and first.stem <= path.stem < second.stem]
            found.append((first, logs, second))
    return found


def rows_of(path: Path) -> list[Row]:
    with LogFile.open(SystemDisk(), str(path)) as log:
        return list(log.rows())


def transactions_of(path: Path) -> list[LogTransaction]:
    with LogFile.open(SystemDisk(), str(path)) as log:
        return list(log.transactions())


class Data:
    """Tuples by space and primary key, changed by rows as in a server."""

    def __init__(self) -> None:
        self.schema = SchemaTracker()
        self.spaces: dict[int, dict[tuple[Any, ...], tuple[Any, ...]]] = {}

    def apply(self, row: Row) -> None:
        if row.type not in DML:
            return
        body = unpack_body(row.body)
        space_id = body[Key.SPACE_ID]
        if space_id in SCHEMA_SPACE_IDS:
            self.schema.apply(row.type, row.body)
        tuples = self.spaces.setdefault(space_id, {})
        key = body[Key.KEY] if Key.KEY in body else self._key(space_id, body[Key.TUPLE])
        operations = body.get(Key.OPS, body.get(Key.TUPLE))
        if row.type in (RequestType.INSERT, RequestType.REPLACE) or (
            row.type == RequestType.UPSERT and key not in tuples
        ):
            tuples[key] = body[Key.TUPLE]
        elif row.type == RequestType.DELETE:
            tuples.pop(key, None)
            if space_id == SPACE_ID:
                self.spaces.pop(key[0], None)
        elif key in tuples:
            names = self.schema.schema.space(space_id).field_names
            change = update if row.type == RequestType.UPDATE else upsert
            decoded = decode_operations(operations, index_base=body.get(Key.INDEX_BASE, 0), field_names=names)
            tuples[key] = change(tuples[key], decoded)
        if space_id == TRUNCATE_ID:
            self.spaces.pop(key[0], None)

    def _key(self, space_id: int, values: tuple[Any, ...]) -> tuple[Any, ...]:
        primary = self.schema.schema.space(space_id).primary_key
        assert primary is not None
        return tuple(values[part.field] for part in primary.parts)

    def visible(self) -> dict[int, list[tuple[Any, ...]]]:
        """Return the content of a snapshot: tuples of memtx, without temporary spaces."""
        kept = {}
        for space in self.schema.schema:
            tuples = self.spaces.get(space.id)
            if tuples and not space.is_temporary and space.engine == "memtx":
                kept[space.id] = sorted(tuples.values(), key=repr)
        return kept


def settled(data: Data, snapshot: Path, logs: list[Path]) -> list[Decision[LogTransaction]]:
    """Return the decisions on all rows of `logs` after `snapshot`; kept ones are applied to `data`."""
    with LogFile.open(SystemDisk(), str(snapshot)) as file:
        start, version = VClock(file.meta.vclock), file.meta.version
    promote = None
    for row in rows_of(snapshot):
        if row.type == RequestType.RAFT_PROMOTE:
            body = decode_control(row.type, row.body)
            assert isinstance(body, Promote)
            promote = body
        data.apply(row)
    has_flags = not str(version).startswith("2.6")

    def is_synchronous(transaction: LogTransaction) -> bool:
        ids = (unpack_body(row.body).get(Key.SPACE_ID) for row in transaction.rows)
        return any(space_id in data.schema.schema.synchronous for space_id in ids)

    tracker: SettledTracker[LogTransaction] = SettledTracker(is_synchronous=None if has_flags else is_synchronous)
    tracker.start(start, promote)
    decisions = []
    for path in logs:
        for transaction in transactions_of(path):
            if all(row.lsn <= start.get(row.replica_id) for row in transaction.rows):
                continue
            for decision in tracker.push(transaction):
                decisions.append(decision)
                for row in decision.transaction.rows if decision.kept else ():
                    data.apply(row)
    assert tracker.is_quiet
    return decisions


@pytest.mark.parametrize(
    ("first", "logs", "second"),
    spans(),
    ids=lambda path: "-".join(path.parts[-5:-2] + path.parts[-2:]) if isinstance(path, Path) else "",
)
def test_settled_rows_lead_from_one_snapshot_to_the_next(first: Path, logs: list[Path], second: Path) -> None:
    ours, theirs = Data(), Data()
    settled(ours, first, logs)
    for row in rows_of(second):
        theirs.apply(row)
    assert ours.schema.schema == theirs.schema.schema
    assert ours.visible() == theirs.visible()


def test_recorded_logs_of_every_release_have_both_verdicts() -> None:
    for release in ("2.6", "2.11", "3.8"):
        first, logs, _ = next(
            span for span in spans() if f"tarantool-{release}" in str(span[0]) and span[0].stem.endswith("14")
        )
        verdicts = [decision.kept for decision in settled(Data(), first, logs)]
        assert verdicts.count(False) == 1
        assert verdicts.count(True) > 20


# One synchronous transaction at a time: with two, fibers of 2.6.0 can wait forever.
QUEUE = """
box.cfg{replication_synchro_quorum = 2, replication_synchro_timeout = 0.3, log = 'server.log'}
local fiber = require('fiber')
local sync = box.schema.space.create('sync', {is_sync = true})
local plain = box.schema.space.create('plain')
local own = box.schema.space.create('own', {is_local = true})
for _, space in pairs{sync, plain, own} do space:create_index('pk') end
local number = 0
local function round(quorum)
    box.cfg{replication_synchro_quorum = quorum}
    local running = 0
    for _, space in ipairs{plain, sync, plain, own} do
        number, running = number + 1, running + 1
        local value = number
        fiber.create(function() pcall(space.insert, space, {value}) running = running - 1 end)
    end
    while running > 0 do fiber.sleep(0.01) end
end
for _, quorum in ipairs{1, 2, 1, 2, 2, 1} do round(quorum) end
local left = {}
for name, space in pairs{sync = sync, plain = plain, own = own} do
    for _, tuple in space:pairs() do table.insert(left, name .. tuple[1]) end
end
table.sort(left)
print(table.concat(left, ' '))
os.exit(0)
"""


@pytest.mark.real
def test_rollback_of_a_real_server_includes_local_and_asynchronous_rows(tarantool: ModuleType, tmp_path: Path) -> None:
    left = tarantool.run(QUEUE, tmp_path, seconds=60).split()
    data = Data()
    decisions = settled(data, tmp_path / f"{0:020}.snap", sorted(tmp_path.glob("*.xlog")))
    names = [data.schema.schema.space(space_id).name for space_id in (512, 513, 514)]
    tuples = [
        f"{name}{row[0]}" for name, at in zip(names, (512, 513, 514), strict=True) for row in data.spaces[at].values()
    ]
    assert sorted(tuples) == left
    withdrawn = [decision.transaction for decision in decisions if not decision.kept]
    assert {transaction.is_local for transaction in withdrawn} == {True, False}
