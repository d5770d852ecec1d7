"""Transactions: statements that become true together, and how they are taken back.

`Transaction` changes the live indexes at once and remembers how to undo it: autocommit, recovery, replication and DDL,
none of which gives way to others before it ends. `InteractiveTransaction` may wait for its client between statements:
it reads a view of the moment of its first one, keeps its writes to itself, and at commit finds out whether what it read
still holds; the first committer wins. Both only collect the rows for the log: who writes them, and when, is the node's
part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn, TypeVar

from flowstone.box.alter import on_change
from flowstone.box.index import WHOLE, Index
from flowstone.box.keys import Key, Span
from flowstone.box.pending_definitions import PendingDefinitions, check_change
from flowstone.box.read_view import Changes, KeyOrder, Layer, ReadView, Spans, successor
from flowstone.box.space import Space, Values
from flowstone.box.system import FIRST_SYSTEM_SPACE_ID, FIRST_USER_SPACE_ID, TRUNCATE_ID
from flowstone.iproto import constants, errors
from flowstone.iproto.msgpack import pack, unpack

if TYPE_CHECKING:
    from flowstone.box.box import Box
    from flowstone.box.foreign_keys import Guards

ADMIN: Final = 1
"""The user that may do everything: who embeds a node, and whatever the node does by itself."""

T = TypeVar("T")

Undo = tuple[Index, Key, bytes | None] | Callable[[], None]


class Statement(NamedTuple):
    """One row for the log. `body` is its MessagePack map; `space` is None for a row that is about none (NOP)."""

    type: int
    space: Space | None
    body: bytes

    @property
    def is_local(self) -> bool:
        """Never replicated. Of a temporary space only its truncation is logged at all."""
        return self.space is not None and (self.space.definition.is_local or self.space.definition.is_temporary)


class Isolation(IntEnum):
    """What a transaction may see, by the numbers of the protocol."""

    DEFAULT = 0
    READ_COMMITTED = 1
    READ_CONFIRMED = 2
    BEST_EFFORT = 3
    LINEARIZABLE = 4
    """As READ_CONFIRMED, begun when everything is here that a quorum had before: that wait is the node's part."""


_READING_CONFIRMED: Final = (Isolation.READ_CONFIRMED, Isolation.LINEARIZABLE)


class Transaction:
    """Statements whose effect is there at once; `rollback` takes all of it back, the newest first."""

    is_interactive = False
    keeps_spaces = False
    """Whether a row of a definition keeps the spaces there were, for views opened while it is in flight, although the
    box is recovering: then nobody opens any, and it would cost a log of many definitions dear."""
    enforces_keys = False
    """True if foreign keys are enforced although the box is recovering: for rows of a peer, as servers do."""

    def __init__(self, box: Box, user: int = ADMIN) -> None:
        self.box = box
        self.user = user
        self.statements: list[Statement] = []
        self._undo: list[Undo] = []
        self._is_made_sync = False

    @property
    def is_sync(self) -> bool:
        """Whether it waits for a quorum: it was told to, or one of its statements is about a synchronous space."""
        if self._is_made_sync:
            return True
        for statement in self.statements:
            space = statement.space
            if space is not None and space.definition.is_sync:
                return True
        return False

    def make_sync(self) -> None:
        """It waits for a quorum, whatever its spaces are."""
        self._is_made_sync = True

    def space(self, space: int | str) -> Space:
        return self.box.space(space)

    def find(self, index: Index, key: Key) -> bytes | None:
        return index.map.get(key)

    def find_to_replace(self, space: Space, index: Index, key: Key) -> bytes | None:
        """As `find`, for who overwrites the tuple without having looked at it."""
        return index.map.get(key)

    def scan(self, index: Index, span: Span) -> Iterator[tuple[Key, bytes]]:
        return index.scan(span)

    def count(self, index: Index, span: Span) -> int:
        return index.count(span)

    def random(self, index: Index, number: int) -> bytes | None:
        """The tuple at position `number` of `index`, modulo their count."""
        return index.random(number)

    def log(self, statement: Statement) -> None:
        """Adds a row for the log; temporary spaces have none."""
        space = statement.space
        if space is None or not space.definition.is_temporary:
            self.statements.append(statement)

    def write(
        self, space: Space, old: bytes | None, new: bytes | None, old_values: Values | None, new_values: Values | None
    ) -> None:
        """Replaces tuple `old` by `new`, either of which may be missing; a taken unique key changes nothing."""
        if new_values is not None and len(space.served) == 1 and space.id >= FIRST_USER_SPACE_ID:
            # As most: in its only index the new tuple stands where the old one stood.
            index = space.served[0]
            self._set(index, index.key.entries(new_values)[0], new)
            return
        if old_values is None and old is not None:
            old_values = unpack(old)
        planned = list(space.entries(old_values, new_values))
        for index, _, added in planned:
            # Of the primary index the statement knows already: it found `old` there, or nothing.
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

    def put_along(self, space: Space, row: Values) -> None:
        """Write and log a row of a system space that goes with the statement under way; rights are not checked."""
        assert space.primary is not None
        old = self.find(space.primary, space.primary.key.entries(row)[0])
        self.write(space, old, pack(row), None, row)
        body = pack({constants.Key.SPACE_ID.value: space.id, constants.Key.TUPLE.value: row})
        self.log(Statement(constants.RequestType.REPLACE.value, space, body))

    def _set(self, index: Index, key: Key, value: bytes | None) -> None:
        self._undo.append((index, key, index.set(key, value)))

    def _alter(self, space: Space, old: Values | None, new: Values | None, mark: int) -> None:
        before = {} if self.box.is_recovering and not self.keeps_spaces else dict(self.box.spaces)
        try:
            undo = on_change(self, space, old, new)
        except BaseException:
            self._undo_to(mark)
            raise
        if undo is not None:
            self._undo.append(_Altered(undo, before))

    def on_rollback(self, undo: Callable[[], None]) -> None:
        """`undo` takes back something that is no entry of an index, in its turn."""
        self._undo.append(undo)

    def savepoint(self) -> tuple[int, int]:
        """A point to go back to with `rollback_to`."""
        return len(self._undo), len(self.statements)

    def rollback_to(self, savepoint: tuple[int, int]) -> None:
        self._undo_to(savepoint[0])
        del self.statements[savepoint[1] :]

    def attempt(self, statement: Callable[[], T]) -> T:
        """Runs one statement of several: if it fails, it alone is taken back."""
        savepoint = self.savepoint()
        try:
            return statement()
        except BaseException:
            self.rollback_to(savepoint)
            raise

    def rollback(self) -> None:
        """Takes everything back; the transaction is empty afterwards."""
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
        """Makes `view`, just opened, see what was there before this transaction."""
        for entry in reversed(self._undo):
            if isinstance(entry, tuple):
                index, key, before = entry
                view.changes.setdefault(index, {})[key] = before
            elif isinstance(entry, _Altered):
                view.spaces = dict(entry.spaces)


