"""Replay into the real server, and into a server with interactive transactions under control of the test."""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from decimal import Decimal
from typing import Any

import pytest

from flowstone.client import play as module
from flowstone.client.connection import Connection
from flowstone.client.play import PlayError, PlayInterrupted, PlayResult, play
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.errors import AccessDenied, NoSuchIndexId, NoSuchSpace, TupleFound
from flowstone.iproto.msgpack import pack
from flowstone.iproto.row import Row
from flowstone.iproto.uri import parse_uri
from flowstone.outside import production
from flowstone.xlog.transactions import LogTransaction, make_transaction
from tests.conftest import FULL
from tests.node.fake_server import Reply, Streaming, answering, peer, refusal
from tests.real_tarantool import Server

SETUP = """
box.schema.user.create('nobody', {password='x'})
box.schema.user.create('executor', {password='x'})
box.schema.user.grant('executor', 'execute', 'universe')
function fresh()
    if box.space.t then box.space.t:drop() end
    local t = box.schema.space.create('t', {id = 600})
    t:create_index('pk')
    t:create_index('second', {parts = {2, 'scalar'}, unique = true})
end
"""
SPACE = 600


@pytest.fixture(scope="module")
def running(tarantool: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with tarantool.serve(tmp_path_factory.mktemp("server"), setup=SETUP) as server:
        yield server


@pytest.fixture
async def server(running: Server) -> Server:
    await lua(running, "fresh()")
    return running


async def lua(server: Server, expression: str) -> tuple[Any, ...]:
    async with await Connection.open(production(), parse_uri(server.uri)) as connection:
        body = pack({Key.EXPR.value: expression, Key.TUPLE.value: []})
        data: tuple[Any, ...] = (await connection.request(RequestType.EVAL, body))[Key.DATA]
        return data


async def select(server: Server, space: int = SPACE) -> tuple[Any, ...]:
    async with await Connection.open(production(), parse_uri(server.uri)) as connection:
        keys = {Key.SPACE_ID: space, Key.LIMIT: 2**32 - 1, Key.KEY: (), Key.ITERATOR: 2}
        body = pack({key.value: value for key, value in keys.items()})
        data: tuple[Any, ...] = (await connection.request(RequestType.SELECT, body))[Key.DATA]
        return data


class Log:
    """Builds transactions as a log has them, LSN after LSN."""

    def __init__(self, replica_id: int = 1) -> None:
        self.lsn = 0
        self.replica_id = replica_id

    def row(self, type: RequestType, **keys: Any) -> Row:
        self.lsn += 1
        raw = {Key[name.upper()].value: value for name, value in keys.items()}
        parts = [pack(key) + (value if isinstance(value, bytes) else pack(value)) for key, value in raw.items()]
        body = bytes((0x80 + len(parts),)) + b"".join(parts)
        return Row(type, self.replica_id, lsn=self.lsn, body=body)

    def insert(self, *tuple: Any, space: int = SPACE) -> Row:
        return self.row(RequestType.INSERT, space_id=space, tuple=tuple)

    def one(self, row: Row) -> LogTransaction:
        return make_transaction([row])


def inserts(log: Log, keys: Sequence[int]) -> list[LogTransaction]:
    return [log.one(log.insert(key, key)) for key in keys]


@pytest.mark.real
async def test_every_kind_of_row_is_replayed(server: Server) -> None:
    log = Log()
    rows = [
        log.insert(1, 1, "abcdef", 5),
        log.insert(2, 2, "x", 5),
        log.row(RequestType.REPLACE, space_id=SPACE, tuple=(2, 2, "replaced", 5)),
        log.row(RequestType.UPDATE, space_id=SPACE, index_base=1, key=(1,), tuple=(("+", 4, 1), (":", 3, 2, 1, "-"))),
        log.row(RequestType.UPDATE, space_id=SPACE, key=(2,), tuple=(("+", 3, 1), (":", 2, 0, 2, "R"))),
        log.row(RequestType.UPSERT, space_id=SPACE, index_base=1, tuple=(1, 1), ops=(("=", 5, "new"),)),
        log.row(RequestType.UPSERT, space_id=SPACE, tuple=(2, 2), ops=(("!", -1, "end"), ("=", 4, "e"))),
        log.row(RequestType.UPSERT, space_id=SPACE, tuple=(3, 3), ops=(("=", 4, "unused"),)),
        log.insert(4, 44),
        log.insert(5, 55),
        log.row(RequestType.DELETE, space_id=SPACE, key=(4,)),
        log.row(RequestType.DELETE, space_id=SPACE, index_id=1, key=(55,)),
        log.row(RequestType.UPDATE, space_id=SPACE, index_id=1, index_base=1, key=(3,), tuple=(("=", 3, "by second"),)),
    ]
    result = await play(production(), server.uri, [log.one(row) for row in rows])
    assert result == PlayResult(13, 13, 0, {1: 13})
    assert await select(server) == (
        (1, 1, "a-cdef", 6, "new"),
        (2, 2, "Rplaced", 6, "e"),
        (3, 3, "by second"),
    )


@pytest.mark.real
async def test_values_keep_their_encoding(server: Server) -> None:
    values = (
        uuid.UUID(int=5),
        Decimal("-1.50"),
        b"binary",
        "text",
        1.0,
        {"a": ()},
        (None, -1, 2**64 - 1),
        True,
        "\udcff",
    )
    exact = b"\x94\x01\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00\xca\x3f\x80\x00\x00\x82\xa1a\x01\xa1b\x80"
    log = Log()
    first = log.one(log.insert(2, 2, *values))
    second = log.one(log.row(RequestType.INSERT, space_id=SPACE, tuple=exact))
    operations = b"\x91\x93\xa1=\x05\xcb\x40\x00\x00\x00\x00\x00\x00\x00"
    third = log.one(log.row(RequestType.UPDATE, space_id=SPACE, key=(2,), tuple=operations))
    await play(production(), server.uri, [first, second, third])
    raw = "local f = require('ffi') local t = box.space.t:get(1) local b = f.new('char[99]') "
    raw += "f.C.box_tuple_to_buf(t, b, 99) return require('digest').base64_encode(f.string(b, t:bsize()))"
    assert (await lua(server, raw))[0] == base64.b64encode(exact).decode()
    _, found = await select(server)
    assert found == (2, 2, *values[:3], 2.0, *values[4:])
    assert list(map(type, found[2:])) == [*map(type, values[:3]), float, *map(type, values[4:])]
    assert str(found[3]) == "-1.50"


@pytest.mark.real
async def test_play_stops_at_the_rejected_row(server: Server) -> None:
    log = Log()
    transactions = inserts(log, [*range(1, 500), 250, *range(500, 600)])
    with pytest.raises(PlayError) as caught:
        await play(production(), server.uri, transactions, file=lambda: "00.xlog")
    error = caught.value
    assert [row[0] for row in await select(server)] == list(range(1, 500))
    assert error.result == PlayResult(499, 499, 0, {1: 499})
    assert error.row is transactions[499].rows[0]
    assert isinstance(error.error, TupleFound)
    assert str(error).startswith(
        f"00.xlog: row with LSN 500 of replica 1 (INSERT, space 600) was rejected by {server.uri}: Duplicate key"
    )
    assert "(ER_TUPLE_FOUND, 3)" in str(error)
    assert str(error).endswith("applied: retry it with --from 500, or skip it with --from 501")


@pytest.mark.real
async def test_long_transaction_is_applied_completely_or_not_at_all(server: Server) -> None:
    log = Log()
    good = make_transaction([log.insert(key, key) for key in range(10)])
    bad = make_transaction([log.insert(key, key) for key in (10, 11, 5, 12)])
    after = log.one(log.insert(99, 99))
    with pytest.raises(PlayError, match=r"row with LSN 13 .* retry it with --from 11, or skip it with --from 15"):
        await play(production(), server.uri, [good, bad, after])
    assert [row[0] for row in await select(server)] == list(range(10))


@pytest.mark.real
async def test_replay_resumes_where_it_stopped(server: Server) -> None:
    log = Log()
    transactions = inserts(log, [1, 2, 2, 3])
    with pytest.raises(PlayError) as caught:
        await play(production(), server.uri, transactions)
    assert caught.value.row is not None
    behind = [one for one in transactions if one.lsn > caught.value.row.lsn]
    assert await play(production(), server.uri, behind) == PlayResult(1, 1, 0, {1: 4})
    assert [row[0] for row in await select(server)] == [1, 2, 3]


@pytest.mark.real
async def test_rows_without_effect_are_skipped_and_counted(server: Server) -> None:
    log = Log(2)
    nop = make_transaction([log.insert(1, 1), log.row(RequestType.NOP)])
    confirm = log.one(log.row(RequestType.RAFT_CONFIRM, replica_id=1, lsn=5))
    assert await play(production(), server.uri, [nop, confirm]) == PlayResult(1, 1, 2, {2: 3})


@pytest.mark.real
async def test_schema_and_data_are_replayed_in_order(server: Server) -> None:
    await lua(server, "if box.space.made then box.space.made:drop() end")
    log = Log()
    fields: tuple[Any, ...] = (700, 1, "made", "memtx", 0, {}, ())
    index = (700, 0, "pk", "tree", {"unique": True}, ((0, "unsigned"),))
    transactions = [
        *inserts(log, range(5)),
        make_transaction([log.insert(*fields, space=280), log.insert(*index, space=288)]),
        log.one(log.insert(1, "in the new space", space=700)),
        log.one(log.row(RequestType.UPSERT, space_id=330, ops=(("+", 1, 1),), tuple=(SPACE, 1))),
        *inserts(log, [7]),
    ]
    await play(production(), server.uri, transactions)
    assert await select(server, 700) == ((1, "in the new space"),)
    assert await select(server) == ((7, 7),)


@pytest.mark.real
async def test_engines_without_shared_transactions_are_replayed(server: Server) -> None:
    vinyl = "if box.space.v then box.space.v:drop() end "
    vinyl += "box.schema.space.create('v', {id = 650, engine = 'vinyl'}):create_index('pk')"
    await lua(server, vinyl)
    log = Log()
    transactions = [log.one(log.insert(key, key, space=space)) for key in range(20) for space in (SPACE, 650)]
    update = log.row(RequestType.UPDATE, space_id=650, key=(3,), tuple=(("=", 1, "new"),))
    assert (await play(production(), server.uri, [*transactions, log.one(update)])).rows == 41
    assert len(await select(server)) == len(await select(server, 650)) == 20
    assert (await select(server, 650))[3] == (3, "new")


@pytest.mark.real
async def test_error_names_a_missing_space_or_index(server: Server) -> None:
    log = Log()
    with pytest.raises(PlayError, match="space 12345") as caught:
        await play(production(), server.uri, [log.one(log.insert(1, space=12345))])
    assert isinstance(caught.value.error, NoSuchSpace)
    with pytest.raises(PlayError) as caught:
        await play(
            production(), server.uri, [log.one(log.row(RequestType.DELETE, space_id=SPACE, index_id=9, key=(1,)))]
        )
    assert isinstance(caught.value.error, NoSuchIndexId)


@pytest.mark.real
async def test_error_for_missing_rights_names_the_grant(server: Server) -> None:
    log = Log()
    with pytest.raises(
        PlayError, match=r"grant\('nobody', 'execute', 'universe'\), which lets the user run any"
    ) as caught:
        await play(production(), f"nobody:x@{server.uri}", inserts(log, [1]))
    assert isinstance(caught.value.error, AccessDenied)
    with pytest.raises(PlayError, match=r"row with LSN 1 .*Write access to space 't' is denied"):
        await play(production(), f"executor:x@{server.uri}", inserts(Log(), [1]))


@pytest.mark.real
async def test_many_rows_are_replayed_quickly(server: Server) -> None:
    count = 1_000_000 if FULL else 50_000
    log = Log()
    source = (log.one(log.insert(key, key, "some text", key * 2, 1.5)) for key in range(count))
    seen: list[PlayResult] = []
    started = time.monotonic()
    result = await play(production(), server.uri, source, on_progress=seen.append)
    assert time.monotonic() - started < count / 5_000
    assert result.rows == count
    assert await lua(server, "return box.space.t:len()") == (count,)
    assert len(seen) == count / 1000
    assert seen[-1] == result


@pytest.mark.real
async def test_rows_read_before_the_source_failed_are_applied(server: Server) -> None:
    async def source() -> AsyncIterator[LogTransaction]:
        for one in inserts(Log(), range(3)):
            yield one
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="disk"):
        await play(production(), server.uri, source())
    assert len(await select(server)) == 3


