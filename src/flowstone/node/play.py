"""Replays transactions of a log into a live server, over IPROTO, in order, and stops at the first refusal.

Many transactions of the log become one on the server, which is what makes it fast; if that one is refused,
it is rolled back and its parts are sent one by one, so that exactly the transactions before the refused one
are there. Transactions that touch Tarantool's own spaces always go alone. Servers with interactive
transactions get BEGIN, rows, COMMIT on a stream; all others one EVAL per batch (see `LUA`). A server that knows
neither gets row after row, and no transaction of several rows: they would become true one by one.

Rows name their space by number only, so a number that means another space on the server is found out by name,
before the first row of it is sent.
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
from flowstone.iproto.errors import AccessDenied, TarantoolError, TransactionYield, TupleFound, Unsupported, error_of
from flowstone.iproto.msgpack import pack
from flowstone.iproto.packet import Response
from flowstone.iproto.row import Row
from flowstone.iproto.uri import Uri, parse_uri
from flowstone.node import rights
from flowstone.node.connection import Connection, ConnectionFailed
from flowstone.node.statement import SYSTEM_SPACES_END, Statement, is_of_snapshot, statement_of
from flowstone.outside import Outside
from flowstone.xlog.transactions import Transaction

BATCH_ROWS = 1000
BATCH_BYTES = 1024**2
ANSWER_SECONDS = 300.0
"""A batch may build an index or wait for a quorum, so it gets longer than an ordinary request."""

INTERRUPT_SECONDS = 5.0
"""Who cancels the replay wants to know what is applied, but not to wait for long."""

STREAM_ID = 1
SNAPSHOT_SUFFIX = ".snap"
VSPACE_ID = 281
"""`_vspace`: the definitions of those spaces that the user may see."""

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
Names = Callable[[int], str | None]


@dataclass(frozen=True, slots=True)
class PlayResult:
    """What was applied, rows `skipped` because they change no space, and the last LSN per replica id.

    Rows of a snapshot have no LSN, so they leave no position.
    """

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


class PlayInterrupted(PlayError):
    """Replay was cancelled, and the server did not say in time what became of the batch under way."""


class _Piece(msgspec.Struct, frozen=True, gc=False):
    """A transaction of the log, ready to be sent; `space_ids` are those whose tuples it changes."""

    transaction: Transaction
    statements: tuple[Statement, ...]
    space_ids: frozenset[int]
    file: str | None
    size: int
    is_alone: bool
    is_of_snapshot: bool


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
    names: Names | None = None,
) -> PlayResult:
    """Replays `transactions` into the server at `uri`, in their order, and says how far it came.

    `on_progress` is called after every batch with the result so far. `file` is asked after each transaction
    is taken from `transactions` for the file that it came from, to be named in an error. `names` says what the
    log calls a space when its first row comes, None if it does not say.

    Raises PlayError at the first row that the server refuses, or whose space has another name there: everything
    before that row's transaction is applied, nothing from it on. Raises what `transactions` raises, after
    applying what came before. A cancelled replay ends when the batch under way is applied and told to
    `on_progress`; with PlayInterrupted if that takes too long.
    """
    where = parse_uri(uri) if isinstance(uri, str) else uri
    async with await Connection.open(outside, where) as connection:
        player = _Player(connection, where.user, on_progress, names)
        await player.run(_batches(outside, transactions, file))
        return player.result


def _piece(transaction: Transaction, file: str | None) -> _Piece:
    size, is_alone = 0, False
    statements, space_ids = [], set()
    for row in transaction.rows:
        statement = statement_of(row)
        if statement is not None:
            statements.append(statement)
            space_ids.add(statement.changed_space_id)
            size += len(row.body)
            is_alone = is_alone or statement.space_id < SYSTEM_SPACES_END
    # Rows of local spaces and of Raft look like rows of a log even in a snapshot: only the file tells them apart.
    in_snapshot = file is not None and file.endswith(SNAPSHOT_SUFFIX)
    from_snapshot = in_snapshot or is_of_snapshot(transaction.rows[0])
    return _Piece(transaction, tuple(statements), frozenset(space_ids), file, size, is_alone, from_snapshot)


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
            if batch and (full or not _go_together(batch[-1], piece)):
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


def _go_together(piece: _Piece, next: _Piece) -> bool:
    # Where a snapshot ends, another way to resume begins.
    return not (piece.is_alone or next.is_alone) and piece.is_of_snapshot == next.is_of_snapshot


class _Player:
    """Applies batch after batch, the next one being prepared while the server works on the last."""

    def __init__(
        self, connection: Connection, user: str | None, on_progress: Progress | None, names: Names | None
    ) -> None:
        self.result = PlayResult()
        self._connection = connection
        self._user = user
        self._on_progress = on_progress
        self._names: Names = names if names is not None else lambda _: None
        self._known: set[int] = set()
        self._way: _Way = _by_eval
        if connection.has(Feature.STREAMS, Feature.TRANSACTIONS):
            self._way = _by_stream

    async def run(self, batches: AsyncIterator[list[_Piece]]) -> None:
        batch = await anext(batches, None)
        while batch is not None:
            under_way = asyncio.create_task(self._settle(batch))
            try:
                following = await anext(batches, None)
                await asyncio.shield(under_way)
            except asyncio.CancelledError:
                await self._finish(under_way, batch)
                raise
            except Exception:
                await under_way
                raise
            batch = following

    async def _finish(self, under_way: asyncio.Task[None], batch: list[_Piece]) -> None:
        """What the server was asked for happens, wanted or not; so that it can be told, it is waited for."""
        try:
            async with asyncio.timeout(INTERRUPT_SECONDS):
                await asyncio.shield(under_way)
        except TimeoutError:
            under_way.cancel()
            what, hint = _under_way(batch)
            raise PlayInterrupted(f"interrupted while {what}", self.result, hint=hint) from None

    async def _settle(self, batch: list[_Piece]) -> None:
        for number, piece in enumerate(batch):
            difference = await self._difference(piece)
            if difference is not None:
                await self._settle_known(batch[:number])
                raise self._another_space(piece, *difference)
        await self._settle_known(batch)

    async def _settle_known(self, batch: list[_Piece]) -> None:
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

    async def _difference(self, piece: _Piece) -> tuple[int, str, str] | None:
        """Of the first space of `piece` that the server calls otherwise: number, our name, its name."""
        for space_id in sorted(piece.space_ids - self._known):
            self._known.add(space_id)
            name = self._names(space_id) if space_id >= SYSTEM_SPACES_END else None
            if name is None:
                continue
            found = await self._name_there(space_id)
            # A space that is not there, or not to be seen, is for the server to refuse.
            if found is not None and found != name:
                return space_id, name, found
        return None

    async def _name_there(self, space_id: int) -> str | None:
        keys = {Key.SPACE_ID: VSPACE_ID, Key.INDEX_ID: 0, Key.LIMIT: 1, Key.KEY: (space_id,)}
        try:
            answer = await self._connection.request(
                RequestType.SELECT, pack({key.value: value for key, value in keys.items()})
            )
        except AccessDenied:
            return None
        except TarantoolError as error:
            raise self._impossible(error) from error
        except (ConnectionFailed, RemoteProtocolError) as error:
            raise PlayError(str(error), self.result, hint="nothing was under way") from error
        match answer.get(Key.DATA):
            case ((_, _, str(name), *_),):
                return name
        return None

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
        except Unsupported as error:
            if self._way is not _by_eval:
                raise self._impossible(error) from error
            self._way = _row_by_row
            return await self._apply(batch)
        except (ConnectionFailed, RemoteProtocolError) as error:
            what, hint = _under_way(batch)
            raise PlayError(f"{error}, while {what}", self.result, hint=hint) from error
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
                **{piece.transaction.replica_id: piece.transaction.lsn for piece in pieces if not piece.is_of_snapshot},
            },
        )
        if self._on_progress is not None:
            self._on_progress(self.result)

    def _refused(self, piece: _Piece, refusal: _Refusal) -> PlayError:
        if refusal.at is None and self._way is _row_by_row:
            return self._too_long(piece)
        error = refusal.error
        file = f"{piece.file}: " if piece.file else ""
        row = piece.statements[refusal.at].row if refusal.at is not None else None
        if refusal.at is None:
            what = f"the commit of the {_place(piece)}"
        else:
            statement = piece.statements[refusal.at]
            kind = RequestType(statement.row.type).name
            what = f"{_row(piece, statement.row)} ({kind}, {self._space(statement.space_id)})"
        # Nothing has to make room for a row of a snapshot: what is there is newer.
        advice = None if piece.is_of_snapshot and isinstance(error, TupleFound) else error.hint
        return PlayError(
            f"{file}{what} was refused by {self._connection.address}: {error.message} ({error.name}, {error.code})",
            self.result,
            hint=f"{advice}; {_resume(piece)}" if advice else _resume(piece),
            row=row,
            error=error,
        )

    def _too_long(self, piece: _Piece) -> PlayError:
        file = f"{piece.file}: " if piece.file else ""
        return PlayError(
            f"{file}the {_place(piece)} has {len(piece.statements)} rows, and {self._connection.address} takes no "
            "transactions of several rows from clients",
            self.result,
            hint="replay into a server that has streams or EVAL: Tarantool, or a Flowstone node of dialect 2.11; "
            + _resume(piece),
        )

    def _another_space(self, piece: _Piece, space_id: int, name: str, found: str) -> PlayError:
        statement = next(each for each in piece.statements if each.changed_space_id == space_id)
        file = f"{piece.file}: " if piece.file else ""
        return PlayError(
            f"{file}{_row(piece, statement.row)} is for space {space_id} named {name!r}, which is named {found!r} at "
            f"{self._connection.address}; nothing from there on was applied",
            self.result,
            hint=f"replay into a server where {name!r} has number {space_id}: "
            f"box.schema.space.create({name!r}, {{id = {space_id}}}), or rename it there if it is the same space",
            row=statement.row,
        )

    def _space(self, space_id: int) -> str:
        name = self._names(space_id)
        return f"space {name!r}, number {space_id}" if name is not None else f"space {space_id}"

    def _impossible(self, error: TarantoolError) -> PlayError:
        """The server refuses the way we ask, not a row."""
        hint = error.hint
        if isinstance(error, AccessDenied):
            hint = rights.to_run_transactions(self._user)
        message = f"{self._connection.address} does not let us replay: {error.message} ({error.name}, {error.code})"
        return PlayError(message, self.result, hint=hint, error=error)


def _row(piece: _Piece, row: Row) -> str:
    if piece.is_of_snapshot:
        return f"row {row.lsn} of the snapshot"
    return f"row with LSN {row.lsn} of replica {row.replica_id}"


def _place(piece: _Piece) -> str:
    transaction = piece.transaction
    if piece.is_of_snapshot:
        return _row(piece, transaction.rows[0])
    return f"transaction with LSN {transaction.tsn} to {transaction.lsn} of replica {transaction.replica_id}"


_SNAPSHOT_AGAIN = (
    "a snapshot is replayed from its start into spaces that are empty; to give others only what they lack see "
    "docs/how-to/archive-and-restore.md"
)


def _resume(piece: _Piece) -> str:
    if piece.is_of_snapshot:
        return f"nothing from there on was applied; {_SNAPSHOT_AGAIN}"
    again, behind = piece.transaction.tsn, piece.transaction.lsn + 1
    return f"nothing from there on was applied: --from {again} to try it again, --from {behind} to leave it out"


def _under_way(batch: list[_Piece]) -> tuple[str, str]:
    """Which part of the log `batch` is, and what to do if nobody knows whether it was applied."""
    first, last = batch[0].transaction, batch[-1].transaction
    if batch[0].is_of_snapshot:
        return f"rows {first.lsn} to {last.lsn} of the snapshot were under way", _SNAPSHOT_AGAIN
    ranges: dict[int, tuple[int, int]] = {}
    for piece in batch:
        transaction = piece.transaction
        start, _ = ranges.get(transaction.replica_id, (transaction.tsn, 0))
        ranges[transaction.replica_id] = start, transaction.lsn
    what = ", ".join(f"LSN {start} to {end} of replica {number}" for number, (start, end) in ranges.items())
    ways = (
        f"{f'--replica {number} ' if len(ranges) > 1 else ''}--from {start} or --from {end + 1}"
        for number, (start, end) in ranges.items()
    )
    return f"transactions with {what} were under way", f"see if they arrived, then resume with {', '.join(ways)}"


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


async def _row_by_row(connection: Connection, statements: Sequence[Statement]) -> _Refusal | None:
    if len(statements) > 1:
        return _Refusal(None, Unsupported("no transactions of several rows"))
    row = statements[0].row
    answer = await connection.answer(connection.send(RequestType(row.type), row.body), timeout=ANSWER_SECONDS)
    return _Refusal(0, answer.error()) if answer.is_error else None


async def _by_stream(connection: Connection, statements: Sequence[Statement]) -> _Refusal | None:
    if len(statements) == 1:
        return await _row_by_row(connection, statements)
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
