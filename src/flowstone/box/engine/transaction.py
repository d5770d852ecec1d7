"""Transactions: groups of statements that take effect, and are rolled back, together.

`BoxTransaction` changes the live indexes at once and records how to undo the changes. It serves autocommit, recovery,
replication and DDL, which never yield to other tasks before they end. `InteractiveTransaction` may stay open while it
waits for its client: it reads from a view opened by its first statement, keeps its writes to itself, and checks at
commit that everything it read is unchanged; the first committer wins. Both only collect the rows for the log; the node
writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import IntEnum
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn, TypeVar

from flowstone.box.ddl.alter import on_change
from flowstone.box.engine.index import WHOLE, EngineIndex
from flowstone.box.engine.keys import Key, Span
from flowstone.box.engine.pending_definitions import PendingDefinitions, check_change
from flowstone.box.engine.read_view import Changes, KeyOrder, Layer, ReadView, Spans, successor
from flowstone.box.engine.space import EngineSpace, Values
from flowstone.box.system import FIRST_SYSTEM_SPACE_ID, FIRST_USER_SPACE_ID, TRUNCATE_ID
from flowstone.iproto import constants, errors
from flowstone.iproto.msgpack import pack, unpack

if TYPE_CHECKING:
    from flowstone.box.box import Box
    from flowstone.box.engine.foreign_keys import Guards

ADMIN: Final = 1
"""The user with all rights: for programs that embed a node, and for actions of the node itself."""

T = TypeVar("T")

Undo = tuple[EngineIndex, Key, bytes | None] | Callable[[], None]


class Statement(NamedTuple):
    """One row for the log. `body` is its MessagePack map; `space` is None for a row without a space (NOP)."""

    type: int
    space: EngineSpace | None
    body: bytes

    @property
    def is_local(self) -> bool:
        """True if the row is not replicated. For a temporary space only its truncation is logged at all."""
        return self.space is not None and (self.space.definition.is_local or self.space.definition.is_temporary)


class Isolation(IntEnum):
    """Isolation levels, numbered as in the protocol."""

    DEFAULT = 0
    READ_COMMITTED = 1
    READ_CONFIRMED = 2
    BEST_EFFORT = 3
    LINEARIZABLE = 4
    """As READ_CONFIRMED, but the node first waits until its data includes everything that a quorum had before the
    start."""


_READING_CONFIRMED: Final = (Isolation.READ_CONFIRMED, Isolation.LINEARIZABLE)


class BoxTransaction:
    """Statements that take effect at once; `rollback` undoes all of them, newest first."""

    is_interactive = False
    keeps_spaces = False
    """True if a DDL row keeps a copy of the old spaces during recovery, too, for views opened while it is in flight.

    Reading a log opens no views, and copying the spaces for each of many definitions would be expensive.
    """
    enforces_keys = False
    """True if foreign keys are enforced during recovery, too: real servers do so for rows from a peer."""

    def __init__(self, box: Box, user: int = ADMIN) -> None:
        self.box = box
        self.user = user
        self.statements: list[Statement] = []
        self._undo: list[Undo] = []
        self._is_made_sync = False

    @property
    def is_sync(self) -> bool:
        """True if the commit waits for a quorum: `make_sync` was called, or a statement is on a synchronous space."""
        if self._is_made_sync:
            return True
        for statement in self.statements:
            space = statement.space
            if space is not None and space.definition.is_sync:
                return True
        return False

    def make_sync(self) -> None:
        """Make the commit wait for a quorum even if no space is synchronous."""
        self._is_made_sync = True

    def space(self, space: int | str) -> EngineSpace:
        return self.box.space(space)

    def find(self, index: EngineIndex, key: Key) -> bytes | None:
        return index.get(key)

    def find_to_replace(self, space: EngineSpace, index: EngineIndex, key: Key) -> bytes | None:
        """Same as `find`, for statements that overwrite the tuple without reading it."""
        return index.get(key)

    def scan(self, index: EngineIndex, span: Span) -> Iterator[tuple[Key, bytes]]:
        return index.scan(span)

    def collect(self, index: EngineIndex, span: Span, offset: int, limit: int) -> list[bytes]:
        """Return up to `limit` tuples of `span`, without the first `offset` ones."""
        return index.entries.collect(*span, offset, limit)

    def count(self, index: EngineIndex, span: Span) -> int:
        return index.count(span)

    def random(self, index: EngineIndex, number: int) -> bytes | None:
        """Return the tuple at position `number` of `index`, modulo the number of tuples."""
        return index.random(number)

    def log(self, statement: Statement) -> None:
        """Add a row for the log; changes of temporary spaces are not logged."""
        space = statement.space
        if space is None or not space.definition.is_temporary:
            self.statements.append(statement)

    def write(
        self,
        space: EngineSpace,
        old: bytes | None,
        new: bytes | None,
        old_values: Values | None,
        new_values: Values | None,
    ) -> None:
        """Replace tuple `old` by `new`; either may be None.

        Raise TupleFound, and change nothing, if a secondary unique key belongs to another tuple.
        """
        if new_values is not None and len(space.served) == 1 and space.id >= FIRST_USER_SPACE_ID:
            # The common case: in the only index the new tuple replaces the old one at the same key.
            index = space.served[0]
            self._set(index, index.key.entries(new_values)[0], new)
            return
        if old_values is None and old is not None:
            old_values = unpack(old)
        planned = list(space.entries(old_values, new_values))
        for index, _, added in planned:
            # The statement has already looked up the primary key: it found `old`, or nothing.
            if index.key.is_unique and index is not space.primary:
                for entry in added:
                    found = self.find(index, entry)
                    if found is not None and found != old:
                        raise space.duplicate(index)
        mark = len(self._undo)
        for index, removed, added in planned:
            for entry in removed:
                self._set(index, entry, None)
            for entry in added:
                self._set(index, entry, new)
        if FIRST_SYSTEM_SPACE_ID <= space.definition.id < FIRST_USER_SPACE_ID:
            self._alter(space, old_values, new_values, mark)

    def put_along(self, space: EngineSpace, row: Values) -> None:
        """Write and log a row of a system space as part of the current statement; access rights are not checked."""
        assert space.primary is not None
        old = self.find(space.primary, space.primary.key.entries(row)[0])
        self.write(space, old, pack(row), None, row)
        body = pack({constants.Key.SPACE_ID.value: space.id, constants.Key.TUPLE.value: row})
        self.log(Statement(constants.RequestType.REPLACE.value, space, body))

    def _set(self, index: EngineIndex, key: Key, value: bytes | None) -> None:
        self._undo.append((index, key, index.set(key, value)))

    def _alter(self, space: EngineSpace, old: Values | None, new: Values | None, mark: int) -> None:
        before = {} if self.box.is_recovering and not self.keeps_spaces else dict(self.box.spaces)
        try:
            undo = on_change(self, space, old, new)
        except BaseException:
            self._undo_to(mark)
            raise
        if undo is not None:
            self._undo.append(_Altered(undo, before))

    def on_rollback(self, undo: Callable[[], None]) -> None:
        """Register `undo`, which reverts a change outside of the indexes, to run in order during a rollback."""
        self._undo.append(undo)

    def savepoint(self) -> tuple[int, int]:
        """Return the current point, for `rollback_to`."""
        return len(self._undo), len(self.statements)

    def rollback_to(self, savepoint: tuple[int, int]) -> None:
        self._undo_to(savepoint[0])
        del self.statements[savepoint[1] :]

    def attempt(self, statement: Callable[[], T]) -> T:
        """Run one statement; if it fails, roll back this statement only and raise its error."""
        savepoint = self.savepoint()
        try:
            return statement()
        except BaseException:
            self.rollback_to(savepoint)
            raise

    def rollback(self) -> None:
        """Undo all statements; the transaction is empty afterwards."""
        self.rollback_to((0, 0))

    def _undo_to(self, mark: int) -> None:
        while len(self._undo) > mark:
            entry = self._undo.pop()
            if isinstance(entry, tuple):
                index, key, before = entry
                index.set(key, before)
            else:
                entry()

    def hide_from(self, view: ReadView) -> None:
        """Make `view`, which has just been opened, show the state before this transaction."""
        for entry in reversed(self._undo):
            if isinstance(entry, tuple):
                index, key, before = entry
                view.changes.setdefault(index, {})[key] = before
            elif isinstance(entry, _Altered):
                view.spaces = dict(entry.spaces)


class InteractiveTransaction(BoxTransaction):
    """A transaction that may stay open between statements; others see its changes only after `prepare`.

    It reads the data as of its first statement, and holds no resources before that. After a failure every call,
    including `prepare`, raises the same error; after a rollback it is as new. Rows of system spaces take effect in
    `prepare`, which rejects invalid ones. Until then only the later statements of this transaction see its truncations
    and obey the formats and constraints that it has changed.
    """

    is_interactive = True

    def __init__(self, box: Box, user: int = ADMIN, isolation: Isolation = Isolation.DEFAULT) -> None:
        super().__init__(box, user)
        self.isolation = isolation
        self._failure: errors.TarantoolError | None = None
        self._forget()

    def _forget(self) -> None:
        self._view: ReadView | None = None
        self._writes: dict[EngineIndex, Changes] = {}
        self._orders: dict[EngineIndex, KeyOrder] = {}
        self._spaces: dict[int, EngineSpace] = {}
        self._guards: dict[int, Guards | None] = {}
        self._keys_read: dict[EngineIndex, dict[Key, None]] = {}
        self._spans_read: dict[EngineIndex, list[Span]] = {}
        self._changes: list[tuple[int, bytes | None, bytes | None]] = []
        self._pending: PendingDefinitions | None = None

    def check(self) -> None:
        """Raise the failure of this transaction, if it has failed."""
        if self._failure is not None:
            raise self._failure.with_traceback(None)  # the traceback would grow each time the error is raised

    def fail(self, failure: errors.TarantoolError) -> None:
        """Roll back; every later call raises `failure`."""
        self.rollback()
        self._failure = failure

    def end(self) -> None:
        """Roll back and close the transaction; every later call raises NoTransaction."""
        self.fail(errors.NoTransaction("No active transaction"))

    def space(self, space: int | str) -> EngineSpace:
        self.check()
        current = self.box.space(space)
        if self.isolation is Isolation.LINEARIZABLE:
            _check_linearizable(current)
        if self._view is not None and self._view.spaces.get(current.id) is not current:
            self._fail_by_conflict()
        self._spaces[current.id] = current
        self._guards.setdefault(current.id, current.guards)
        return current if self._pending is None else self._pending.shown(current)

    def _fail_by_conflict(self) -> NoReturn:
        failure = conflict()
        self.fail(failure)
        raise failure

    def _opened(self) -> ReadView:
        """Return the view; the first statement that passes its access checks opens it."""
        self.check()
        if self._view is None:
            spaces = self.box.spaces
            self._view = self.box.open_view(confirmed=self.isolation in _READING_CONFIRMED)
            # Spaces that were looked up but have changed since do not conflict: nothing was read from them.
            self._spaces = {number: space for number, space in self._spaces.items() if spaces.get(number) is space}
            self._guards = {number: space.guards for number, space in self._spaces.items()}
            if any(self._view.spaces.get(number) is not space for number, space in self._spaces.items()):
                self._fail_by_conflict()
        return self._view

    def find(self, index: EngineIndex, key: Key) -> bytes | None:
        found = self._find(index, key)
        self._keys_read.setdefault(index, {})[key] = None
        return found

    def _find(self, index: EngineIndex, key: Key) -> bytes | None:
        view = self._opened()
        writes = self._writes.get(index)
        if writes is not None and key in writes:
            return writes[key]
        return view.get(index, key)

    def find_to_replace(self, space: EngineSpace, index: EngineIndex, key: Key) -> bytes | None:
        """Overwriting is not a read, unless the old tuple determines which secondary entries to delete."""
        return self._find(index, key) if len(space.served) == 1 else self.find(index, key)

    def scan(self, index: EngineIndex, span: Span) -> Iterator[tuple[Key, bytes]]:
        """Yield the entries of `span`, and record the part that was consumed as read; all of it if the scan ends."""
        source = self._opened().source(index)
        writes = self._writes.get(index)
        if writes is not None:
            source = Layer(source, writes, self._orders[index])
        spans = self._spans_read.setdefault(index, [])
        place = len(spans)
        spans.append(Span(span.low, span.low, False) if span.low is not None else span)
        for key, value in source.scan(span):
            spans[place] = _covered(span, key)
            yield key, value
        spans[place] = span

    def collect(self, index: EngineIndex, span: Span, offset: int, limit: int) -> list[bytes]:
        return [raw for _, raw in islice(self.scan(index, span), offset, offset + limit)]

    def count(self, index: EngineIndex, span: Span) -> int:
        return sum(1 for _ in self.scan(index, span))

    def random(self, index: EngineIndex, number: int) -> bytes | None:
        """Read the whole index: the result depends on all tuples."""
        tuples = [raw for _, raw in self.scan(index, WHOLE)]
        return tuples[number % len(tuples)] if tuples else None

    def log(self, statement: Statement) -> None:
        self.check()
        super().log(statement)

    def _set(self, index: EngineIndex, key: Key, value: bytes | None) -> None:
        self._opened()
        writes = self._writes.get(index)
        if writes is None:
            writes = self._writes[index] = {}
            self._orders[index] = KeyOrder(writes)
        self._undo.append(_Overlay(writes, self._orders[index], key))
        writes[key] = value

    def write(
        self,
        space: EngineSpace,
        old: bytes | None,
        new: bytes | None,
        old_values: Values | None,
        new_values: Values | None,
    ) -> None:
        super().write(space, old, new, old_values, new_values)
        self._changes.append((space.id, old, new))
        self._undo.append(self._forget_change)

    def _forget_change(self) -> None:
        self._changes.pop()

    def _alter(self, space: EngineSpace, old: Values | None, new: Values | None, mark: int) -> None:
        if self._pending is None:
            self._pending = PendingDefinitions(self.box)
        undo = self._pending.note(space.id, old, new)
        if undo is not None:
            self._undo.append(undo)

    def prepare(self) -> BoxTransaction:
        """Apply the writes to the box and return them as a `BoxTransaction` that can still be rolled back.

        Raise error 97 (transaction conflict) if data that this transaction read has changed. Either way this
        transaction ends.
        """
        try:
            self.check()
            if self._is_made_sync and self.statements and all(statement.is_local for statement in self.statements):
                problem = "An attempt to commit a fully local transaction synchronously"
                raise errors.IllegalParams(f"Illegal parameters, {problem}")
            if self.statements or self._writes:
                self._validate()
            prepared = BoxTransaction(self.box, self.user)
            if self._pending is not None:
                self._repeat(prepared)
            else:
                for index, writes in self._writes.items():
                    for key, value in writes.items():
                        prepared._set(index, key, value)
            prepared.statements, self.statements = [*self.statements, *prepared.statements], []
            prepared._is_made_sync = self._is_made_sync
            self._undo = []
            return prepared
        finally:
            self.end()

    def _repeat(self, prepared: BoxTransaction) -> None:
        """Apply the changes in order: changes of system spaces determine the spaces and rules of later ones."""
        primaries = {number: space.primary for number, space in self._spaces.items()}
        try:
            for space_id, old, new in self._changes:
                space = self.box.space(space_id)
                if space_id >= FIRST_USER_SPACE_ID:
                    if space.index(0) is not primaries.get(space_id):
                        raise _primary_changed(space)
                    check_change(prepared, space, old, new)
                values = unpack(new) if new is not None else None
                prepared.write(space, old, new, None, values)
                if space_id == TRUNCATE_ID and values is not None:
                    truncated = self.box.space(values[0])
                    primaries[truncated.id] = truncated.primary
        except BaseException:
            prepared.rollback()
            raise

    def _validate(self) -> None:
        for number, space in self._spaces.items():
            if self.box.spaces.get(number) is not space or self._guards.get(number) is not space.guards:
                raise conflict()
        changes = self._view.changes if self._view is not None else {}
        for index, before in changes.items():
            keys, spans = self._keys_read.get(index, {}), Spans(self._spans_read.get(index, []))
            for key, value in before.items():
                # A change that has been reverted, for example after a failed log write, is no conflict.
                if (key in keys or key in spans) and index.get(key) != value:
                    raise conflict()

    def rollback(self) -> None:
        super().rollback()
        if self._view is not None:
            self._view.close()
        self._failure = None
        self._forget()


class _Altered:
    """Undo of a DDL row, with the state of the spaces before the row."""

    __slots__ = ("_undo", "spaces")

    def __init__(self, undo: Callable[[], None], spaces: dict[int, EngineSpace]) -> None:
        self._undo = undo
        self.spaces = spaces

    def __call__(self) -> None:
        self._undo()


class _Overlay:
    """Undo of one write of an interactive transaction."""

    __slots__ = ("_before", "_key", "_order", "_was_there", "_writes")

    def __init__(self, writes: Changes, order: KeyOrder, key: Key) -> None:
        self._writes = writes
        self._order = order
        self._key = key
        self._was_there = key in writes
        self._before = writes.get(key)

    def __call__(self) -> None:
        if self._was_there:
            self._writes[self._key] = self._before
        else:
            del self._writes[self._key]
            self._order.remove(self._key)


def _covered(span: Span, last: Key) -> Span:
    """Return the part of `span` up to and including `last`, in its direction."""
    return Span(last, span.high, True) if span.reverse else Span(span.low, successor(last), False)


def _check_linearizable(space: EngineSpace) -> None:
    """Raise Unsupported for an asynchronous space: its latest commits on other members cannot be known."""
    definition = space.definition
    if not (definition.is_sync or definition.is_temporary or definition.is_local):
        raise errors.Unsupported(f'space "{space.name}" does not support linearizable operations')


def _primary_changed(space: EngineSpace) -> errors.TarantoolError:
    """Return the error for a write that used an index which is no longer the primary one."""
    return errors.Unsupported(
        f"Flowstone does not support writing to space '{space.name}' in the transaction that changes its primary index;"
        " commit that change first"
    )


def conflict() -> errors.TarantoolError:
    """Return the error for a transaction that was not the first to commit."""
    return errors.TransactionConflict("Transaction has been aborted by conflict")
