"""The rows that a replica set is born with, in the order of its first snapshot.

They are those of real servers, kept as text beside this module: one JSON file per dialect, a list of tuples under
each space id, without the UUIDs. Everything that differs between two births is an argument.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any, Final, NamedTuple
from uuid import UUID

from flowstone.box import system
from flowstone.box.access import ADMIN, PUBLIC, SUPER, Privilege
from flowstone.box.dialect import Dialect
from flowstone.errors import FlowstoneError
from flowstone.iproto.auth import METHOD
from flowstone.iproto.msgpack import pack

FIRST_USER_ID: Final = 32
"""Real servers give it to the first user that is created: ids up to 31 are taken by `super`."""


ADMIN_NAME: Final = "admin"
"""Who is there from the beginning and may do everything, but has no password."""


class FirstUserRefused(FlowstoneError):
    """The first user cannot have this name."""


class FirstUser(NamedTuple):
    """A user who may do everything. `password_hash` is `auth.hash_of_hash` of the password, 20 bytes.

    The name `admin` means the one who is there anyway, and who gets the password.
    """

    name: str
    password_hash: bytes


def bootstrap_rows(
    dialect: Dialect,
    instance_uuid: UUID,
    replicaset_uuid: UUID,
    first_user: FirstUser | tuple[str, bytes] | None = None,
    *,
    time: int = 0,
) -> Iterator[tuple[int, bytes]]:
    """Space id and raw tuple of each row: spaces by id, tuples by primary key, as a snapshot has them.

    `time` is when it happens, in seconds since 1970; 2.11 notes it at the first user. FirstUserRefused for the name
    of `guest`, who has no password, or of a role.
    """
    tables = _tables(dialect)
    # Its key sorts before the others of `_schema`.
    tables[system.SCHEMA_ID].insert(0, ["cluster", str(replicaset_uuid)])
    tables[system.CLUSTER_ID] = [[1, str(instance_uuid)]]
    if first_user is not None:
        _add_user(tables, dialect, FirstUser(*first_user), time)
    for space_id in sorted(tables):
        for row in tables[space_id]:
            yield space_id, pack(row)


def collation_rows() -> list[tuple[Any, ...]]:
    """The tuples of `_collation` that every server is born with, the same in all dialects."""
    return [tuple(row) for row in _tables(Dialect.V2_6)[system.COLLATION_ID]]


def _tables(dialect: Dialect) -> dict[int, list[list[Any]]]:
    text = files("flowstone.box").joinpath(f"bootstrap-{dialect.value}.json").read_text("utf-8")
    return {int(space_id): rows for space_id, rows in json.loads(text).items()}


def _add_user(tables: dict[int, list[list[Any]]], dialect: Dialect, user: FirstUser, time: int) -> None:
    users = tables[system.USER_ID]
    taken = {row[_NAME]: number for number, row in enumerate(users)}
    if user.name == ADMIN_NAME:
        users[taken[ADMIN_NAME]] = _user_row(dialect, ADMIN, user, time)
        return
    if user.name in taken:
        kind = users[taken[user.name]][_KIND]
        raise FirstUserRefused(
            f"the first user cannot be called {user.name!r}, which every server has as a {kind}",
            hint=f"take another name, or {ADMIN_NAME!r} to give that one a password",
        )
    users.append(_user_row(dialect, FIRST_USER_ID, user, time))
    tables[system.PRIV_ID].extend(_privilege_rows())


_NAME, _KIND = 2, 3
"""Fields of `_user`."""


def _user_row(dialect: Dialect, user_id: int, user: FirstUser, time: int) -> list[Any]:
    auth = {METHOD: base64.b64encode(user.password_hash).decode()}
    row: list[Any] = [user_id, ADMIN, user.name, "user", auth]
    return row if dialect is Dialect.V2_6 else [*row, [], time]


def _privilege_rows() -> list[list[Any]]:
    """What box.schema.user.create gives, and the role `super`, in the order of `_priv`'s primary key."""
    grants = (
        ("role", PUBLIC, Privilege.EXECUTE),
        ("role", SUPER, Privilege.EXECUTE),
        ("universe", 0, Privilege.SESSION | Privilege.USAGE),
        ("user", FIRST_USER_ID, Privilege.ALTER),
    )
    return [[ADMIN, FIRST_USER_ID, kind, object_id, int(privilege)] for kind, object_id, privilege in grants]
