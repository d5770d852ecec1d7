"""Users other than admin get the same errors and see the same objects as on a real server."""

from __future__ import annotations

from typing import Any

import pytest

from flowstone.box.access import Privilege
from flowstone.box.ddl import functions as ddl
from flowstone.box.ddl.access_functions import privilege_bits, privilege_names
from flowstone.box.dialect import Dialect
from flowstone.iproto import errors
from tests.box.bootstrapped import bootstrapped, rows, run
from tests.box.ddl_steps import TABLES, Outcome, by, call, differences, our_outcome, real_outcome

STEPS = (
    call("create_user", "bob", password="secret"),
    call("create_user", "eve"),
    call("create_role", "readers"),
    call("create_space", "t", format=[["id", "unsigned"], "value"]),
    call("create_index", "t", "pk"),
    call("create_sequence", "numbers"),
    call("create_function", "f"),
    *by(
        "bob",
        call("insert", "t", [1]),
        call("create_space", "mine"),
        call("create_user", "carl"),
        call("create_role", "writers"),
        call("create_sequence", "own"),
        call("create_function", "g"),
        call("drop_space", "t"),
        call("truncate", "t"),
        call("create_index", "t", "second", parts=[[2, "string"]]),
        call("grant", "eve", "read", "space", "t"),
        call("grant", "eve", "public"),
        call("next_value", "numbers"),
        call("drop_user", "bob"),
        call("drop_user", "eve"),
        call("drop_role", "readers"),
        call("insert", "_priv", [32, 33, "role", 2, 4]),
        call("insert", "_priv", [32, 33, "universe", 0, 1]),
        call("delete", "_user", [33]),
        call("insert", "_schema", ["x", 1]),
    ),
    # what helps
    call("grant", "bob", "read,write", "space", "t"),
    *by("bob", call("insert", "t", [1, "x"]), call("truncate", "t"), call("drop_index", "t", "pk")),
    call("grant", "bob", "write", "sequence", "numbers"),
    *by("bob", call("next_value", "numbers")),
    call("grant", "bob", "read,write", "space", "_schema"),
    call("grant", "bob", "read,write", "space", "_space"),
    call("grant", "bob", "read,write", "space", "_index"),
    call("grant", "bob", "read,write", "space", "_priv"),
    call("grant", "bob", "read,write", "space", "_user"),
    call("grant", "bob", "read,write", "space", "_sequence"),
    call("grant", "bob", "read,write", "space", "_space_sequence"),
    call("grant", "bob", "read,write", "space", "_sequence_data"),
    call("grant", "bob", "read,write", "space", "_trigger"),
    call("grant", "bob", "read,write", "space", "_fk_constraint"),
    call("grant", "bob", "read,write", "space", "_ck_constraint"),
    call("grant", "bob", "read,write", "space", "_func_index"),
    call("grant", "bob", "read,write", "space", "_func"),
    *by("bob", call("create_space", "mine"), call("create_user", "carl"), call("create_sequence", "own")),
    call("grant", "bob", "create", "space"),
    call("grant", "bob", "create", "sequence"),
    call("grant", "bob", "create", "user"),
    call("grant", "bob", "create", "role"),
    call("grant", "bob", "create", "function"),
    *by(
        "bob",
        call("create_space", "mine"),
        call("create_index", "mine", "pk", sequence=True),
        call("insert", "mine", [None, 2]),
        call("grant", "eve", "read", "space", "mine"),
        call("grant", "eve", "read", "space", "t"),
        call("grant", "eve", "read", "space"),
        call("grant", "eve", "read", "universe"),
        call("create_user", "carl"),
        call("create_role", "writers"),
        call("grant", "eve", "writers"),
        call("grant", "eve", "readers"),
        call("grant_role", "writers", "write", "space", "mine"),
        call("create_sequence", "own"),
        call("next_value", "own"),
        call("create_function", "g"),
        call("grant", "eve", "execute", "function", "g"),
        call("grant", "eve", "execute", "function", "f"),
        call("rename_space", "t", "stolen"),
        call("rename_space", "mine", "ours"),
        call("delete", "_user", [33]),
        call("drop_user", "carl"),
    ),
    *by(
        "eve",
        call("insert", "ours", [None, 3]),
        call("drop_space", "ours"),
        call("next_value", "own"),
    ),
    *by("bob", call("drop_sequence", "own"), call("drop_role", "writers")),
    call("revoke", "bob", "usage", "universe"),
    *by("bob", call("insert", "ours", [None, 4]), call("insert", "t", [5, 5]), call("create_space", "more")),
    call("drop_user", "bob"),
)


