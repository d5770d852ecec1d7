"""Statements after a change of definitions in one transaction: constraints and formats apply as on a real server."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flowstone import Node
from flowstone.box import system
from flowstone.box.dialect import Dialect
from flowstone.box.engine import statements
from flowstone.box.engine.transaction import BoxTransaction
from flowstone.iproto import errors
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.msgpack import pack
from flowstone.iproto.packet import decode_response
from tests import real_tarantool
from tests.box.constraint_programs import (
    TRUNCATE,
    Step,
    alter,
    delete,
    drop_index,
    drop_space,
    field,
    index,
    insert,
    nullable_index,
    plain,
    refers,
    replace,
    shown,
    space,
    truncate,
    update,
)
from tests.box.engine.test_foreign_keys import answer, function, make
from tests.conformance.wire import Client
from tests.interop.versions import Binary, parameters
from tests.node.conversations import Conversation

P, C, D = 600, 601, 602
PLAIN = (field("id"), field("cid", is_nullable=True))
KEYED = (field("id"), field("cid", is_nullable=True, **refers("f", P, "id")))
PARENT = [space(P, field("id"), field("x", is_nullable=True)), index(P, 0, 0), insert(P, 1), insert(P, 2)]
FREE = [*PARENT, space(C, *PLAIN), index(C, 0, 0), nullable_index(C, 1, 1), insert(C, 1, 1)]
BOUND = [*PARENT, space(C, *KEYED), index(C, 0, 0), nullable_index(C, 1, 1), insert(C, 1, 1)]
MISSING = "239 Foreign key constraint 'f' failed for field '2 (cid)': foreign tuple was not found"
REFERENCED = "238 Foreign key 'f' integrity check failed: tuple is referenced"

Story = tuple[list[Step], list[tuple[Step, Any]], dict[int, list[Any]]]
"""Steps before the transaction, its statements with their answers, and the tuples of spaces after COMMIT."""

STORIES: dict[str, Story] = {
    "a key that is added": (
        FREE,
        [
            (alter(C, *KEYED), "done"),
            (insert(C, 2, 99), MISSING),
            (replace(C, 1, 99), MISSING),
            (update(C, 1, ["=", 2, 99]), MISSING),
            (delete(P, 1), REFERENCED),
            (insert(C, 3, 2), [[3, 2]]),
            (delete(P, 2), REFERENCED),
            (delete(C, 1), [[1, 1]]),
            (delete(P, 1), [[1]]),
        ],
        {P: [[2]], C: [[3, 2]]},
    ),
    "a key of the whole tuple that is added": (
        FREE,
        [
            (alter(C, *PLAIN, foreign_key={"f": {"space": P, "field": {"cid": "id"}}}), "done"),
            (insert(C, 2, 99), "240 Foreign key constraint 'f' failed: foreign tuple was not found"),
            (delete(P, 1), REFERENCED),
            (delete(P, 2), [[2]]),
        ],
        {P: [[1]], C: [[1, 1]]},
    ),
    "a key that is dropped": (
        BOUND,
        [
            (insert(C, 2, 99), MISSING),
            (alter(C, *PLAIN), "done"),
            (insert(C, 2, 99), [[2, 99]]),
            (delete(P, 1), [[1]]),
        ],
        {P: [[2]], C: [[1, 1], [2, 99]]},
    ),
    "a field that is renamed with its key": (
        FREE,
        [
            (alter(C, field("id"), field("parent", is_nullable=True, **refers("f", P, "id"))), "done"),
            (insert(C, 2, 99), MISSING.replace("cid", "parent")),
        ],
        {C: [[1, 1]]},
    ),
    "a parent whose field is renamed": (
        BOUND,
        [
            (alter(P, field("number"), field("x", is_nullable=True)), "done"),
            (insert(C, 2, 2), MISSING.replace("foreign tuple", "foreign index")),
            (delete(P, 2), REFERENCED.replace("tuple is referenced", "wrong foreign field name")),
        ],
        {P: [[1], [2]], C: [[1, 1]]},
    ),
    "a truncated child": (
        BOUND,
        [
            (replace(TRUNCATE, C, 1), "done"),
            (update(C, 1, ["=", 2, 2]), []),
            (delete(P, 1), [[1]]),
            (insert(C, 1, 1), MISSING),
            (insert(C, 1, 2), [[1, 2]]),
            (delete(P, 2), REFERENCED),
        ],
        {P: [[2]], C: [[1, 2]]},
    ),
    "a truncated parent": (
        [*BOUND, delete(C, 1)],
        [
            (replace(TRUNCATE, P, 1), "done"),
            (insert(C, 1, 1), MISSING),
            (insert(P, 1), [[1]]),
            (insert(C, 1, 1), [[1, 1]]),
        ],
        {P: [[1]], C: [[1, 1]]},
    ),
    "a format of an empty space": (
        [*PARENT, space(C, *PLAIN), index(C, 0, 0)],
        [
            (alter(C, field("id"), field("text", "string")), "done"),
            (insert(C, 1, 1), "23"),
            (insert(C, 1, "x"), [[1, "x"]]),
        ],
        {C: [[1, "x"]]},
    ),
}


@pytest.mark.parametrize("name", STORIES)
async def test_statements_after_a_definition_are_answered_as_by_a_real_server(name: str) -> None:
    before, steps, after = STORIES[name]
    client = await make(*before)
    await client.request(RequestType.BEGIN, stream=1)
    for number, (step, expected) in enumerate(steps):
        assert await answer(client, step, 1) == expected, f"step {number}: {step}"
    await client.request(RequestType.COMMIT, stream=1)
    for number, tuples in after.items():
        assert plain(await client.select(space=number)) == tuples


RUN = f"""
local before, steps, after = ...
local function run(step)
    local space, result = box.space[step[2]], nil
    if step[1] == {RequestType.INSERT.value} then result = space:insert(step[3])
    elseif step[1] == {RequestType.REPLACE.value} then result = space:replace(step[3])
    elseif step[1] == {RequestType.DELETE.value} then result = space:delete(step[3])
    else result = space:update(step[3], step[4]) end
    return step[2] >= 512 and {{result}} or 'done'
