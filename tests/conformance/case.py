"""The type of a case: the spaces it needs and the requests it sends, with constructors for the table.

A case runs on a server that has only the spaces of the case; the first is number 512, named `test`. Cases are data;
`target.py` runs them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowstone.iproto.constants import Key, RequestType

SPACE = 512
"""The id of a case's first space; the next ones follow."""

ADMIN = "admin"
LIMIT = 2**32 - 1

EQ, REQ, ALL, LT, LE, GE, GT, BITS_ALL_SET, BITS_ANY_SET, BITS_ALL_NOT_SET, OVERLAPS, NEIGHBOR = range(12)
ITERATORS = {"EQ": EQ, "REQ": REQ, "ALL": ALL, "LT": LT, "LE": LE, "GE": GE, "GT": GT}

_SPACE, _INDEX, _SEQUENCE, _SPACE_SEQUENCE, _FUNC, _USER, _PRIV, _TRUNCATE = 280, 288, 284, 340, 296, 304, 312, 330


@dataclass(frozen=True)
class Request:
    """One request. `payload` replaces header and body, `data` also the length of the packet; sent unchanged."""

    type: int = 0
    body: Any = field(default_factory=dict)
    user: str = ADMIN
    schema_version: int | None = None
    payload: bytes | None = None
    data: bytes | None = None
    unordered: bool = False  # the tuples of the reply may be in any order

    def by(self, user: str) -> Request:
        """Return the request, to be sent over a connection of `user`; that of `guest` does not authenticate."""
        return dataclasses.replace(self, user=user)


@dataclass(frozen=True)
class Index:
    """Return a row of `_index`, without the ids of space and index."""

    name: str
    type: str
    parts: Any
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Space:
    """A space with its indexes in the order of their ids, filled with `tuples`."""

    indexes: Sequence[Index]
    tuples: Sequence[Any] = ()
    format: Sequence[Any] = ()
    field_count: int = 0
    flags: Mapping[str, Any] = field(default_factory=dict)
    name: str = "test"
    engine: str = "memtx"


@dataclass(frozen=True)
class Case:
    """The requests in `before` must succeed; the replies to `requests` are compared."""

    name: str
    requests: tuple[Request, ...]
    spaces: tuple[Space, ...] = ()
    before: tuple[Request, ...] = ()


def group(
    name: str,
    spaces: Space | Sequence[Space],
    cases: Mapping[str, Request | list[Request]],
    *,
    before: Sequence[Request] = (),
) -> list[Case]:
    """Return cases that share their spaces: for each a name, and its request or requests."""
    shared = (spaces,) if isinstance(spaces, Space) else tuple(spaces)
    return [
        Case(f"{name}: {edge}", tuple(requests) if isinstance(requests, list) else (requests,), shared, tuple(before))
        for edge, requests in cases.items()
    ]


# --- spaces ---------------------------------------------------------------------------------------


def tree(*parts: Any, name: str = "", unique: bool = True, **options: Any) -> Index:
    """Return a TREE index; a part is a (field, type) pair or a map made by `part`."""
    return Index(name, "tree", _alike(parts), {"unique": unique, **options})


def hashed(*parts: Any, name: str = "", unique: bool = True) -> Index:
    """Return a HASH index."""
    return Index(name, "hash", _alike(parts), {"unique": unique})


def _alike(parts: Sequence[Any]) -> list[Any]:
    """Return the parts as a server expects them: pairs or maps, not both in one index."""
    if not any(isinstance(item, dict) for item in parts):
        return list(parts)
    return [item if isinstance(item, dict) else part(*item) for item in parts]


def part(field: int, type: str, **options: Any) -> dict[str, Any]:
    return {"field": field, "type": type, **options}


def column(name: str, type: str = "any", **options: Any) -> dict[str, Any]:
    return {"name": name, "type": type, **options}


PRIMARY = tree((0, "unsigned"), name="pk")
BY_NAME = tree((0, "string"), name="pk")


# --- requests -------------------------------------------------------------------------------------


def _body(**fields: Any) -> dict[Key, Any]:
    """Return a body without the keys that are None."""
    return {Key[key.upper()]: value for key, value in fields.items() if value is not None}


