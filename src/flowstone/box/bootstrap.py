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
from flowstone.iproto.auth import METHOD
from flowstone.iproto.msgpack import pack

FIRST_USER_ID: Final = 32
"""Real servers give it to the first user that is created: ids up to 31 are taken by `super`."""


class FirstUser(NamedTuple):
    """A user who may do everything. `password_hash` is `auth.hash_of_hash` of the password, 20 bytes."""

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

    `time` is when it happens, in seconds since 1970; 2.11 notes it at the first user.
    """
    tables = _tables(dialect)
    # Its key sorts before the others of `_schema`.
    tables[system.SCHEMA_ID].insert(0, ["cluster", str(replicaset_uuid)])
    tables[system.CLUSTER_ID] = [[1, str(instance_uuid)]]
    if first_user is not None:
        tables[system.USER_ID].append(_user_row(dialect, FirstUser(*first_user), time))
        tables[system.PRIV_ID].extend(_privilege_rows())
    for space_id in sorted(tables):
        for row in tables[space_id]:
            yield space_id, pack(row)


def _tables(dialect: Dialect) -> dict[int, list[list[Any]]]:
    text = files("flowstone.box").joinpath(f"bootstrap-{dialect.value}.json").read_text("utf-8")
    return {int(space_id): rows for space_id, rows in json.loads(text).items()}


def _user_row(dialect: Dialect, user: FirstUser, time: int) -> list[Any]:
    auth = {METHOD: base64.b64encode(user.password_hash).decode()}
    row: list[Any] = [FIRST_USER_ID, ADMIN, user.name, "user", auth]
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
