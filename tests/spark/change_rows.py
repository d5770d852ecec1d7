"""Rows for the tests of changes: transactions of one replica set as in a log."""

from __future__ import annotations

from typing import Any

from flowstone.box.definitions import FieldDefinition, IndexDefinition, IndexPart, SpaceDefinition
from flowstone.box.schema import Schema
from flowstone.iproto.constants import RequestType
from flowstone.iproto.msgpack import pack
from flowstone.iproto.row import Row
from tests.node.archived_rows import transaction

UUID = "aaaaaaaa-0000-4000-8000-000000000001"
ORDERS = SpaceDefinition(
    512,
    "orders",
    fields=(FieldDefinition("id", "unsigned"), FieldDefinition("name", "string")),
    indexes=(IndexDefinition(512, 0, "pk", "tree", True, (IndexPart(0, "unsigned"),)),),
)
SCHEMA = Schema({512: ORDERS, 513: SpaceDefinition(513, "other")})

INSERT, REPLACE, UPDATE = RequestType.INSERT, RequestType.REPLACE, RequestType.UPDATE
UPSERT, DELETE, NOP = RequestType.UPSERT, RequestType.DELETE, RequestType.NOP


def statement(kind: RequestType, lsn: int, body: dict[int, Any], *, origin: int = 1, at: float | None = None) -> Row:
    return Row(kind, origin, lsn=lsn, timestamp=100.0 + lsn if at is None else at, body=pack(body) if body else b"")


def insert(lsn: int, *values: Any, space: int = 512, **how: Any) -> Row:
    return statement(INSERT, lsn, {0x10: space, 0x21: values}, **how)


def delete(lsn: int, *key: Any, space: int = 512, **how: Any) -> Row:
    return statement(DELETE, lsn, {0x10: space, 0x20: key}, **how)


def update(lsn: int, key: int, *operations: Any, **how: Any) -> Row:
    return statement(UPDATE, lsn, {0x10: 512, 0x20: (key,), 0x15: 1, 0x21: operations}, **how)


def upsert(lsn: int, values: tuple[Any, ...], *operations: Any, space: int = 512, **how: Any) -> Row:
    return statement(UPSERT, lsn, {0x10: space, 0x21: values, 0x28: operations}, **how)


def truncate(lsn: int, space: int = 512) -> Row:
    return upsert(lsn, (space, 1), ("+", 1, 1), space=330)


def define(lsn: int, space: int, name: str, *fields: tuple[str, str], kind: RequestType = REPLACE) -> Row:
    layout = [{"name": field, "type": field_type} for field, field_type in fields]
    return statement(kind, lsn, {0x10: 280, 0x21: (space, 1, name, "memtx", 0, {}, layout)})


def define_key(lsn: int, space: int) -> Row:
    return statement(INSERT, lsn, {0x10: 288, 0x21: (space, 0, "pk", "tree", {"unique": True}, [[0, "unsigned"]])})


def rekey(lsn: int, *parts: tuple[int, str], space: int = 512) -> Row:
    """Change the primary key in place."""
    return statement(REPLACE, lsn, {0x10: 288, 0x21: (space, 0, "pk", "tree", {"unique": True}, parts)})


def whole(*rows: Row, flags: int = 0) -> bytes:
    return transaction(rows, flags)
