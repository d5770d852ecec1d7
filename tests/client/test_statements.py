"""Bodies of statements and results of responses, without a server."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.box.definitions import FieldDefinition, IndexDefinition, IndexPart, SpaceDefinition
from flowstone.box.row_forms import TupleForm
from flowstone.box.schema import Schema, UnknownSpace
from flowstone.client.known_schema import KnownSchema
from flowstone.client.statements import CallOrEval, Get, Select, Store, UpdateOrDelete, Upsert
from flowstone.errors import RemoteProtocolError
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.errors import ExactMatch, MoreThanOneTuple, NoSuchIndexName
from flowstone.iproto.msgpack import pack, unpack
from flowstone.iproto.packet import decode_response
from flowstone.iproto.replies import encode_data

FRUIT = SpaceDefinition(
    id=512,
    name="fruit",
    fields=(FieldDefinition("id", "unsigned"), FieldDefinition("name", "string")),
    indexes=(
        IndexDefinition(512, 0, "pk", "tree", True, (IndexPart(0, "unsigned"),)),
        IndexDefinition(512, 2, "by_name", "tree", False, (IndexPart(1, "string"),)),
    ),
)
TUPLES = TupleForm()
SCHEMA = KnownSchema(Schema({512: FRUIT}), 7)


def body(statement: Any) -> dict[Key, Any]:
    return {Key(key): value for key, value in unpack(statement.body(SCHEMA)).items()}


def reply(*tuples: tuple[Any, ...]) -> bytes:
    """Return the body of a server's response."""
    return decode_response(encode_data(1, 7, [pack(one) for one in tuples])[5:]).body


def test_row_is_stored_in_the_order_of_the_format() -> None:
    insert = Store(RequestType.INSERT, "fruit", {"name": "fig", "id": 1}, TUPLES)
    assert body(insert) == {Key.SPACE_ID: 512, Key.TUPLE: (1, "fig")}
    stored = insert.result(reply((1, "fig")), SCHEMA)
    assert (stored.id, stored.name) == (1, "fig")


def test_response_without_the_stored_row_is_invalid() -> None:
    with pytest.raises(RemoteProtocolError, match="no tuple"):
        Store(RequestType.INSERT, "fruit", (1,), TUPLES).result(reply(), SCHEMA)


def test_change_names_index_and_operations() -> None:
    update = UpdateOrDelete("fruit", "pk", 1, {"name": "kiwi"}, TUPLES)
    assert update.type is RequestType.UPDATE
    assert body(update) == {
        Key.SPACE_ID: 512, Key.INDEX_ID: 0, Key.KEY: (1,), Key.TUPLE: (("=", "name", "kiwi"),)
    }  # fmt: skip
    delete = UpdateOrDelete("fruit", 2, "fig", None, TUPLES)
    assert delete.type is RequestType.DELETE
    assert body(delete) == {Key.SPACE_ID: 512, Key.INDEX_ID: 2, Key.KEY: ("fig",)}
    assert delete.result(reply(), SCHEMA) is None


def test_upsert_has_tuple_and_operations() -> None:
    upsert = Upsert(512, (1, "fig"), [("=", 1, "kiwi")], TUPLES)
    assert body(upsert) == {Key.SPACE_ID: 512, Key.TUPLE: (1, "fig"), Key.OPS: (("=", 1, "kiwi"),)}


def test_select_has_all_its_options() -> None:
    select = Select("fruit", "by_name", "fig", iterator="GE", limit=5, offset=2, form=TUPLES)
    assert body(select) == {
        Key.SPACE_ID: 512, Key.INDEX_ID: 2, Key.LIMIT: 5, Key.OFFSET: 2, Key.ITERATOR: 5, Key.KEY: ("fig",)
    }  # fmt: skip


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.text())))
def test_selected_rows_are_those_of_the_response(rows: list[tuple[int, str]]) -> None:
    select = Select("fruit", 0, (), iterator="ALL", limit=100, offset=0, form=TUPLES)
    assert select.result(reply(*rows), SCHEMA) == rows


def test_get_rejects_what_may_match_several_rows() -> None:
    with pytest.raises(MoreThanOneTuple):
        Get("fruit", "by_name", "fig", TUPLES).body(SCHEMA)
    with pytest.raises(ExactMatch, match=r"expected 1, got 2"):
        Get("fruit", 0, (1, 2), TUPLES).body(SCHEMA)
    with pytest.raises(ExactMatch, match=r"expected 1, got 20"):
        Get("fruit", 0, tuple(range(20)), TUPLES).body(SCHEMA)
    with pytest.raises(RemoteProtocolError, match="2 tuples"):
        Get("fruit", 0, 1, TUPLES).result(reply((1,), (2,)), SCHEMA)


def test_unknown_names_are_rejected() -> None:
    with pytest.raises(UnknownSpace, match="known spaces: fruit"):
        Get("fruits", 0, 1, TUPLES).body(SCHEMA)
    with pytest.raises(NoSuchIndexName, match="No index 'colour' is defined in space 'fruit'"):
        Get("fruit", "colour", 1, TUPLES).body(SCHEMA)


def test_call_returns_the_values_of_the_function() -> None:
    call = CallOrEval(RequestType.CALL, "f", (1, "a"), is_read=True)
    assert body(call) == {Key.FUNCTION_NAME: "f", Key.TUPLE: (1, "a")}
    assert not call.is_write
    assert call.result(reply((1,), (2,)), SCHEMA) == ((1,), (2,))
    assert CallOrEval(RequestType.EVAL, "return", (), is_read=False).is_write


@pytest.mark.parametrize("wrong", [b"\x81\x30\x01", b"\x81\x30", b"\xc0", b"\x81\x30\xdd\x00\x00\x00\x05\x90"])
def test_response_that_is_no_data_is_invalid(wrong: bytes) -> None:
    select = Select("fruit", 0, (), iterator="ALL", limit=100, offset=0, form=TUPLES)
    with pytest.raises(RemoteProtocolError):
        select.result(wrong, SCHEMA)
