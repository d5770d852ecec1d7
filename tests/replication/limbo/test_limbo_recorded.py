"""Recorded logs of real servers through a validating limbo, which ends in the state of their next snapshot."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowstone.box.dialect import Dialect
from flowstone.iproto.constants import Flag, RequestType
from flowstone.iproto.row import Row
from flowstone.replication.limbo.actions import Action, Commit, Reject, Undo, Write
from flowstone.replication.limbo.control_rows import Promote, RaftState, decode_control
from flowstone.replication.limbo.limbo import Limbo
from flowstone.replication.limbo.split_brain import Fate, SettlingRequest
from flowstone.xlog.transactions import CONTROL_TYPES, LogTransaction
from tests.replication.test_recorded_logs import rows_of, spans, transactions_of

SPANS = [span for span in spans() if "tarantool-2.6" not in str(span[0])]


def promote_of(snapshot: Path) -> Promote:
    """Return the state of the queue in a snapshot; none before the first promotion."""
    for row in rows_of(snapshot):
        if row.type == RequestType.RAFT_PROMOTE:
            body = decode_control(row.type, row.body)
            assert isinstance(body, Promote)
            return body
    return Promote(0, 0, 0)


class Reader:
    """Processes a log as a replica processes its upstream's rows, with a journal that writes immediately."""

    def __init__(self, state: Promote) -> None:
        self.limbo: Limbo[int] = Limbo(instance_id=31, dialect=Dialect.V2_11, quorum=31, timeout=5.0)
        self.limbo.restore(state)
        self.committed: list[int] = []
        self.undone: list[int] = []

    def push(self, transaction: LogTransaction) -> None:
        row = transaction.rows[0]
        if row.type in CONTROL_TYPES:
            self._push_control(row)
            return
        lsn, flags, replica_id = transaction.lsn, transaction.flags, transaction.replica_id
        has_effect = any(row.type != RequestType.NOP for row in transaction.rows)
        if transaction.is_local or not has_effect:
            return
        assert self.limbo.admit(replica_id, lsn, flags=flags, has_effect=True) is Fate.ACCEPTED
        is_synchronous = bool(flags & Flag.WAIT_ACK)
        entry = self.limbo.receive(lsn, origin_id=replica_id, lsn=lsn, is_synchronous=is_synchronous)
        if entry is not None:
            self._do(self.limbo.written(entry, lsn, 0.0))

    def _push_control(self, row: Row) -> None:
        body = decode_control(row.type, row.body)
        if not isinstance(body, RaftState):
            self._do(self.limbo.request(SettlingRequest(row.replica_id, body)))

    def _do(self, actions: list[Action[int]]) -> None:
        for action in actions:
            match action:
                case Write(request):
                    self._do(self.limbo.request_written(request))
                case Commit(entries):
                    self.committed += [entry.transaction for entry in entries]
                case Undo(entry):
                    self.undone.append(entry.transaction)
                case Reject(_, error):
                    raise error


@pytest.mark.parametrize(("first", "logs", "second"), SPANS, ids=lambda value: getattr(value, "stem", ""))
def test_log_leads_from_the_state_of_one_snapshot_to_that_of_the_next(
    first: Path, logs: list[Path], second: Path
) -> None:
    reader = Reader(promote_of(first))
    for path in logs:
        for transaction in transactions_of(path):
            reader.push(transaction)
    assert reader.limbo.checkpoint().encode() == promote_of(second).encode()
    assert reader.limbo.pending == ()
    # Each recording has decisions, once the queue has an owner; two of them also have a rollback.
    assert bool(reader.committed) == bool(reader.limbo.owner_id)
    has_rollback = bool({"01-join-subscribe", "06-contested-election"} & set(first.parts))
    assert bool(reader.undone) == (bool(reader.committed) and has_rollback)
