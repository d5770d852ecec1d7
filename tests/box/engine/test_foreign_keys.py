"""Foreign keys: answers equal those of real servers, including bulk statements, transactions and rows of peers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from flowstone import Node
from flowstone.box import system
from flowstone.box.box import Box
from flowstone.box.dialect import Dialect
from flowstone.box.engine import statements
from flowstone.box.lane.table import table_of
from flowstone.iproto import errors
from flowstone.iproto.constants import RequestType
from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.msgpack import pack
from flowstone.iproto.packet import decode_response
from flowstone.node.upstream.plain_rows import Replicated
from tests import real_tarantool
from tests.box.constraint_programs import (
    Step,
    alter,
    answers_of,
    delete,
    family,
    field,
    index,
    insert,
    plain,
    programs,
    recorded,
    refers,
    replace,
    shown,
    space,
    truncate,
)
from tests.conformance.wire import Client
from tests.interop.versions import Binary, parameters
from tests.node.conversations import Conversation
from tests.node.instances import make_instance

OURS = recorded("2.11.9")


async def answer(client: Conversation, step: Step, stream: int = 0) -> Any:
    type, body = step
    try:
        rows = await client.data(type, body, stream=stream)
    except TarantoolError as error:
        return shown(error)
    return plain(rows) if body[0x10] >= 512 else "done"


@pytest.mark.parametrize("name", programs())
async def test_statements_are_answered_as_by_a_real_server(name: str) -> None:
    client = Conversation(make_instance())
    for number, (step, expected) in enumerate(zip(programs()[name], OURS[name], strict=True)):
        assert await answer(client, step) == expected, f"step {number}: {step}"


@pytest.mark.parametrize("binary", parameters(">=2.11"))
def test_recordings_equal_answers_of_real_servers(binary: Binary, tmp_path: Path) -> None:
    with real_tarantool.serve(tmp_path, binary=binary.path) as server:
        assert answers_of(server.port) == recorded(str(binary))


async def make(*steps: Step, dialect: Dialect = Dialect.V2_11) -> Conversation:
    client = Conversation(make_instance(dialect=dialect))
    for step in steps:
        result = await answer(client, step)
        assert isinstance(result, list) or result == "done", f"{step}: {result}"
    return client


P, C = 600, 601
FAMILY = [*family(P, C), insert(P, 1, 10), insert(C, 1, 10)]
REFERENCED = "238 Foreign key 'f1' integrity check failed: tuple is referenced"
MISSING = "239 Foreign key constraint 'f1' failed for field '2 (cid)': foreign tuple was not found"


async def test_parent_with_zero_in_a_complex_key_is_kept_while_referenced() -> None:
    """Real servers treat 0 as nil and delete the tuple; the row of a peer that deletes it is applied."""
    client = await make(
        space(P, field("id"), field("x"), field("y")),
        index(P, 0, 0),
        index(P, 1, 1, 2),
        space(C, field("id"), field("a"), field("b"), foreign_key={"k": {"space": P, "field": {"a": "x", "b": "y"}}}),
        index(C, 0, 0),
        index(C, 1, 1, 2, unique=False),
        insert(P, 1, 0, 5),
        insert(C, 1, 0, 5),
    )
    assert await answer(client, delete(P, 1)) == REFERENCED.replace("f1", "k")
    with applying(client.instance.box) as effect:
        statements.delete(effect, effect.space(P), 0, pack((1,)))
    assert not len(client.instance.box.space(P))


@contextmanager
def applying(box: Box) -> Iterator[Replicated]:
    """Execute rows of a peer as an applier does."""
    box.is_recovering = True
    try:
        yield Replicated(box)
    finally:
        box.is_recovering = False


async def test_rows_of_a_peer_are_checked() -> None:
    client = await make(*FAMILY)
    box = client.instance.box
    with applying(box) as effect, pytest.raises(errors.FieldForeignKeyFailed, match="foreign tuple was not found"):
        statements.insert(effect, effect.space(C), pack((2, 11)))
    with applying(box) as effect, pytest.raises(errors.ForeignKeyIntegrity, match="tuple is referenced"):
        statements.delete(effect, effect.space(P), 0, pack((1,)))
    with applying(box) as effect, pytest.raises(errors.AlterSpace, match="space is referenced by foreign key"):
        statements.upsert(effect, effect.space(system.TRUNCATE_ID), pack((P, 1)), pack((("+", 1, 1),)))


async def test_rows_of_a_log_are_not_checked() -> None:
    client = await make(*FAMILY)
    box = client.instance.box
    box.is_recovering = True
    statements.insert(box.begin(), box.space(C), pack((2, 11)))
    statements.delete(box.begin(), box.space(P), 0, pack((1,)))
    box.is_recovering = False
    assert await answer(client, insert(C, 3, 11)) == MISSING


async def test_keys_are_checked_per_statement_of_a_transaction() -> None:
    client = await make(*FAMILY)
    await client.request(RequestType.BEGIN, stream=1)
    assert await answer(client, delete(P, 1), 1) == REFERENCED
    assert await answer(client, delete(C, 1), 1) == [[1, 10]]
    assert await answer(client, delete(P, 1), 1) == [[1, 10]]
    assert await answer(client, insert(C, 1, 10), 1) == MISSING
    assert await answer(client, insert(P, 2, 10), 1) == [[2, 10]]
    assert await answer(client, insert(C, 1, 10), 1) == [[1, 10]]
    await client.request(RequestType.COMMIT, stream=1)
    assert (await client.select(space=P), await client.select(space=C)) == (((2, 10),), ((1, 10),))


@pytest.mark.parametrize("first", [1, 2])
async def test_concurrent_transactions_cannot_violate_a_foreign_key(first: int) -> None:
    client = await make(*FAMILY, insert(P, 2, 20))
    for stream in (1, 2):
        await client.request(RequestType.BEGIN, stream=stream)
    assert await answer(client, insert(C, 2, 20), 1) == [[2, 20]]
    assert await answer(client, delete(P, 2), 2) == [[2, 20]]
    await client.request(RequestType.COMMIT, stream=first)
    with pytest.raises(errors.TransactionConflict):
        await client.request(RequestType.COMMIT, stream=3 - first)


async def test_concurrently_added_key_aborts_a_transaction_on_its_parent() -> None:
    client = await make(
        space(P, field("id")),
        index(P, 0, 0),
        space(C, field("id"), field("cid")),
        index(C, 0, 0),
        insert(P, 1),
        insert(C, 1, 1),
    )
    await client.request(RequestType.BEGIN, stream=1)
    assert await answer(client, delete(P, 1), 1) == [[1]]
    assert await answer(client, alter(C, field("id"), field("cid", **refers("f", P, 0)))) == "done"
    with pytest.raises(errors.TransactionConflict):
        await client.request(RequestType.COMMIT, stream=1)


async def test_guards_are_dropped_with_the_key_and_restored_by_a_rollback() -> None:
    client = await make(*FAMILY)
    box = client.instance.box
    assert box.space(P).guards is not None
    transaction = box.begin()
    plain_format = pack([field("id"), field("cid", is_nullable=True)])
    operations = b"\x91\x93\xa1=\x06" + plain_format
    statements.update(transaction, box.space(system.SPACE_ID), 0, pack((C,)), operations)
    assert (box.space(P).guards, box.space(C).guards) == (None, None)
    transaction.rollback()
    assert await answer(client, delete(P, 1)) == REFERENCED
    assert await answer(client, insert(C, 2, 11)) == MISSING


async def test_dialect_2_6_ignores_keys_of_a_format_and_rejects_those_of_flags() -> None:
    orphans = [insert(P, 1, 10), insert(C, 1, 11), delete(P, 1)]
    client = await make(*family(P, C), *orphans, dialect=Dialect.V2_6)
    assert client.instance.box.space(P).guards is None
    flags = {"foreign_key": {"k": {"space": P, "field": {"id": "id"}}}}
    assert (await answer(client, space(620, field("id"), **flags))).startswith("111 ")


async def test_bulk_paths_exclude_spaces_with_foreign_keys() -> None:
    client = await make(*FAMILY, space(620, field("id")), index(620, 0, 0))
    box = client.instance.box
    for number, is_free in ((P, False), (C, False), (620, True)):
        table = table_of(box.space(number))
        assert table is not None
        assert table.is_plain is is_free


async def test_pipelined_requests_are_checked(tmp_path: Path) -> None:
    """The server executes many requests of a turn in bulk, and a single one on a separate path."""
    simple = [
        space(P, field("id")),
        index(P, 0, 0),
        space(C, field("id"), field("cid", **refers("f1", P, "id"))),
        index(C, 0, 0),
        insert(P, 1),
    ]

    def talk(port: int) -> None:
        with closing(Client(port)) as wire:
            assert not decode_response(wire.authenticate("app", "secret")).is_error
            for step in simple:
                assert not decode_response(wire.request(*step)).is_error, step
            for step, code in ((replace(C, 1, 2), 239), (insert(C, 1, 2), 239), (delete(P, 1), 238)):
                for packet in (wire.request(*step), *wire.batch(*step, 200)):
                    with pytest.raises(TarantoolError) as caught:
                        decode_response(packet).values()
                    assert caught.value.code == code
            assert not decode_response(wire.request(*replace(C, 1, 1))).is_error

    async with Node(tmp_path, listen="127.0.0.1:0", user=("app", "secret")) as node:
        await asyncio.to_thread(talk, int(str(node.address).rpartition(":")[2]))


# --- check functions --------------------------------------------------------------------------------------------------


def function(number: int, name: str, **given: Any) -> Step:
    body = given.get("body", "function(value) return value > 0 end")
    row = [
        number,
        1,
        name,
        0,
        "LUA",
        body,
        "function",
        [],
        "any",
        "none",
        "none",
        given.get("pure", True),
        bool(body),
        True,
    ]
    return RequestType.INSERT, {0x10: 296, 0x21: [*row, ["LUA"], {}, "", "2026-01-01", "2026-01-01"]}


CHECKED = [function(66, "positive"), space(P, field("id"), field("n", constraint={"above": 66})), index(P, 0, 0)]


@pytest.mark.parametrize("step", [insert(P, 1, 1), replace(P, 1, 1), delete(P, 1), truncate(P)])
async def test_local_writes_to_a_space_with_a_check_function_are_rejected(step: Step) -> None:
    client = await make(*CHECKED)
    if step[1][0x10] == P:
        with pytest.raises(errors.Unsupported, match=r"constraint 'above' on field 2 \(n\) calls function 'positive'"):
            await client.request(*step)
    else:
        assert await answer(client, step) == "done"


async def test_rows_of_a_peer_are_applied_to_a_space_with_a_check_function() -> None:
    client = await make(*CHECKED)
    box = client.instance.box
    with applying(box) as effect:
        statements.insert(effect, effect.space(P), pack((1, 1)))
    assert await client.select(space=P) == ((1, 1),)


async def test_check_function_cannot_be_added_to_existing_rows() -> None:
    client = await make(function(66, "positive"), space(P, field("id")), index(P, 0, 0), insert(P, 1))
    with pytest.raises(errors.Unsupported, match="which only a Tarantool server can run"):
        await client.request(*alter(P, field("id", constraint={"above": 66})))
    assert await answer(client, insert(P, 2)) == [[2]]


async def test_check_function_must_exist_and_cannot_be_dropped_while_in_use() -> None:
    client = await make(*CHECKED, function(67, "nobody", body=""), function(68, "changing", pure=False))
    failed = "234 Failed to create constraint 'c' in space 's620': constraint "
    for number, why in (
        (67, "lua function 'nobody' must have persistent body"),
        (68, "function 'changing' must be deterministic"),
        (69, "function '69' was not found by ID"),
    ):
        assert await answer(client, space(620, field("id", constraint={"c": number}))) == failed + why
    drop = RequestType.DELETE, {0x10: 296, 0x20: [66]}
    assert str(await answer(client, drop)).endswith("function is referenced by constraint")
