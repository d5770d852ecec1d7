"""The generator writes entries as Tsurugi wrote them, and directories that open."""

from __future__ import annotations

import struct
from pathlib import Path

from flowstone.limestone import read_table, tables
from tests.limestone.tsurugi.encoder import ColumnSpec, TableSpec, metadata_key, table_metadata
from tests.limestone.tsurugi.generator import METADATA, GeneratedDatabase, put_entry, remove_entry, storage_entry
from tests.limestone.tsurugi.recorded import log_of

TABLE = TableSpec("t", (ColumnSpec("id", "int8", nullable=False), ColumnSpec("w", "int4")), ("id",))


def test_entries_have_the_bytes_of_recorded_ones() -> None:
    recorded = b"".join(path.read_bytes() for path in sorted(log_of("basic").glob("pwal_*")))
    first = (1, 1 << 63)
    assert storage_entry(8, 1 << 32, first) in recorded
    drop = TableSpec("t_drop", (ColumnSpec("id", "int8", nullable=False), ColumnSpec("w", "int4")), ("id",))
    value = table_metadata(drop, 0, 0x16)[16:]
    at = recorded.rindex(value)
    size = 16 + len(value)
    key_at = at - 16 - 16 - 8
    version = struct.unpack_from("<QQ", recorded, key_at + 8)
    whole = recorded[at - 16 : at + len(value)]
    assert put_entry(METADATA, metadata_key(0x16), whole, version) == recorded[key_at - 17 : key_at + 24 + size]
    row = put_entry(0, bytes.fromhex("800000000000004d"), bytes.fromhex("7e7fffffa7"), (0, 0))
    assert row[17:25] in recorded
    assert recorded.count(remove_entry(METADATA, metadata_key(0xF), (0, 0))[:21]) == 1


def test_generated_database_is_read_as_it_was_written(tmp_path: Path) -> None:
    database = GeneratedDatabase(str(tmp_path / "log"))
    database.create(TABLE, 2)
    database.create_index("ix", "t", "w", 3)
    database.upsert("t", [{"id": 1, "w": 5}, {"id": 2, "w": None}])
    database.commit()
    database.delete("t", [{"id": 1}])
    database.commit()
    database.reserve("t")
    database.commit()
    database.remove("t")
    database.commit()
    assert read_table(database.path, "t", epoch=1).to_pylist() == [{"id": 1, "w": 5}, {"id": 2, "w": None}]
    assert read_table(database.path, "t", epoch=2).to_pylist() == [{"id": 2, "w": None}]
    assert tables(database.path, epoch=3) == tables(database.path, epoch=4) == {}
