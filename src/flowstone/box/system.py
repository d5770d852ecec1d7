"""The built-in system spaces: their ids, fields and primary keys (docs/spec/files.md#system-spaces).

These definitions make it possible to read a log without its snapshot: `_space` has a name, and the schema can be
tracked from the first row. The fields are the fields of 3.8; the rows of a server's own snapshot replace them.
Definitions are returned as rows of `_space` and `_index`, so that the same code reads both.
"""

from __future__ import annotations

from typing import Any, Final

VINYL_DEFERRED_DELETE_ID: Final = 257
SCHEMA_ID: Final = 272
COLLATION_ID: Final = 276
SPACE_ID: Final = 280
SEQUENCE_ID: Final = 284
SEQUENCE_DATA_ID: Final = 285
INDEX_ID: Final = 288
FUNC_ID: Final = 296
USER_ID: Final = 304
PRIV_ID: Final = 312
CLUSTER_ID: Final = 320
TRIGGER_ID: Final = 328
TRUNCATE_ID: Final = 330
SPACE_SEQUENCE_ID: Final = 340
FK_CONSTRAINT_ID: Final = 356
CK_CONSTRAINT_ID: Final = 364
FUNC_INDEX_ID: Final = 372
SESSION_SETTINGS_ID: Final = 380
GC_CONSUMERS_ID: Final = 388
RECOVERY_POINT_ID: Final = 396

FIRST_SYSTEM_SPACE_ID: Final = 256
FIRST_USER_SPACE_ID: Final = 512

NEWER_SPACE_IDS: Final = frozenset((341, GC_CONSUMERS_ID, RECOVERY_POINT_ID))
"""System spaces newer than 2.6; where they exist, they have a row in `_space`."""

SCHEMA_SPACE_IDS: Final = frozenset((SPACE_ID, INDEX_ID))
"""The system spaces whose rows define spaces and indexes."""

_FIELDS: Final = {
    VINYL_DEFERRED_DELETE_ID: "space_id:unsigned lsn:unsigned tuple:array",
    SCHEMA_ID: "key:string value:any?",
    COLLATION_ID: "id:unsigned name:string owner:unsigned type:string locale:string opts:map",
    SPACE_ID: "id:unsigned owner:unsigned name:string engine:string field_count:unsigned flags:map format:array",
    SEQUENCE_ID: "id:unsigned owner:unsigned name:string step:integer min:integer max:integer start:integer"
    " cache:integer cycle:boolean",
    SEQUENCE_DATA_ID: "id:unsigned value:integer",
    INDEX_ID: "id:unsigned iid:unsigned name:string type:string opts:map parts:array",
    FUNC_ID: "id:unsigned owner:unsigned name:string setuid:unsigned language:string body:string"
    " routine_type:string param_list:array returns:string aggregate:string sql_data_access:string"
    " is_deterministic:boolean is_sandboxed:boolean is_null_call:boolean exports:array opts:map comment:string"
    " created:string last_altered:string trigger:array",
    USER_ID: "id:unsigned owner:unsigned name:string type:string auth:map auth_history:array last_modified:unsigned",
    PRIV_ID: "grantor:unsigned grantee:unsigned object_type:string object_id:scalar privilege:unsigned",
    CLUSTER_ID: "id:unsigned uuid:string name:string?",
    TRIGGER_ID: "name:string space_id:unsigned opts:map",
    TRUNCATE_ID: "id:unsigned count:unsigned",
    SPACE_SEQUENCE_ID: "id:unsigned sequence_id:unsigned is_generated:boolean field:unsigned path:string",
    FK_CONSTRAINT_ID: "name:string child_id:unsigned parent_id:unsigned is_deferred:boolean match:string"
    " on_delete:string on_update:string child_cols:array parent_cols:array",
    CK_CONSTRAINT_ID: "space_id:unsigned name:string is_deferred:boolean language:string code:string"
    " is_enabled:boolean",
    FUNC_INDEX_ID: "space_id:unsigned index_id:unsigned func_id:unsigned",
    SESSION_SETTINGS_ID: "name:string value:any",
    GC_CONSUMERS_ID: "uuid:string vclock:map opts:map",
    RECOVERY_POINT_ID: "timestamp:unsigned replica_id:unsigned lsn:unsigned opts:map",
}

