"""The box: all spaces of an instance, their lookup by id or name, the rights on them, and their transactions.

Pure: no file, no socket, no clock. `Box.space` raises the error for a space that does not exist, for all statements.
All changes go through transactions, which collect the rows that the node has to write to the log.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol
from uuid import UUID

from flowstone.box import system
from flowstone.box.access import Access
from flowstone.box.definitions import read_index, read_space, with_indexes
from flowstone.box.dialect import Dialect
from flowstone.box.engine.collation import Collation
from flowstone.box.engine.constraints import ForeignKey
from flowstone.box.engine.foreign_keys import guards_of
from flowstone.box.engine.function import FunctionDefinition
from flowstone.box.engine.read_view import ReadView
from flowstone.box.engine.sequence import Sequence
from flowstone.box.engine.space import NOT_KNOWN, EngineSpace
from flowstone.box.engine.transaction import ADMIN, BoxTransaction, InteractiveTransaction, Isolation
from flowstone.iproto import errors
from flowstone.iproto.msgpack import pack


class Visible(Protocol):
    """One or more transactions whose changes other transactions can already see."""

    def hide_from(self, view: ReadView) -> None:
        """Hide these changes from `view`, which has just been opened."""
        ...


class Box:
    """All spaces, users, sequences and functions of one instance.

    `schema_version` grows with every change of a definition; clients see it in each reply.

    `is_recovering` is set while rows come from a log or from a peer that has already accepted them. While it is set,
    access rights are not checked, and definitions of features that we do not serve are kept.
    """

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect
        self.tuple_size_max = 1024 * 1024
        self.clear()

    def clear(self) -> None:
        """Reset to the state of a new box. No transaction or view may be open."""
        self.spaces: dict[int, EngineSpace] = {}
        self.names: dict[str, EngineSpace] = {}
        self.schema_version = 1
        self.access = Access()
        self.sequences: dict[int, Sequence] = {}
        self.collations: dict[int, Collation] = {}
        self.foreign_keys: dict[int, tuple[ForeignKey, ...]] = {}
        """Foreign keys of all spaces, by the id of the child space."""
        self.functions: dict[str, FunctionDefinition] = {}
        self.is_recovering = False
        self.is_read_only = False
        self.read_only_reason = "box.cfg.read_only is true"
        """Reason for being read-only, worded as in servers since 2.10."""
        self.repeats_updates = False
        """True if one UPSERT may change a field more than once, as in replica sets since 3.0."""
        self.replica_id = 0
        """Our own id in `_cluster`; 0 until this instance is registered."""
        self.deleted_members: set[tuple[int, UUID]] = set()
        """Id and UUID of each row of `_cluster` that was deleted, or got another UUID, since the newest snapshot was
        read. An instance listed here was once a member, so its own files belong to this replica set.
        """
        self.recorded_members: dict[int, UUID] = {}
        """UUIDs of former members by id, as recorded in `_schema`. Joining members receive these records, too."""
        self.views: list[ReadView] = []
        self.in_flight: deque[Visible] = deque()
        """Visible changes that are not committed yet (not in the log, or pending in the limbo), in LSN order."""
        self._put_system_spaces()

    def take_over(self, other: Box) -> None:
        """Take over the contents of `other`, which must not be used afterwards.

        `spaces` and `names` stay the same objects, so references to them see the new contents.
        """
        self.spaces.clear()
        self.spaces.update(other.spaces)
        self.names.clear()
        self.names.update(other.names)
        self.schema_version = max(self.schema_version, other.schema_version) + 1
        self.dialect, self.access, self.views = other.dialect, other.access, other.views
        self.repeats_updates = other.repeats_updates
        self.sequences, self.collations, self.functions = other.sequences, other.collations, other.functions
        self.foreign_keys = other.foreign_keys
        self.deleted_members, self.recorded_members = other.deleted_members, other.recorded_members

    @property
    def former_members(self) -> set[tuple[int, UUID]]:
        """Id and UUID of each instance known to have been a member under that id."""
        return self.deleted_members | set(self.recorded_members.items())

    def _put_system_spaces(self) -> None:
        """Put the built-in definitions that are needed to read a snapshot; its rows replace them."""
        indexes = [read_index(row) for row in system.index_rows()]
        for row in system.space_rows():
            definition = read_space(row)
            if definition.id in system.NEWER_SPACE_IDS:
                continue
            mine = [index for index in indexes if index.space_id == definition.id]
            self.put_space(EngineSpace(with_indexes(definition, mine), self.collations, self.views, self.dialect))

    def space(self, space: int | str) -> EngineSpace:
        """Return the space with this id or name; raise NoSuchSpace if it does not exist."""
        found = self.spaces.get(space) if isinstance(space, int) else self.names.get(space)
        if found is None:
            raise errors.NoSuchSpace(f"Space '{space}' does not exist")
        return found

    def put_space(self, space: EngineSpace) -> None:
        """Make `space` the current space with its id."""
        old = self.spaces.get(space.id)
        if old is not None:
            self.names.pop(old.name, None)
        space.claim_indexes()
        self.spaces[space.id] = space
        self.names[space.name] = space
        self._guard(space)
        self.schema_version += 1

    def remove_space(self, space_id: int) -> None:
        self.names.pop(self.spaces.pop(space_id).name, None)
        if space_id in self.foreign_keys:
            self._set_foreign_keys(space_id, ())
        self.schema_version += 1

    def _guard(self, space: EngineSpace) -> None:
        """Set the guards of `space`, which has just become current, and of its parents."""
        keys = space.definition.foreign_keys if self.dialect.has_constraints else ()
        if keys != self.foreign_keys.get(space.id, ()):
            self._set_foreign_keys(space.id, keys)
        if self.foreign_keys or space.definition.checks:
            self._set_guards(space)

    def _set_foreign_keys(self, child_id: int, keys: tuple[ForeignKey, ...]) -> None:
        before = self.foreign_keys.pop(child_id, ())
        if keys:
            self.foreign_keys[child_id] = keys
        for parent_id in dict.fromkeys(key.parent_id(child_id) for key in (*before, *keys)):
            if parent_id in self.spaces:
                self._set_guards(self.spaces[parent_id])

    def _set_guards(self, space: EngineSpace) -> None:
        guards = guards_of(space.definition, self.foreign_keys) if self.dialect.has_constraints else None
        if guards != space.guards:
            space.guards = guards
            space.table = NOT_KNOWN

    def read_only_error(self) -> errors.TarantoolError:
        """Return the error for writes to a read-only instance."""
        if self.dialect is Dialect.V2_6:
            return errors.Readonly("Can't modify data because this instance is in read-only mode.")
        return errors.Readonly(f"Can't modify data on a read-only instance - {self.read_only_reason}")

    def begin(self, user: int = ADMIN) -> BoxTransaction:
        """Begin a transaction whose statements take effect at once. It must end before the next `await`."""
        return BoxTransaction(self, user)

    def begin_interactive(self, user: int = ADMIN, isolation: Isolation = Isolation.DEFAULT) -> InteractiveTransaction:
        """Begin a transaction that may stay open between statements; `prepare` or `rollback` ends it."""
        return InteractiveTransaction(self, user, isolation)

    def open_view(self, *, confirmed: bool = False) -> ReadView:
        """Open a view of all spaces as they are now; with `confirmed`, without changes in flight."""
        view = ReadView(dict(self.spaces), self.views, self._sequence_rows())
        if confirmed:
            for transaction in reversed(self.in_flight):
                transaction.hide_from(view)
        return view

    def _sequence_rows(self) -> list[bytes]:
        values = ((number, sequence.value) for number, sequence in sorted(self.sequences.items()))
        return [pack((number, value)) for number, value in values if value is not None]
