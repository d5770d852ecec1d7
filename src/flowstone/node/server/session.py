"""The session of one client: its user, its streams and their transactions, and the handlers of its requests.

`Session.handle` returns the reply of a request that can be answered from memory, and a coroutine for one that has to
wait, such as a procedure or a queued request of a stream. A write returns its transaction with the reply; the caller
writes it to the log before it sends the reply. Every error of a request is in its reply; the session raises none.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import struct
from collections.abc import Awaitable, Callable, Coroutine
from functools import cached_property
from typing import Any, Final, TypeVar

from flowstone.box.access import GUEST, Privilege
from flowstone.box.dialect import Dialect
from flowstone.box.engine import statements
from flowstone.box.engine.space import EngineSpace
from flowstone.box.engine.transaction import BoxTransaction, InteractiveTransaction, Isolation
from flowstone.errors import FlowstoneError, RemoteProtocolError
from flowstone.iproto import auth, errors
from flowstone.iproto.constants import Key, RequestType, type_name
from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.msgpack import pack, unpack
from flowstone.iproto.replies import encode_data, encode_data_with_position, encode_error, encode_ok, encode_push
from flowstone.iproto.requests import Request
from flowstone.node.instance import Instance
from flowstone.node.server.login_attempts import LoginAttempts, address_of
from flowstone.node.server.procedures import Call, Procedures, rows_of_call_16
from flowstone.node.server.request_batch import Reply
from flowstone.node.server.streams import OpenTransactions, RequestStream
from flowstone.node.server.watchers import BALLOT, Watchers, ballot
from flowstone.node.synchro.linearizable import linearization_point

LOG = logging.getLogger("flowstone.node")

STREAMS_MAX: Final = 1024
"""Streams of one connection with an open transaction or pending requests."""

WATCHES_MAX: Final = 1024
"""Watched keys of one connection."""

WATCHES_MAX_BEFORE_AUTH: Final = 16
"""Watched keys of a client that has not authenticated. Connectors need only the few built-in keys."""

T = TypeVar("T")

Answer = Reply | Coroutine[Any, Any, Reply]
Replicate = Callable[[Request], Coroutine[Any, Any, None]]
"""Serves a request of a replica; raises the error if it cannot."""

Handler = Callable[["Session", Request, "RequestStream | None"], Answer]

_SPACE_ID, _INDEX_ID, _LIMIT, _OFFSET = 0x10, 0x11, 0x12, 0x13
_ITERATOR, _INDEX_BASE, _FETCH_POSITION = 0x14, 0x15, 0x1F
_KEY, _TUPLE, _OPS, _AFTER_POSITION, _AFTER_TUPLE = 0x20, 0x21, 0x28, 0x2E, 0x2F
_SPACE_NAME, _INDEX_NAME = 0x5E, 0x5F
_TRUE = b"\xc3"

_WHILE_LOADING = frozenset(
    {
        RequestType.PING,
        RequestType.ID,
        RequestType.VOTE,
        RequestType.VOTE_DEPRECATED,
        RequestType.WATCH,
        RequestType.UNWATCH,
        RequestType.WATCH_ONCE,
    }
)
"""Requests that a node answers before it has data."""

_NO_REPLY: Final = Reply(b"")


class Session:
    """A session with the rights of `user`, guest before authentication. `send` sends packets that are not replies."""

    def __init__(
        self,
        instance: Instance,
        watchers: Watchers,
        procedures: Procedures,
        send: Callable[[bytes], None],
        *,
        id: int,
        salt: bytes,
        peer: str = "",
        open_transactions: OpenTransactions | None = None,
        logins: LoginAttempts | None = None,
        replicate: Replicate | None = None,
    ) -> None:
        self.id = id
        self.peer = peer
        self.user = GUEST
        self.is_authenticated = False
        self._instance = instance
        self._box = instance.box
        self._watchers = watchers
        self._procedures = procedures
        self._send = send
        self._replicate = replicate or no_replication
        self._salt = salt
        self._wide = instance.box.dialect is not Dialect.V2_6
        self._streams: dict[int, RequestStream] = {}
        self._open_transactions = open_transactions or OpenTransactions(STREAMS_MAX, STREAMS_MAX)
        self._logins = logins or LoginAttempts(instance)
        self._watched: dict[str, None] = {}
        self._is_closed = False
        self._handlers = _HANDLERS if self._wide else _HANDLERS_2_6

    @property
    def is_watching_ballot(self) -> bool:
        return BALLOT in self._watched

    @cached_property
    def address(self) -> str:
        """The part of `peer` that identifies a machine."""
        return address_of(self.peer)

    # --- all requests ---

    def handle(self, request: Request) -> Answer:
        """Execute a request; return its reply, or a coroutine that does. Every error becomes a reply."""
        if self._is_closed:
            return _NO_REPLY
        try:
            if request.error is not None:
                raise request.error
            handler = self._handlers.get(request.type)
            if handler is None:
                raise errors.UnknownRequestType(f"Unknown request type {request.type}")
            self._instance.counters.operations[request.type] += 1
            self._check(request)
            if request.stream_id:
                return self._handle_in_stream(handler, request)
            return handler(self, request, None)
        except Exception as error:
            return self._refusal(request, error)

    def _check(self, request: Request) -> None:
        version = self._box.schema_version
        if request.schema_version and request.schema_version != version:
            raise errors.WrongSchemaVersion(
                f"Wrong schema version, current: {version}, in request: {request.schema_version}"
            )
        if self._instance.status == "loading" and request.type not in _WHILE_LOADING:
            raise errors.Loading("Instance bootstrap hasn't finished yet")

    def _refusal(self, request: Request, error: Exception) -> Reply:
        """Return the reply with the error. Internal errors are logged, without the content of the request.

        Expected errors, such as errors while the node is being stopped, are logged without a traceback.
        """
        self._instance.counters.errors += 1
        if isinstance(error, RemoteProtocolError):
            told: TarantoolError = errors.InvalidMsgpack(f"Invalid MsgPack - {error.message}")
        elif isinstance(error, TarantoolError):
            told = error
        elif isinstance(error, FlowstoneError):
            LOG.error("%s request failed: %s", type_name(request.type), error, extra=self.fields_of(request))
            told = errors.Unknown(error.message)
        elif isinstance(error, OSError):  # clients must not see paths of files
            LOG.error("%s request failed: %s", type_name(request.type), error, extra=self.fields_of(request))
            told = errors.Unknown(f"Internal error: {error.strerror or type(error).__name__}")
        else:
            LOG.error("%s request failed", type_name(request.type), exc_info=error, extra=self.fields_of(request))
            told = errors.Unknown(f"Internal error: {type(error).__name__}")
        if LOG.isEnabledFor(logging.DEBUG):
            more = self.fields_of(request) | {"error_code": told.code}
            LOG.debug("%s request rejected: %s", type_name(request.type), told.message, extra=more)
        return Reply(encode_error(request.sync, self._box.schema_version, told, self._wide), request.sync)

    def fields_of(self, request: Request) -> dict[str, Any]:
        """Return the fields of log records about a request; connection and sync identify it."""
        return {
            "peer": self.peer,
            "connection": self.id,
            "sync": request.sync,
            "request_id": f"{self.id}-{request.sync}",
            "request": type_name(request.type),
        }

    def _ok(self, request: Request, body: bytes = b"\x80", transaction: BoxTransaction | None = None) -> Reply:
        return Reply(encode_ok(request.sync, self._box.schema_version, body, self._wide), request.sync, transaction)

    def _data(self, request: Request, tuples: list[bytes], transaction: BoxTransaction | None = None) -> Reply:
        packet = encode_data(request.sync, self._box.schema_version, tuples, self._wide)
        return Reply(packet, request.sync, transaction)

    def close(self) -> None:
        """Roll back the transactions of the client, remove its watches, and drop its queued requests.

        Transactions that were already returned with a reply are still written to the log.
        """
        self._is_closed = True
        for stream in self._streams.values():
            transaction = self._end(stream)
            if transaction is not None:
                transaction.end()
        self._streams.clear()
        self._watchers.forget(self)

    # --- streams ---

    def _now(self) -> float:
        return self._instance.outside.clock.monotonic()

    def _handle_in_stream(self, handler: Handler, request: Request) -> Answer:
        stream = self._streams.get(request.stream_id)
        if stream is None:
            if len(self._streams) >= STREAMS_MAX:
                raise errors.Unsupported(f"A connection does not support more than {STREAMS_MAX} open streams")
            stream = self._streams[request.stream_id] = RequestStream()
        if stream.last is not None:
            return self._behind(stream, stream.last, handler, request)
        try:
            answer = handler(self, request, stream)
            if isinstance(answer, Reply):
                return answer
            return self._behind(stream, None, lambda *_: answer, request)
        finally:
            self._forget_idle(request.stream_id)

    def _behind(
        self, stream: RequestStream, before: asyncio.Future[None] | None, handler: Handler, request: Request
    ) -> Coroutine[Any, Any, Reply]:
        """Return a coroutine that executes the request after the earlier requests of its stream."""
        through: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        stream.last = through

        async def wait() -> Reply:
            try:
                if before is not None:
                    await asyncio.shield(before)
                if self._is_closed and before is not None:
                    return _NO_REPLY
                return await self._finish(handler(self, request, stream))
            except Exception as error:
                return self._refusal(request, error)
            finally:
                if stream.last is through:
                    stream.last = None
                    self._forget_idle(request.stream_id)
                through.set_result(None)

        return wait()

    async def _finish(self, answer: Answer) -> Reply:
        """Commit the transaction of a reply, if any, and return the reply without it."""
        reply = answer if isinstance(answer, Reply) else await answer
        if reply.transaction is not None:
            await self._instance.commits.commit(reply.transaction)
        return Reply(reply.packet, reply.sync)

    def _forget_idle(self, stream_id: int) -> None:
        stream = self._streams.get(stream_id)
        if stream is not None and stream.transaction is None and stream.last is None:
            del self._streams[stream_id]

    def expire(self, now: float) -> None:
        """Abort transactions whose deadline has passed, so that an idle client holds no read view."""
        for stream in self._streams.values():
            stream.expire(now)

    def _begin(self, request: Request, stream: RequestStream | None) -> Answer:
        assert stream is not None, "the decoder lets no BEGIN pass without a stream"
        wants_sync = _wants_sync(request)
        if stream.transaction is not None:
            raise errors.ActiveTransaction("Operation is not permitted when there is an active transaction ")
        raw = request.fields.get(Key.TIMEOUT)
        timeout: float = struct.unpack(">d", raw[1:])[0] if raw else 0.0
        if timeout != 0 and not timeout > 0:
            raise errors.IllegalParams("Illegal parameters, timeout must be a number greater than 0")
        level = request.uint(Key.TXN_ISOLATION)
        if level > Isolation.LINEARIZABLE:
            raise errors.IllegalParams("Illegal parameters, unknown isolation level")
        timeout = timeout or self._instance.configuration.txn_timeout
        deadline = self._now() + timeout

        def begin() -> Reply:
            if self._is_closed:
                return _NO_REPLY
            stream.is_known = self._open_transactions.add(self.is_authenticated)
            stream.transaction = self._box.begin_interactive(self.user, Isolation(level))
            stream.deadline = deadline
            if wants_sync:
                stream.transaction.make_sync()
            return self._ok(request)

        return self._begin_later(timeout, begin) if level == Isolation.LINEARIZABLE else begin()

    async def _begin_later(self, timeout: float, begin: Callable[[], Reply]) -> Reply:
        await linearization_point(self._instance, timeout)
        return begin()

    def _end(self, stream: RequestStream) -> InteractiveTransaction | None:
        """Remove the transaction from the stream, and return it."""
        transaction, stream.transaction = stream.transaction, None
        if transaction is not None:
            self._open_transactions.remove(stream.is_known)
        return transaction

    def _commit(self, request: Request, stream: RequestStream | None) -> Reply:
        assert stream is not None, "the decoder lets no COMMIT pass without a stream"
        wants_sync = _wants_sync(request)
        stream.expire(self._now())
        transaction = self._end(stream)
        if transaction is None:
            return self._ok(request)
        if wants_sync:
            transaction.make_sync()
        prepared = transaction.prepare()
        return self._ok(request, transaction=prepared if prepared.statements else None)

    def _rollback(self, request: Request, stream: RequestStream | None) -> Reply:
        assert stream is not None, "the decoder lets no ROLLBACK pass without a stream"
        transaction = self._end(stream)
        if transaction is not None:
            transaction.end()
        return self._ok(request)

    # --- statements ---

    def _write(
        self,
        request: Request,
        stream: RequestStream | None,
        statement: Callable[[BoxTransaction, EngineSpace], bytes | None],
    ) -> Reply:
        """Run a statement in the transaction of the stream, or in one of its own, which is returned with the reply."""
        transaction = stream.usable(self._now()) if stream is not None else None
        if transaction is not None:
            result = self._attempt(transaction, request, statement)
            return self._data(request, [] if result is None else [result])
        own = self._box.begin(self.user)
        try:
            result = statement(own, self._space(own, request))
        except BaseException:
            own.rollback()
            raise
        return self._data(request, [] if result is None else [result], own if own.statements else None)

    def _attempt(
        self, transaction: BoxTransaction, request: Request, statement: Callable[[BoxTransaction, EngineSpace], T]
    ) -> T:
        """Run one statement of an open transaction."""
        return transaction.attempt(lambda: statement(transaction, self._space(transaction, request)))

    def _space(self, transaction: BoxTransaction, request: Request) -> EngineSpace:
        if self._wide and _SPACE_NAME in request.fields:
            return transaction.space(request.text(_SPACE_NAME))
        return transaction.space(request.uint(_SPACE_ID))

    def _index_id(self, space: EngineSpace, request: Request) -> int:
        if self._wide and _INDEX_NAME in request.fields:
            return space.index(request.text(_INDEX_NAME)).definition.id
        return request.uint(_INDEX_ID)

    def _select(self, request: Request, stream: RequestStream | None) -> Reply:
        transaction = stream.usable(self._now()) if stream is not None else None
        if transaction is None:
            reading = self._box.begin(self.user)
            tuples, position = self._read(request, reading, self._space(reading, request))
        else:
            read = lambda txn, space: self._read(request, txn, space)  # noqa: E731
            tuples, position = self._attempt(transaction, request, read)
        if position is None:
            return self._data(request, tuples)
        packet = encode_data_with_position(request.sync, self._box.schema_version, tuples, position, self._wide)
        return Reply(packet, request.sync)

    def _read(
        self, request: Request, transaction: BoxTransaction, space: EngineSpace
    ) -> tuple[list[bytes], bytes | None]:
        index_id = self._index_id(space, request)
        fields = request.fields
        after: bytes | None = None
        is_paged = self._wide and (_AFTER_POSITION in fields or _AFTER_TUPLE in fields or _FETCH_POSITION in fields)
        if is_paged and _AFTER_POSITION in fields:
            after = request.text(_AFTER_POSITION).encode("utf-8", "surrogateescape")
        elif is_paged and _AFTER_TUPLE in fields:
            after = statements.position_of(space.index(index_id), fields[_AFTER_TUPLE])
        tuples = statements.select(
            transaction,
            space,
            index_id,
            iterator=request.uint(_ITERATOR),
            offset=request.uint(_OFFSET),
            limit=request.uint(_LIMIT),
            key=fields[_KEY],
            after=after,
        )
        if not is_paged or fields.get(_FETCH_POSITION) != _TRUE:
            return tuples, None
        return tuples, statements.position_of(space.index(index_id), tuples[-1]) if tuples else after

    def _insert(self, request: Request, stream: RequestStream | None) -> Reply:
        raw = request.fields[_TUPLE]
        return self._write(request, stream, lambda txn, space: statements.insert(txn, space, raw))

    def _replace(self, request: Request, stream: RequestStream | None) -> Reply:
        raw = request.fields[_TUPLE]
        return self._write(request, stream, lambda txn, space: statements.replace(txn, space, raw))

    def _update(self, request: Request, stream: RequestStream | None) -> Reply:
        key, operations, base = request.fields[_KEY], request.fields[_TUPLE], request.uint(_INDEX_BASE)
        return self._write(
            request,
            stream,
            lambda txn, space: statements.update(txn, space, self._index_id(space, request), key, operations, base),
        )

    def _delete(self, request: Request, stream: RequestStream | None) -> Reply:
        key = request.fields[_KEY]
        return self._write(
            request, stream, lambda txn, space: statements.delete(txn, space, self._index_id(space, request), key)
        )

    def _upsert(self, request: Request, stream: RequestStream | None) -> Reply:
        raw, operations, base = request.fields[_TUPLE], request.fields[_OPS], request.uint(_INDEX_BASE)
        return self._write(request, stream, lambda txn, space: statements.upsert(txn, space, raw, operations, base))

    # --- calls ---

    def _call(self, request: Request, stream: RequestStream | None) -> Answer:
        name = request.text(Key.FUNCTION_NAME)
        user = self._caller(name)
        transaction = stream.usable(self._now()) if stream is not None else None
        arguments = unpack(request.fields.get(_TUPLE, b"\x90"))
        call = Call(self._instance, self._watchers, name, arguments, user, self, transaction, request.sync)
        results = self._procedures.run(call)
        if inspect.isawaitable(results):
            return self._answer_call(request, results)
        return self._results(request, results)

    def _caller(self, name: str) -> int:
        """Return the user whose rights the function has; raise AccessDenied if the session may not call it."""
        access, function = self._box.access, self._box.functions.get(name)
        if function is None:
            access.check_universe(self.user, Privilege.EXECUTE, "function", name)
            return self.user
        access.check(self.user, Privilege.EXECUTE, "function", function.id, function.owner, name)
        return function.owner if function.is_setuid else self.user

    def push(self, sync: int, value: bytes) -> None:
        """Send a message before the reply to the request with this SYNC."""
        if not self._is_closed:
            self._send(encode_push(sync, self._box.schema_version, value, self._wide))

    async def _answer_call(self, request: Request, results: Awaitable[list[bytes]]) -> Reply:
        try:
            return self._results(request, await results)
        except Exception as error:
            return self._refusal(request, error)

    def _results(self, request: Request, results: list[bytes]) -> Reply:
        return self._data(request, rows_of_call_16(results) if request.type == RequestType.CALL_16 else results)

    def _eval(self, request: Request, stream: RequestStream | None) -> Answer:
        self._box.access.check_universe(self.user, Privilege.EXECUTE)
        transaction = stream.usable(self._now()) if stream is not None else None
        arguments = unpack(request.fields.get(_TUPLE, b"\x90"))
        call = Call(self._instance, self._watchers, "eval", arguments, self.user, self, transaction, request.sync)
        expression = request.text(Key.EXPR).encode("utf-8", "surrogateescape")
        results = self._procedures.evaluate(call, expression)
        if inspect.isawaitable(results):
            return self._answer_call(request, results)
        return self._results(request, results)

    def _sql(self, request: Request, stream: RequestStream | None) -> Reply:
        raise errors.Unsupported("Flowstone does not support SQL: use SELECT and the other requests of the protocol")

    # --- connection ---

    def _ping(self, request: Request, stream: RequestStream | None) -> Reply:
        return self._ok(request)

    def _identify(self, request: Request, stream: RequestStream | None) -> Reply:
        dialect = self._box.dialect
        body = {
            Key.VERSION.value: dialect.protocol_version,
            Key.FEATURES.value: dialect.features,
            Key.AUTH_TYPE.value: auth.METHOD,
        }
        return self._ok(request, pack(body))

    def _auth(self, request: Request, stream: RequestStream | None) -> Answer:
        name, proof = request.text(Key.USER_NAME), unpack(request.fields[_TUPLE])
        if name == "guest" and not proof:
            self.user, self.is_authenticated = self._box.access.login(name).id, False
            return self._ok(request)
        answer = _scramble_of(proof)
        if self._wide and proof[0] != auth.METHOD:
            raise errors.UnknownAuthMethod(f"Unknown authentication method '{proof[0]}'")
        if self._logins.must_wait(self.peer, name):
            return self._login_later(request, name, answer)
        try:
            self._login(name, answer)
        except errors.CredsMismatch:
            self._logins.failed(self.peer, name)
            raise
        return self._ok(request)

    def _login(self, name: str, answer: bytes) -> None:
        user = self._box.access.find(name)
        stored = user.password_hash if user is not None and not user.is_role else None
        # Unknown users are checked as well, so that timing does not reveal which users exist.
        is_right = auth.check(answer, stored or self._salt[: auth.SCRAMBLE_SIZE], self._salt)
        if user is None or stored is None or not is_right:
            raise errors.CredsMismatch(f"Incorrect password supplied for user '{name}'")
        self.user = self._box.access.login(name).id
        self.is_authenticated = self.user != GUEST  # guest has an empty password, which proves nothing

    async def _login_later(self, request: Request, name: str, answer: bytes) -> Reply:
        try:
            await self._logins.wait(self.peer, name, lambda: self._login(name, answer))
        except Exception as error:
            return self._refusal(request, error)
        return self._ok(request)

    def _vote(self, request: Request, stream: RequestStream | None) -> Reply:
        return self._ok(request, pack({Key.BALLOT.value: ballot(self._instance)}))

    def _vote_deprecated(self, request: Request, stream: RequestStream | None) -> Reply:
        vclock = {replica_id: lsn for replica_id, lsn in self._instance.vclock if replica_id}
        return self._ok(request, pack({Key.VCLOCK.value: vclock}))

    def _serve_replica(self, request: Request, stream: RequestStream | None) -> Answer:
        return self._answer_replica(request, self._replicate(request))

    async def _answer_replica(self, request: Request, work: Coroutine[Any, Any, None]) -> Reply:
        """Serve the replica. Replies are sent while the request runs, so the returned reply is empty, or an error."""
        try:
            await work
        except Exception as error:
            return self._refusal(request, error)
        return Reply(b"", request.sync)

    def _watch(self, request: Request, stream: RequestStream | None) -> Reply:
        key = request.text(Key.EVENT_KEY)
        most = WATCHES_MAX if self.is_authenticated else WATCHES_MAX_BEFORE_AUTH
        if key not in self._watched and len(self._watched) >= most:
            raise errors.Unsupported(f"A connection does not support watching more than {most} keys")
        self._watched[key] = None
        self._watchers.watch(self, self._send, key, request.sync)
        return Reply(b"", request.sync)

    def _unwatch(self, request: Request, stream: RequestStream | None) -> Reply:
        key = request.text(Key.EVENT_KEY)
        self._watched.pop(key, None)
        self._watchers.unwatch(self, key)
        return Reply(b"", request.sync)

    def _watch_once(self, request: Request, stream: RequestStream | None) -> Reply:
        value = self._watchers.value(request.text(Key.EVENT_KEY))
        return self._data(request, [] if value is None else [value])


_HANDLERS_2_6: dict[int, Handler] = {
    RequestType.SELECT.value: Session._select,
    RequestType.INSERT.value: Session._insert,
    RequestType.REPLACE.value: Session._replace,
    RequestType.UPDATE.value: Session._update,
    RequestType.DELETE.value: Session._delete,
    RequestType.UPSERT.value: Session._upsert,
    RequestType.CALL.value: Session._call,
    RequestType.CALL_16.value: Session._call,
    RequestType.AUTH.value: Session._auth,
    RequestType.EVAL.value: Session._eval,
    RequestType.EXECUTE.value: Session._sql,
    RequestType.PREPARE.value: Session._sql,
    RequestType.PING.value: Session._ping,
    RequestType.VOTE.value: Session._vote,
    RequestType.VOTE_DEPRECATED.value: Session._vote_deprecated,
    RequestType.JOIN.value: Session._serve_replica,
    RequestType.SUBSCRIBE.value: Session._serve_replica,
    RequestType.FETCH_SNAPSHOT.value: Session._serve_replica,
    RequestType.REGISTER.value: Session._serve_replica,
}
_HANDLERS: dict[int, Handler] = _HANDLERS_2_6 | {
    RequestType.ID.value: Session._identify,
    RequestType.BEGIN.value: Session._begin,
    RequestType.COMMIT.value: Session._commit,
    RequestType.ROLLBACK.value: Session._rollback,
    RequestType.WATCH.value: Session._watch,
    RequestType.UNWATCH.value: Session._unwatch,
    RequestType.WATCH_ONCE.value: Session._watch_once,
}


def _wants_sync(request: Request) -> bool:
    """Return True if BEGIN or COMMIT requests a synchronous transaction, which clients of 3.x can."""
    raw = request.fields.get(Key.IS_SYNC)
    if raw is not None and raw != _TRUE:
        raise errors.IllegalParams("Illegal parameters, is_sync can only be true")
    return raw is not None


def no_replication(request: Request) -> Coroutine[Any, Any, None]:
    """Reject a request of a replica: this instance has no relays."""
    raise errors.Unsupported("This instance does not support replication: it has no directory")


def _scramble_of(proof: tuple[Any, ...]) -> bytes:
    """Return the scramble of an AUTH request, which follows the name of the method."""
    if len(proof) < 2:
        raise errors.InvalidMsgpack("Invalid MsgPack - authentication request body")
    scramble = proof[1]
    if isinstance(scramble, str):
        scramble = scramble.encode("utf-8", "surrogateescape")
    if not isinstance(scramble, bytes):
        raise errors.InvalidMsgpack("Invalid MsgPack - authentication scramble")
    if len(scramble) != auth.SCRAMBLE_SIZE:
        raise errors.InvalidMsgpack("Invalid MsgPack - invalid scramble size")
    return scramble