def select(
    key: Any = (),
    iterator: int | None = None,
    *,
    space: int = SPACE,
    index: int | None = None,
    limit: Any = LIMIT,
    offset: Any = None,
    unordered: bool = False,
) -> Request:
    body = _body(space_id=space, index_id=index, limit=limit, offset=offset, iterator=iterator, key=key)
    return Request(RequestType.SELECT, body, unordered=unordered)


def insert(tuple: Any, *, space: Any = SPACE) -> Request:
    return Request(RequestType.INSERT, _body(space_id=space, tuple=tuple))


def replace(tuple: Any, *, space: Any = SPACE) -> Request:
    return Request(RequestType.REPLACE, _body(space_id=space, tuple=tuple))


def delete(key: Any, *, space: Any = SPACE, index: Any = None) -> Request:
    return Request(RequestType.DELETE, _body(space_id=space, index_id=index, key=key))


def update(key: Any, *operations: Any, space: Any = SPACE, index: Any = None, base: Any = None) -> Request:
    """Return an UPDATE. Each operation is a list; fields count from `base`, by default 0."""
    body = _body(space_id=space, index_id=index, index_base=base, key=key, tuple=list(operations))
    return Request(RequestType.UPDATE, body)


def upsert(tuple: Any, *operations: Any, space: Any = SPACE, base: Any = None) -> Request:
    return Request(RequestType.UPSERT, _body(space_id=space, index_base=base, tuple=tuple, ops=list(operations)))


def call(function: Any, *arguments: Any) -> Request:
    return Request(RequestType.CALL, _body(function_name=function, tuple=list(arguments)))


def request(type: int, **fields: Any) -> Request:
    """Return any request, given the names of the keys of its body."""
    return Request(type, _body(**fields))


# --- definitions, as rows of the system spaces ----------------------------------------------------


def create_space(
    id: Any = SPACE,
    name: Any = "test",
    *,
    owner: Any = 1,
    engine: Any = "memtx",
    field_count: Any = 0,
    flags: Any = None,
    format: Any = (),
) -> Request:
    return insert([id, owner, name, engine, field_count, flags or {}, format], space=_SPACE)


def alter_space(
    id: Any = SPACE,
    name: Any = "test",
    *,
    owner: Any = 1,
    engine: Any = "memtx",
    field_count: Any = 0,
    flags: Any = None,
    format: Any = (),
) -> Request:
    return replace([id, owner, name, engine, field_count, flags or {}, format], space=_SPACE)


def drop_space(id: int = SPACE) -> Request:
    return delete([id], space=_SPACE)


def create_index(
    parts: Any, *, id: Any = 0, space: Any = SPACE, name: Any = "pk", type: Any = "tree", options: Any = None
) -> Request:
    return insert([space, id, name, type, {"unique": True} if options is None else options, parts], space=_INDEX)


def alter_index(
    parts: Any, *, id: Any = 0, space: Any = SPACE, name: Any = "pk", type: Any = "tree", options: Any = None
) -> Request:
    return replace([space, id, name, type, {"unique": True} if options is None else options, parts], space=_INDEX)


def drop_index(id: int, *, space: int = SPACE) -> Request:
    return delete([space, id], space=_INDEX)


def create_user(
    id: int,
    name: Any,
    password_hash: str | None = None,
    *,
    type: Any = "user",
    owner: int = 1,
    more: Sequence[Any] = (),
) -> Request:
    """Return a row; `more` has the fields that servers have added since 2.6."""
    auth = {} if password_hash is None else {"chap-sha1": password_hash}
    return insert([id, owner, name, type, auth, *more], space=_USER)


def grant(grantee: int, object_type: Any, object_id: Any, privilege: Any, *, grantor: Any = 1) -> Request:
    return replace([grantor, grantee, object_type, object_id, privilege], space=_PRIV)


def create_sequence(
    id: int, name: str, *, step: int = 1, min: int = 1, max: int = 2**63 - 1, start: int = 1, cycle: bool = False
) -> Request:
    return insert([id, 1, name, step, min, max, start, 0, cycle], space=_SEQUENCE)


def attach_sequence(
    sequence: int, *, space: int = SPACE, field: int = 0, path: str = "", generated: bool = True
) -> Request:
    return insert([space, sequence, generated, field, path], space=_SPACE_SEQUENCE)


def truncate(space: int = SPACE, count: int = 1) -> Request:
    return replace([space, count], space=_TRUNCATE)