end
local function answer(step)
    local is_done, result = pcall(run, step)
    return is_done and result or {{code = result.code, message = result.message}}
end
for _, step in ipairs(before) do run(step) end
box.begin()
local answers = {{}}
for _, step in ipairs(steps) do table.insert(answers, answer(step)) end
box.commit()
local tuples = {{}}
for _, number in ipairs(after) do table.insert(tuples, box.space[number]:select()) end
return answers, tuples
"""
"""Run a story without yielding: the real server aborts a stream that changes definitions at its first yield."""


@pytest.mark.parametrize("binary", parameters(">=2.11"))
def test_stories_equal_answers_of_real_servers(binary: Binary, tmp_path: Path) -> None:
    def told(step: Step) -> list[Any]:
        type, body = step
        given = [body[0x20], body.get(0x21)] if 0x20 in body else [body[0x21]]
        return [type, body[0x10], *given]

    def read(found: Any) -> Any:
        if isinstance(found, dict):
            return shown(errors.CLASSES[found["code"]](found["message"]))
        return found if isinstance(found, str) else plain(found)

    for name, (before, steps, after) in STORIES.items():
        directory = tmp_path / name.replace(" ", "-")
        with real_tarantool.serve(directory, binary=binary.path) as server, closing(Client(server.port)) as client:
            arguments = [[told(step) for step in before], [told(step) for step, _ in steps], [*after]]
            reply = client.request(RequestType.EVAL, {Key.EXPR: RUN, Key.TUPLE: arguments})
            answers, tuples = decode_response(reply).values()[Key.DATA]
        assert [read(each) for each in answers] == [expected for _, expected in steps], name
        assert [plain(each) for each in tuples] == [*after.values()], name


async def refused_by_commit(client: Conversation, *steps: Step) -> str:
    """Return the error of COMMIT after statements that all succeed; check that nothing was stored."""
    numbers = [each for each in (P, C, D) if each in client.instance.box.spaces]
    before = {each: await client.select(space=each) for each in numbers}
    definitions = await client.select(space=280)
    await client.request(RequestType.BEGIN, stream=1)
    for step in steps:
        found = await answer(client, step, 1)
        assert isinstance(found, list) or found == "done", f"{step}: {found}"
    with pytest.raises(TarantoolError) as caught:
        await client.request(RequestType.COMMIT, stream=1)
    assert {each: await client.select(space=each) for each in numbers} == before
    assert await client.select(space=280) == definitions
    return shown(caught.value)


async def test_commit_rejects_rows_that_violate_a_key_added_later() -> None:
    client = await make(*FREE)
    assert await refused_by_commit(client, insert(C, 2, 99), alter(C, *KEYED)) == MISSING
    assert await refused_by_commit(client, delete(P, 1), alter(C, *KEYED)) == MISSING


async def test_commit_rejects_orphans_written_while_a_key_was_dropped() -> None:
    client = await make(*BOUND)
    assert await refused_by_commit(client, alter(C, *PLAIN), insert(C, 2, 99), alter(C, *KEYED)) == MISSING


async def test_keys_over_indexes_of_the_same_transaction_are_checked_by_the_commit() -> None:
    client = await make(*PARENT, space(C, *PLAIN), index(C, 0, 0), insert(C, 1, 1))
    added = [nullable_index(C, 1, 1), alter(C, *KEYED)]
    assert await refused_by_commit(client, *added, delete(P, 1)) == REFERENCED
    by_x = (field("id"), field("cid", is_nullable=True, **refers("f", P, "x")))
    empty = await make(*PARENT, space(C, *PLAIN), index(C, 0, 0))
    assert await refused_by_commit(empty, nullable_index(P, 1, 1), alter(C, *by_x), insert(C, 2, 99)) == (
        MISSING.replace("foreign tuple", "foreign index")
    )
    await empty.request(RequestType.BEGIN, stream=1)
    for step in (index(P, 1, 1), alter(C, *by_x), insert(P, 5, 50), insert(C, 1, 50), delete(P, 1), delete(P, 2)):
        await answer(empty, step, 1)


async def test_writes_after_a_truncation_survive_other_definitions() -> None:
    client = await make(*FREE)
    await client.request(RequestType.BEGIN, stream=1)
    for step in (truncate(C), insert(C, 1, 2), alter(C, *KEYED)):
        await answer(client, step, 1)
    assert await answer(client, insert(C, 1, 2), 1) == "3"
    assert await answer(client, delete(P, 2), 1) == REFERENCED
    assert await answer(client, delete(P, 1), 1) == [[1]]
    await client.request(RequestType.COMMIT, stream=1)
    assert (await client.select(space=P), await client.select(space=C)) == (((2,),), ((1, 2),))


async def test_truncated_child_does_not_restrict_its_parent() -> None:
    client = await make(*BOUND)
    await client.request(RequestType.BEGIN, stream=1)
    assert await answer(client, truncate(C), 1) == "done"
    assert await answer(client, delete(P, 1), 1) == [[1]]
    await client.request(RequestType.COMMIT, stream=1)
    assert (await client.select(space=P), await client.select(space=C)) == (((2,),), ())


async def test_space_created_in_the_transaction_restricts_its_parent_and_accepts_no_rows_before_the_commit() -> None:
    client = await make(*PARENT)
    created = [space(C, *KEYED), index(C, 0, 0)]
    no_index = REFERENCED.replace("tuple is referenced", "index was not found")
    assert await refused_by_commit(client, *created, delete(P, 1)) == no_index
    await client.request(RequestType.BEGIN, stream=1)
    for step in (*created, nullable_index(C, 1, 1)):
        assert await answer(client, step, 1) == "done"
    assert await answer(client, insert(C, 2, 99), 1) == "36"
    assert await answer(client, delete(P, 1), 1) == [[1]]
    await client.request(RequestType.COMMIT, stream=1)
    assert await answer(client, insert(C, 2, 99)) == MISSING


async def test_dropped_child_does_not_restrict_its_parent() -> None:
    client = await make(*PARENT, space(C, *KEYED))
    await client.request(RequestType.BEGIN, stream=1)
    assert await answer(client, drop_space(C), 1) == "done"
    assert await answer(client, delete(P, 1), 1) == [[1]]
    await client.request(RequestType.COMMIT, stream=1)
    assert await client.select(space=P) == ((2,),)


def alter_child(transaction: BoxTransaction, *format: dict[str, Any]) -> None:
    operations = pack([["=", 6, list(format)]])
    statements.update(transaction, transaction.space(system.SPACE_ID), 0, pack([C]), operations)


async def test_rolled_back_definition_does_not_affect_later_statements() -> None:
    box = (await make(*FREE)).instance.box
    transaction = box.begin_interactive()

    def alter_and_fail() -> None:
        alter_child(transaction, *KEYED)
        assert transaction.space(P).guards is not None
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        transaction.attempt(alter_and_fail)
    assert (transaction.space(P), transaction.space(C)) == (box.space(P), box.space(C))
    alter_child(transaction, *KEYED)
    transaction.rollback()
    assert (transaction.space(P), transaction.space(C)) == (box.space(P), box.space(C))


async def test_other_transactions_do_not_see_constraints_before_the_commit() -> None:
    client = await make(*FREE)
    box = client.instance.box
    transaction = box.begin_interactive()
    alter_child(transaction, *KEYED)
    assert (box.space(P).guards, box.space(C).guards) == (None, None)
    assert await answer(client, insert(C, 2, 99)) == [[2, 99]]
    with pytest.raises(errors.FieldForeignKeyFailed):
        transaction.prepare()
    assert (box.space(P).guards, box.space(C).guards) == (None, None)


async def test_dropping_the_parent_concurrently_aborts_the_transaction() -> None:
    client = await make(*FREE)
    transaction = client.instance.box.begin_interactive()
    alter_child(transaction, *KEYED)
    statements.insert(transaction, transaction.space(C), pack([2, 2]))
    assert await answer(client, delete(P, 2)) == [[2]]
    with pytest.raises(errors.TransactionConflict):
        transaction.prepare()


async def test_invalid_definition_is_rejected_by_the_commit() -> None:
    client = await make(*FREE)
    nonsense = field("cid", is_nullable=True, foreign_key={"f": 1})
    assert (await refused_by_commit(client, alter(C, field("id"), nonsense), insert(C, 2, 99))).startswith("141 ")


async def test_dialect_2_6_ignores_keys_that_a_transaction_adds() -> None:
    client = await make(*FREE, dialect=Dialect.V2_6)
    transaction = client.instance.box.begin_interactive()
    alter_child(transaction, *KEYED)
    statements.insert(transaction, transaction.space(C), pack([2, 99]))
    transaction.prepare()
    assert await client.select(space=C) == ((1, 1), (2, 99))


@pytest.mark.parametrize("step", [insert(C, 2, 1), replace(C, 2, 1), delete(C, 1)])
async def test_check_function_of_the_same_transaction_rejects_local_writes(step: Step) -> None:
    client = await make(function(66, "positive"), space(C, *PLAIN), index(C, 0, 0))
    checked = field("cid", is_nullable=True, constraint={"above": 66})
    await client.request(RequestType.BEGIN, stream=1)
    assert await answer(client, alter(C, field("id"), checked), 1) == "done"
    with pytest.raises(errors.Unsupported, match=r"constraint 'above' on field 2 \(cid\) calls function 'positive'"):
        await client.request(*step, stream=1)
    await client.request(RequestType.COMMIT, stream=1)
    assert await client.select(space=C) == ()


async def test_dropped_check_function_rejects_nothing() -> None:
    checked = field("cid", is_nullable=True, constraint={"above": 66})
    client = await make(function(66, "positive"), space(C, field("id"), checked), index(C, 0, 0))
    await client.request(RequestType.BEGIN, stream=1)
    assert await answer(client, alter(C, *PLAIN), 1) == "done"
    assert await answer(client, insert(C, 1, 1), 1) == [[1, 1]]
    await client.request(RequestType.COMMIT, stream=1)
    assert await client.select(space=C) == ((1, 1),)


async def test_rows_of_a_space_that_loses_its_primary_index_are_rejected_by_the_commit() -> None:
    client = await make(space(C, *PLAIN), index(C, 0, 0))
    assert await refused_by_commit(client, drop_index(C, 0), insert(C, 1, 1)) == "35"


async def test_rows_of_a_space_whose_primary_index_changes_are_rejected_by_the_commit() -> None:
    """The log identifies tuples by primary key, so a replica would change other tuples."""
    by_cid = RequestType.REPLACE, {0x10: 288, 0x21: [C, 0, "i0", "tree", {"unique": True}, [[1, "unsigned"]]]}
    for written in (insert(C, 2, 1), update(C, 1, ["=", 3, 5]), delete(C, 1)):
        client = await make(space(C, field("id"), field("cid")), index(C, 0, 0), insert(C, 1, 1))
        assert await refused_by_commit(client, by_cid, written) == "5"
        assert await refused_by_commit(client, drop_index(C, 0), index(C, 0, 0), written) == "5"


async def test_transaction_of_the_python_api_checks_keys_that_it_adds(tmp_path: Path) -> None:
    async with Node(tmp_path) as node:
        parent = await node.create_space("parent", format=[field("id")])
        await parent.create_index("primary")
        child = await node.create_space("child", format=[field("id"), field("cid")])
        await child.create_index("primary")
        await child.create_index("cid", parts=["cid"], unique=False)
        await parent.insert([1])
        await child.insert([1, 1])
        async with node.transaction() as transaction:
            format = [field("id"), field("cid", **refers("f", parent.id, "id"))]
            transaction.space("_space").update([child.id], [("=", "format", format)])
            with pytest.raises(errors.FieldForeignKeyFailed, match="foreign tuple was not found"):
                transaction.space("child").insert([2, 99])
            with pytest.raises(errors.ForeignKeyIntegrity, match="tuple is referenced"):
                transaction.space("parent").delete([1])
        assert [list(row) for row in child.select()] == [[1, 1]]
        assert [list(row) for row in parent.select()] == [[1]]