class InteractiveTransaction(Transaction):
    """Statements with time between them; nobody else sees them before `prepare`.

    It sees everything as it was at its first statement, and until then it costs nobody anything. One that has failed
    answers whatever is asked of it, `prepare` too, with its failure; after a rollback it is as if it had just begun.
    Rows of system spaces take effect with `prepare`, which refuses those that make no sense; before, only the
    statements of this transaction see what it has truncated, and obey formats and constraints that it has changed.
    """

    is_interactive = True

    def __init__(self, box: Box, user: int = ADMIN, isolation: Isolation = Isolation.DEFAULT) -> None:
        super().__init__(box, user)
        self.isolation = isolation
        self._failure: errors.TarantoolError | None = None
        self._forget()

    def _forget(self) -> None:
        self._view: ReadView | None = None
        self._writes: dict[Index, Changes] = {}
        self._orders: dict[Index, KeyOrder] = {}
        self._spaces: dict[int, Space] = {}
        self._guards: dict[int, Guards | None] = {}
        self._keys_read: dict[Index, dict[Key, None]] = {}
        self._spans_read: dict[Index, list[Span]] = {}
        self._changes: list[tuple[int, bytes | None, bytes | None]] = []
        self._pending: PendingDefinitions | None = None

    def check(self) -> None:
        """Raises why it has failed, if it has."""
        if self._failure is not None:
            raise self._failure.with_traceback(None)  # which would grow with every time that it is raised

    def fail(self, failure: errors.TarantoolError) -> None:
        """Takes everything back; from now on there is only `failure` to be had."""
        self.rollback()
        self._failure = failure

    def end(self) -> None:
        """Takes everything back, for good."""
        self.fail(errors.NoTransaction("No active transaction"))

    def space(self, space: int | str) -> Space:
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
        """The view, opened by the first statement that has a right to what it names."""
        self.check()
        if self._view is None:
            spaces = self.box.spaces
            self._view = self.box.open_view(confirmed=self.isolation in _READING_CONFIRMED)
            # Nothing was read of a space that was looked up and has changed since.
            self._spaces = {number: space for number, space in self._spaces.items() if spaces.get(number) is space}
            self._guards = {number: space.guards for number, space in self._spaces.items()}
            if any(self._view.spaces.get(number) is not space for number, space in self._spaces.items()):
                self._fail_by_conflict()
        return self._view

    def find(self, index: Index, key: Key) -> bytes | None:
        found = self._find(index, key)
        self._keys_read.setdefault(index, {})[key] = None
        return found

    def _find(self, index: Index, key: Key) -> bytes | None:
        view = self._opened()
        writes = self._writes.get(index)
        if writes is not None and key in writes:
            return writes[key]
        return view.get(index, key)

    def find_to_replace(self, space: Space, index: Index, key: Key) -> bytes | None:
        """That alone is no conflict, unless the old tuple says which entries of other indexes must go."""
        return self._find(index, key) if len(space.served) == 1 else self.find(index, key)

    def scan(self, index: Index, span: Span) -> Iterator[tuple[Key, bytes]]:
        """Reads the part of `span` that is taken from the iterator, to its end if the iterator ends."""
        source = self._opened().source(index)
        writes = self._writes.get(index)
        if writes is not None:
            source = Layer(source, writes, self._orders.get(index))
        spans = self._spans_read.setdefault(index, [])
        place = len(spans)
        spans.append(Span(span.low, span.low, False) if span.low is not None else span)
        for key, value in source.scan(span):
            spans[place] = _covered(span, key) if index.is_ordered else WHOLE
            yield key, value
        spans[place] = span if index.is_ordered else WHOLE

    def count(self, index: Index, span: Span) -> int:
        return sum(1 for _ in self.scan(index, span))

    def random(self, index: Index, number: int) -> bytes | None:
        """Which tuple that is depends on all of them."""
        tuples = [raw for _, raw in self.scan(index, WHOLE)]
        return tuples[number % len(tuples)] if tuples else None

    def log(self, statement: Statement) -> None:
        self.check()
        super().log(statement)

    def _set(self, index: Index, key: Key, value: bytes | None) -> None:
        self._opened()
        writes = self._writes.get(index)
        if writes is None:
            writes = self._writes[index] = {}
            if index.is_ordered:
                self._orders[index] = KeyOrder(writes)
        self._undo.append(_Overlay(writes, self._orders.get(index), key))
        writes[key] = value

    def write(
        self, space: Space, old: bytes | None, new: bytes | None, old_values: Values | None, new_values: Values | None
    ) -> None:
        super().write(space, old, new, old_values, new_values)
        self._changes.append((space.id, old, new))
        self._undo.append(self._forget_change)

    def _forget_change(self) -> None:
        self._changes.pop()

    def _alter(self, space: Space, old: Values | None, new: Values | None, mark: int) -> None:
        if self._pending is None:
            self._pending = PendingDefinitions(self.box)
        undo = self._pending.note(space.id, old, new)
        if undo is not None:
            self._undo.append(undo)

    def prepare(self) -> Transaction:
        """Makes the writes live, as a transaction that can be taken back; error 97 if what it read has changed.

        However that goes, this one is at its end.
        """
        try:
            self.check()
            if self._is_made_sync and self.statements and all(statement.is_local for statement in self.statements):
                problem = "An attempt to commit a fully local transaction synchronously"
                raise errors.IllegalParams(f"Illegal parameters, {problem}")
            if self.statements or self._writes:
                self._validate()
            prepared = Transaction(self.box, self.user)
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

    def _repeat(self, prepared: Transaction) -> None:
        """Apply the changes in their order: those of system spaces determine what later ones find and must obey."""
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
                # What was changed and is as before, say because its log write failed, disturbs nobody.
                if (key in keys or key in spans) and index.map.get(key) != value:
                    raise conflict()

    def rollback(self) -> None:
        super().rollback()
        if self._view is not None:
            self._view.close()
        self._failure = None
        self._forget()


