"""Split brain detection: whether rows of another instance match our history of the synchronous queue.

It has the filters of 2.11 (docs/spec/synchro.md#split-brain-filter), as functions of a row and a `QueueHistory`; they
change no state. A row is accepted; or replaced by a NOP, because it decides nothing new; or rejected with
ER_SPLIT_BRAIN, because two owners have decided independently. The error has the text of real servers, and its hint has
both histories.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from flowstone.iproto import errors
from flowstone.iproto.errors import TarantoolError
from flowstone.replication.limbo.control_rows import Confirm, Demote, Promote, Rollback
from flowstone.replication.limbo.tenures import Owner
from flowstone.replication.vclock import VClock

Body = Confirm | Rollback | Promote | Demote


@dataclass(frozen=True, slots=True, eq=False)
class SettlingRequest:
    """A control row about the queue. `origin_id`, the id in its header, is the instance that wrote the row."""

    origin_id: int
    body: Body
    lsn: int = 0
    """The LSN of the row itself; 0 if unknown, and then whether a quorum has the row is not checked."""

    @property
    def is_transfer(self) -> bool:
        return isinstance(self.body, Promote | Demote)


class Fate(Enum):
    """The treatment of a row that is not rejected."""

    ACCEPTED = "accepted"
    NOP = "made a NOP"  # written as a NOP, so that the vclock advances


@dataclass(frozen=True, slots=True)
class QueueHistory:
    """Our history of the queue: `term` is the newest of a PROMOTE or DEMOTE, `first` to `last` are the pending LSNs."""

    owner_id: int
    term: int
    confirmed: VClock
    promote_terms: Mapping[int, int]
    first: int = 0
    last: int = 0
    former: tuple[Owner, ...] = ()
    """See `Tenures.former`."""

    @property
    def confirmed_lsn(self) -> int:
        return self.confirmed.get(self.owner_id)

    def is_current(self, origin_id: int) -> bool:
        """Return True if `origin_id` wrote the newest PROMOTE or DEMOTE."""
        return self.promote_terms.get(origin_id, 0) == self.term

    def __str__(self) -> str:
        owner = f"replica {self.owner_id} owns the queue" if self.owner_id else "nobody owns the queue"
        pending = f", lsn {self.first}..{self.last} pending" if self.first else ""
        return f"{owner} since term {self.term}, confirmed up to lsn {self.confirmed_lsn}{pending}"


def filter_transaction(
    origin_id: int, lsn: int, history: QueueHistory, *, waits_for_verdict: bool, has_effect: bool
) -> Fate:
    """Filter a transaction of `origin_id` whose last row is `lsn`; raise ER_SPLIT_BRAIN.

    `waits_for_verdict`: it has the flag WAIT_SYNC. `has_effect`: not all of its rows are NOPs.
    """
    if history.is_current(origin_id):
        return Fate.ACCEPTED
    if waits_for_verdict:
        # The PROMOTE of the successor has decided about it already.
        return Fate.NOP
    # Without an owner nobody decides, so the row contradicts nothing. NOPs have no data that could contradict.
    if history.owner_id and has_effect:
        term = history.promote_terms.get(origin_id, 0)
        theirs = f"transaction {origin_id}:{lsn} of term {term}"
        raise _split_brain("got an async transaction from an old term", theirs, history)
    return Fate.ACCEPTED


def filter_request(request: SettlingRequest, history: QueueHistory, *, is_validating: bool = True) -> Fate:
    """Filter a control row; raise ER_SPLIT_BRAIN, ER_UNSUPPORTED for a row that no server writes, or ER_PROTOCOL.

    Without `is_validating` (schemas up to 2.10.1, and during a join) histories are not compared, and a row is rejected
    only with ER_PROTOCOL.
    """
    body = request.body
    # Reject it even without validation: such a row would decide transactions that do not exist yet.
    _check_past(request)
    # The term filter comes before the validation, as in 2.11 (docs/spec/synchro.md#term-filter).
    if isinstance(body, Confirm | Rollback) and _is_settled(request.origin_id, body, history):
        return Fate.NOP
    if not is_validating:
        return Fate.ACCEPTED
    if isinstance(body, Promote | Demote) and _is_overtaken(body, history):
        return Fate.NOP
    # The first PROMOTE of a replica set takes over from nobody; all other rows are about an owner.
    if body.owner_id == 0 and not isinstance(body, Promote):
        raise _unsupported("synchronous requests with zero replica_id")
    is_ignorant = isinstance(body, Promote | Demote) and _has_missed_nothing(body, history)
    if body.owner_id != history.owner_id and not is_ignorant:
        raise _refusal("got a request from a foreign synchro queue owner", request, history)
    if isinstance(body, Promote | Demote):
        if not is_ignorant:
            _check_transfer(request, body, history)
    elif body.lsn == 0:
        raise _unsupported("zero LSN for CONFIRM/ROLLBACK")
    return Fate.ACCEPTED


def filter_request_of_2_6(request: SettlingRequest, history: QueueHistory) -> Fate:
    """Filter a control row with the rule of 2.6: a verdict must be about the owner.

    2.6 rejects all others, even a repeated verdict. Here a verdict that agrees with our history is accepted.
    """
    body = request.body
    if isinstance(body, Promote | Demote):
        raise unknown_to_2_6(type(body))
    _check_past(request)
    # With pending entries of another owner, a foreign verdict could decide them by their LSNs.
    if body.owner_id != history.owner_id and (history.first or _contradicts(body, history)):
        text = f"CONFIRM message arrived for an unknown master id {body.owner_id}, expected {history.owner_id}"
        raise errors.SyncMasterMismatch(text)
    return Fate.ACCEPTED


def _check_past(request: SettlingRequest) -> None:
    """Reject a verdict of an owner about its own later rows: accepting it would decide future transactions."""
    body = request.body
    if request.lsn and body.owner_id == request.origin_id and body.lsn >= request.lsn:
        what = f"{type(body).__name__.upper()} up to lsn {body.lsn}, which is not before its own lsn {request.lsn}"
        raise errors.Protocol(f"replica {request.origin_id} wrote {what}")


def _contradicts(body: Confirm | Rollback, history: QueueHistory) -> bool:
    """Return True if a verdict about a former owner disagrees with ours, by the instance that cleared its queue."""
    if not history.owner_id:
        return False  # everything in a snapshot is decided, and a snapshot does not name the former owner
    is_confirmed = body.lsn <= history.confirmed.get(body.owner_id)
    return is_confirmed is not isinstance(body, Confirm)


def unknown_to_2_6(kind: type[Promote | Demote]) -> TarantoolError:
    return errors.Unsupported(f"Dialect 2.6 does not support {kind.__name__.upper()}")


def _is_settled(origin_id: int, body: Confirm | Rollback, history: QueueHistory) -> bool:
    is_confirmed = body.lsn <= history.confirmed.get(body.owner_id)
    if isinstance(body, Confirm):
        return is_confirmed and body.lsn > 0 and body.owner_id > 0
    # A ROLLBACK of an older term: the new owner did not confirm these rows, so they are rolled back already.
    return not is_confirmed and not history.is_current(origin_id)


def _is_overtaken(body: Promote | Demote, history: QueueHistory) -> bool:
    """Return True if a newer PROMOTE has overtaken this one, and all that this one confirms is confirmed.

    The next leader was elected by members that had not read this row, so it decides nothing. 2.11 and 3.8 reject it:
    there a leader that is killed before its PROMOTE is read must be rebootstrapped.
    """
    return 0 < body.term < history.term and body.lsn <= history.confirmed.get(body.owner_id)


def _has_missed_nothing(body: Promote | Demote, history: QueueHistory) -> bool:
    """Return True if the new owner was elected without knowing the present one, which has committed nothing.

    On the other side, `_is_overtaken` detects the same case.
    """
    return body.term > history.term and (body.owner_id, body.lsn) in history.former


def _check_transfer(request: SettlingRequest, body: Promote | Demote, history: QueueHistory) -> None:
    if body.term == 0:
        raise _unsupported("PROMOTE/DEMOTE with a zero term")
    if body.term <= history.term:
        raise _refusal("got a PROMOTE/DEMOTE with an obsolete term", request, history)
    if body.lsn < history.confirmed_lsn:
        raise _refusal("got a request with lsn from an already processed range", request, history)
    # Valid with an empty queue, too: the usual PROMOTE after everything was confirmed.
    if body.lsn == history.confirmed_lsn:
        return
    if not history.first:
        raise _refusal("got a request mentioning future lsn", request, history)
    if not history.first <= body.lsn <= history.last:
        raise _refusal("got a request lsn out of queue range", request, history)


def _unsupported(what: str) -> TarantoolError:
    return errors.Unsupported(f"Replication does not support {what}")


def _refusal(what: str, request: SettlingRequest, history: QueueHistory) -> TarantoolError:
    body = request.body
    name = type(body).__name__.upper()
    term = body.term if isinstance(body, Promote | Demote) else history.promote_terms.get(request.origin_id, 0)
    return _split_brain(
        what,
        f"{name} by replica {request.origin_id} of term {term}, about owner {body.owner_id} up to lsn {body.lsn}",
        history,
    )


def _split_brain(what: str, theirs: str, history: QueueHistory) -> TarantoolError:
    hint = f"theirs: {theirs}; ours: {history}; decide which data to keep and rebootstrap the other side"
    return errors.SplitBrain(f"Split-Brain discovered: {what}", hint=hint)
