"""The rows of a first snapshot, compared with those of real servers."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from flowstone.box.bootstrap import FIRST_USER_ID, FirstUserRefused, bootstrap_rows
from flowstone.box.dialect import Dialect
from flowstone.iproto.auth import hash_of_hash
from flowstone.iproto.msgpack import pack, unpack
from tests.places import VECTORS

INSTANCE, REPLICASET = UUID(int=1), UUID(int=2)


def rows(dialect: Dialect, **options: Any) -> list[tuple[int, Any]]:
    return [(space_id, unpack(raw)) for space_id, raw in bootstrap_rows(dialect, INSTANCE, REPLICASET, **options)]


def frozen(value: Any) -> Any:
    return unpack(pack(value))


@pytest.mark.parametrize("dialect", list(Dialect))
def test_rows_equal_those_of_the_real_server(dialect: Dialect) -> None:
    release = ".".join(map(str, dialect.greeting_version))
    real = json.loads((VECTORS / f"bootstrap-{release}.json").read_text())
    instance = next(row[1] for space_id, row in real if space_id == 320)
    replicaset = next(row[1] for space_id, row in real if space_id == 272 and row[0] == "cluster")
    ours = bootstrap_rows(dialect, UUID(instance), UUID(replicaset))
    # Byte by byte, and in the same order.
    assert list(ours) == [(space_id, pack(row)) for space_id, row in real]


@pytest.mark.parametrize("dialect", list(Dialect))
def test_spaces_are_in_ascending_order(dialect: Dialect) -> None:
    ids = [space_id for space_id, _ in rows(dialect, first_user=("boss", hash_of_hash("secret")))]
    assert ids == sorted(ids)


@pytest.mark.parametrize("dialect", list(Dialect))
def test_first_user_has_all_privileges(dialect: Dialect) -> None:
    with_user = rows(dialect, first_user=("boss", hash_of_hash("secret")), time=1_700_000_000)
    added = [row for row in with_user if row not in rows(dialect)]
    assert added[0][1][:4] == (FIRST_USER_ID, 1, "boss", "user")
    assert added[0][1][4] == {"chap-sha1": base64.b64encode(hash_of_hash("secret")).decode()}
    assert [space_id for space_id, _ in added] == [304, 312, 312, 312, 312]
    if dialect is Dialect.V2_11:
        assert added[0][1][5:] == ((), 1_700_000_000)
    assert [row for space_id, row in added if space_id == 312] == [
        (1, 32, "role", 2, 4),
        (1, 32, "role", 31, 4),
        (1, 32, "universe", 0, 24),
        (1, 32, "user", 32, 128),
    ]


@pytest.mark.parametrize("dialect", list(Dialect))
def test_first_user_named_admin_sets_the_password_of_admin(dialect: Dialect) -> None:
    with_user = rows(dialect, first_user=("admin", hash_of_hash("secret")), time=1_700_000_000)
    added = [row for row in with_user if row not in rows(dialect)]
    auth = {"chap-sha1": base64.b64encode(hash_of_hash("secret")).decode()}
    tail = ((), 1_700_000_000) if dialect is Dialect.V2_11 else ()
    assert added == [(304, (1, 1, "admin", "user", auth, *tail))]
    assert len(with_user) == len(rows(dialect))


@pytest.mark.parametrize(
    ("name", "kind"), [("guest", "user"), ("public", "role"), ("replication", "role"), ("super", "role")]
)
def test_first_user_cannot_have_an_existing_name(name: str, kind: str) -> None:
    with pytest.raises(FirstUserRefused, match=f"cannot have the name '{name}': it is a built-in {kind}"):
        rows(Dialect.V2_6, first_user=(name, hash_of_hash("secret")))


def test_admin_with_a_password_equals_that_of_the_real_server(tarantool: Any, tmp_path: Path) -> None:
    script = """
        box.cfg{log='tarantool.log'}
        box.schema.user.passwd('admin', 'secret')
        print(require('json').encode(box.space._user:get{1}))
        os.exit(0)
    """
    user = json.loads(tarantool.run(script, tmp_path))
    ours = rows(Dialect.V2_6, first_user=("admin", hash_of_hash("secret")))
    assert (304, frozen(user)) in ours


def test_first_user_equals_that_of_the_real_server(tarantool: Any, tmp_path: Path) -> None:
    script = """
        box.cfg{log='tarantool.log'}
        box.schema.user.create('boss', {password='secret'})
        box.schema.user.grant('boss', 'super')
        local json = require('json')
        print(json.encode({box.space._user:get{32}, box.space._priv:select{32}}))
        os.exit(0)
    """
    user, privileges = json.loads(tarantool.run(script, tmp_path))
    ours = rows(Dialect.V2_6, first_user=("boss", hash_of_hash("secret")))
    assert [row for space_id, row in ours if space_id == 304][-1] == frozen(user)
    assert [row for space_id, row in ours if space_id == 312][-len(privileges) :] == list(frozen(privileges))
