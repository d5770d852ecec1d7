"""Replays transactions of a log into a live server, over IPROTO, in order, and stops at the first rejected one.

For speed, many transactions of the log become one transaction on the server. If the server rejects it, the whole batch
is rolled back and its transactions are sent one by one, so that exactly the transactions before the rejected one are
applied. Transactions that change system spaces are always sent alone.

A server with interactive transactions gets BEGIN, the rows and COMMIT on a stream; any other server gets one EVAL per
batch (see `LUA`). A server that supports neither gets single rows; transactions of several rows are not replayed into
it, because their rows would be committed one by one.

Rows refer to their space by id. Before the first row of a space is sent, its name is compared with the name that the
server has for this id, so that no row is applied to a different space.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgpack
import msgspec

from flowstone.client import rights
from flowstone.client.connection import Connection, ConnectionFailed
from flowstone.client.log_statement import SYSTEM_SPACES_END, LogStatement, is_of_snapshot, statement_of
from flowstone.errors import FlowstoneError, RemoteProtocolError
from flowstone.iproto.constants import Feature, Key, RequestType
from flowstone.iproto.errors import AccessDenied, TarantoolError, TransactionYield, TupleFound, Unsupported, error_of
from flowstone.iproto.msgpack import pack
from flowstone.iproto.packet import Response
from flowstone.iproto.row import Row
from flowstone.iproto.uri import Uri, parse_uri
from flowstone.outside import Outside
from flowstone.xlog.transactions import LogTransaction

BATCH_ROWS = 1000
BATCH_BYTES = 1024**2
"""Limits of a batch; a larger transaction is a batch of its own."""

ANSWER_SECONDS = 300.0
"""Timeout of a batch. Longer than the timeout of other requests, because a batch may build an index or wait for a
quorum."""

INTERRUPT_SECONDS = 5.0
"""Time that a cancelled replay waits for the current batch, so that it can report the applied rows."""

STREAM_ID = 1
SNAPSHOT_SUFFIX = ".snap"
VSPACE_ID = 281
"""`_vspace`: the definitions of the spaces that the user may access."""

TAKEN_PER_TURN = 64
"""Transactions that are read before the event loop runs, so that the current batch makes progress."""

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
"""Executes rows in one transaction. Returns nothing, or the number of the rejected row (0: the commit), code, message.