_NAMES: Final = {
    VINYL_DEFERRED_DELETE_ID: "_vinyl_deferred_delete",
    SCHEMA_ID: "_schema",
    COLLATION_ID: "_collation",
    SPACE_ID: "_space",
    SEQUENCE_ID: "_sequence",
    SEQUENCE_DATA_ID: "_sequence_data",
    INDEX_ID: "_index",
    FUNC_ID: "_func",
    USER_ID: "_user",
    PRIV_ID: "_priv",
    CLUSTER_ID: "_cluster",
    TRIGGER_ID: "_trigger",
    TRUNCATE_ID: "_truncate",
    SPACE_SEQUENCE_ID: "_space_sequence",
    FK_CONSTRAINT_ID: "_fk_constraint",
    CK_CONSTRAINT_ID: "_ck_constraint",
    FUNC_INDEX_ID: "_func_index",
    SESSION_SETTINGS_ID: "_session_settings",
    GC_CONSUMERS_ID: "_gc_consumers",
    RECOVERY_POINT_ID: "_recovery_point",
}

VIEWS: Final = {
    COLLATION_ID: 277,
    SPACE_ID: 281,
    SEQUENCE_ID: 286,
    INDEX_ID: 289,
    FUNC_ID: 297,
    USER_ID: 305,
    PRIV_ID: 313,
    SPACE_SEQUENCE_ID: 341,
}
"""Ids of the read-only views by base space, such as `_vspace` of `_space`; fields and keys are the same."""

_ENGINES: Final = {VINYL_DEFERRED_DELETE_ID: "blackhole", SESSION_SETTINGS_ID: "service"}
_FLAGS: Final[dict[int, dict[str, object]]] = {
    VINYL_DEFERRED_DELETE_ID: {"group_id": 1},
    SESSION_SETTINGS_ID: {"temporary": True},
    GC_CONSUMERS_ID: {"group_id": 1},
}
_KEYS: Final = {
    INDEX_ID: (0, 1),
    PRIV_ID: (1, 2, 3),
    FK_CONSTRAINT_ID: (0, 1),
    CK_CONSTRAINT_ID: (0, 1),
    FUNC_INDEX_ID: (0, 1),
    RECOVERY_POINT_ID: (0, 1, 2),
}
"""Field numbers of primary keys other than the first field alone."""


def space_rows() -> list[tuple[Any, ...]]:
    """Return the tuples of `_space` that define the system spaces."""
    rows = []
    for space_id, name in _NAMES.items():
        format = _format(space_id)
        # Only `_session_settings` fixes the number of fields.
        field_count = len(format) if space_id == SESSION_SETTINGS_ID else 0
        flags = _FLAGS.get(space_id, {})
        rows.append((space_id, 1, name, _ENGINES.get(space_id, "memtx"), field_count, flags, format))
        if space_id in VIEWS:
            rows.append((VIEWS[space_id], 1, f"_v{name[1:]}", "sysview", 0, {}, format))
    return sorted(rows, key=lambda row: row[0])


def index_rows() -> list[tuple[Any, ...]]:
    """Return the tuples of `_index` that define the primary keys of the system spaces."""
    rows = []
    for space_id in _NAMES:
        if space_id == VINYL_DEFERRED_DELETE_ID:
            continue
        format = _format(space_id)
        parts = tuple((field, format[field]["type"]) for field in _KEYS.get(space_id, (0,)))
        kind = "hash" if space_id == SEQUENCE_DATA_ID else "tree"
        rows.append((space_id, 0, "primary", kind, {"unique": True}, parts))
        if space_id in VIEWS:
            rows.append((VIEWS[space_id], 0, "primary", kind, {"unique": True}, parts))
    return sorted(rows, key=lambda row: row[0])


def _format(space_id: int) -> tuple[dict[str, object], ...]:
    format: list[dict[str, object]] = []
    for field in _FIELDS[space_id].split():
        name, kind = field.split(":")
        if kind.endswith("?"):
            format.append({"name": name, "type": kind[:-1], "is_nullable": True})
        else:
            format.append({"name": name, "type": kind})
    return tuple(format)
