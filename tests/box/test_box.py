"""The box: spaces by id and name, a reliable schema version, views with and without pending changes."""

from __future__ import annotations

import pytest

from flowstone.box.box import Box
from flowstone.box.dialect import Dialect
from flowstone.box.engine import statements
from flowstone.box.engine.space import EngineSpace
from flowstone.box.system import TRUNCATE_ID
from flowstone.iproto import errors
from flowstone.iproto.msgpack import pack
from tests.box.spaces import box_with, definition, on

A, B = pack((1, "a")), pack((1, "b"))


def test_new_box_has_the_system_spaces() -> None:
    box = Box(Dialect.V2_6)
    assert box.space("_space") is box.space(280)
    assert box.space("_index").index("primary") is box.space(288).index(0)


def test_space_is_found_by_id_and_by_name() -> None:
    box = box_with(definition(512, on("0:unsigned"), name="things"))
    assert box.space("things") is box.space(512)
    with pytest.raises(errors.NoSuchSpace, match="Space 'nothing' does not exist"):
        box.space("nothing")
    with pytest.raises(errors.NoSuchSpace, match="Space '513' does not exist"):
        box.space(513)


def test_renamed_space_is_absent_under_its_old_name() -> None:
    box = box_with(definition(512, on("0:unsigned"), name="old"))
    old = box.space(512)
    box.put_space(old.altered(definition(512, on("0:unsigned"), name="new"), box.collations))
    assert box.space("new").id == 512
    with pytest.raises(errors.NoSuchSpace):
        box.space("old")
    box.put_space(old)
    assert box.space("old") is old
    assert "new" not in box.names


def test_schema_version_grows_with_every_definition() -> None:
    box = Box(Dialect.V2_6)
    versions = [box.schema_version]
    box.put_space(EngineSpace(definition(512, on("0:unsigned")), box.collations, box.views))
    versions.append(box.schema_version)
    box.remove_space(512)
    versions.append(box.schema_version)
    assert versions == sorted(set(versions))
    assert "s512" not in box.names


def test_confirmed_view_does_not_see_pending_writes() -> None:
    box = box_with(definition(512, on("0:unsigned"), on("1:string")))
    space = box.space(512)
    for raw in (A, B):
        transaction = box.begin()
        statements.replace(transaction, space, raw)
        box.in_flight.append(transaction)
    with box.open_view() as view, box.open_view(confirmed=True) as confirmed:
        assert [raw for _, raw in view.scan(space.index(1))] == [B]
        assert list(confirmed.scan(space.index(1))) == []
        box.in_flight.popleft()
        with box.open_view(confirmed=True) as later:
            assert [raw for _, raw in later.scan(space.index(1))] == [A]
        box.in_flight.pop().hide_from(later)
        transaction.rollback()
        assert [raw for _, raw in view.scan(space.index(1))] == [B]
        assert list(confirmed.scan(space.index(1))) == []


def test_confirmed_view_includes_a_space_with_a_pending_truncation() -> None:
    box = box_with(definition(512, on("0:unsigned")))
    statements.insert(box.begin(), box.space(512), A)
    transaction = box.begin()
    statements.replace(transaction, box.space(TRUNCATE_ID), pack((512, 1)))
    box.in_flight.append(transaction)
    with box.open_view() as view, box.open_view(confirmed=True) as confirmed:
        assert list(view.spaces[512].tuples()) == []
        assert list(confirmed.spaces[512].tuples()) == [A]
        assert list(confirmed.scan(confirmed.spaces[TRUNCATE_ID].index(0))) == []


def test_replaced_box_content_is_visible_through_existing_space_objects() -> None:
    box, other = box_with(definition(512, on("0:unsigned"))), box_with(definition(513, on("0:unsigned")))
    spaces, version = box.spaces, box.schema_version
    statements.insert(other.begin(), other.space(513), A)
    box.take_over(other)
    assert (512 in spaces, list(spaces[513].tuples())) == (False, [A])
    assert box.schema_version > version
    with box.open_view() as view:
        statements.delete(box.begin(), box.space(513), 0, pack((1,)))
        assert [raw for _, raw in view.scan(box.space(513).index(0))] == [A]
