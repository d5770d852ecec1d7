"""Replays transactions of a log into a live server, over IPROTO, in order, and stops at the first refusal.

Many transactions of the log become one on the server, which is what makes it fast; if that one is refused,
it is rolled back and its parts are sent one by one, so that exactly the transactions before the refused one
are there. Transactions that touch Tarantool's own spaces always go alone. Servers with interactive
transactions get BEGIN, rows, COMMIT on a stream; all others one EVAL per batch (see `LUA`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgpack
import msgspec

from flowstone.errors import FlowstoneError, RemoteProtocolError
from flowstone.iproto.constants import Feature, Key, RequestType
from flowstone.iproto.errors import AccessDenied, TarantoolError, TransactionYield, error_of
from flowstone.iproto.packet import Response
from flowstone.iproto.row import Row
from flowstone.iproto.uri import Uri, parse_uri
from flowstone.node.connection import Connection, ConnectionFailed
from flowstone.node.statement import SYSTEM_SPACES_END, Statement, statement_of
from flowstone.outside import Outside
from flowstone.xlog.transactions import Transaction

BATCH_ROWS = 1000
BATCH_BYTES = 1024**2
ANSWER_SECONDS = 300.0
"""A batch may build an index or wait for a quorum, so it gets longer than an ordinary request."""

STREAM_ID = 1
TAKEN_PER_TURN = 64
"""Transactions read before the loop gets its turn, so that the batch under way moves on meanwhile."""

LUA = """
local rows = ...
local ffi = require('ffi')
pcall(ffi.cdef, [[
struct tuple_format *box_tuple_format_default(void);
struct tuple *box_tuple_new(struct tuple_format *, const char *, const char *);
]])
local format = ffi.C.box_tuple_format_default()
local function tuple(raw)
    local data = ffi.cast('const char *', raw)
    local made = ffi.C.box_tuple_new(format, data, data + #raw)
    if made == nil then box.error() end
    return box.internal.tuple.bless(made)
end
local function apply(row)
    local kind, space = row[1], box.space[row[2]]
    if space == nil then box.error(box.error.NO_SUCH_SPACE, '#' .. row[2]) end
    if kind == 2 then return space:insert(tuple(row[4])) end
    if kind == 3 then return space:replace(tuple(row[4])) end
    if kind == 9 then return space:upsert(tuple(row[4]), tuple(row[5])) end
    local index = space.index[row[3]]
    if index == nil then box.error(box.error.NO_SUCH_INDEX_ID, row[3], space.name) end
    if kind == 4 then return index:update(tuple(row[4]), tuple(row[5])) end
    return index:delete(tuple(row[4]))
end
local function refuse(at, err)
    box.rollback()
    if type(err) ~= 'cdata' then return at, box.error.PROC_LUA, tostring(err) end
    return at, err.code or box.error.PROC_LUA, err.message
end
if #rows > 1 then box.begin() end
for at, row in ipairs(rows) do
    local ok, err = pcall(apply, row)
    if not ok then return refuse(at, err) end
end
local ok, err = pcall(box.commit)
if not ok then return refuse(0, err) end
"""
"""Executes rows in one transaction; returns nothing, or the refused number (0: commit), code, message.

Tuples come as strings of MessagePack and are made into the server's tuples byte for byte: as Lua values they
would lose the difference between 1 and 1.0, and between binary and text. One row goes without a transaction,
because some changes of the schema cannot be made inside of one.
"""

Progress = Callable[["PlayResult"], None]


@dataclass(frozen=True, slots=True)
class PlayResult:
    """What was applied, rows `skipped` because they change no space, and the last LSN per replica id."""

    transactions: int = 0
    rows: int = 0
    skipped: int = 0
    positions: Mapping[int, int] = field(default_factory=dict)


class PlayError(FlowstoneError):
    """Replay stopped. `result` is what is surely applied; `row` and `error` name the refused row and why."""

    def __init__(
        self,
        message: str,
        result: PlayResult,
        *,
        hint: str | None = None,
        row: Row | None = None,
        error: TarantoolError | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.result = result
        self.row = row
        self.error = error


class _Piece(msgspec.Struct, frozen=True, gc=False):
    """A transaction of the log, ready to be sent."""

    transaction: Transaction
    statements: tuple[Statement, ...]
    file: str | None
    size: int
    is_alone: bool


@dataclass(frozen=True, slots=True)
class _Refusal:
    """`at` is the number of the refused statement, None where the transaction as a whole was refused."""

    at: int | None
    error: TarantoolError


class _Way(Protocol):
    async def __call__(self, connection: Connection, statements: Sequence[Statement]) -> _Refusal | None:
        """Executes all of `statements` or none, as one transaction."""
        ...


async def play(
    outside: Outside,
    uri: Uri | str,
    transactions: AsyncIterable[Transaction] | Iterable[Transaction],
    *,
    on_progress: Progress | None = None,
    file: Callable[[], str | None] | None = None,
) -> PlayResult:
    """Replays `transactions` into the server at `uri`, in their order, and says how far it came.

    `on_progress` is called after every batch with the result so far. `file` is asked after each transaction
    is taken from `transactions` for the file that it came from, to be named in an error.

    Raises PlayError at the first row that the server refuses: everything before that row's transaction is
    applied, nothing from it on. Raises what `transactions` raises, after applying what came before.
    """
    where = parse_uri(uri) if isinstance(uri, str) else uri
    async with await Connection.open(outside, where) as connection:
        player = _Player(connection, on_progress)
        await player.run(_batches(outside, transactions, file))
        return player.result


def _piece(transaction: Transaction, file: str | None) -> _Piece:
    size, is_alone = 0, False
    statements = []
    for row in transaction.rows:
        statement = statement_of(row)
        if statement is not None:
            statements.append(statement)
            size += len(row.body)
            is_alone = is_alone or statement.space_id < SYSTEM_SPACES_END
    return _Piece(transaction, tuple(statements), file, size, is_alone)


async def _async(items: AsyncIterable[Transaction] | Iterable[Transaction]) -> AsyncIterator[Transaction]:
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item


async def _batches(
    outside: Outside,
    transactions: AsyncIterable[Transaction] | Iterable[Transaction],
    file: Callable[[], str | None] | None,
) -> AsyncIterator[list[_Piece]]:
    """Pieces put together until a batch is full. What was read before an error is a batch of its own."""
    batch: list[_Piece] = []
    rows = size = taken = 0
    failure: Exception | None = None
    try:
        async for transaction in _async(transactions):
            piece = _piece(transaction, file() if file is not None else None)
            full = rows + len(piece.statements) > BATCH_ROWS or size + piece.size > BATCH_BYTES
            if batch and (full or piece.is_alone or batch[-1].is_alone):
                yield batch
                batch, rows, size = [], 0, 0
            batch.append(piece)
            rows, size, taken = rows + len(piece.statements), size + piece.size, taken + 1
            if taken % TAKEN_PER_TURN == 0:
                await outside.clock.sleep(0)
    except Exception as error:
        failure = error
    if batch:
        yield batch
    if failure is not None:
        raise failure


class _Player:
    """Applies batch after batch, the next one being prepared while the server works on the last."""

    def __init__(self, connection: Connection, on_progress: Progress | None) -> None:
        self.result = PlayResult()
        self._connection = connection
        self._on_progress = on_progress
        self._way: _Way = _by_eval
        if connection.has(Feature.STREAMS, Feature.TRANSACTIONS):
            self._way = _by_stream

    async def run(self, batches: AsyncIterator[list[_Piece]]) -> None:
        batch = await anext(batches, None)
        while batch is not None:
            under_way = asyncio.create_task(self._settle(batch))
            try:
                batch = await anext(batches, None)
            except Exception:
                await under_way
                raise
            except BaseException:
                under_way.cancel()
                raise
            await under_way

    async def _settle(self, batch: list[_Piece]) -> None:
        refusal = await self._apply(batch)
        if refusal is None:
            self._count(batch)
            return
        if len(batch) == 1:
            raise self._refused(batch[0], refusal)
        for piece in batch:
            refusal = await self._apply([piece])
            if refusal is not None:
                raise self._refused(piece, refusal)
            self._count([piece])

    async def _apply(self, batch: list[_Piece]) -> _Refusal | None:
        statements = [statement for piece in batch for statement in piece.statements]
        if not statements:
            return None
        try:
            refusal = await self._way(self._connection, statements)
            if self._way is _by_stream and refusal is not None and isinstance(refusal.error, TransactionYield):
                # Interactive transactions need memtx_use_mvcc_engine, which is off by default.
                self._way = _by_eval
                refusal = await self._way(self._connection, statements)
            return refusal
        except (ConnectionFailed, RemoteProtocolError) as error:
            first, last = batch[0].transaction, batch[-1].transaction
            raise PlayError(
                f"{error}; transactions with LSN {first.tsn} to {last.lsn} were under way",
                self.result,
                hint=f"see if they arrived, then resume with --from {first.tsn} or --from {last.lsn + 1}",
            ) from error
        except TarantoolError as error:
            raise self._impossible(error) from error

    def _count(self, pieces: list[_Piece]) -> None:
        rows = sum(len(piece.statements) for piece in pieces)
        total = sum(len(piece.transaction.rows) for piece in pieces)
        self.result = PlayResult(
            self.result.transactions + sum(bool(piece.statements) for piece in pieces),
            self.result.rows + rows,
            self.result.skipped + total - rows,
            {
                **self.result.positions,
                **{piece.transaction.replica_id: piece.transaction.lsn for piece in pieces},
            },
        )
        if self._on_progress is not None:
            self._on_progress(self.result)

    def _refused(self, piece: _Piece, refusal: _Refusal) -> PlayError:
        transaction, error = piece.transaction, refusal.error
        file = f"{piece.file}: " if piece.file else ""
        if refusal.at is None:
            row, what = None, f"the commit of the transaction with LSN {transaction.tsn} to {transaction.lsn}"
        else:
            statement = piece.statements[refusal.at]
            row = statement.row
            type_ = RequestType(row.type).name
            what = f"row with LSN {row.lsn} of replica {row.replica_id} ({type_}, space {statement.space_id})"
        resume = f"nothing from there on was applied, resume with --from {transaction.tsn}"
        said = f"{error.message} ({error.name}, {error.code})"
        return PlayError(
            f"{file}{what} was refused by {self._connection.address}: {said}",
            self.result,
            hint=f"{error.hint}; {resume}" if error.hint else resume,
            row=row,
            error=error,
        )

    def _impossible(self, error: TarantoolError) -> PlayError:
        """The server refuses the way we ask, not a row."""
        hint = error.hint
        if isinstance(error, AccessDenied):
            hint = "let the user run transactions: box.schema.user.grant(user, 'execute', 'universe')"
        message = f"{self._connection.address} does not let us replay: {error.message} ({error.name}, {error.code})"
        return PlayError(message, self.result, hint=hint, error=error)


async def _by_eval(connection: Connection, statements: Sequence[Statement]) -> _Refusal | None:
    packer = msgpack.Packer(use_bin_type=False)
    rows = [statement.for_lua() for statement in statements]
    body = packer.pack({Key.EXPR.value: LUA, Key.TUPLE.value: [rows]})
    response = await connection.answer(connection.send(RequestType.EVAL, body), timeout=ANSWER_SECONDS)
    answer = connection.values(response).get(Key.DATA)
    if answer == ():
        return None
    match answer:
        case (int(at), int(code), str(message)) if 0 <= at <= len(statements):
            return _Refusal(at - 1 if at else None, error_of(code, message))
    raise RemoteProtocolError(f"{connection.address} answered a replay with {answer!r}")


async def _by_stream(connection: Connection, statements: Sequence[Statement]) -> _Refusal | None:
    if len(statements) == 1:
        row = statements[0].row
        answer = await connection.answer(connection.send(RequestType(row.type), row.body), timeout=ANSWER_SECONDS)
        return _Refusal(0, answer.error()) if answer.is_error else None
    # Without a transaction the rows would commit one by one, so BEGIN is waited for.
    await connection.request(RequestType.BEGIN, stream_id=STREAM_ID)
    sent = [
        connection.send(RequestType(statement.row.type), statement.row.body, stream_id=STREAM_ID)
        for statement in statements
    ]
    answers: list[Response] = [await connection.answer(one, timeout=ANSWER_SECONDS) for one in sent]
    for at, answer in enumerate(answers):
        if answer.is_error:
            await connection.request(RequestType.ROLLBACK, stream_id=STREAM_ID)
            return _Refusal(at, answer.error())
    commit = connection.send(RequestType.COMMIT, stream_id=STREAM_ID)
    end = await connection.answer(commit, timeout=ANSWER_SECONDS)
    return _Refusal(None, end.error()) if end.is_error else None