Tuples are passed as MessagePack strings and become tuples byte for byte: as Lua values they would lose the difference
between 1 and 1.0, and between binary and text. A single row is executed without a transaction, because some schema
changes are not allowed in one.
"""

Progress = Callable[["PlayResult"], None]
Names = Callable[[int], str | None]


@dataclass(frozen=True, slots=True)
class PlayResult:
    """The transactions and rows applied, rows `skipped` because they change no space, and the last LSN per replica id.

    Rows of a snapshot have no LSN and are not in `positions`.
    """

    transactions: int = 0
    rows: int = 0
    skipped: int = 0
    positions: Mapping[int, int] = field(default_factory=dict)


class PlayError(FlowstoneError):
    """Replay stopped. `result` counts what is certainly applied; `row` is the rejected row, `error` the reason."""

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
    """Replay was cancelled, and the server did not report the outcome of the current batch in time."""


class _Piece(msgspec.Struct, frozen=True, gc=False):
    """A transaction of the log, ready to be sent. `space_ids` are the spaces whose tuples it changes."""

    transaction: LogTransaction
    statements: tuple[LogStatement, ...]
    space_ids: frozenset[int]
    file: str | None
    size: int
    is_alone: bool
    is_of_snapshot: bool


@dataclass(frozen=True, slots=True)
class _Refusal:
    """A rejected transaction. `at` is the index of the rejected statement; None if the commit was rejected."""

    at: int | None
    error: TarantoolError


class _Way(Protocol):
    async def __call__(self, connection: Connection, statements: Sequence[LogStatement]) -> _Refusal | None:
        """Execute `statements` as one transaction. Return the refusal if the server rejected it."""
        ...


async def play(
    outside: Outside,
    uri: Uri | str,
    transactions: AsyncIterable[LogTransaction] | Iterable[LogTransaction],
    *,
    on_progress: Progress | None = None,
    file: Callable[[], str | None] | None = None,
    names: Names | None = None,
) -> PlayResult:
    """Replay `transactions` into the server at `uri`, in order, and return the result.

    `on_progress` is called with the result so far after each batch. `file` is called after each transaction is read and
    returns its file, for error messages. `names` is called at the first row of a space and returns the name of the
    space in the log; None if it is unknown.

    Raise PlayError at the first row that the server rejects, or whose space has another name on the server: all
    transactions before that row's transaction are applied; this transaction and later ones are not. An error raised by
    `transactions` is raised after the transactions before it are applied. A cancelled replay ends after the current
    batch is applied and reported to `on_progress`; if that takes too long, it raises PlayInterrupted.
    """
    where = parse_uri(uri) if isinstance(uri, str) else uri
    async with await Connection.open(outside, where) as connection:
        player = _Player(connection, where.user, on_progress, names)
        await player.run(_batches(outside, transactions, file))
        return player.result


def _piece(transaction: LogTransaction, file: str | None) -> _Piece:
    size, is_alone = 0, False
    statements, space_ids = [], set()
    for row in transaction.rows:
        statement = statement_of(row)
        if statement is not None:
            statements.append(statement)
            space_ids.add(statement.changed_space_id)
            size += len(row.body)
            is_alone = is_alone or statement.space_id < SYSTEM_SPACES_END
    # In a snapshot, rows of local spaces and of Raft look like rows of a log: only the file name distinguishes them.
    in_snapshot = file is not None and file.endswith(SNAPSHOT_SUFFIX)
    from_snapshot = in_snapshot or is_of_snapshot(transaction.rows[0])
    return _Piece(transaction, tuple(statements), frozenset(space_ids), file, size, is_alone, from_snapshot)


async def _async(items: AsyncIterable[LogTransaction] | Iterable[LogTransaction]) -> AsyncIterator[LogTransaction]:
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item


async def _batches(
    outside: Outside,
    transactions: AsyncIterable[LogTransaction] | Iterable[LogTransaction],
    file: Callable[[], str | None] | None,
) -> AsyncIterator[list[_Piece]]:
    """Yield batches of pieces. If reading fails, yield the pieces read so far, then raise the error."""
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
    # Rows of a snapshot and rows of a log need different advice to resume.
    return not (piece.is_alone or next.is_alone) and piece.is_of_snapshot == next.is_of_snapshot


class _Player:
    """Applies the batches in order, and prepares the next batch while the server executes the current one."""

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
        """Wait for the current batch when cancelled: the server executes it anyway, and the outcome is reported."""
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
        """Return id, name in the log and name on the server of the first space of `piece` whose names differ."""
        for space_id in sorted(piece.space_ids - self._known):
            self._known.add(space_id)
            name = self._names(space_id) if space_id >= SYSTEM_SPACES_END else None
            if name is None:
                continue
            found = await self._name_there(space_id)
            # The server itself rejects rows of a space that does not exist or is not accessible.
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
            raise PlayError(str(error), self.result, hint="no transaction was in progress") from error
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
            what = f"commit of {_place(piece)}"
        else:
            statement = piece.statements[refusal.at]
            kind = RequestType(statement.row.type).name
            what = f"{_row(piece, statement.row)} ({kind}, {self._space(statement.space_id)})"
        # The usual advice for a duplicate is to delete the tuple; here the existing tuple is newer than the snapshot.
        advice = None if piece.is_of_snapshot and isinstance(error, TupleFound) else error.hint
        return PlayError(
            f"{file}{what} was rejected by {self._connection.address}: {error.message} ({error.name}, {error.code})",
            self.result,
            hint=f"{advice}; {_resume(piece)}" if advice else _resume(piece),
            row=row,
            error=error,
        )

    def _too_long(self, piece: _Piece) -> PlayError:
        file = f"{piece.file}: " if piece.file else ""
        return PlayError(
            f"{file}{_place(piece)} has {len(piece.statements)} rows, but {self._connection.address} accepts only "
            "single-row transactions from clients",
            self.result,
            hint="replay into a server with streams or EVAL: Tarantool, or a Flowstone node of dialect 2.11; "
            + _resume(piece),
        )

    def _another_space(self, piece: _Piece, space_id: int, name: str, found: str) -> PlayError:
        statement = next(each for each in piece.statements if each.changed_space_id == space_id)
        file = f"{piece.file}: " if piece.file else ""
        return PlayError(
            f"{file}{_row(piece, statement.row)} belongs to space {name!r} with id {space_id}, but space {space_id} is "
            f"named {found!r} at {self._connection.address}; nothing from this transaction on was applied",
            self.result,
            hint=f"replay into a server where {name!r} has id {space_id}: box.schema.space.create({name!r}, "
            f"{{id = {space_id}}}), or rename space {space_id} there if it is the same space",
            row=statement.row,
        )

    def _space(self, space_id: int) -> str:
        name = self._names(space_id)
        return f"space {name!r}, id {space_id}" if name is not None else f"space {space_id}"

    def _impossible(self, error: TarantoolError) -> PlayError:
        """Return the error for a server that rejects the kind of request, not a row."""
        hint = error.hint
        if isinstance(error, AccessDenied):
            hint = rights.to_run_transactions(self._user)
        message = f"cannot replay into {self._connection.address}: {error.message} ({error.name}, {error.code})"
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
    "replay a snapshot from its start into empty spaces; to add only missing tuples to other spaces, see "
    "docs/how-to/archive-and-restore.md"
)


def _resume(piece: _Piece) -> str:
    if piece.is_of_snapshot:
        return f"nothing from this row on was applied; {_SNAPSHOT_AGAIN}"
    first, after = piece.transaction.tsn, piece.transaction.lsn + 1
    return f"nothing from this transaction on was applied: retry it with --from {first}, or skip it with --from {after}"


def _under_way(batch: list[_Piece]) -> tuple[str, str]:
    """Return the part of the log that `batch` is, and the advice if it is unknown whether it was applied."""
    first, last = batch[0].transaction, batch[-1].transaction
    if batch[0].is_of_snapshot:
        return f"rows {first.lsn} to {last.lsn} of the snapshot were in progress", _SNAPSHOT_AGAIN
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
    advice = f"check whether they were applied, then resume with {', '.join(ways)}"
    return f"transactions with {what} were in progress", advice


async def _by_eval(connection: Connection, statements: Sequence[LogStatement]) -> _Refusal | None:
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
    raise RemoteProtocolError(f"{connection.address} sent an invalid response to a replay: {answer!r}")


async def _row_by_row(connection: Connection, statements: Sequence[LogStatement]) -> _Refusal | None:
    if len(statements) > 1:
        return _Refusal(None, Unsupported("transactions of several rows are not supported"))
    row = statements[0].row
    answer = await connection.answer(connection.send(RequestType(row.type), row.body), timeout=ANSWER_SECONDS)
    return _Refusal(0, answer.error()) if answer.is_error else None


async def _by_stream(connection: Connection, statements: Sequence[LogStatement]) -> _Refusal | None:
    if len(statements) == 1:
        return await _row_by_row(connection, statements)
    # Wait for BEGIN: without a transaction, the rows would be committed one by one.
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
