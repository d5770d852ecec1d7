"""Methods of spaces and indexes for CALL, such as `box.space.NAME:len` and `box.space.NAME.index.NAME:max`.

They follow the conventions of Lua: a key may be a single value, fields are counted from 1, and a missing tuple is no
result. They use the same statements and checks as other requests.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from flowstone.box.arguments import ITERATORS
from flowstone.box.box import Box
from flowstone.box.ddl import functions as ddl
from flowstone.box.definitions import IndexPart
from flowstone.box.engine import statements
from flowstone.box.engine.index import WHOLE, EngineIndex
from flowstone.box.engine.space import EngineSpace
from flowstone.box.engine.transaction import BoxTransaction
from flowstone.iproto import errors
from flowstone.iproto.msgpack import pack, unpack
from flowstone.node.instance import Instance
from flowstone.node.server.procedures import Call, Outcome, Procedure, Results, array, value

Method = Callable[[Call, BoxTransaction, EngineSpace, int], Results]
"""A method of the index with this id; methods of a space get its primary index."""

_NAME = re.compile(r"box\.space\.([^.:]+)(?:\.index\.([^.:]+))?:(\w+)")
_FIRST_FIELD = 1
"""The number of the first field in Lua."""


def find_method(instance: Instance, name: str) -> Procedure | None:
    """Return the method of an existing space or index; None if there is none."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    space_name, index_name, method_name = match.groups()
    space = instance.box.names.get(space_name)
    if space is None:
        return None
    index_id = 0
    if index_name is not None:
        found = [index for index in space.indexes.values() if index.definition.name == index_name]
        if not found:
            return None
        index_id = found[0].definition.id
    tables = (READS_OF_INDEX, WRITES_OF_INDEX) if index_name is not None else (READS_OF_SPACE, WRITES_OF_SPACE)
    for table, run in zip(tables, (_read, _write), strict=True):
        method = table.get(method_name)
        if method is not None:
            return partial(run, method, space.id, index_id)
    return None


def _read(method: Method, space_id: int, index_id: int, call: Call) -> Outcome:
    transaction = call.reading()
    return method(call, transaction, transaction.space(space_id), index_id)


def _write(method: Method, space_id: int, index_id: int, call: Call) -> Outcome:
    return call.writing(lambda transaction: method(call, transaction, transaction.space(space_id), index_id))


# --- arguments ---


def _key(key: Any) -> bytes:
    if key is None:
        return statements.EMPTY_KEY
    return pack(key if isinstance(key, tuple) else (key,))


def _tuple(call: Call, number: int) -> bytes:
    given = call.get(number)
    if not isinstance(given, tuple):
        raise errors.TupleNotArray("Tuple/Key must be MsgPack array")
    return pack(given)


def _operations(call: Call, number: int) -> bytes:
    given = call.get(number)
    return pack(given if isinstance(given, tuple) else ())


def _iterator(options: Any, key: bytes) -> int:
    """Return the iterator, given by name or number. The default is ALL for an empty key, and EQ for others."""
    wanted = options.get("iterator") if isinstance(options, dict) else options if isinstance(options, str) else None
    if wanted is None:
        return ITERATORS["ALL"] if key == statements.EMPTY_KEY else ITERATORS["EQ"]
    if isinstance(wanted, str) and wanted.upper() in ITERATORS:
        return ITERATORS[wanted.upper()]
    if isinstance(wanted, int) and not isinstance(wanted, bool):
        return wanted
    raise errors.IteratorType(f"Unknown iterator type '{wanted}'")


def _unsigned(options: dict[str, Any], name: str, default: int) -> int:
    given = options.get(name)
    if given is None:
        return default
    if not isinstance(given, int | float) or isinstance(given, bool) or given < 0:
        raise errors.IllegalParams(f"Illegal parameters, options parameter '{name}' should be of type number")
    return int(given)


def _one(raw: bytes | None) -> Results:
    return [] if raw is None else [raw]


# --- reading ---


def _len(call: Call, transaction: BoxTransaction, space: EngineSpace, index_id: int) -> Results:
    if not space.indexes:
        return value(0)
    everything = ITERATORS["ALL"]
    return value(statements.count(transaction, space, index_id, iterator=everything))