async def streamed(store: Streaming, transactions: list[LogTransaction], **options: Any) -> PlayResult:
    async with peer(answering(store, (2, 11, 9))) as uri:
        return await play(production(), uri, transactions, **options)


async def test_batch_is_one_transaction_on_a_stream() -> None:
    store = Streaming()
    assert (await streamed(store, inserts(Log(), range(1500)))).rows == 1500
    assert store.keys == list(range(1500))
    assert store.log.count("BEGIN") == store.log.count("COMMIT") == 2


async def test_play_on_a_stream_stops_at_the_rejected_row() -> None:
    store = Streaming()
    with pytest.raises(PlayError, match="row with LSN 4 "):
        await streamed(store, inserts(Log(), [1, 2, 3, 2, 5]))
    assert store.keys == [1, 2, 3]
    assert store.log.count("ROLLBACK") == 1


async def test_transaction_is_not_split_on_a_stream() -> None:
    store = Streaming()
    log = Log()
    good = make_transaction([log.insert(key, key) for key in (1, 2)])
    bad = make_transaction([log.insert(key, key) for key in (3, 2)])
    with pytest.raises(PlayError, match=r"LSN 4 .* --from 3"):
        await streamed(store, [good, bad])
    assert store.keys == [1, 2]


async def test_server_without_streams_gets_transactions_in_lua() -> None:
    store = Streaming(yields=True)
    assert (await streamed(store, inserts(Log(), range(2500)))).rows == 2500
    assert store.keys == list(range(2500))
    assert (store.log.count("BEGIN"), store.log.count("EVAL")) == (1, 3)


