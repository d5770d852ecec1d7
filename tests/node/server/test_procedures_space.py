"""Methods of spaces and indexes, called by name as in Lua."""

from __future__ import annotations

from typing import Any

import pytest

from flowstone.box.access import GUEST
from flowstone.box.ddl import functions as ddl
from flowstone.iproto import errors
from flowstone.iproto.constants import RequestType
from tests.node.conversations import Conversation
from tests.node.instances import make_instance


@pytest.fixture
def client() -> Conversation:
    instance = make_instance()
    transaction = instance.box.begin()
    ddl.create_space(transaction, "t")
    ddl.create_index(transaction, "t", "pk")
    ddl.create_index(transaction, "t", "by_name", parts=[[2, "string"]], unique=False)
    return Conversation(instance)


@pytest.fixture
async def filled(client: Conversation) -> Conversation:
    for key, name in ((1, "c"), (2, "b"), (3, "a"), (4, "b")):
        await client.call("box.space.t:insert", (key, name))
    return client


async def test_statements_take_lua_arguments(client: Conversation) -> None:
    assert await client.call("box.space.t:insert", (1, "one")) == ((1, "one"),)
    assert await client.call("box.space.t:replace", (2, "two")) == ((2, "two"),)
    assert await client.call("box.space.t:put", (2, "due")) == ((2, "due"),)
    assert await client.call("box.space.t:get", 1) == ((1, "one"),)
    assert await client.call("box.space.t:get", (7,)) == ()
    assert await client.call("box.space.t:update", 1, (("=", 2, "uno"),)) == ((1, "uno"),)
    assert await client.call("box.space.t:update", 9, (("=", 2, "uno"),)) == ()
    assert await client.call("box.space.t:upsert", (1, "x"), (("=", 2, "ein"),)) == ()
    assert await client.call("box.space.t:delete", 1) == ((1, "ein"),)
    assert await client.call("box.space.t:delete", 1) == ()
    assert await client.call("box.space.t:auto_increment", ("n",)) == ((3, "n"),)


@pytest.mark.parametrize("method", ["insert", "replace", "upsert", "auto_increment"])
async def test_a_tuple_must_be_an_array(client: Conversation, method: str) -> None:
    with pytest.raises(errors.TupleNotArray):
        await client.call(f"box.space.t:{method}", 5)


async def test_sequence_of_an_empty_space_starts_at_one(client: Conversation) -> None:
    assert await client.call("box.space.t:auto_increment", ("n",)) == ((1, "n"),)


@pytest.mark.parametrize(
    ("method", "arguments", "results"),
    [
        ("len", (), (4,)),
        ("count", (), (4,)),
        ("count", (2,), (1,)),
        ("count", (2, {"iterator": "GT"}), (2,)),
        ("select", (), (((1, "c"), (2, "b"), (3, "a"), (4, "b")),)),
        ("select", (2,), (((2, "b"),),)),
        ("select", ((), {"iterator": "REQ", "limit": 1}), (((4, "b"),),)),
        ("select", (2, {"iterator": 6, "offset": 1}), (((4, "b"),),)),
        ("select", (2, "LT"), (((1, "c"),),)),
        ("select", ((), {"after": (3, "a")}), (((4, "b"),),)),
        ("min", (), ((1, "c"),)),
        ("max", (), ((4, "b"),)),
        ("bsize", (), (16,)),
        ("random", (2,), ((3, "a"),)),
        ("format", (), ((),)),
        ("index.by_name:select", ("b",), (((2, "b"), (4, "b")),)),
        ("index.by_name:count", ("b",), (2,)),
        ("index.by_name:min", (), ((3, "a"),)),
        ("index.by_name:max", ("b",), ((4, "b"),)),
        ("index.by_name:len", (), (4,)),
        ("index.by_name:max", ("x",), ()),
        ("index.pk:get", (3,), ((3, "a"),)),
        ("index.pk:update", (3, (("=", 2, "z"),)), ((3, "z"),)),
        ("index.pk:delete", (3,), ((3, "a"),)),
    ],
)
async def test_methods_return_the_same_as_in_lua(
    filled: Conversation, method: str, arguments: Any, results: tuple
) -> None:
    name = f"box.space.t.{method}" if method.startswith("index") else f"box.space.t:{method}"
    assert await filled.call(name, *arguments) == results


async def test_select_returns_a_page_and_its_position(filled: Conversation) -> None:
    first, position = await filled.call("box.space.t:select", (), {"limit": 3, "fetch_pos": True})
    assert len(first) == 3
    rest, _ = await filled.call("box.space.t:select", (), {"after": position, "fetch_pos": True})
    assert rest == ((4, "b"),)