DIFFERENT = {
    # The server reads the name past the end of a table, and reports "access to vinyl".
    'box.session.su(\'bob\', function() box.schema.user.grant("eve", "read", "space") end)': 42,
}
"""Places where our error is better than the real one, and its code."""


@pytest.fixture(scope="module")
def real(tarantool: Any, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return real_outcome(tarantool, tmp_path_factory.mktemp("real"), STEPS)


@pytest.fixture(scope="module")
def ours() -> Outcome:
    return our_outcome(STEPS)


def test_every_step_has_the_result_of_the_real_server(real: Outcome, ours: Outcome) -> None:
    found = differences(STEPS, real, ours, DIFFERENT)
    assert not found, f"{len(found)} of {len(STEPS)}\n" + "\n".join(found)


@pytest.mark.parametrize("table", [name for name in TABLES if name != "_schema"])
def test_rows_equal_those_of_the_real_server(real: Outcome, ours: Outcome, table: str) -> None:
    assert ours.tables[table] == real.tables[table]


def test_privilege_names_are_converted_to_bits_and_back() -> None:
    for dialect in Dialect:
        bits = privilege_bits("read, write,Execute", "universe", dialect)
        assert bits == Privilege.READ | Privilege.WRITE | Privilege.EXECUTE
    assert privilege_names(bits) == "read,write,execute"


def test_only_dialect_2_6_finds_privilege_names_inside_words() -> None:
    assert privilege_bits("unread", "space", Dialect.V2_6) == Privilege.READ
    with pytest.raises(errors.UnsupportedPriv, match="Unsupported space privilege 'unread'"):
        privilege_bits("unread", "space", Dialect.V2_11)


def test_info_lists_the_privileges_of_a_user() -> None:
    box = bootstrapped()
    run(box, ddl.create_user, "bob")
    run(box, ddl.create_space, "t")
    run(box, ddl.grant, "bob", "read,write", "space", "t")
    run(box, ddl.grant, "bob", "execute", "function")
    assert run(box, ddl.user_info, "bob") == [
        ["execute", "function", ""],
        ["execute", "role", "public"],
        ["read,write", "space", "t"],
        ["session,usage", "universe", ""],
        ["alter", "user", "bob"],
    ]
    assert run(box, ddl.user_info, user=box.access.user("bob").id) == run(box, ddl.user_info, "bob")
    assert ["execute", "function", "box.schema.user.info"] in run(box, ddl.role_info, "public")


def test_disabled_user_cannot_log_in_until_enabled() -> None:
    box = bootstrapped()
    run(box, ddl.create_user, "bob")
    run(box, ddl.disable_user, "bob")
    with pytest.raises(errors.AccessDenied):
        box.access.login("bob")
    run(box, ddl.enable_user, "bob")
    assert box.access.login("bob").name == "bob"


def test_users_and_roles_have_separate_namespaces() -> None:
    box = bootstrapped()
    run(box, ddl.create_role, "readers")
    assert run(box, ddl.role_exists, "readers")
    assert not run(box, ddl.user_exists, "readers")
    assert run(box, ddl.user_exists, "guest")


def test_user_may_change_its_own_password() -> None:
    box = bootstrapped(Dialect.V2_11)
    run(box, ddl.create_user, "bob", password="old", time=5)
    before = box.access.user("bob")
    run(box, ddl.passwd, "new", user=before.id, time=7)
    assert box.access.user("bob").password_hash != before.password_hash
    assert rows(box, "_user", before.id)[0][5:] == ((), 7)