async def test_error_of_a_lost_connection_names_the_rows_in_flight() -> None:
    store = Streaming()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def answer(row: Row) -> tuple[int, bytes]:
            if row.type == RequestType.COMMIT:
                raise ConnectionError
            return store(row)

        await answering(answer, (2, 11, 9))(reader, writer)

    async with peer(talk) as uri:
        with pytest.raises(
            PlayError, match=r"LSN 1 to 5 of replica 1 were in progress; .* --from 1 or --from 6$"
        ) as caught:
            await play(production(), uri, inserts(Log(), range(5)))
    assert caught.value.result == PlayResult()


async def test_batches_end_at_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_BYTES", 100)
    store = Streaming()
    await streamed(store, inserts(Log(), range(200, 230)))
    assert store.log.count("BEGIN") > 2


async def test_error_of_a_lost_connection_names_each_replica_with_rows_in_flight() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def answer(row: Row) -> tuple[int, bytes]:
            if row.type == RequestType.COMMIT:
                raise ConnectionError
            return Streaming()(row)

        await answering(answer, (2, 11, 9))(reader, writer)

    async with peer(talk) as uri:
        with pytest.raises(PlayError) as caught:
            await play(production(), uri, [*inserts(Log(1), range(3)), *inserts(Log(2), range(4, 6))])
    assert "LSN 1 to 3 of replica 1, LSN 1 to 2 of replica 2 were in progress" in str(caught.value)
    assert str(caught.value).endswith("--replica 1 --from 1 or --from 4, --replica 2 --from 1 or --from 3")


