"""The initial rows of a new replica set, in the order of its first snapshot.

They are the rows of real servers, stored next to this module: one JSON file per dialect, with a list of tuples per
space id, without UUIDs. Everything that differs between two replica sets is an argument.
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
"""Id of the first created user, as in real servers: `super` has id 31, and new users get the next id."""


ADMIN_NAME: Final = "admin"
"""The built-in user with all rights, who has no password by default."""


class FirstUserRefused(FlowstoneError):
    """The name is not allowed for the first user."""


class FirstUser(NamedTuple):
    """A user with all rights. `password_hash` is `auth.hash_of_hash` of the password, 20 bytes.

    The name `admin` means the built-in user, who then gets this password.
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
    """Yield space id and raw tuple of each row in snapshot order: spaces by id, tuples by primary key.

    `time` is the current Unix time; 2.11 stores it in the row of the first user. Raise FirstUserRefused if the name is
    `guest`, who cannot have a password, or the name of a role.
    """
    tables = _tables(dialect)
    # The key "cluster" sorts before all others in `_schema`.
    tables[system.SCHEMA_ID].insert(0, ["cluster", str(replicaset_uuid)])
    tables[system.CLUSTER_ID] = [[1, str(instance_uuid)]]
    if first_user is not None:
        _add_user(tables, dialect, FirstUser(*first_user), time)
    for space_id in sorted(tables):
        for row in tables[space_id]:
            yield space_id, pack(row)


def collation_rows() -> list[tuple[Any, ...]]:
    """Return the built-in tuples of `_collation`, which are the same in all dialects."""
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
            f"the first user cannot have the name {user.name!r}: it is a built-in {kind}",
            hint=f"use another name, or {ADMIN_NAME!r} to set the password of that user",
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
    """Return the grants of box.schema.user.create plus the role `super`, in primary key order of `_priv`."""
    grants = (
        ("role", PUBLIC, Privilege.EXECUTE),
        ("role", SUPER, Privilege.EXECUTE),
        ("universe", 0, Privilege.SESSION | Privilege.USAGE),
        ("user", FIRST_USER_ID, Privilege.ALTER),
    )
    return [[ADMIN, FIRST_USER_ID, kind, object_id, int(privilege)] for kind, object_id, privilege in grants]
