"""What Lua may call of the box: statements, transactions, sessions, built-in procedures, and waiting.

The functions check rights as the requests of the protocol do, because they use the same statements with the user of the
task. Every function returns True and its results, or False, a code and a text; None if the task has to wait first.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import struct
from collections.abc import Awaitable, Callable
from typing import Any, Final

from flowstone.box.access import Privilege
from flowstone.box.arguments import ITERATORS
from flowstone.box.engine import statements
from flowstone.box.engine.transaction import BoxTransaction
from flowstone.box.update.update import OLDEST, decode_operations, update_raw, upsert_raw
from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from flowstone.iproto.error_codes import NAMES
from flowstone.iproto.msgpack import pack, unpack
from flowstone.node.instance import Instance
from flowstone.node.lua.runtime import SLICE_EXCEEDED, LuaState
from flowstone.node.lua.task import Answer, LuaTask, failure
from flowstone.node.server.procedures import Call, Outcome, Results

LOG = logging.getLogger("flowstone.node")

SLEEP_SECONDS_MAX: Final = 3600.0 * 24 * 365
_FIRST_FIELD: Final = 1
"""The number of the first field in Lua."""

_LEVELS: Final = {b"ERROR": logging.ERROR, b"WARNING": logging.WARNING, b"INFO": logging.INFO, b"DEBUG": logging.DEBUG}
_TEXT_MAX: Final = 4096
"""Characters of a log line of a Lua function."""


class BoxFunctions:
    """The functions, for the task that is running."""

    def __init__(
        self,
        instance: Instance,
        run_built_in: Callable[[Call], Outcome],
        has_built_in: Callable[[str], bool],
    ) -> None:
        self._instance = instance
        self._box = instance.box
        self._run_built_in = run_built_in
        self._has_built_in = has_built_in
        self.task: LuaTask | None = None
        self.state: LuaState | None = None

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Return the functions by their names in Lua."""
        checked = (
            *(self.get, self.select, self.position, self.count, self.edge, self.random, self.update_tuple),
            *(self.insert, self.replace, self.update, self.upsert, self.delete),
            *(self.begin, self.commit, self.rollback, self.is_in_transaction, self.savepoint, self.rollback_to),
            *(self.call, self.push, self.effective_user, self.su, self.restore_user, self.sleep),
        )
        return {function.__name__: self._guarded(function) for function in checked} | {
            "schema_version": lambda: self._box.schema_version,
            "describe": self._describe,
            "has_procedure": lambda name: self._has_built_in(_text(name)),
            "error_codes": lambda: pack({name: code for code, name in NAMES.items()}),
            "error_text": _error_text,
            "task_id": lambda: self._current.id,
            "log": self._log,
        }

    def _guarded(self, function: Callable[..., Answer | None]) -> Callable[..., Answer | None]:
        """Return the function with its errors as values, and inside the limits of the state."""

        def run(*arguments: Any) -> Answer | None:
            state = self.state
            assert state is not None
            try:
                if state.is_late():
                    return False, 32, SLICE_EXCEEDED
                return function(*arguments)
            except FlowstoneError as error:
                return failure(error)
            except Exception as error:
                LOG.exception("%s in Lua failed", function.__name__)
                return False, 0, f"Internal error: {type(error).__name__}".encode()

        return run

    @property
    def _current(self) -> LuaTask:
        assert self.task is not None, "Lua runs in a slice of a task"
        return self.task

    # --- reading ---

    def _reading(self) -> BoxTransaction:
        task = self._current
        task.check()
        return task.transaction if task.transaction is not None else self._box.begin(task.user)

    def get(self, space: int, index: int, key: bytes) -> Answer:
        transaction = self._reading()
        return True, statements.get(transaction, transaction.space(space), index, key)

    def select(
        self,
        space_id: int,
        index: int,
        iterator: int,
        offset: int,
        limit: int,
        key: bytes,
        after: bytes,
        wants_position: bool,
    ) -> Answer:
        """Return the tuples that match, joined, and their number; if wanted, a position after them and their sizes."""
        transaction = self._reading()
        space = transaction.space(space_id)
        found = statements.select(
            transaction,
            space,
            index,
            iterator=iterator,
            offset=int(offset),
            limit=int(limit),
            key=key,
            after=after or None,
        )
        position = None
        if wants_position and found and len(found) >= limit:
            position = statements.position_of(space.index(index), found[-1])
        if not wants_position:
            return True, b"".join(found), len(found)
        sizes = struct.pack(f">{len(found)}I", *map(len, found))
        return True, b"".join(found), len(found), position, sizes

    def position(self, space: int, index: int, tuple_: bytes) -> Answer:
        return True, statements.position_of(self._reading().space(space).index(index), tuple_)

    def count(self, space_id: int, index: int, iterator: int, key: bytes) -> Answer:
        transaction = self._reading()
        return True, statements.count(transaction, transaction.space(space_id), index, iterator=iterator, key=key)

    def edge(self, name: bytes, space_id: int, index_id: int, key: bytes) -> Answer:
        transaction = self._reading()
        space = transaction.space(space_id)
        index = space.index(index_id)
        if not index.is_ordered:
            definition = index.definition
            raise errors.UnsupportedIndexFeature(
                f"Index '{definition.name}' ({definition.type.upper()}) of space '{space.name}'"
                f" ({space.definition.engine}) does not support {_text(name)}()"
            )
        iterator = ITERATORS["EQ" if name == b"min" else "REQ"]
        found = statements.select(transaction, space, index_id, iterator=iterator, limit=1, key=key)
        return True, found[0] if found else None

    def random(self, space_id: int, index: int, seed: int) -> Answer:
        transaction = self._reading()
        space = transaction.space(space_id)
        statements.check_access(transaction, space, Privilege.READ.value)
        return True, transaction.random(space.index(index), int(seed))

    # --- writing ---

    def _write(self, statement: Callable[[BoxTransaction], bytes | None]) -> Answer | None:
        """Run a statement in the open transaction, or in one of its own, which is committed."""
        task = self._current
        task.check()
        transaction = task.transaction
        if transaction is not None:
            open_one = transaction
            return True, transaction.attempt(lambda: statement(open_one))
        own = self._box.begin(task.user)
        try:
            result = statement(own)
        except BaseException:
            own.rollback()
            raise
        return self._commit(own, result)

    def _commit(self, transaction: BoxTransaction, result: bytes | None) -> Answer | None:
        """Write the transaction to the log; wait if that takes time."""
        outcome: list[FlowstoneError | None] = []
        waiting: asyncio.Future[Answer] | None = None

        def done(error: FlowstoneError | None) -> None:
            outcome.append(error)
            if waiting is not None and not waiting.done():
                waiting.set_result((True, result) if error is None else failure(error))

        self._instance.commits.submit(transaction, done)
        if not outcome:
            self._instance.journal.flush()
        if outcome:
            return (True, result) if outcome[0] is None else failure(outcome[0])
        waiting = asyncio.get_running_loop().create_future()
        self._current.awaited = waiting
        return None

    def insert(self, space: int, raw: bytes) -> Answer | None:
        return self._write(lambda txn: statements.insert(txn, txn.space(space), raw))

    def replace(self, space: int, raw: bytes) -> Answer | None:
        return self._write(lambda txn: statements.replace(txn, txn.space(space), raw))

    def update(self, space: int, index: int, key: bytes, operations: bytes) -> Answer | None:
        return self._write(lambda txn: statements.update(txn, txn.space(space), index, key, operations, _FIRST_FIELD))

    def upsert(self, space: int, raw: bytes, operations: bytes) -> Answer | None:
        return self._write(lambda txn: statements.upsert(txn, txn.space(space), raw, operations, _FIRST_FIELD))

    def delete(self, space: int, index: int, key: bytes) -> Answer | None:
        return self._write(lambda txn: statements.delete(txn, txn.space(space), index, key))

    def update_tuple(self, raw: bytes, operations: bytes, names: bytes, is_upsert: bool) -> Answer:
        """Apply operations to a tuple that is not stored."""
        fields = [str(name) for name in unpack(names)]
        decoded = decode_operations(operations, index_base=_FIRST_FIELD, field_names=fields)
        return True, (upsert_raw if is_upsert else update_raw)(raw, decoded, None, OLDEST)

    # --- transactions ---

    def begin(self, is_sync: bool) -> Answer:
        task = self._current
        if task.transaction is not None:
            raise errors.ActiveTransaction("Operation is not permitted when there is an active transaction ")
        transaction = self._box.begin(task.user)
        if is_sync:
            transaction.make_sync()
        task.begin(transaction)
        return True, None

    def commit(self) -> Answer | None:
        task = self._current
        self._check_not_in_stream(task)
        transaction = task.end()
        return (True, None) if transaction is None else self._commit(transaction, None)

    def rollback(self) -> Answer:
        task = self._current
        self._check_not_in_stream(task)
        task.forgive()
        transaction = task.end()
        if transaction is not None:
            transaction.rollback()
        return True, None

    def _check_not_in_stream(self, task: LuaTask) -> None:
        if task.is_in_stream:
            raise errors.Unsupported("Flowstone does not support ending the transaction of a stream by a function")

    def is_in_transaction(self) -> Answer:
        task = self._current
        return True, task.transaction is not None

    def savepoint(self) -> Answer:
        task = self._current
        task.check()
        if task.transaction is None:
            raise errors.NoTransaction("No active transaction")
        task.savepoints.append(task.transaction.savepoint())
        return True, len(task.savepoints)

    def rollback_to(self, number: object) -> Answer:
        task = self._current
        task.check()
        if task.transaction is None:
            raise errors.NoTransaction("No active transaction")
        if not isinstance(number, int) or not 0 < number <= len(task.savepoints):
            raise errors.NoSuchSavepoint("Can not rollback to savepoint: the savepoint does not exist")
        task.transaction.rollback_to(task.savepoints[number - 1])
        del task.savepoints[number:]
        return True, None

    # --- procedures and sessions ---

    def call(self, name: bytes, arguments: bytes) -> Answer | None:
        """Run a built-in procedure; return the number of its results, and the results joined."""
        task = self._current
        task.check()
        given = task.call
        call = Call(
            self._instance,
            given.watchers,
            _text(name),
            unpack(arguments),
            task.user,
            given.session,
            task.transaction,
            given.sync,
        )
        outcome = self._run_built_in(call)
        if inspect.isawaitable(outcome):
            task.awaited = _joined(outcome)
            return None
        return True, len(outcome), b"".join(outcome)

    def push(self, value: bytes) -> Answer:
        task = self._current
        task.call.session.push(task.call.sync, value)
        return True, None

    def effective_user(self) -> Answer:
        return True, self._box.access.user(self._current.user).name.encode()

    def su(self, user: object, is_temporary: bool) -> Answer:
        """Change the user of the request, and unless `is_temporary` of the session; return the user before.

        As on a real server, only the other user needs a right, that to a session: code that is not in a sandbox is
        trusted, and only those who may execute everything can run code of their own.
        """
        task, access = self._current, self._box.access
        wanted = access.user(user.decode("utf-8", "surrogateescape") if isinstance(user, bytes) else int(str(user)))
        access.login(wanted.name)
        before, task.user = task.user, wanted.id
        if not is_temporary:
            task.call.session.user = wanted.id
        return True, before

    def restore_user(self, user: int) -> Answer:
        self._current.user = user
        return True, None

    # --- waiting, and the rest ---

    def sleep(self, seconds: Any) -> None:
        if not isinstance(seconds, int | float) or not seconds >= 0:
            raise errors.ProcLua("fiber.sleep(): wrong delay")
        self._current.awaited = self._slept(min(float(seconds), SLEEP_SECONDS_MAX))

    async def _slept(self, seconds: float) -> Answer:
        await self._instance.outside.clock.sleep(seconds)
        return True, None

    def _describe(self, name: bytes | int) -> bytes | None:
        """Return what Lua needs to know about a space, as MessagePack; None if it does not exist."""
        box = self._box
        space = box.spaces.get(name) if isinstance(name, int) else box.names.get(_text(name))
        if space is None:
            return None
        definition = space.definition
        indexes = [
            {
                "id": index.definition.id,
                "name": index.definition.name,
                "type": index.definition.type.upper(),
                "unique": index.definition.unique,
                "parts": [
                    {"fieldno": part.field + 1, "type": part.type, "is_nullable": part.is_nullable}
                    for part in index.definition.parts
                ],
            }
            for index in space.indexes.values()
        ]
        return pack(
            {
                "id": space.id,
                "name": space.name,
                "engine": definition.engine,
                "field_count": definition.field_count,
                "is_local": definition.is_local,
                "is_sync": definition.is_sync,
                "temporary": definition.is_temporary,
                "names": list(space.format.field_names),
                "indexes": indexes,
            }
        )

    def _log(self, level: bytes, text: bytes) -> None:
        LOG.log(_LEVELS.get(level, logging.INFO), "Lua: %s", text[:_TEXT_MAX].decode("utf-8", "backslashreplace"))


async def _joined(outcome: Awaitable[Results]) -> Answer:
    results = await outcome
    return True, len(results), b"".join(results)


def _error_text(code: int, arguments: bytes) -> bytes:
    """Return the text of `box.error(code, ...)`: the first argument, which in most texts is all."""
    given = unpack(arguments)
    if code == 0 or not given or given[0] is None:
        return b"Unknown error"
    return str(given[0]).encode("utf-8", "surrogateescape")


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")