async def test_names_are_queried_once_per_space_of_the_log() -> None:
    store = Streaming(names={600: "t", 601: "u"})
    log = Log()
    rows = [log.one(log.insert(key, space=600 + key % 3)) for key in range(3000)]
    names = {600: "t", 601: "u", 602: "v"}
    assert (await streamed(store, rows, names=names.get)).rows == 3000
    assert store.log.count("SELECT") == 3


async def test_play_stops_before_the_first_row_of_a_space_with_another_name() -> None:
    store = Streaming(names={600: "t", 601: "users"})
    log = Log()
    good = [log.one(log.insert(key)) for key in range(3)]
    bad = make_transaction([log.insert(10), log.insert(11, space=601)])
    with pytest.raises(PlayError) as caught:
        await streamed(store, [*good, bad, log.one(log.insert(12))], names={600: "t", 601: "orders"}.get)
    assert store.keys == [0, 1, 2]
    assert caught.value.result == PlayResult(3, 3, 0, {1: 3})
    assert caught.value.row is bad.rows[1]
    said = str(caught.value)
    told = "row with LSN 5 of replica 1 belongs to space 'orders' with id 601, but space 601 is named 'users' at 127"
    assert said.startswith(told)
    assert "; replay into a server where 'orders' has id 601: box.schema.space.create('orders', {id = 601})" in said