class _Altered:
    """How to take back what a row of a system space did, and which spaces there were before it."""

    __slots__ = ("_undo", "spaces")

    def __init__(self, undo: Callable[[], None], spaces: dict[int, Space]) -> None:
        self._undo = undo
        self.spaces = spaces

    def __call__(self) -> None:
        self._undo()


class _Overlay:
    """How to take back one write of an interactive transaction."""

    __slots__ = ("_before", "_key", "_order", "_was_there", "_writes")

    def __init__(self, writes: Changes, order: KeyOrder | None, key: Key) -> None:
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
            if self._order is not None:
                self._order.remove(self._key)


def _covered(span: Span, last: Key) -> Span:
    """The part of `span` up to and with `last`."""
    return Span(last, span.high, True) if span.reverse else Span(span.low, successor(last), False)


def _check_linearizable(space: Space) -> None:
    """What others have committed to an asynchronous space, nobody can know."""
    definition = space.definition
    if not (definition.is_sync or definition.is_temporary or definition.is_local):
        raise errors.Unsupported(f'space "{space.name}" does not support linearizable operations')


def _primary_changed(space: Space) -> errors.TarantoolError:
    """The error of statements that have found tuples by an index that no longer is the primary one."""
    return errors.Unsupported(
        f"Flowstone does not support writing to space '{space.name}' in the transaction that changes its primary index;"
        " commit that change first"
    )


def conflict() -> errors.TarantoolError:
    """The error of a transaction that was not the first to commit."""
    return errors.TransactionConflict("Transaction has been aborted by conflict")
