"""The checks of a real server on tuples of `_space` and `_index`, with its errors (alter.cc of 2.6.0).

Only for local changes: rows from a log or a peer were checked there, perhaps by a newer server. The tuples have already
passed the formats of their spaces. Accepts the types and options of 2.6, and in dialect 2.11 also the types and options
of 2.11. The order of the checks is the server's, since a client sees the first error.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from typing import Any, Final

from flowstone.box.definitions import (
    IndexDefinition,
    IndexPart,
    SpaceDefinition,
    field_type,
    read_index,
    read_space,
)
from flowstone.box.dialect import Dialect
from flowstone.box.engine.constraints import CONSTRAINT, FOREIGN_KEY, check_field_constraints, check_tuple_constraints
from flowstone.box.engine.field_types import ACCEPTS, contains
from flowstone.box.engine.paths import EVERY, PathError, Step, format_path, parse_path
from flowstone.iproto import errors

NAME_MAX: Final = 65000
_INVALID_NAME_MAX: Final = 64
"""Number of characters of an overlong name that an error message shows."""

SPACE_ID_MAX: Final = 2**31 - 1
INDEX_ID_MAX: Final = 127
PARTS_MAX: Final = 255
INDEX_FIELD_MAX: Final = 2**15 - 1
ENGINE_NAME_MAX: Final = 16
ENGINES: Final = ("memtx", "vinyl", "sysview", "blackhole", "service")
INDEX_TYPES: Final = ("tree", "hash", "rtree", "bitset")
GROUP_LOCAL: Final = 1
_COLLATION_NONE: Final = 0

_TYPES_OF_2_11: Final = frozenset(("datetime", "interval"))
_NOT_INDEXED: Final = frozenset(("any", "array", "map", "interval"))
_ACTIONS: Final = ("none", "rollback", "abort", "fail", "ignore", "replace", "default")

_SPACE_OPTIONS: Final = {
    "group_id": "unsigned",
    "temporary": "boolean",
    "view": "boolean",
    "is_sync": "boolean",
    "sql": "string",
    "checks": "legacy",
}
_FIELD_OPTIONS: Final = {
    "type": "enum",
    "name": "string",
    "is_nullable": "boolean",
    "nullable_action": "enum",
    "collation": "unsigned",
    "default": "string",
}
_INDEX_OPTIONS: Final = {
    "unique": "boolean",
    "dimension": "integer",
    "distance": "enum",
    "range_size": "integer",
    "page_size": "integer",
    "run_count_per_level": "integer",
    "run_size_ratio": "float",
    "bloom_fpr": "float",
    "lsn": "integer",
    "func": "unsigned",
    "sql": "legacy",
}
_PART_OPTIONS: Final = {
    "type": "enum",
    "field": "unsigned",
    "collation": "unsigned",
    "is_nullable": "boolean",
    "nullable_action": "enum",
    "sort_order": "enum",
    "path": "string",
}
_ADDED_IN_2_11: Final[dict[str, dict[str, str]]] = {
    "space": {"defer_deletes": "boolean"},
    "index": {"hint": "boolean"},
    "part": {"exclude_null": "boolean"},
}

Collations = Mapping[int, object]


def checked_space(row: tuple[Any, ...], error: type[errors.TarantoolError], dialect: Dialect) -> SpaceDefinition:
    """Check a tuple of `_space` and return its space. `error` is CreateSpace or AlterSpace."""
    space_id, _, name, engine, field_count, flags, format = row[:7]
    text = "Failed to create space '{}': {}" if error is errors.CreateSpace else "Can't modify space '{}': {}"

    def refused(reason: str) -> errors.TarantoolError:
        return error(text.format(name, reason))

    check_name_length(name, error, text, "space name is too long")
    check_identifier(name)
    if space_id > SPACE_ID_MAX:
        raise refused("space id is too big")
    if space_id == 0:
        raise refused("space id 0 is reserved")
    if len(engine.encode()) > ENGINE_NAME_MAX:
        raise refused("space engine name is too long")
    check_identifier(engine)
    for number, field in enumerate(format, 1):
        problem = _field_problem(number, field, dialect)
        if problem is not None:
            raise refused(problem)
    if 0 < field_count < len(format):
        raise refused("exact_field_count must be either 0 or >= formatted field count")
    known = _SPACE_OPTIONS | (_ADDED_IN_2_11["space"] if dialect is Dialect.V2_11 else {})
    if dialect.has_constraints:
        check_tuple_constraints(flags)
        flags = {name: value for name, value in flags.items() if name not in (CONSTRAINT, FOREIGN_KEY)}
    check_options(flags, known, errors.WrongSpaceOptions, "Wrong space options (field {}): {}", 5)
    _check_flags(flags, refused)
    _check_duplicates(format)
    if engine not in ENGINES:
        raise errors.NoSuchEngine(f"Space engine '{engine}' does not exist")
    if engine == "vinyl" and flags.get("temporary"):
        raise errors.AlterSpace(f"Can't modify space '{name}': engine does not support temporary flag")
    return read_space(row)


def _field_problem(number: int, field: Any, dialect: Dialect) -> str | None:
    """Return what is wrong with a field of a format, or None. Some problems raise an error of their own."""
    if not isinstance(field, dict):
        return f"field {number} is not map"
    for key, value in field.items():
        if not isinstance(key, str):
            return f"field {number} format is not map with string keys"
        if key in _FIELD_OPTIONS:
            _check_option(
                key, value, _FIELD_OPTIONS[key], errors.WrongSpaceFormat, "Wrong space format (field {}): {}", number
            )
    if dialect.has_constraints:
        check_field_constraints(number, field)
    name = field.get("name", "")
    if not name:
        return f"field {number} name is not specified"
    if len(name.encode("utf-8", "surrogateescape")) > NAME_MAX:
        return f"field {number} name is too long"
    check_identifier(name)
    kind = known_type(field.get("type", "any"), dialect)
    if kind is None:
        return f"field {number} has unknown field type"
    is_nullable = field.get("is_nullable", False)
    action = field.get("nullable_action", "none" if is_nullable else "default").lower()
    if action not in _ACTIONS:
        return f"field {number} has unknown field on conflict nullable action"
    if is_nullable != (action == "none"):
        return f"field {number} has conflicting nullability and nullable action properties"
    if field.get("collation", _COLLATION_NONE) != _COLLATION_NONE and kind not in ("string", "scalar", "any"):
        return "collation is reasonable only for string, scalar and any fields"
    return None


def _check_flags(flags: dict[str, Any], refused: Any) -> None:
    group_id = flags.get("group_id", 0)
    if group_id not in (0, GROUP_LOCAL):
        raise errors.NoSuchGroup(f"Replication group '{group_id}' does not exist")
    if flags.get("view") and not flags.get("sql"):
        raise errors.ViewMissingSql("Space declared as a view must have SQL statement")
    if flags.get("is_sync") and group_id == GROUP_LOCAL:
        raise refused("local space can't be synchronous")


def _check_duplicates(format: tuple[dict[str, Any], ...]) -> None:
    seen: dict[str, None] = {}
    for field in format:
        if field["name"] in seen:
            raise errors.SpaceFieldIsDuplicate(f"Space field '{field['name']}' is duplicate")
        seen[field["name"]] = None


def checked_index(
    row: tuple[Any, ...], space: SpaceDefinition, collations: Collations, dialect: Dialect
) -> IndexDefinition:
    """Check a tuple of `_index` and return the index that it defines on `space`."""
    if len(row) != 6:
        got = ", ".join(_kind_name(value) for value in row)
        raise errors.WrongIndexRecord(
            f"Wrong record in _index space: got {{{got}}}, expected {{space id (unsigned), index id (unsigned), "
            "name (string), type (string), options (map), parts (array)}"
        )
    _, index_id, name, kind, options, parts = row
    _check_index_options(options, dialect)
    check_name_length(
        name,
        errors.ModifyIndex,
        f"Can't create or modify index '{{}}' in space '{space.name}': {{}}",
        "index name is too long",
    )
    check_identifier(name)
    _check_parts(parts, dialect)
    if not parts:
        raise _index_refused(name, space, "part count must be positive")
    index = read_index(row, space.fields)
    _check_collations(index, space, collations)
    paths = _checked_paths(index)
    _check_index(index, index_id, space, paths)
    if kind.lower() not in INDEX_TYPES:
        raise errors.IndexType(f"Unsupported index type supplied for index '{name}' in space '{space.name}'")
    _check_engine(index, space, paths)
    return index


def _check_index_options(options: dict[Any, Any], dialect: Dialect) -> None:
    error, text = errors.WrongIndexOptions, "Wrong index options (field {}): {}"
    known = _INDEX_OPTIONS | (_ADDED_IN_2_11["index"] if dialect is Dialect.V2_11 else {})
    check_options(options, known, error, text, 4)
    problems = (
        (
            options.get("distance", "euclid").lower() not in ("euclid", "manhattan"),
            "distance must be either 'euclid' or 'manhattan'",
        ),
        (
            options.get("page_size", 8192) <= 0 or 0 < options.get("range_size", 0) < options.get("page_size", 8192),
            "page_size must be greater than 0 and less than or equal to range_size",
        ),
        (options.get("run_count_per_level", 2) <= 0, "run_count_per_level must be greater than 0"),
        (options.get("run_size_ratio", 3.5) <= 1, "run_size_ratio must be greater than 1"),
        (
            not 0 < options.get("bloom_fpr", 0.05) <= 1,
            "bloom_fpr must be greater than 0 and less than or equal to 1",
        ),
    )
    for is_wrong, problem in problems:
        if is_wrong:
            raise error(text.format(4, problem))


def _check_parts(parts: tuple[Any, ...], dialect: Dialect) -> None:
    if parts and isinstance(parts[0], tuple):
        for part in parts:
            _check_pair(part, dialect)
        return
    for number, part in enumerate(parts, 1):
        problem = _part_problem(number, part, dialect)
        if problem is not None:
            raise errors.WrongIndexOptions(f"Wrong index options (field {number}): {problem}")


def _check_pair(part: Any, dialect: Dialect) -> None:
    if not isinstance(part, tuple):
        problem = "expected an array"
    elif not part:
        problem = "expected a non-empty array"
    elif len(part) < 2:
        problem = "a field type is missing"
    elif type(part[0]) is not int or part[0] < 0:
        problem = "field id must be an integer"
    elif not isinstance(part[1], str):
        problem = "field type must be a string"
    elif known_type(part[1], dialect) is None:
        problem = "unknown field type"
    else:
        return
    raise errors.WrongIndexParts(
        f"Wrong index parts: {problem}; expected field1 id (number), field1 type (string), ..."
    )


def _part_problem(number: int, part: Any, dialect: Dialect) -> str | None:
    if not isinstance(part, dict):
        return "index part is expected to be a map"
    known = _PART_OPTIONS | (_ADDED_IN_2_11["part"] if dialect is Dialect.V2_11 else {})
    check_options(part, known, errors.WrongIndexOptions, "Wrong index options (field {}): {}", number)
    kind = known_type(part.get("type", ""), dialect)
    if kind is None:
        return "index part: unknown field type"
    if part.get("collation", _COLLATION_NONE) != _COLLATION_NONE and kind not in ("string", "scalar"):
        return "collation is reasonable only for string and scalar parts"
    is_nullable = part.get("is_nullable", False)
    action = part.get("nullable_action", "none" if is_nullable else "default").lower()
    if is_nullable != (action == "none"):
        return "index part: conflicting nullability and nullable action properties"
    if part.get("sort_order", "asc").lower() not in ("asc", "desc", "undef"):
        return "index part: unknown sort order"
    try:
        parse_path(part.get("path", ""))
    except PathError:
        return "invalid path"
    return None


def _check_collations(index: IndexDefinition, space: SpaceDefinition, collations: Collations) -> None:
    for number, part in enumerate(index.parts, 1):
        if part.collation and part.collation not in collations:
            raise errors.WrongIndexOptions(f"Wrong index options (field {number}): collation was not found by ID")
    check_format_collations(space, collations)


def check_format_collations(space: SpaceDefinition, collations: Collations) -> None:
    """Raise WrongCollationOptions if a field of the format has an unknown collation."""
    for number, field in enumerate(space.fields, 1):
        if field.collation and field.collation not in collations:
            raise errors.WrongCollationOptions(
                f"Wrong collation options (field {number}): collation was not found by ID"
            )


def _checked_paths(index: IndexDefinition) -> list[tuple[Step, ...]]:
    """Return the path of each part as steps; all multikey parts must refer to the same array."""
    paths = [parse_path(part.path or "") for part in index.parts]
    root: tuple[int, tuple[Step, ...]] | None = None
    for number, (part, steps) in enumerate(zip(index.parts, paths, strict=True), 1):
        if EVERY not in steps:
            continue
        at = steps.index(EVERY)
        root = root or (part.field, steps[:at])
        if root != (part.field, steps[:at]):
            raise errors.WrongIndexOptions(f"Wrong index options (field {number}): incompatable multikey index path")
        if EVERY in steps[at + 1 :]:
            raise errors.WrongIndexOptions(
                f"Wrong index options (field {number}): no more than one array index placeholder [*] is allowed"
                " in JSON path"
            )
    return paths


def _check_index(index: IndexDefinition, index_id: int, space: SpaceDefinition, paths: list[tuple[Step, ...]]) -> None:
    is_multikey = any(EVERY in steps for steps in paths)
    reason = None
    if index_id > INDEX_ID_MAX:
        reason = "index id too big"
    elif index_id == 0 and not index.unique:
        reason = "primary key must be unique"
    elif len(index.parts) > PARTS_MAX:
        reason = "too many key parts"
    elif index_id == 0 and is_multikey:
        reason = "primary key cannot be multikey"
    elif index_id == 0 and index.is_functional:
        reason = "primary key can not use a function"
    elif any(part.field > INDEX_FIELD_MAX for part in index.parts):
        reason = "field no is too big"
    else:
        places = [(part.field, steps) for part, steps in zip(index.parts, paths, strict=True)]
        if len(frozenset(places)) < len(places):
            reason = "same key part is indexed twice"
    if reason is not None:
        raise _index_refused(index.name, space, reason)


def _check_engine(index: IndexDefinition, space: SpaceDefinition, paths: list[tuple[Step, ...]]) -> None:
    """Raise the error of the engine if it does not support the index, which is otherwise valid."""
    if space.engine == "vinyl" and index.type != "tree":
        raise errors.IndexType(f"Unsupported index type supplied for index '{index.name}' in space '{space.name}'")
    if any(part.is_nullable for part in index.parts):
        if index.id == 0:
            raise errors.NullablePrimary(f"Primary index of space '{space.name}' can not contain nullable parts")
        if index.type != "tree":
            raise errors.Unsupported(f"{index.type.upper()} does not support nullable parts")
    root = next((part.field for part, steps in zip(index.parts, paths, strict=True) if EVERY in steps), None)
    if root is not None and root < len(space.fields) and space.fields[root].is_nullable:
        raise errors.Unsupported("multikey index does not support nullable root field")
    reason = _kind_problem(index, root is not None)
    if reason is not None:
        raise _index_refused(index.name, space, reason)
    if index.type in ("rtree", "bitset"):
        raise errors.Unsupported(f"Flowstone does not support {index.type.upper()} indexes")
    for part in index.parts:
        if part.type in _NOT_INDEXED:
            raise _index_refused(index.name, space, f"field type '{part.type}' is not supported")
    if index.is_functional:
        raise errors.Unsupported("Flowstone does not support functional indexes")


def _kind_problem(index: IndexDefinition, is_multikey: bool) -> str | None:
    kind = index.type.upper()
    if kind == "TREE":
        return None
    if kind == "HASH":
        if not index.unique:
            return "HASH index must be unique"
    else:
        if len(index.parts) != 1:
            return f"{kind} index key can not be multipart"
        if index.unique:
            return "RTREE index can not be unique" if kind == "RTREE" else "BITSET can not be unique"
        if kind == "RTREE" and index.parts[0].type != "array":
            return "RTREE index field type must be ARRAY"
        if kind == "BITSET" and index.parts[0].type not in ("unsigned", "string"):
            return "BITSET index field type must be NUM or STR"
    if is_multikey:
        return f"{kind} index cannot be multikey"
    if index.is_functional:
        return f"{kind} index can not use a function"
    return None


def check_part_types(space: SpaceDefinition, dialect: Dialect = Dialect.V2_6) -> None:
    """Raise an error if an index and the format, or two indexes, disagree on the type of a field (tuple_format.c)."""
    nodes: dict[tuple[Step, ...], _Node] = {}
    for number, field in enumerate(space.fields):
        nodes[number,] = _Node(field.type)
    for index in space.indexes:
        if index.is_functional:
            continue  # its parts refer to the result of the function
        for part in index.parts:
            _use_part(nodes, part, dialect)


class _Node:
    """The type of one value in a tuple, as determined so far."""

    __slots__ = ("is_key_part", "type")

    def __init__(self, type: str = "any") -> None:
        self.type = type
        self.is_key_part = False


def _use_part(nodes: dict[tuple[Step, ...], _Node], part: IndexPart, dialect: Dialect) -> None:
    steps: tuple[Step, ...] = (part.field, *parse_path(part.path or ""))
    for length in range(1, len(steps)):
        node = nodes.setdefault(steps[:length], _Node())
        needed = "map" if isinstance(steps[length], str) else "array"
        if not contains(node.type, needed):
            raise _mismatch(errors.IndexPartTypeMismatch, steps[:length], node.type, needed)
        node.type = needed
        _check_elements(nodes, steps[: length + 1])
    node = nodes.setdefault(steps, _Node())
    if contains(node.type, part.type, dialect):
        node.type = part.type
    elif not contains(part.type, node.type, dialect):
        error = errors.IndexPartTypeMismatch if node.is_key_part else errors.FormatMismatchIndexPart
        raise _mismatch(error, steps, node.type, part.type)
    node.is_key_part = True


def _check_elements(nodes: dict[tuple[Step, ...], _Node], steps: tuple[Step, ...]) -> None:
    """Raise MultikeyIndexMismatch if an array is indexed both by all elements and by single ones."""
    parent, is_every = steps[:-1], steps[-1] is EVERY
    for other in nodes:
        if other[:-1] == parent and (other[-1] is EVERY) != is_every:
            raise errors.MultikeyIndexMismatch(
                f"Field {_place(parent)} is used as multikey in one index and as single key in another"
            )


def _mismatch(
    error: type[errors.TarantoolError], steps: tuple[Step, ...], found: str, wanted: str
) -> errors.TarantoolError:
    if error is errors.IndexPartTypeMismatch:
        return error(f"Field {_place(steps)} has type '{found}' in one index, but type '{wanted}' in another")
    return error(f"Field {_place(steps)} has type '{found}' in space format, but type '{wanted}' in index definition")


def _place(steps: tuple[Step, ...]) -> str:
    return str(int(str(steps[0])) + 1) if len(steps) == 1 else format_path(steps)


def known_type(name: object, dialect: Dialect) -> str | None:
    """Return the current name of a field type, or None if the dialect does not have the type."""
    if not isinstance(name, str) or not name:
        return None
    kind = field_type(name)
    if kind not in ACCEPTS or (dialect is Dialect.V2_6 and kind in _TYPES_OF_2_11):
        return None
    return kind


def check_identifier(name: str) -> None:
    """Raise Identifier unless `name` is non-empty and consists of printable characters."""
    for character in name or "\0":
        if character == "\ufffd" or unicodedata.category(character) in ("Cn", "Zl", "Zp", "Cc", "Cs"):
            raise errors.Identifier(f"Invalid identifier '{name}' (expected printable symbols only or it is too long)")


def check_name_length(name: str, error: type[errors.TarantoolError], text: str, reason: str) -> None:
    """Raise `error` if `name` is too long; `text` is formatted with the beginning of the name and `reason`."""
    if len(name.encode("utf-8", "surrogateescape")) > NAME_MAX:
        raise error(text.format(name[:_INVALID_NAME_MAX], reason))


def check_options(
    options: Mapping[Any, Any], known: Mapping[str, str], error: type[errors.TarantoolError], text: str, field: int
) -> None:
    """Raise `error` if an option is unknown or has a wrong type; `text` is formatted with `field` and the problem."""
    for key, value in options.items():
        if not isinstance(key, str):
            raise error(text.format(field, "key must be a string"))
        if key not in known:
            raise error(text.format(field, f"unexpected option '{key}'"))
        _check_option(key, value, known[key], error, text, field)


def _check_option(
    name: str, value: object, kind: str, error: type[errors.TarantoolError], text: str, field: int
) -> None:
    fits = {
        "boolean": isinstance(value, bool),
        "unsigned": type(value) is int and 0 <= value < 2**32,
        "integer": type(value) is int,
        "float": type(value) in (int, float),
        "string": isinstance(value, str),
        "enum": isinstance(value, str),
        "legacy": True,
    }[kind]
    if not fits:
        raise error(text.format(field, f"'{name}' must be {kind}"))


def _kind_name(value: object) -> str:
    if type(value) is int:
        return "unsigned" if value >= 0 else "integer"
    names = {str: "string", bytes: "binary", tuple: "array", dict: "map", bool: "boolean", float: "double"}
    return "nil" if value is None else names.get(type(value), "extension")


def _index_refused(name: str, space: SpaceDefinition, reason: str) -> errors.TarantoolError:
    return errors.ModifyIndex(f"Can't create or modify index '{name}' in space '{space.name}': {reason}")
