"""The events of triggers."""

from __future__ import annotations

import pytest

import flowstone
from flowstone.box.engine.transaction import Statement
from flowstone.iproto.constants import RequestType
from flowstone.iproto.msgpack import pack
from flowstone.iproto.row import Row
from flowstone.node.changes import Change, SettledChange, listener


def change(kind: RequestType, **body: object) -> Change:
    keys = {"key": 0x20, "tuple": 0x21, "ops": 0x28}
    return Change(Statement(kind.value, None, pack({keys[name]: value for name, value in body.items()})))


def test_event_of_an_insert_has_only_fields() -> None:
    insert = change(RequestType.INSERT, tuple=(1, "tea"))
    assert (insert.type, insert.fields, insert.key, insert.operations) == ("INSERT", (1, "tea"), None, None)


def test_event_of_an_update_has_a_key_and_operations() -> None:
    update = change(RequestType.UPDATE, key=(1,), tuple=(("=", 1, "cup"),))
    assert (update.type, update.fields, update.key, update.operations) == ("UPDATE", None, (1,), (("=", 1, "cup"),))


def test_event_of_an_upsert_has_fields_and_operations() -> None:
    upsert = change(RequestType.UPSERT, tuple=(1, 1), ops=(("+", 1, 1),))
    assert (upsert.fields, upsert.operations) == ((1, 1), (("+", 1, 1),))


def test_error_names_a_row_without_a_space() -> None:
    nop = Change(Statement(RequestType.NOP.value, None, b""))
    assert (nop.type, nop.space, nop.space_id, nop.fields) == ("NOP", None, None, None)


def test_exception_in_a_trigger_is_logged_and_not_raised(caplog: pytest.LogCaptureFixture) -> None:
    def broken(changes: tuple[Change, ...]) -> None:
        raise ZeroDivisionError

    listener(broken)(())
    assert "transaction trigger failed" in caplog.text


async def test_settled_change_has_the_tuple_before_and_after(node: flowstone.Node) -> None:
    space, row = node.box.space("fruit"), Row(RequestType.UPDATE, 2, 0, 7, 1.5)
    old, new = pack((1, "fig", 3)), pack((1, "fig", 4))
    update = SettledChange(Statement(RequestType.UPDATE.value, space, b"\x80"), row, old, new)
    assert (update.type, update.space, update.key) == ("UPDATE", "fruit", (1,))
    assert (update.replica_id, update.lsn, update.timestamp) == (2, 7, 1.5)
    assert update.old is not None
    assert update.new is not None
    assert (update.old["count"], update.new["count"]) == (3, 4)
    assert repr(update) == "<UPDATE in 'fruit': Tuple(1, 'fig', 3) → Tuple(1, 'fig', 4)>"


async def test_event_of_a_truncation_has_no_tuples_and_no_key(node: flowstone.Node) -> None:
    row = Row(RequestType.REPLACE, 1, 0, 8, 2.5)
    change = SettledChange(Statement(row.type, node.box.space("fruit"), b"\x80"), row, type="TRUNCATE")
    assert (change.type, change.space, change.old, change.new, change.key) == ("TRUNCATE", "fruit", None, None, None)
