"""Tables of changes for the tests of folding: statements of transactions in the engine, as a source delivers them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from flowstone.box.definitions import SpaceDefinition
from flowstone.box.schema import SchemaTracker
from flowstone.columns.arrow_columns import MOMENT
from flowstone.columns.sort_keys import sort_keys, sort_keys_of_keys
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import pack, unpack_body

RAW = pa.schema(
    [
        ("_space_id", pa.int32()),
        ("_sort_key", pa.binary()),
        ("_operation", pa.string()),
        ("_commit_version", pa.int64()),
        ("_commit_timestamp", MOMENT),
        ("_replica_id", pa.int32()),
        ("_lsn", pa.int64()),
        ("_tuple_msgpack", pa.binary()),
        ("_key_msgpack", pa.binary()),
        ("_operations_msgpack", pa.binary()),
        ("_index_base", pa.int32()),
    ]
)
OPERATIONS = {
    RequestType.INSERT: "insert",
    RequestType.REPLACE: "replace",
    RequestType.UPDATE: "update",
    RequestType.UPSERT: "upsert",
    RequestType.DELETE: "delete",
}


def change(space: SpaceDefinition, version: int, lsn: int, kind: int, body: bytes) -> dict[str, Any]:
    """Return a row of the log as a row of RAW."""
    request = unpack_body(body)
    operation = OPERATIONS[RequestType(kind)]
    has_tuple = operation in ("insert", "replace", "upsert")
    key = None if has_tuple else pack(request[Key.KEY])
    value = pack(request[Key.TUPLE]) if has_tuple else None
    operations = {"upsert": request.get(Key.OPS), "update": request.get(Key.TUPLE)}.get(operation)
    # An update through another index that found no tuple is not logged.
    array = pa.array([None if request.get(Key.INDEX_ID) else value if has_tuple else key], pa.binary())
    made = sort_keys(space, array) if has_tuple else sort_keys_of_keys(space, array)
    return {
        "_space_id": space.id,
        "_sort_key": made[0].as_py(),
        "_operation": operation,
        "_commit_version": version,
        "_commit_timestamp": version,
        "_replica_id": 1,
        "_lsn": lsn,
        "_tuple_msgpack": value,
        "_key_msgpack": key,
        "_operations_msgpack": None if operations is None else pack(operations),
        "_index_base": request.get(Key.INDEX_BASE, 0),
    }


def table(rows: Sequence[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), RAW)


def system_space(space_id: int) -> SpaceDefinition:
    return SchemaTracker().schema.space(space_id)
