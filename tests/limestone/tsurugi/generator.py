"""A Tsurugi database that exists only as its log: tables, rows and schema changes, written byte by byte.

Imports nothing from `src`. `test_generator.py` compares its entries with recorded ones.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable
from typing import Any

from tests.limestone.tsurugi.encoder import TableSpec, index_metadata, key_of, metadata_key, table_metadata, value_of

METADATA = (1 << 64) - 2
UUID = "dddddddd-1111-4000-8000-000000000001"
SHORT = 1 << 63
"""Marks versions of short transactions."""


def put_entry(storage_id: int, key: bytes, value: bytes, version: tuple[int, int]) -> bytes:
    head = struct.pack("<BIIQ", 1, len(key), len(value), storage_id)
    return head + key + struct.pack("<QQ", *version) + value


def remove_entry(storage_id: int, key: bytes, version: tuple[int, int]) -> bytes:
    return struct.pack("<BIQ", 5, len(key), storage_id) + key + struct.pack("<QQ", *version)


def storage_entry(kind: int, storage_id: int, version: tuple[int, int]) -> bytes:
    return struct.pack("<BQQQ", kind, storage_id, *version)


class GeneratedDatabase:
    """A log directory with two channels, and what its tables hold at the end of each epoch."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.epoch = 0
        self.tables: dict[str, tuple[TableSpec, int, int]] = {}
        """Specification, storage id and surrogate id of each table."""
        self.rows: dict[str, dict[bytes, dict[str, Any]]] = {}
        self._entries: tuple[list[bytes], list[bytes]] = ([], [])
        self._minor = 0
        os.makedirs(path)
        content = {"format_version": "1.1", "instance_uuid": UUID, "persistent_format_version": 7}
        self._write("limestone-manifest.json", json.dumps(content).encode())
        catalog = "COMPACTION_CATALOG_HEADER\nMAX_EPOCH_ID 0\nMAX_BLOB_ID 0\nCOMPACTION_CATALOG_FOOTER\n"
        self._write("compaction_catalog", catalog.encode())

    def _write(self, name: str, data: bytes) -> None:
        with open(f"{self.path}/{name}", "ab") as file:
            file.write(data)

    def _version(self) -> tuple[int, int]:
        self._minor += 1
        return self.epoch + 1, SHORT | self._minor

    def commit(self, *, durable: bool = True) -> int:
        """End the epoch: write what happened in it, and make it durable."""
        self.epoch += 1
        for channel, entries in enumerate(self._entries):
            if entries:
                begin, end = struct.pack("<BQ", 2, self.epoch), struct.pack("<BQB", 3, self.epoch, 1)
                self._write(f"pwal_{channel:04}", b"".join((begin, *entries, end)))
                entries.clear()
        if durable:
            self._write("epoch", struct.pack("<BQ", 4, self.epoch))
        return self.epoch

    def create(self, table: TableSpec, number: int, *, surrogate: int | None = None, version: int = 14) -> None:
        """Create a table in storage `number` << 32."""
        surrogate = number if surrogate is None else surrogate
        self.tables[table.name] = table, number << 32, surrogate
        self.rows[table.name] = {}
        value = table_metadata(table, number << 32, surrogate, version=version)
        at = self._version()
        self._entries[0].append(put_entry(METADATA, metadata_key(surrogate), value, at))
        self._entries[0].append(storage_entry(8, number << 32, at))

    def create_index(self, name: str, table: str, column: str, number: int) -> None:
        value = index_metadata(name, table, [(column, False)], number << 32, number)
        self._entries[0].append(put_entry(METADATA, metadata_key(number), value, self._version()))

    def reserve(self, name: str) -> None:
        """Begin to drop a table, as Tsurugi 1.11 does: its rows stay for a while."""
        table, storage_id, surrogate = self.tables[name]
        value = table_metadata(table, storage_id, surrogate, reserved=True)
        self._entries[0].append(put_entry(METADATA, metadata_key(surrogate), value, self._version()))
        del self.rows[name]

    def remove(self, name: str) -> None:
        """Finish dropping a table."""
        _, storage_id, surrogate = self.tables.pop(name)
        at = self._version()
        self._entries[0].append(storage_entry(9, storage_id, at))
        self._entries[1].append(remove_entry(METADATA, metadata_key(surrogate), at))

    def upsert(self, name: str, rows: Iterable[dict[str, Any]]) -> None:
        table, storage_id, _ = self.tables[name]
        entries, held = self._entries[1], self.rows[name]
        for row in rows:
            key = key_of(table, row)
            entries.append(put_entry(storage_id, key, value_of(table, row), self._version()))
            held[key] = row

    def delete(self, name: str, keys: Iterable[dict[str, Any]]) -> None:
        table, storage_id, _ = self.tables[name]
        for each in keys:
            key = key_of(table, each)
            self._entries[1].append(remove_entry(storage_id, key, self._version()))
            del self.rows[name][key]

    def damage(self, name: str, key: bytes, value: bytes) -> None:
        """Write an entry that does not fit its table."""
        self._entries[1].append(put_entry(self.tables[name][1], key, value, self._version()))