async def test_truncate_is_checked_by_the_name_of_the_truncated_space() -> None:
    store = Streaming(names={600: "other"})
    log = Log()
    truncate = log.row(RequestType.UPSERT, space_id=330, tuple=(SPACE, 1), ops=(("+", 1, 1),))
    with pytest.raises(PlayError, match="belongs to space 't' with id 600, but space 600 is named 'other'"):
        await streamed(store, [log.one(truncate)], names={SPACE: "t"}.get)
    assert "UPSERT" not in store.log


@pytest.mark.real
async def test_names_are_queried_from_a_real_server(server: Server) -> None:
    names = {SPACE: "t"}
    assert (await play(production(), server.uri, inserts(Log(), [1]), names=names.get)).rows == 1
    with pytest.raises(PlayError, match="belongs to space 'u' with id 600, but space 600 is named 't' at "):
        await play(production(), server.uri, inserts(Log(), [2]), names={SPACE: "u"}.get)
    with pytest.raises(PlayError, match=r"\(INSERT, space 't', id 600\) was rejected"):
        await play(production(), server.uri, inserts(Log(), [1]), names=names.get)
    assert await select(server) == ((1, 1),)


def of_snapshot(number: int, *tuple: Any, space: int = SPACE) -> LogTransaction:
    body = pack({Key.SPACE_ID.value: space, Key.TUPLE.value: tuple})
    return make_transaction([Row(RequestType.INSERT, lsn=number, body=body)])


async def test_rejected_snapshot_row_is_named_by_number_without_a_resume_position() -> None:
    store = Streaming()
    with pytest.raises(PlayError, match=r"^row 2 of the snapshot \(INSERT, space 600\) was rejected") as caught:
        await streamed(store, [of_snapshot(1, 1), of_snapshot(2, 1), *inserts(Log(), [5])])
    assert "--from" not in str(caught.value)
    assert caught.value.hint is not None
    assert "into empty spaces; to add only missing tuples to other spaces, see docs/how-to" in caught.value.hint
    assert "delete" not in caught.value.hint  # the existing data may be the only copy
    assert caught.value.result == PlayResult(1, 1, 0, {})


async def test_snapshot_rows_truncate_nothing_and_yield_no_position() -> None:
    store = Streaming()
    result = await streamed(store, [of_snapshot(1, 600, 3, space=330), of_snapshot(2, 7), *inserts(Log(), [8])])
    assert result == PlayResult(2, 2, 1, {1: 1})
    assert store.keys == [7, 8]