def _count(call: Call, transaction: BoxTransaction, space: EngineSpace, index_id: int) -> Results:
    if not space.indexes:
        return value(0)
    key = _key(call.get(0))
    return value(statements.count(transaction, space, index_id, iterator=_iterator(call.get(1), key), key=key))


def _get(call: Call, transaction: BoxTransaction, space: EngineSpace, index_id: int) -> Results:
    return _one(statements.get(transaction, space, index_id, _key(call.get(0))))


def _select(call: Call, transaction: BoxTransaction, space: EngineSpace, index_id: int) -> Results:
    key, given = _key(call.get(0)), call.get(1)
    options = given if isinstance(given, dict) else {}
    after = options.get("after")
    index = space.index(index_id)
    position = None
    if isinstance(after, str):
        position = after.encode("utf-8", "surrogateescape")
    elif isinstance(after, tuple):
        position = statements.position_of(index, pack(after))
    found = statements.select(
        transaction,
        space,
        index_id,
        iterator=_iterator(given, key),
        offset=_unsigned(options, "offset", 0),
        limit=_unsigned(options, "limit", statements.LIMIT_MAX),
        key=key,
        after=position,
    )
    if options.get("fetch_pos") is not True:
        return [array(found)]
    if found:
        position = statements.position_of(index, found[-1])
    return [array(found), *([] if position is None else value(position.decode("utf-8", "surrogateescape")))]


def _min(call: Call, transaction: BoxTransaction, space: EngineSpace, index_id: int) -> Results:
    return _one(_edge("min", "EQ", _key(call.get(0)), transaction, space, index_id))


def _max(call: Call, transaction: BoxTransaction, space: EngineSpace, index_id: int) -> Results:
    return _one(_edge("max", "REQ", _key(call.get(0)), transaction, space, index_id))


def _edge(
    name: str, iterator: str, key: bytes, transaction: BoxTransaction, space: EngineSpace, index_id: int
) -> bytes | None:
    """Return the first tuple that matches the key in the order of the iterator; None without a match."""
    index = space.index(index_id)
    if not index.is_ordered:
        definition = index.definition
        raise errors.UnsupportedIndexFeature(
            f"Index '{definition.name}' ({definition.type.upper()}) of space '{space.name}'"
            f" ({space.definition.engine}) does not support {name}()"
        )
    found = statements.select(transaction, space, index_id, iterator=ITERATORS[iterator], limit=1, key=key)
    return found[0] if found else None


def _random(call: Call, transaction: BoxTransaction, space: EngineSpace, index_id: int) -> Results:
    statements.check_access(transaction, space, 1)
    number = call.get(0)
    if not isinstance(number, int) or isinstance(number, bool):
        number = call.instance.outside.random.randrange(2**32)
    return _one(transaction.random(space.index(index_id), number))


def _bsize(call: Call, transaction: BoxTransaction, space: EngineSpace, index_id: int) -> Results:
    statements.check_access(transaction, space, 1)
    tuples = transaction.scan(space.primary, WHOLE) if space.primary is not None else ()
    return value(sum(len(raw) for _, raw in tuples))


def _format(call: Call, transaction: BoxTransaction, space: EngineSpace, index_id: int) -> Results:
    return value(stored_format(transaction, space))


def stored_format(transaction: BoxTransaction, space: EngineSpace) -> tuple[Any, ...]:
    """Return the format of the space in `_vspace`; empty if the user may not see the space."""
    row = statements.get(transaction, transaction.space("_vspace"), 0, pack((space.id,)))
    format: tuple[Any, ...] = unpack(row)[6] if row is not None else ()
    return format


# --- writing ---


def _insert(call: Call, transaction: BoxTransaction, space: EngineSpace, index_id: int) -> Results:
    return [statements.insert(transaction, space, _tuple(call, 0))]


def _replace(call: Call, transaction: BoxTransaction, space: EngineSpace, index_id: int) -> Results:
    return [statements.replace(transaction, space, _tuple(call, 0))]


def _update(call: Call, transaction: BoxTransaction, space: EngineSpace, index_id: int) -> Results:
    key, operations = _key(call.get(0)), _operations(call, 1)
    return _one(statements.update(transaction, space, index_id, key, operations, _FIRST_FIELD))


