"""Changes of an archive as batches: each settled transaction once and completely, however the log is split."""

from __future__ import annotations

from random import Random

import pyarrow as pa
import pytest

from flowstone.columns.change_contract import ChangeContract
from flowstone.iproto.row import Row
from flowstone.replication.vclock import VClock
from flowstone.spark.index.log_index import ArchiveIndex
from flowstone.spark.sources.change_batches import FormatChanged, read_slice
from flowstone.spark.sources.stream_order import SplitTransaction
from tests.node.archived_rows import SYNC, confirm, rollback
from tests.spark.archives import DIRECTORY, WrittenArchive
from tests.spark.change_rows import INSERT, ORDERS, UUID, define, delete, insert, statement, truncate, update, whole

DEFINED = VClock({1: 2})
TYPED = ChangeContract(UUID, ORDERS)


def changes(
    archive: WrittenArchive,
    contract: ChangeContract = TYPED,
    start: VClock = DEFINED,
    end: VClock | None = None,
    *,
    size: int = 1 << 20,
    show_secrets: bool = False,
) -> pa.Table:
    index = ArchiveIndex.open(archive.disk, DIRECTORY)
    end = index.settled if end is None else end
    batches = [
        batch
        for part in index.slices(start, end, size=size)
        for batch in read_slice(archive.disk, part, start, end, contract, show_secrets=show_secrets)
    ]
    return pa.Table.from_batches(batches, contract.schema)


@pytest.fixture
def archive() -> WrittenArchive:
    archive = WrittenArchive()
    archive.define_orders()
    return archive


def _any_statement(random: Random, lsn: int, origin: int) -> Row:
    kind = random.randrange(3)
    if kind == 0:
        return insert(lsn, lsn, "x" * random.randint(0, 9), origin=origin, at=random.random() * 100)
    return update(lsn, lsn, ("=", 2, "y"), origin=origin) if kind == 1 else delete(lsn, lsn, origin=origin)


def scribble(archive: WrittenArchive, seed: int) -> set[int]:
    """Write transactions of all kinds in blocks of any size, of two origins; return LSNs of origin 1 that are rolled
    back.
    """
    random = Random(seed)
    lsns = {1: 2, 2: 0}
    withdrawn: set[int] = set()
    for _ in range(60):
        block = []
        for _ in range(random.randint(1, 5)):
            origin = random.choice((1, 1, 2))
            count = random.randint(1, 3)
            first = lsns[origin] + 1
            lsns[origin] += count
            rows = [_any_statement(random, lsn, origin) for lsn in range(first, first + count)]
            is_synchronous = origin == 1 and random.random() < 0.3
            block.append(whole(*rows, flags=SYNC if is_synchronous else 0))
            if is_synchronous:
                lsns[1] += 1
                is_kept = random.random() < 0.6
                block.append(confirm(lsns[1], lsns[1] - 1) if is_kept else rollback(lsns[1], first))
                withdrawn.update(() if is_kept else range(first, first + count))
        archive.write(*block)
    archive.save()
    return withdrawn


@pytest.mark.parametrize("seed", range(3))
def test_changes_are_the_same_for_any_division_of_the_log(seed: int) -> None:
    archive = WrittenArchive(wal_max_size=4000)
    archive.define_orders()
    withdrawn = scribble(archive, seed)
    table = changes(archive)
    table.validate(full=True)
    assert changes(archive, size=1) == table
    index = ArchiveIndex.open(archive.disk, DIRECTORY)
    parts, start = [], VClock({1: 2})
    while start != index.settled:
        end = index.cut(start, max_rows=Random(seed).randint(1, 40))
        parts.append(changes(archive, start=start, end=end, size=500))
        start = end
    assert len(parts) > 5
    assert pa.concat_tables(parts).combine_chunks() == table.combine_chunks()
    rows = table.select(["_replica_id", "_lsn", "_tsn", "_commit_version", "_commit_timestamp"]).to_pylist()
    assert withdrawn
    assert withdrawn.isdisjoint(row["_lsn"] for row in rows if row["_replica_id"] == 1)
    assert len({(row["_replica_id"], row["_lsn"]) for row in rows}) == len(rows)
    versions = [row["_commit_version"] for row in rows]
    assert versions == sorted(versions)
    assert len(set(versions)) == len({(row["_replica_id"], row["_tsn"]) for row in rows})
    times = [row["_commit_timestamp"] for row in rows]
    assert times == sorted(times)


def test_space_names_are_those_at_each_row(archive: WrittenArchive) -> None:
    archive.write(
        whole(insert(3, 3, "x")),
        whole(define(4, 512, "renamed", ("id", "unsigned"), ("name", "string"))),
        whole(insert(5, 5, "x"), truncate(6)),
    )
    archive.save()
    table = changes(archive, ChangeContract(UUID))
    assert table.column("_space").to_pylist() == ["orders", "renamed", "renamed"]
    assert changes(archive).column("_operation").to_pylist() == ["insert", "insert", "truncate"]


def test_definitions_before_the_window_apply_within_it(archive: WrittenArchive) -> None:
    archive.write(whole(define(3, 513, "late", ("id", "unsigned"))), whole(insert(4, 1, space=513)))
    archive.save()
    assert changes(archive, ChangeContract(UUID), VClock({1: 3})).column("_space").to_pylist() == ["late"]


def test_rows_of_another_format_are_refused(archive: WrittenArchive) -> None:
    archive.write(whole(insert(3, 3, "x")), whole(define(4, 512, "orders", ("id", "unsigned"))))
    archive.save()
    assert len(changes(archive)) == 1
    archive.write(whole(insert(5, 5)))
    archive.save()
    with pytest.raises(FormatChanged, match=r"format of space 'orders' changed .*; restart the query"):
        changes(archive)


def test_position_inside_a_transaction_is_refused(archive: WrittenArchive) -> None:
    archive.write(whole(insert(3, 3, "x"), insert(4, 4, "x")))
    archive.save()
    with pytest.raises(SplitTransaction, match="inside the transaction with LSN 3"):
        changes(archive, start=VClock({1: 3}))


def test_password_hashes_are_hidden_by_default(archive: WrittenArchive) -> None:
    user = (32, 1, "eve", "user", {"chap-sha1": "secret="})
    archive.write(whole(statement(INSERT, 3, {0x10: 304, 0x21: user})))
    archive.save()
    contract = ChangeContract(UUID, show_system=True, wanted=("_tuple", "_tuple_msgpack"))
    (row,) = changes(archive, contract).to_pylist()
    assert row["_tuple"] == '[32,1,"eve","user",{"chap-sha1":"<hidden>"}]'
    assert b"secret" not in row["_tuple_msgpack"]
    assert "secret=" in changes(archive, contract, show_secrets=True).column("_tuple")[0].as_py()
