"""Statements on system spaces by value, with the privileges of the calling user."""

from __future__ import annotations

import pytest

from flowstone.box.ddl import schema_rows as ddl_rows
from flowstone.iproto import errors
from flowstone.iproto.msgpack import unpack_body
from tests.box.bootstrapped import bootstrapped


def test_logged_operations_count_fields_from_one() -> None:
    transaction = bootstrapped().begin()
    assert ddl_rows.update(transaction, "_schema", ("max_id",), ("+", 2, 1)) == ("max_id", 512)
    (statement,) = transaction.statements
    assert unpack_body(statement.body) == {0x10: 272, 0x15: 1, 0x20: ("max_id",), 0x21: (("+", 2, 1),)}


def test_next_id_follows_the_highest() -> None:
    transaction = bootstrapped().begin()
    assert ddl_rows.auto_increment(transaction, "_user", 1, "bob", "user", {}) == 32
    assert ddl_rows.auto_increment(transaction, "_sequence", 1, "s", 1, 1, 9, 1, 0, False) == 1
    assert ddl_rows.last(transaction, "_user") == (32, 1, "bob", "user", {})


def test_as_admin_restores_the_user() -> None:
    transaction = bootstrapped().begin(0)
    with ddl_rows.as_admin(transaction):
        ddl_rows.insert(transaction, "_schema", "key", "value")
    assert transaction.user == 0
    with pytest.raises(errors.AccessDenied, match="Write access to space '_schema' is denied for user 'guest'"):
        ddl_rows.delete(transaction, "_schema", "key")


def test_revoke_all_removes_all_privileges_on_an_object() -> None:
    transaction = bootstrapped().begin()
    ddl_rows.revoke_all(transaction, "space", 330)
    assert ddl_rows.select(transaction, "_vpriv", "space", 330, index=2) == []
    assert ddl_rows.get(transaction, "_priv", 2, "space", 281) == (1, 2, "space", 281, 1)
