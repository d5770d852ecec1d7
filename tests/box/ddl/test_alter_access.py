"""Rows of `_user`, `_priv`, `_func` and `_collation`, and their effects; test_functions.py compares the errors."""

from __future__ import annotations

import pytest

from flowstone.box.access import USER_MAX, Privilege, User
from flowstone.box.ddl import functions as ddl
from flowstone.box.ddl.alter_access import read_user
from flowstone.iproto import errors
from flowstone.iproto.auth import hash_of_hash
from flowstone.iproto.msgpack import pack
from tests.box.bootstrapped import bootstrapped, delete, insert, recover, replace, rows, run

EMPTY = "vhvewKp0tNyweZQ+cFKAlsyphfg="


def test_user_is_read_from_its_row() -> None:
    assert read_user((32, 1, "bob", "user", {"chap-sha1": EMPTY})) == User(32, 1, "bob", False, hash_of_hash(""))
    assert read_user((33, 1, "clerks", "role", {})) == User(33, 1, "clerks", True)
    # Lua cannot tell an empty map from an empty array, and 2.11 adds fields.
    assert read_user((34, 1, "eve", "user", (), (), 0)).password_hash is None
    assert read_user((34, 1, "eve", "user", {"pap-sha256": ("a", "b")})).password_hash is None


def test_user_is_created_and_dropped_with_its_row() -> None:
    box = bootstrapped()
    run(box, insert, "_user", 32, 1, "bob", "user", {"chap-sha1": EMPTY})
    run(box, replace, "_user", 32, 1, "robert", "user", {})
    assert box.access.find("bob") is None
    assert box.access.user("robert").password_hash is None
    run(box, delete, "_user", 32)
    assert box.access.find("robert") is None


def test_number_of_users_and_roles_is_limited_to_32() -> None:
    box = bootstrapped()
    for number in range(USER_MAX - len(box.access.users)):
        run(box, ddl.create_user, f"user {number}")
    with pytest.raises(errors.UserMax, match="A limit on the total number of users has been reached: 32"):
        run(box, ddl.create_user, "one more")
    assert box.access.find("one more") is None


def test_plain_text_password_is_rejected_and_not_shown() -> None:
    with pytest.raises(errors.CreateUser) as caught:
        run(bootstrapped(), insert, "_user", 32, 1, "bob", "user", {"chap-sha1": "hunter2"})
    assert "hunter2" not in str(caught.value)


def test_privileges_take_effect_with_their_row() -> None:
    box = bootstrapped()
    run(box, ddl.create_user, "bob")
    bob = box.access.user("bob").id
    run(box, insert, "_priv", 1, bob, "space", 280, 1)
    assert box.access.allows(bob, 280) & Privilege.READ
    run(box, replace, "_priv", 1, bob, "space", 280, 2)
    assert not box.access.allows(bob, 280) & Privilege.READ
    run(box, delete, "_priv", bob, "space", 280)
    assert not box.access.allows(bob, 280) & Privilege.WRITE


def test_privileges_on_newer_object_types_are_preserved() -> None:
    box = bootstrapped()
    recover(box, [(312, pack((1, 0, "lua_call", "some.function", 4))), (312, pack((1, 0, "sql", 0, 4)))])
    assert box.access.granted(0)["lua_call", "some.function"] == Privilege.EXECUTE


def test_functions_are_found_by_name() -> None:
    box = bootstrapped()
    run(box, ddl.create_function, "f", setuid=True)
    function = box.functions["f"]
    assert (function.id, function.owner, function.is_setuid) == (68, 1, True)
    with pytest.raises(errors.Unsupported, match="function does not support alter"):
        run(box, replace, "_func", *rows(box, "_func", 68)[0][:2], "g", *rows(box, "_func", 68)[0][3:])
    run(box, ddl.drop_function, "f")
    assert "f" not in box.functions


def test_collations_are_found_by_id() -> None:
    box = bootstrapped()
    run(box, insert, "_collation", 1000, "mine", 1, "ICU", "de", {"strength": "primary"})
    assert box.collations[1000].sort_key("A") == box.collations[1000].sort_key("a")
    run(box, delete, "_collation", 1000)
    assert 1000 not in box.collations