def _upsert(call: Call, transaction: BoxTransaction, space: EngineSpace, index_id: int) -> Results:
    statements.upsert(transaction, space, _tuple(call, 0), _operations(call, 1), _FIRST_FIELD)
    return []


def _delete(call: Call, transaction: BoxTransaction, space: EngineSpace, index_id: int) -> Results:
    return _one(statements.delete(transaction, space, index_id, _key(call.get(0))))


def _auto_increment(call: Call, transaction: BoxTransaction, space: EngineSpace, index_id: int) -> Results:
    given = call.get(0)
    if not isinstance(given, tuple):
        raise errors.TupleNotArray("Tuple/Key must be MsgPack array")
    highest = _edge("max", "REQ", statements.EMPTY_KEY, transaction, space, 0)
    number = unpack(highest)[0] + 1 if highest is not None else 1
    return [statements.insert(transaction, space, pack((number, *given)))]


def _truncate(call: Call, transaction: BoxTransaction, space: EngineSpace, index_id: int) -> Results:
    ddl.truncate(transaction, space.id)
    return []


def _drop(call: Call, transaction: BoxTransaction, space: EngineSpace, index_id: int) -> Results:
    ddl.drop_space(transaction, space.id)
    return []


def _rename(call: Call, transaction: BoxTransaction, space: EngineSpace, index_id: int) -> Results:
    ddl.rename_space(transaction, space.id, call.text(0, "space_name"))
    return []


def _format_or_set(call: Call, transaction: BoxTransaction, space: EngineSpace, index_id: int) -> Results:
    format = call.get(0)
    if format is None:
        return _format(call, transaction, space, index_id)
    ddl.format_space(transaction, space.id, format)
    return []


def _create_index(call: Call, transaction: BoxTransaction, space: EngineSpace, index_id: int) -> Results:
    index, _ = ddl.create_index(transaction, space.id, call.text(0, "name"), **call.options(1))
    return value(describe_index(index, transaction.box))


def describe_index(index: EngineIndex, box: Box) -> dict[str, Any]:
    """Return the fields of the Lua object of an index."""
    definition = index.definition
    return {
        "unique": definition.unique,
        "parts": [_describe_part(part, box) for part in definition.parts],
        "id": definition.id,
        "space_id": definition.space_id,
        "type": definition.type.upper(),
        "name": definition.name,
    }


def _describe_part(part: IndexPart, box: Box) -> dict[str, Any]:
    described: dict[str, Any] = {"type": part.type, "is_nullable": part.is_nullable, "fieldno": part.field + 1}
    collation = box.collations.get(part.collation) if part.collation is not None else None
    if collation is not None:
        described["collation"] = collation.name
    return described | ({"path": part.path} if part.path else {})


def _drop_index(call: Call, transaction: BoxTransaction, space: EngineSpace, index_id: int) -> Results:
    ddl.drop_index(transaction, space.id, index_id)
    return []


def _rename_index(call: Call, transaction: BoxTransaction, space: EngineSpace, index_id: int) -> Results:
    ddl.rename_index(transaction, space.id, index_id, call.text(0, "name"))
    return []


def _alter_index(call: Call, transaction: BoxTransaction, space: EngineSpace, index_id: int) -> Results:
    ddl.alter_index(transaction, space.id, index_id, **call.options(0))
    return []


READS_OF_INDEX: dict[str, Method] = {
    "len": _len,
    "count": _count,
    "get": _get,
    "select": _select,
    "min": _min,
    "max": _max,
    "random": _random,
}
READS_OF_SPACE: dict[str, Method] = {**READS_OF_INDEX, "bsize": _bsize}
WRITES_OF_INDEX: dict[str, Method] = {
    "update": _update,
    "delete": _delete,
    "drop": _drop_index,
    "rename": _rename_index,
    "alter": _alter_index,
}
WRITES_OF_SPACE: dict[str, Method] = {
    "insert": _insert,
    "replace": _replace,
    "put": _replace,
    "update": _update,
    "upsert": _upsert,
    "delete": _delete,
    "auto_increment": _auto_increment,
    "truncate": _truncate,
    "drop": _drop,
    "rename": _rename,
    "format": _format_or_set,
    "create_index": _create_index,
}