async def test_wrong_arguments_are_errors_with_codes(filled: Conversation) -> None:
    with pytest.raises(errors.IteratorType, match="Unknown iterator type 'xx'"):
        await filled.call("box.space.t:select", (), {"iterator": "xx"})
    with pytest.raises(errors.IllegalParams, match="'limit' should be of type number"):
        await filled.call("box.space.t:select", (), {"limit": "many"})
    with pytest.raises(errors.MoreThanOneTuple):
        await filled.call("box.space.t.index.by_name:get", "b")


async def test_space_without_indexes_is_empty(client: Conversation) -> None:
    await client.call("box.schema.space.create", "bare")
    assert await client.call("box.space.bare:len") == (0,)
    assert await client.call("box.space.bare:count") == (0,)


async def test_hash_index_has_no_first_tuple(client: Conversation) -> None:
    await client.call("box.schema.space.create", "h")
    await client.call("box.space.h:create_index", "pk", {"type": "hash"})
    with pytest.raises(
        errors.UnsupportedIndexFeature, match=r"\(HASH\) of space 'h' \(memtx\) does not support max\(\)"
    ):
        await client.call("box.space.h:max")


async def test_an_index_shows_collations_and_paths(client: Conversation) -> None:
    parts = (
        {"field": 2, "type": "string", "collation": "unicode_ci", "is_nullable": True},
        {"field": 3, "type": "unsigned", "path": "a.b", "is_nullable": True},
    )
    (index,) = await client.call("box.space.t:create_index", "odd", {"parts": parts, "unique": False})
    assert index["parts"] == (
        {"type": "string", "is_nullable": True, "fieldno": 2, "collation": "unicode_ci"},
        {"type": "unsigned", "is_nullable": True, "fieldno": 3, "path": "a.b"},
    )


async def test_definitions_are_changed_by_methods(client: Conversation) -> None:
    (index,) = await client.call("box.space.t:create_index", "third", {"parts": ((3, "unsigned"),)})
    assert index == {
        "unique": True,
        "parts": ({"type": "unsigned", "is_nullable": False, "fieldno": 3},),
        "id": 2,
        "space_id": 512,
        "type": "TREE",
        "name": "third",
    }
    await client.call("box.space.t.index.third:rename", "last")
    await client.call("box.space.t.index.last:alter", {"unique": False})
    await client.call("box.space.t.index.last:drop")
    await client.call("box.space.t:format", ({"name": "id", "type": "unsigned"},))
    assert await client.call("box.space.t:format") == (({"name": "id", "type": "unsigned"},),)
    await client.call("box.space.t:rename", "tt")
    await client.call("box.space.tt:insert", (1, "x"))
    await client.call("box.space.tt:truncate")
    assert await client.call("box.space.tt:len") == (0,)
    await client.call("box.space.tt:drop")
    with pytest.raises(errors.NoSuchProc):
        await client.call("box.space.tt:drop")


async def test_methods_run_in_the_transaction_of_their_stream(client: Conversation) -> None:
    await client.request(RequestType.BEGIN, stream=1)
    await client.call("box.space.t:insert", (1, "x"), stream=1)
    with pytest.raises(errors.TupleFound):
        await client.call("box.space.t:insert", (1, "y"), stream=1)
    assert await client.call("box.space.t:len", stream=1) == (1,)
    assert await client.call("box.space.t:len") == (0,)
    await client.request(RequestType.COMMIT, stream=1)
    assert await client.call("box.space.t:select") == (((1, "x"),),)


async def test_methods_run_with_the_privileges_of_their_caller(client: Conversation) -> None:
    ddl.grant(client.instance.box.begin(), "guest", "execute", "universe")
    guest = Conversation(client.instance, user=GUEST)
    for method in ("len", "random", "bsize", "select", "truncate", "drop", "insert"):
        with pytest.raises(errors.AccessDenied):
            await guest.call(f"box.space.t:{method}", (1, "x"))


@pytest.mark.parametrize(("method", "results"), [("random", ((1, "c"),)), ("bsize", (16,)), ("len", (4,))])
async def test_methods_in_a_stream_read_in_its_transaction_and_can_conflict(
    filled: Conversation, method: str, results: tuple[Any, ...]
) -> None:
    await filled.request(RequestType.BEGIN, stream=1)
    assert await filled.call("box.space.t:get", 7, stream=1) == ()
    await filled.call("box.space.t:insert", (5, "other's"))
    assert await filled.call(f"box.space.t:{method}", 4, stream=1) == results
    await filled.call("box.space.t:insert", (6, "mine"), stream=1)
    with pytest.raises(errors.TransactionConflict):
        await filled.request(RequestType.COMMIT, stream=1)
