"""Executes a single plain statement, and writes its row at once.

A single request cannot share costs with others, so its cost is the number of steps. A SELECT by primary key, and an
INSERT, REPLACE or DELETE, on a space that has a lane (`box/engine/bulk.py`) skips sessions, transactions and queues.
The lane decides which statements qualify; the space's format and key definition check them. A statement that does not
qualify, or would fail, is left to the session.
"""

from __future__ import annotations

from flowstone.box.access import Privilege
from flowstone.box.box import Box
from flowstone.box.engine.bulk import Lane, lane_of, takes_writes
from flowstone.box.engine.space import Values
from flowstone.box.engine.statements import TUPLE_HEAD_SIZE
from flowstone.box.engine.transaction import ADMIN
from flowstone.errors import FlowstoneError
from flowstone.iproto.constants import RequestType
from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.msgpack import MessagePackError, unpack
from flowstone.iproto.replies import encode_data, encode_error
from flowstone.iproto.requests import CONTENT, plain_statement
from flowstone.iproto.row import encode_lone_header, encode_uint
from flowstone.node.counters import Counters
from flowstone.node.wal.commits import Commits, client_error
from flowstone.node.wal.journal import Journal
from flowstone.outside import Clock

SELECT, INSERT, REPLACE = RequestType.SELECT.value, RequestType.INSERT.value, RequestType.REPLACE.value
DELETE = RequestType.DELETE.value
_READ, _WRITE = Privilege.READ.value, Privilege.WRITE.value


class SingleStatements:
    """Executes single plain statements. `wide` selects the encoding of replies, see `iproto/replies.py`."""

    def __init__(
        self, box: Box, journal: Journal, commits: Commits, clock: Clock, counters: Counters, *, wide: bool
    ) -> None:
        self._counters = counters
        self._box = box
        self._journal = journal
        self._commits = commits
        self._clock = clock
        self._wide = wide

    def execute(self, user: int, packet: bytes) -> bytes | None:
        """Return the reply; None, with nothing done, if the session has to execute the request."""
        try:
            statement = plain_statement(packet)
            if statement is None:
                return None
            kind, sync, space_id, content_at = statement
            space = self._box.spaces.get(space_id)
            lane = lane_of(space) if space is not None else None
            privilege = _READ if kind == SELECT else _WRITE
            if lane is None or (user != ADMIN and not self._box.access.allows(user, space_id) & privilege):
                return None
            content = packet[content_at:]
            values = unpack(content)
            if type(values) is not tuple:
                return None
            if kind == SELECT:
                found = lane.primary.get(lane.primary.key.exact(values))
                self._counters.operations[SELECT] += 1
                return encode_data(sync, self._box.schema_version, () if found is None else (found,), self._wide)
            if takes_writes(lane) and not self._box.is_read_only and self._commits.is_quiet:
                return self._write(lane, kind, sync, content, values)
        except (IndexError, KeyError, TarantoolError, MessagePackError):
            pass  # not plain, or an error: the session executes the request again and reports it
        return None

    def _write(self, lane: Lane, kind: int, sync: int, content: bytes, values: Values) -> bytes | None:
        primary = lane.primary
        if kind == DELETE:
            key, new = primary.key.exact(values), None
        else:
            if len(content) + TUPLE_HEAD_SIZE > self._box.tuple_size_max:
                return None
            lane.space.format.check(content, values)
            key, new = primary.key.entries(values)[0], content
            if kind == INSERT and key in primary.entries:
                return None
        old = primary.set(key, new)
        self._commits.queue.note_async_commit()
        self._counters.operations[kind] += 1
        try:
            self._journal.write_now(self._row(kind, lane.space.id, content), 1)
        except FlowstoneError as error:
            primary.set(key, old)
            self._counters.errors += 1
            return encode_error(sync, self._box.schema_version, client_error(error), self._wide)
        result = old if kind == DELETE else new
        return encode_data(sync, self._box.schema_version, () if result is None else (result,), self._wide)

    def _row(self, kind: int, space_id: int, content: bytes) -> bytes:
        journal = self._journal
        replica_id = journal.replica_id
        head = encode_lone_header(kind, replica_id, journal.next_lsn(replica_id), self._clock.wall())
        return head + b"\x82\x10%b%c" % (encode_uint(space_id), CONTENT[kind]) + content