async def test_snapshot_rows_that_look_like_log_rows_yield_no_position() -> None:
    store = Streaming()
    raft = LogTransaction((Row(RequestType.RAFT, group_id=1, lsn=391, flags=1, body=pack({0: 1})),))
    promote = LogTransaction((Row(RequestType.RAFT_PROMOTE, 1, lsn=392, flags=1, body=pack({2: 1})),))
    files = iter(["0.snap", "0.snap", "0.snap", "0.xlog"])
    rows = [of_snapshot(1, 7), raft, promote, *inserts(Log(), [7])]
    with pytest.raises(PlayError, match=r"0\.xlog: row with LSN 1 .*retry it with --from 1, ") as caught:
        await streamed(store, rows, file=lambda: next(files))
    assert caught.value.result == PlayResult(1, 1, 2, {})


def without_transactions(store: Streaming) -> Callable[[Row], Reply]:
    """A server like a Flowstone node of dialect 2.6: no streams, no EVAL."""

    def answer(row: Row) -> Reply:
        if row.type == RequestType.EVAL:
            return refusal(5, "Flowstone does not support EVAL")
        return store(row)

    return answer


async def test_server_without_streams_and_eval_gets_single_rows() -> None:
    store = Streaming()
    async with peer(answering(without_transactions(store), (2, 6, 0))) as uri:
        result = await play(production(), uri, inserts(Log(), range(5)))
        assert result == PlayResult(5, 5, 0, {1: 5})
        with pytest.raises(PlayError, match=r"row with LSN 2 .* was rejected .*Duplicate key") as caught:
            await play(production(), uri, inserts(Log(), [7, 3, 8]))
    assert caught.value.result == PlayResult(1, 1, 0, {1: 1})
    assert store.keys == [0, 1, 2, 3, 4, 7]


async def test_server_without_streams_and_eval_gets_no_part_of_a_longer_transaction() -> None:
    store, log = Streaming(), Log()
    first, longer = inserts(log, [1]), make_transaction([log.insert(key, key) for key in (2, 3)])
    async with peer(answering(without_transactions(store), (2, 6, 0))) as uri:
        with pytest.raises(PlayError, match=r"LSN 2 to 3 of replica 1 has 2 rows, but .* accepts only single-row"):
            await play(production(), uri, [*first, longer])
    assert store.keys == [1]


class Held:
    """A server that delays its answers to COMMIT until the test releases them."""

    def __init__(self) -> None:
        self.store = Streaming()
        self.asked, self.go = asyncio.Event(), asyncio.Event()

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def wait(row: Row) -> None:
            if row.type == RequestType.COMMIT:
                self.asked.set()
                await self.go.wait()

        await answering(self.store, (2, 11, 9), before=wait)(reader, writer)


async def test_interrupt_reports_the_outcome_of_the_batch_in_flight() -> None:
    held, seen = Held(), list[PlayResult]()
    async with peer(held.talk) as uri:
        replay = asyncio.create_task(play(production(), uri, inserts(Log(), range(1500)), on_progress=seen.append))
        await held.asked.wait()
        replay.cancel()
        await asyncio.wait((replay,), timeout=0.05)
        assert not replay.done()
        held.go.set()
        with pytest.raises(asyncio.CancelledError):
            await replay
    assert seen == [PlayResult(1000, 1000, 0, {1: 1000})]
    assert held.store.keys == list(range(1000))


async def test_interrupt_does_not_wait_for_a_silent_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INTERRUPT_SECONDS", 0.05)
    held = Held()
    async with peer(held.talk) as uri:
        replay = asyncio.create_task(play(production(), uri, inserts(Log(), range(5))))
        await held.asked.wait()
        replay.cancel()
        told = r"LSN 1 to 5 of replica 1 were in progress; .* --from 1 or --from 6$"
        with pytest.raises(PlayInterrupted, match=told):
            await replay
        held.go.set()
