"""System views show each user the objects that are visible to the user."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flowstone.box.box import Box
from flowstone.box.ddl import functions as ddl
from flowstone.box.dialect import Dialect
from flowstone.box.engine import statements
from flowstone.box.sysview import SOURCES
from flowstone.iproto import errors
from flowstone.iproto.msgpack import pack, unpack
from tests.box.bootstrapped import bootstrapped, insert, rows, run


def prepared() -> Box:
    box = bootstrapped()
    run(box, ddl.create_space, "public_one")
    run(box, ddl.create_index, "public_one", "pk", sequence=True)
    run(box, ddl.create_space, "hidden")
    run(box, ddl.create_user, "bob")
    run(box, ddl.create_user, "eve")
    run(box, ddl.create_role, "readers")
    run(box, ddl.create_sequence, "numbers")
    run(box, ddl.create_function, "f")
    run(box, ddl.grant, "bob", "read", "space", "public_one")
    run(box, ddl.grant, "bob", "execute", "function", "f")
    run(box, ddl.grant, "bob", "write", "sequence", "numbers")
    run(box, ddl.grant, "eve", "read", "space", "_space")
    run(box, ddl.grant, "eve", "create", "function")
    return box


PREPARATION = """
box.cfg{log='tarantool.log'}
box.schema.space.create('public_one'):create_index('pk', {sequence=true})
box.schema.space.create('hidden')
box.schema.user.create('bob')
box.schema.user.create('eve')
box.schema.role.create('readers')
box.schema.sequence.create('numbers')
box.schema.func.create('f')
box.schema.user.grant('bob', 'read', 'space', 'public_one')
box.schema.user.grant('bob', 'execute', 'function', 'f')
box.schema.user.grant('bob', 'write', 'sequence', 'numbers')
box.schema.user.grant('eve', 'read', 'space', '_space')
box.schema.user.grant('eve', 'create', 'function')
local seen = {}
for _, user in ipairs({'admin', 'guest', 'bob', 'eve'}) do
    seen[user] = {}
    for _, view in ipairs({'_vspace', '_vindex', '_vuser', '_vpriv', '_vfunc', '_vsequence', '_vcollation'}) do
        box.session.su(user, function()
            local keys = {}
            for _, t in box.space[view]:pairs() do table.insert(keys, {t[1], t[2], t[3], t[4]}) end
            seen[user][view] = keys
        end)
    end
end
print(require('json').encode(seen))
os.exit(0)
"""


def test_each_user_sees_the_rows_that_the_real_server_shows(tarantool: Any, tmp_path: Path) -> None:
    real = json.loads(tarantool.run(PREPARATION, tmp_path))
    box = prepared()
    for user, views in real.items():
        for view, seen in views.items():
            mine = [list(row[:4]) for row in rows(box, view, user=box.access.user(user).id)]
            assert mine == seen, f"{view} of {user}"


def test_get_by_name_finds_only_visible_objects() -> None:
    box = prepared()
    bob = box.access.user("bob").id
    assert [row[2] for row in rows(box, "_vspace", "public_one", user=bob, index=2)] == ["public_one"]
    assert rows(box, "_vspace", "hidden", user=bob, index=2) == []
    assert [row[2] for row in rows(box, "_vuser", user=bob)] == ["public", "bob"]


def test_views_are_read_only() -> None:
    with pytest.raises(errors.ViewIsRo, match="View '_vspace' is read-only"):
        run(bootstrapped(), insert, "_vspace", 512, 1, "t", "memtx", 0, {}, [])


def test_view_of_space_sequences_depends_on_space_rights() -> None:
    box = bootstrapped(Dialect.V2_11)
    run(box, ddl.create_space, "t")
    run(box, ddl.create_index, "t", "pk", sequence=True)
    run(box, ddl.create_user, "bob")
    bob = box.access.user("bob").id
    assert [row[:3] for row in rows(box, "_vspace_sequence")] == [(512, 1, True)]
    assert rows(box, "_vspace_sequence", user=bob) == []
    run(box, ddl.grant, "bob", "read", "space", "t")
    assert len(rows(box, "_vspace_sequence", user=bob)) == 1


def test_every_view_has_its_base_space() -> None:
    box = bootstrapped(Dialect.V2_11)
    views = {space.id for space in box.spaces.values() if space.definition.engine == "sysview"}
    assert views == set(SOURCES)
    for view, base in SOURCES.items():
        assert box.spaces[view].name == f"_v{box.spaces[base].name[1:]}"


def test_view_applies_order_and_limit_of_a_select() -> None:
    box = prepared()
    found = statements.select(box.begin(), box.space("_vspace"), 2, iterator=5, limit=2, key=pack(("h",)))
    assert [unpack(raw)[2] for raw in found] == ["hidden", "public_one"]
