"""Requests of a client, one by one: statements, streams, authentication, watchers, and the rest of the protocol."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from typing import Any

import pytest

from flowstone.box.access import GUEST
from flowstone.box.ddl import functions as ddl
from flowstone.box.dialect import Dialect
from flowstone.box.engine.transaction import Isolation
from flowstone.iproto import auth, errors
from flowstone.iproto.constants import RequestType
from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.requests import Request
from flowstone.node.instance import Instance
from flowstone.node.server.session import STREAMS_MAX, WATCHES_MAX, WATCHES_MAX_BEFORE_AUTH
from flowstone.node.server.streams import OpenTransactions
from flowstone.node.upstream.upstreams import ReplicationClosed
from flowstone.outside import production
from tests.node.answering import Answering
from tests.node.conversations import SALT, Conversation
from tests.node.instances import UUID, make_instance
from tests.standing_clock import StandingClock


@pytest.fixture
def instance() -> Instance:
    """Return an instance with a space 512, `numbers`, with an unsigned first field and a second index by the second
    field."""
    made = make_instance()
    transaction = made.box.begin()
    ddl.create_space(transaction, "numbers")
    ddl.create_index(transaction, "numbers", "pk")
    ddl.create_index(transaction, "numbers", "by_name", parts=[[2, "string"]], unique=False)
    return made


@pytest.fixture
def client(instance: Instance) -> Conversation:
    return Conversation(instance)


def old(instance: Instance) -> Conversation:
    return Conversation(make_instance(dialect=Dialect.V2_6))


def raises(kind: type[TarantoolError], match: str | None = None) -> Any:
    return pytest.raises(kind, match=match)


# --- statements ---


async def test_every_statement_returns_its_tuples(client: Conversation) -> None:
    assert await client.insert(1, "one") == ((1, "one"),)
    assert await client.replace(2, "two") == ((2, "two"),)
    assert await client.select() == ((1, "one"), (2, "two"))
    update = {0x10: 512, 0x20: (1,), 0x21: (("=", 1, "uno"),)}
    assert await client.data(RequestType.UPDATE, update) == ((1, "uno"),)
    assert await client.data(RequestType.UPDATE, {**update, 0x20: (9,)}) == ()
    upsert = {0x10: 512, 0x21: (3, "three"), 0x28: (("=", 1, "tres"),)}
    assert await client.data(RequestType.UPSERT, upsert) == ()
    assert await client.data(RequestType.UPSERT, upsert) == ()
    assert await client.data(RequestType.DELETE, {0x10: 512, 0x20: (3,)}) == ((3, "tres"),)
    assert await client.data(RequestType.DELETE, {0x10: 512, 0x20: (3,)}) == ()


async def test_operations_count_fields_from_the_given_base(client: Conversation) -> None:
    await client.insert(1, "one")
    update = {0x10: 512, 0x20: (1,), 0x21: (("=", 2, "uno"),), 0x15: 1}
    assert await client.data(RequestType.UPDATE, update) == ((1, "uno"),)


async def test_failed_statement_changes_nothing_and_returns_the_reason(client: Conversation) -> None:
    await client.insert(1, "one")
    with raises(errors.TupleFound, "Duplicate key exists"):
        await client.insert(1, "again")
    with raises(errors.FieldType):
        await client.replace("x", "two")
    assert await client.select() == ((1, "one"),)


async def test_select_accepts_iterators_offsets_and_limits(client: Conversation) -> None:
    for key in range(10):
        await client.insert(key, "x")
    body = {0x10: 512, 0x11: 0, 0x12: 2, 0x13: 1, 0x14: 5, 0x20: (5,)}
    assert await client.data(RequestType.SELECT, body) == ((6, "x"), (7, "x"))


async def test_spaces_and_indexes_may_be_given_by_name(client: Conversation) -> None:
    await client.data(RequestType.INSERT, {0x5E: "numbers", 0x21: (1, "one")})
    body = {0x5E: "numbers", 0x5F: "by_name", 0x12: 9, 0x20: ("one",)}
    assert await client.data(RequestType.SELECT, body) == ((1, "one"),)
    with raises(errors.NoSuchSpace):
        await client.data(RequestType.SELECT, {**body, 0x5E: "letters"})
    with raises(TarantoolError, "by_date"):
        await client.data(RequestType.SELECT, {**body, 0x5F: "by_date"})


async def test_select_continues_after_a_page(client: Conversation) -> None:
    for key in range(7):
        await client.insert(key, "x")
    body = {0x10: 512, 0x12: 3, 0x14: 2, 0x20: (), 0x1F: True}
    first = await client.request(RequestType.SELECT, body)
    second = await client.request(RequestType.SELECT, {**body, 0x2E: first[0x35]})
    third = await client.request(RequestType.SELECT, {**body, 0x2F: second[0x30][-1]})
    assert [row[0] for page in (first, second, third) for row in page[0x30]] == list(range(7))
    end = await client.request(RequestType.SELECT, {**body, 0x2E: third[0x35]})
    assert (end[0x30], end[0x35]) == ((), third[0x35])
    with raises(errors.IteratorPosition, "Iterator position is invalid"):
        await client.request(RequestType.SELECT, {**body, 0x2E: "nonsense"})


async def test_replies_carry_the_schema_version(client: Conversation) -> None:
    response = await client.response(RequestType.PING)
    assert response is not None
    assert response.schema_version == client.instance.box.schema_version


async def test_request_for_another_schema_version_is_rejected(client: Conversation) -> None:
    reply = client.session.handle(Request(RequestType.PING, 1, 7, 0, {}))
    assert b"Wrong schema version, current: " in reply.packet  # type: ignore[union-attr]


async def test_guest_needs_a_grant(instance: Instance) -> None:
    guest = Conversation(instance, user=GUEST)
    with raises(errors.AccessDenied, "Write access to space 'numbers' is denied for user 'guest'"):
        await guest.insert(1, "one")
    with raises(errors.AccessDenied, "Execute access to function 'box.info' is denied for user 'guest'"):
        await guest.call("box.info")
    with raises(errors.AccessDenied, "Execute access to universe '' is denied for user 'guest'"):
        await guest.request(RequestType.EVAL, {0x27: "return 1", 0x21: ()})


async def test_deeply_nested_value_is_an_error(client: Conversation) -> None:
    deep = b"\x82\x10\xcd\x02\x00\x21\x92\x01" + b"\x91" * 500 + b"\x01"
    response = await client.response(RequestType.REPLACE, raw=deep)
    assert response is not None
    assert response.error().code == 20


# --- streams ---


async def test_transaction_is_visible_after_its_commit(client: Conversation) -> None:
    await client.request(RequestType.BEGIN, stream=1)
    await client.insert(1, "one", stream=1)
    assert await client.select(stream=1) == ((1, "one"),)
    assert await client.select() == ()
    await client.request(RequestType.COMMIT, stream=1)
    assert await client.select() == ((1, "one"),)


async def test_rolled_back_transaction_leaves_no_trace(client: Conversation) -> None:
    await client.request(RequestType.BEGIN, stream=1)
    await client.insert(1, "one", stream=1)
    await client.request(RequestType.ROLLBACK, stream=1)
    assert await client.select(stream=1) == ()
    assert not client.session._streams


async def test_a_stream_without_a_transaction_commits_each_statement(client: Conversation) -> None:
    await client.insert(1, "one", stream=3)
    assert await client.select() == ((1, "one"),)
    assert not client.session._streams
    for type in (RequestType.COMMIT, RequestType.ROLLBACK):
        await client.request(type, stream=3)


async def test_second_begin_in_a_stream_is_an_error(client: Conversation) -> None:
    await client.request(RequestType.BEGIN, stream=1)
    with raises(errors.ActiveTransaction):
        await client.request(RequestType.BEGIN, stream=1)
    await client.request(RequestType.BEGIN, stream=2)


async def test_first_committer_wins(client: Conversation) -> None:
    await client.insert(1, "one")
    for stream in (1, 2):
        await client.request(RequestType.BEGIN, stream=stream)
        update = {0x10: 512, 0x20: (1,), 0x21: (("=", 1, str(stream)),)}
        await client.data(RequestType.UPDATE, update, stream=stream)
    await client.request(RequestType.COMMIT, stream=1)
    with raises(errors.TransactionConflict):
        await client.request(RequestType.COMMIT, stream=2)
    assert await client.select() == ((1, "1"),)
    assert not client.session._streams


async def test_failed_statement_does_not_end_its_transaction(client: Conversation) -> None:
    await client.request(RequestType.BEGIN, stream=1)
    await client.insert(1, "one", stream=1)
    with raises(errors.TupleFound):
        await client.insert(1, "again", stream=1)
    await client.insert(2, "two", stream=1)
    await client.request(RequestType.COMMIT, stream=1)
    assert await client.select() == ((1, "one"), (2, "two"))


async def test_transaction_times_out(client: Conversation) -> None:
    await client.request(RequestType.BEGIN, {0x56: 0.001}, stream=1)
    await client.insert(1, "one", stream=1)
    client.session.expire(client.instance.outside.clock.monotonic() + 1)
    assert not client.instance.box.views
    for _ in range(2):
        with raises(errors.TransactionTimeout, "aborted by timeout"):
            await client.insert(2, "two", stream=1)
    with raises(errors.TransactionTimeout):
        await client.request(RequestType.COMMIT, stream=1)
    await client.request(RequestType.COMMIT, stream=1)
    assert await client.select() == ()


@pytest.mark.parametrize("last", [RequestType.COMMIT, RequestType.SELECT, RequestType.INSERT])
async def test_transaction_times_out_at_its_deadline_without_a_sweep(last: RequestType) -> None:
    clock = StandingClock()
    instance = make_instance(outside=replace(production(), clock=clock))
    transaction = instance.box.begin()
    ddl.create_space(transaction, "numbers")
    ddl.create_index(transaction, "numbers", "pk")
    client = Conversation(instance)
    await client.request(RequestType.BEGIN, {0x56: 0.2}, stream=1)
    clock.now += 0.1
    await client.insert(1, "one", stream=1)
    clock.now += 0.2
    body = {0x10: 512, 0x12: 1, 0x20: (), 0x14: 2, 0x21: (2, "two")} if last is not RequestType.COMMIT else {}
    with raises(errors.TransactionTimeout, "aborted by timeout"):
        await client.request(last, body, stream=1)
    assert not instance.box.views
    await client.request(RequestType.ROLLBACK, stream=1)
    assert await client.select() == ()


async def test_timed_out_transaction_can_be_rolled_back(client: Conversation) -> None:
    await client.request(RequestType.BEGIN, {0x56: 0.001}, stream=1)
    client.session.expire(client.instance.outside.clock.monotonic() + 1)
    await client.request(RequestType.ROLLBACK, stream=1)
    await client.request(RequestType.BEGIN, stream=1)


async def test_changed_definition_aborts_a_transaction_that_uses_it(client: Conversation) -> None:
    await client.request(RequestType.BEGIN, stream=1)
    await client.insert(1, "one", stream=1)
    await client.call(
        "box.space.numbers:create_index", "third", {"parts": ({"field": 3, "type": "unsigned", "is_nullable": True},)}
    )
    with raises(errors.TransactionConflict):
        await client.insert(2, "two", stream=1)
    with raises(errors.TransactionConflict):
        await client.select(stream=1)
    await client.request(RequestType.ROLLBACK, stream=1)
    assert not client.instance.box.views
    assert await client.select(stream=1) == ()


async def test_functions_do_not_change_definitions_inside_a_transaction(client: Conversation) -> None:
    await client.request(RequestType.BEGIN, stream=1)
    with raises(errors.Unsupported, "call them outside of it"):
        await client.call("box.schema.space.create", "other", stream=1)
    await client.insert(1, "one", stream=1)
    await client.request(RequestType.COMMIT, stream=1)
    assert "other" not in client.instance.box.names


@pytest.mark.parametrize("body", [{0x56: -1.0}, {0x59: 5}])
async def test_begin_with_invalid_options_is_rejected(client: Conversation, body: dict) -> None:
    with raises(errors.IllegalParams):
        await client.request(RequestType.BEGIN, body, stream=1)


@pytest.mark.parametrize("level", range(5))
async def test_every_isolation_level_is_accepted(client: Conversation, level: int) -> None:
    await client.request(RequestType.BEGIN, {0x59: level}, stream=1)
    if level == Isolation.LINEARIZABLE:
        with raises(errors.Unsupported, 'space "numbers" does not support linearizable operations'):
            await client.insert(1, "one", stream=1)
    else:
        await client.insert(1, "one", stream=1)
    await client.request(RequestType.COMMIT, stream=1)
    assert await client.select() == (() if level == Isolation.LINEARIZABLE else ((1, "one"),))


async def test_linearizable_transaction_begins_when_enough_members_have_answered(client: Conversation) -> None:
    followers = Answering(client.instance, members=3)
    begin = asyncio.ensure_future(client.response(RequestType.BEGIN, {0x59: 4}, stream=1))
    select = asyncio.ensure_future(client.response(RequestType.SELECT, {0x10: 281, 0x12: 1, 0x20: ()}, stream=1))
    await asyncio.sleep(0)
    assert not begin.done()
    followers.answer(2)
    response = await begin
    assert response is not None
    assert not response.is_error
    refused = await select
    assert refused is not None
    assert refused.error().code == errors.Unsupported.code, "the requests after it ran in the transaction"


async def test_linearizable_transaction_that_times_out_does_not_begin(client: Conversation) -> None:
    Answering(client.instance, members=3)
    with raises(errors.System, "timed out"):
        await client.request(RequestType.BEGIN, {0x59: 4, 0x56: 0.01}, stream=1)
    await client.insert(1, "one", stream=1)
    assert await client.select() == ((1, "one"),)


async def test_begin_has_no_effect_when_its_client_has_disconnected(client: Conversation) -> None:
    followers = Answering(client.instance, members=3)
    begin = asyncio.ensure_future(client.response(RequestType.BEGIN, {0x59: 4}, stream=1))
    await asyncio.sleep(0)
    client.session.close()
    followers.answer(2)
    assert await begin is None


@pytest.mark.parametrize(("begin", "commit"), [({0x61: True}, {}), ({}, {0x61: True})])
async def test_transaction_is_synchronous_when_its_begin_or_commit_requests_it(
    client: Conversation, begin: dict, commit: dict
) -> None:
    await client.request(RequestType.BEGIN, begin, stream=1)
    await client.insert(1, "one", stream=1)
    with raises(errors.SyncQueueUnclaimed):
        await client.request(RequestType.COMMIT, commit, stream=1)
    assert await client.select() == ()


async def test_is_sync_can_only_be_true(client: Conversation) -> None:
    text = "is_sync can only be true"
    with raises(errors.IllegalParams, text):
        await client.request(RequestType.BEGIN, {0x61: False}, stream=1)
    await client.request(RequestType.BEGIN, stream=1)
    await client.insert(1, "one", stream=1)
    with raises(errors.IllegalParams, text):
        await client.request(RequestType.COMMIT, {0x61: False}, stream=1)
    with raises(errors.InvalidMsgpack):
        await client.request(RequestType.COMMIT, {0x61: "yes"}, stream=1)
    await client.request(RequestType.COMMIT, stream=1)
    assert await client.select() == ((1, "one"),)


async def test_open_transactions_are_limited_more_strictly_for_unauthenticated_clients(instance: Instance) -> None:
    count = OpenTransactions(4, 2, lambda: False)
    clients = [Conversation(instance, open_transactions=count) for _ in range(2)]
    strangers = [Conversation(instance, user=GUEST, open_transactions=count) for _ in range(2)]
    for client in clients:
        client.session.is_authenticated = True
    for conversations, most in ((strangers, 2), (clients, 4)):
        for number in range(most):
            await conversations[number % 2].request(RequestType.BEGIN, stream=1 + number // 2)
        for client in conversations:
            with raises(errors.Unsupported, f"does not support more than {most} open transactions"):
                await client.request(RequestType.BEGIN, stream=9)
        await conversations[0].request(RequestType.COMMIT, stream=1)
        await conversations[0].request(RequestType.BEGIN, stream=1)
        await conversations[0].request(RequestType.ROLLBACK, stream=1)
        conversations[1].session.close()
        for number in range(most // 2 + 1):
            await conversations[0].request(RequestType.BEGIN, stream=20 + number)


async def test_begin_alone_does_not_slow_down_writers(client: Conversation) -> None:
    await client.request(RequestType.BEGIN, stream=1)
    assert not client.instance.box.views
    await client.select(stream=1)
    assert len(client.instance.box.views) == 1
    await client.request(RequestType.COMMIT, stream=1)
    assert not client.instance.box.views


async def test_number_of_streams_is_limited(client: Conversation) -> None:
    for stream in range(1, STREAMS_MAX + 1):
        await client.request(RequestType.BEGIN, stream=stream)
        if stream % 100 == 0:
            await client.select(stream=stream)
    with raises(errors.Unsupported, "open streams"):
        await client.request(RequestType.BEGIN, stream=STREAMS_MAX + 1)
    client.session.close()
    assert not client.instance.box.views


async def test_requests_of_a_stream_wait_for_a_slow_request(client: Conversation) -> None:
    gate, order = asyncio.Event(), []

    async def slow() -> str:
        await gate.wait()
        order.append("slow")
        return "slow"

    client.instance.functions["slow"] = slow
    client.instance.functions["quick"] = lambda: order.append("quick")
    waiting = asyncio.create_task(client.call("slow", stream=1))
    await asyncio.sleep(0)
    behind = asyncio.create_task(client.call("quick", stream=1))
    written = asyncio.create_task(client.insert(1, "one", stream=1))
    await client.call("quick", stream=2)
    await asyncio.sleep(0)
    assert order == ["quick"]
    gate.set()
    assert await waiting == ("slow",)
    await behind
    await written
    assert order == ["quick", "slow", "quick"]
    assert await client.select() == ((1, "one"),)
    assert not client.session._streams


async def test_conflict_in_a_call_leaves_nothing_to_commit(client: Conversation) -> None:
    for name in ("first", "second"):
        await client.call("box.schema.space.create", name)
        await client.call(f"box.space.{name}:create_index", "pk")
    await client.request(RequestType.BEGIN, stream=1)
    await client.call("box.space.first:replace", (1, "mine"), stream=1)
    await client.call("box.space.second:truncate")
    for name in ("second", "first"):
        with raises(errors.TransactionConflict):
            await client.call(f"box.space.{name}:replace", (2, "mine"), stream=1)
    with raises(errors.TransactionConflict):
        await client.request(RequestType.COMMIT, stream=1)
    assert await client.call("box.space.first:len") == await client.call("box.space.second:len") == (0,)
    assert await client.call("box.space.first:replace", (3, "next"), stream=1) == ((3, "next"),)


async def test_queued_requests_of_a_stream_are_dropped_when_the_client_disconnects(client: Conversation) -> None:
    gate = asyncio.Event()
    client.instance.functions["slow"] = gate.wait
    await client.request(RequestType.BEGIN, stream=1)
    await client.insert(1, "one", stream=1)
    running = [asyncio.create_task(client.response(RequestType.CALL, {0x22: "slow"}, stream=s)) for s in (1, 2)]
    await asyncio.sleep(0)
    row = {0x10: 512, 0x21: (2, "two")}
    waiting = [asyncio.create_task(client.response(RequestType.INSERT, row, stream=1))]
    waiting += [
        asyncio.create_task(client.response(type, stream=1)) for type in (RequestType.COMMIT, RequestType.BEGIN)
    ]
    waiting += [asyncio.create_task(client.response(RequestType.BEGIN, stream=2))]
    await asyncio.sleep(0)
    client.session.close()
    gate.set()
    await asyncio.gather(*running)
    assert await asyncio.gather(*waiting) == [None] * 4
    assert await client.response(RequestType.INSERT, row) is None
    assert len(client.instance.box.space(512)) == 0
    assert not client.instance.box.views
    assert not client.session._streams


async def test_2_6_has_no_streams(instance: Instance) -> None:
    client = old(instance)
    for type in (RequestType.BEGIN, RequestType.COMMIT, RequestType.ROLLBACK):
        with raises(errors.UnknownRequestType, f"Unknown request type {type.value}"):
            await client.request(type, stream=1)


# --- authentication ---


@pytest.fixture
def known(instance: Instance) -> Conversation:
    transaction = instance.box.begin()
    ddl.create_user(transaction, "known", password="secret")
    ddl.create_user(transaction, "empty")
    ddl.grant(transaction, "known", "read,write", "space", "numbers")
    return Conversation(instance, user=GUEST)


async def test_authentication_grants_the_privileges_of_the_user(known: Conversation) -> None:
    await known.log_in("known", "secret")
    assert known.session.is_authenticated
    assert await known.insert(1, "one") == ((1, "one"),)


@pytest.mark.parametrize(("user", "password"), [("known", "wrong"), ("nobody", "secret"), ("empty", ""), ("super", "")])
async def test_wrong_passwords_and_unknown_users_look_alike(known: Conversation, user: str, password: str) -> None:
    with raises(errors.CredsMismatch, f"Incorrect password supplied for user '{user}'"):
        await known.log_in(user, password)
    assert not known.session.is_authenticated
    assert known.session.user == GUEST


@pytest.mark.parametrize(
    ("proof", "text"),
    [
        ((), "authentication request body"),
        (("chap-sha1",), "authentication request body"),
        (("chap-sha1", 5), "authentication scramble"),
        (("chap-sha1", b"short"), "invalid scramble size"),
    ],
)
async def test_invalid_scramble_is_bad_messagepack(known: Conversation, proof: tuple, text: str) -> None:
    with raises(errors.InvalidMsgpack, f"Invalid MsgPack - {text}"):
        await known.request(RequestType.AUTH, {0x23: "known", 0x21: proof})


async def test_scramble_may_be_a_string(known: Conversation) -> None:
    text = auth.scramble("secret", SALT).decode("utf-8", "surrogateescape")
    await known.request(RequestType.AUTH, {0x23: "known", 0x21: ("chap-sha1", text)})


async def test_authentication_methods_are_found_by_name(known: Conversation) -> None:
    proof = ("pap-sha256", auth.scramble("secret", SALT))
    with raises(errors.UnknownAuthMethod, "Unknown authentication method 'pap-sha256'"):
        await known.request(RequestType.AUTH, {0x23: "known", 0x21: proof})


async def test_guest_needs_no_scramble_and_counts_as_unauthenticated(known: Conversation) -> None:
    await known.log_in("known", "secret")
    await known.request(RequestType.AUTH, {0x23: "guest", 0x21: ()})
    assert (known.session.user, known.session.is_authenticated) == (GUEST, False)


async def test_guest_with_the_empty_password_counts_as_unauthenticated(known: Conversation) -> None:
    await known.log_in("guest", "")
    assert (known.session.user, known.session.is_authenticated) == (GUEST, False)


async def test_a_disabled_user_may_not_open_a_session(known: Conversation) -> None:
    ddl.disable_user(known.instance.box.begin(), "known")
    with raises(errors.AccessDenied, "Session access to universe"):
        await known.log_in("known", "secret")


# --- the rest of the protocol ---


async def test_id_returns_version_and_features(client: Conversation) -> None:
    answer = await client.request(RequestType.ID, {0x54: 6, 0x55: (0, 1)})
    assert answer == {0x54: 6, 0x55: (0, 1, 2, 3, 4, 5, 6), 0x5B: "chap-sha1"}


@pytest.mark.parametrize("type", [RequestType.ID, RequestType.WATCH, RequestType.UNWATCH, RequestType.WATCH_ONCE])
async def test_2_6_has_neither_id_nor_watchers(instance: Instance, type: RequestType) -> None:
    with raises(errors.UnknownRequestType, f"Unknown request type {type.value}"):
        await old(instance).request(type, {0x57: "box.id"})


async def test_vote_returns_the_ballot(client: Conversation) -> None:
    ballot = (await client.request(RequestType.VOTE))[0x29]
    assert (ballot[6], ballot[2], ballot[9]) == (True, {1: 1}, (str(UUID),))
    assert await client.request(RequestType.VOTE_DEPRECATED) == {0x26: {1: 1}}
    assert (await old(client.instance).request(RequestType.VOTE))[0x29] == {1: False, 4: False, 2: {1: 1}, 3: {}}


@pytest.mark.parametrize("type", [RequestType.EXECUTE, RequestType.PREPARE])
async def test_sql_is_rejected_as_unsupported(client: Conversation, type: RequestType) -> None:
    with raises(errors.Unsupported, "Flowstone does not support SQL: "):
        await client.request(type, {0x40: "SELECT 1", 0x21: ()})


async def test_lua_is_rejected_with_the_name_of_its_extra_when_it_is_not_installed(
    client: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lupa", None)
    with raises(errors.Unsupported, r"Flowstone does not support EVAL without Lua: pip install 'flowstone\[lua\]'"):
        await client.request(RequestType.EVAL, {0x27: "return 1", 0x21: ()})
    await client.call("box.schema.func.create", "f", {"body": "function() end"})
    with raises(errors.Unsupported, r"Flowstone does not support function 'f' without Lua: pip install"):
        await client.call("f")


@pytest.mark.parametrize("type", [RequestType.JOIN, RequestType.SUBSCRIBE])
async def test_replicas_are_rejected_without_a_log(client: Conversation, type: RequestType) -> None:
    with raises(errors.Unsupported, "does not support replication"):
        await client.request(type)


async def test_unknown_request_type_is_reported(client: Conversation) -> None:
    with raises(errors.UnknownRequestType, "Unknown request type 99"):
        await client.request(99)


async def test_most_requests_are_rejected_while_loading(client: Conversation) -> None:
    client.instance.status = "loading"
    await client.request(RequestType.PING)
    assert (await client.request(RequestType.VOTE))[0x29][6] is False
    with raises(errors.Loading):
        await client.select()


async def test_watch_is_answered_only_by_events(client: Conversation) -> None:
    assert await client.response(RequestType.WATCH, {0x57: "box.status"}) is None
    assert client.events[0].values()[0x58]["status"] == "running"
    assert await client.response(RequestType.WATCH, {0x57: "box.status"}) is None
    client.instance.box.is_read_only = True
    client.watchers.check()
    assert client.events[1].values()[0x58]["is_ro"] is True
    assert await client.response(RequestType.UNWATCH, {0x57: "box.status"}) is None
    client.instance.box.is_read_only = False
    client.watchers.check()
    assert len(client.events) == 2


async def test_guest_without_privileges_sees_the_replica_set_in_box_id_like_on_real_servers(
    known: Conversation,
) -> None:
    """2.11.9 and 3.8.0 send the same event to a guest; docs/reference/configuration.md says so."""
    assert await known.response(RequestType.WATCH, {0x57: "box.id"}) is None
    assert known.events[0].values()[0x58]["replicaset_uuid"] == known.instance.replicaset_uuid


async def test_watch_once_returns_the_current_value(client: Conversation) -> None:
    assert await client.data(RequestType.WATCH_ONCE, {0x57: "box.id"}) != ()
    assert await client.data(RequestType.WATCH_ONCE, {0x57: "unknown"}) == ()


@pytest.mark.parametrize(("is_known", "most"), [(False, WATCHES_MAX_BEFORE_AUTH), (True, WATCHES_MAX)])
async def test_number_of_watched_keys_is_limited(client: Conversation, is_known: bool, most: int) -> None:
    client.session.is_authenticated = is_known
    for number in range(most):
        assert await client.response(RequestType.WATCH, {0x57: str(number)}) is None
    with raises(errors.Unsupported, f"watching more than {most} keys"):
        await client.request(RequestType.WATCH, {0x57: "one more"})


async def test_internal_error_does_not_reveal_the_request(
    client: Conversation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(client.session, "_handlers", {RequestType.PING.value: broken})
    with raises(errors.Unknown, "Internal error: ZeroDivisionError"):
        await client.request(RequestType.PING)
    assert "PING request failed" in caplog.text
    assert "Traceback" in caplog.text


async def test_expected_error_is_logged_without_a_traceback(
    client: Conversation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A box.cfg call fails this way when its node is stopped meanwhile: found by a chaos run."""

    async def stopping(options: dict[str, Any]) -> None:
        raise ReplicationClosed("node is stopping", hint="start it again")

    monkeypatch.setattr(client.session._instance, "reload", stopping)
    with raises(errors.Unknown, "node is stopping"):
        await client.request(RequestType.CALL, {0x22: "box.cfg", 0x21: ({"replication": []},)})
    assert "CALL request failed: node is stopping; start it again" in caplog.text
    assert "Traceback" not in caplog.text
