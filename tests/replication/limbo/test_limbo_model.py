"""Random histories of a limbo, compared with a naive owner that recounts everything and a reader of the whole log.

A schedule is a list of story lines, so a hypothesis example can be pasted into a transcript.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from flowstone.box.dialect import Dialect
from flowstone.iproto.constants import RequestType
from flowstone.replication.limbo.actions import Action, Commit, Undo, Write
from flowstone.replication.limbo.control_rows import Confirm, Demote, Promote, RaftState, Rollback, decode_control
from flowstone.replication.limbo.limbo import Limbo
from flowstone.replication.limbo.queue import LimboEntry
from flowstone.replication.limbo.split_brain import SettlingRequest
from flowstone.replication.settled_position import SettledTracker
from flowstone.xlog.transactions import CONTROL_TYPES
from tests.replication.limbo_stories import Story
from tests.replication.stories import OnDone
from tests.replication.test_settled_position import STEPS, write_log

# --- the owner --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Waiting:
    name: str
    is_sync: bool
    lsn: int = 0
    written_at: float = 0.0
    had_quorum: bool = False
    is_plain: bool = False


@dataclass
class NaiveOwner:
    """The behaviour of a 2.11 owner, computed by loops. Instance 1 is promoted; its PROMOTE is 1:1."""

    quorum: int
    lsn: int = 1
    now: float = 0.0
    timeout: float = 5.0
    confirmed: int = 0
    undone: int = 0
    is_fenced: bool = False
    retry_at: float | None = None
    verdict: tuple[str, int] | None = None
    acks: dict[int, int] = field(default_factory=dict)
    queue: list[Waiting] = field(default_factory=list)
    journal: list[tuple[Waiting | tuple[str, int] | None, int]] = field(default_factory=list)

    def tell(self, line: str) -> list[str]:
        word, _, rest = line.partition(" ")
        told: list[str] = getattr(self, f"_{word}")(rest)
        return told

    def _sync(self, name: str) -> list[str]:
        return self._enter(Waiting(name, is_sync=True))

    def _async(self, name: str) -> list[str]:
        return self._enter(Waiting(name, is_sync=False))

    def _enter(self, waiting: Waiting) -> list[str]:
        if self.queue and self.verdict is not None and self.verdict[0] == "ROLLBACK":
            return ["refused: A rollback for a synchronous transaction is received (ER_SYNC_ROLLBACK, 217)"]
        self.lsn += 1
        waits = waiting.is_sync or bool(self.queue)
        if waits:
            self.queue.append(waiting)
        self.journal.append((waiting if waits else None, self.lsn))
        return []

    def _writes(self, rest: str) -> list[str]:
        told: list[str] = []
        for _ in range(min(len(self.journal), 1) if rest else len(self.journal)):
            what, lsn = self.journal.pop(0)
            if isinstance(what, Waiting):
                what.lsn, what.written_at = lsn, self.now
                told += [f"commits {what.name}"] if what.is_plain else []
            elif what is not None:
                told += self._take_effect(*what)
            if what is not None:
                told += self._decide()
        return told

    def _take_effect(self, kind: str, lsn: int) -> list[str]:
        self.verdict = None
        if kind == "ROLLBACK":
            told = [f"undoes {each.name}: ER_SYNC_ROLLBACK 217" for each in reversed(self.queue[1:])]
            told.append(f"undoes {self.queue[0].name}: ER_SYNC_QUORUM_TIMEOUT 216")
            self.undone += len(self.queue)
            self.queue = []
            return told
        self.confirmed = lsn
        committed: list[str] = []
        while self.queue and (not self.queue[0].is_sync or 0 < self.queue[0].lsn <= lsn):
            each = self.queue.pop(0)
            if each.lsn:
                committed.append(each.name)
            else:
                each.is_plain = True
        return ["commits " + " ".join(committed)]

    def _fails(self, _: str) -> list[str]:
        told: list[str] = []
        journal, self.journal = self.journal, []
        self.lsn -= len(journal)
        for what, _lsn in reversed(journal):
            if isinstance(what, Waiting):
                told.append(f"undoes {what.name}: ER_WAL_IO 40")
                if not what.is_plain:
                    assert self.queue.pop() is what
                    self.undone += 1
            elif what is not None:
                self.verdict, self.retry_at = None, self.now + 1.0
            told += self._decide()
        return told

    def _ack(self, rest: str) -> list[str]:
        replica_id, lsn = rest.removesuffix("}").split(" {1: ")
        self.acks[int(replica_id)] = int(lsn)
        return self._decide()

    def _forget(self, rest: str) -> list[str]:
        self.acks.pop(int(rest), None)
        return []

    def _quorum(self, rest: str) -> list[str]:
        self.quorum = int(rest)
        return self._decide()

    def _timeout(self, rest: str) -> list[str]:
        self.timeout = float(rest)
        return self._decide()

    def _fence(self, _: str) -> list[str]:
        self.is_fenced = True
        return []

    def _unfence(self, _: str) -> list[str]:
        self.is_fenced = False
        return self._decide()

    def _at(self, rest: str) -> list[str]:
        self.now = float(rest)
        if self.retry_at is not None and self.now >= self.retry_at:
            self.retry_at = None
        told = self._decide()
        due = self._patience_ends_at()
        if due is not None and self.now >= due:
            told += self._write("ROLLBACK", self.queue[0].lsn)
        return told

    def _patience_ends_at(self) -> float | None:
        if not self.queue or self.verdict or self.is_fenced or self.retry_at is not None:
            return None
        first = self.queue[0]
        return first.written_at + self.timeout if first.lsn and not first.had_quorum else None

    def deadline(self) -> float | None:
        return self.retry_at if self.retry_at is not None else self._patience_ends_at()

    def _decide(self) -> list[str]:
        if self.is_fenced or (self.verdict is not None and self.verdict[0] == "ROLLBACK"):
            return []
        synchronous = [each for each in self.queue if each.is_sync and each.lsn]
        for index, each in enumerate(synchronous):
            if 1 + sum(lsn >= each.lsn for lsn in self.acks.values()) >= self.quorum:
                for covered in synchronous[: index + 1]:
                    covered.had_quorum = True
        ready = [each.lsn for each in synchronous if each.had_quorum]
        if self.verdict is not None or self.retry_at is not None or not ready:
            return []
        return self._write("CONFIRM", ready[-1])

    def _write(self, kind: str, lsn: int) -> list[str]:
        self.verdict = kind, lsn
        self.lsn += 1
        self.journal.append((self.verdict, self.lsn))
        return [f"writes {kind} 1:{lsn}"]


MOVES = st.lists(
    st.one_of(
        st.sampled_from(["sync", "sync", "async", "writes", "writes", "writes one", "fails", "fence", "unfence"]),
        st.tuples(st.sampled_from([2, 3, 4]), st.integers(0, 4)).map(lambda ack: f"ack {ack[0]} {ack[1]}"),
        st.integers(1, 4).map("quorum {}".format),
        st.sampled_from([2, 3, 4]).map("forget {}".format),
        st.sampled_from(["later 0.5", "later 1", "later 5", "timeout 2", "timeout 5"]),
    ),
    max_size=60,
)


def as_line(move: str, number: int, naive: NaiveOwner) -> str:
    """Return the move as a story line: generated names, ACKs relative to the newest LSN, relative time."""
    word, *rest = move.split()
    match word:
        case "sync" | "async":
            return f"{word} t{number}"
        case "ack":
            return f"ack {rest[0]} {{1: {max(1, naive.lsn - int(rest[1]))}}}"
        case "later":
            return f"at {naive.now + float(rest[0])}"
    return move


@given(MOVES, st.integers(1, 3))
def test_owner_agrees_with_a_naive_owner(moves: list[str], quorum: int) -> None:
    story, naive = Story(), NaiveOwner(quorum)
    for line in (f"instance 1 of 2.11, quorum {quorum}", "promote term 2", "writes"):
        story.tell(line)
    confirmed: list[int] = []
    for number, move in enumerate(moves):
        line = as_line(move, number, naive)
        told = story.tell(line)[:-1]
        assert told == naive.tell(line), line
        limbo = story.limbo
        assert [(entry.transaction, entry.lsn) for entry in limbo.pending] == [(e.name, e.lsn) for e in naive.queue]
        assert limbo.deadline == naive.deadline()
        assert (limbo.confirmed_lsn, limbo.rollback_count) == (naive.confirmed, naive.undone)
        confirmed += [int(text.rpartition(":")[2]) for text in told if text.startswith("writes CONFIRM")]
    # One verdict for one LSN; only a CONFIRM that failed is written again.
    assert confirmed == sorted(confirmed)
    if "fails" not in moves:
        assert len(confirmed) == len(set(confirmed))


# --- the follower -----------------------------------------------------------------------------------------------------


class Follower:
    """A limbo that gets a log row by row, with a journal that writes immediately."""

    def __init__(self) -> None:
        self.limbo: Limbo[str] = Limbo(instance_id=9, dialect=Dialect.V2_11, quorum=2, timeout=5.0)
        self.limbo.restore(Promote(1, 0, 1), promote_terms={1: 1})
        self.limbo.is_validating = False  # the logs contain late rows, which the reader skips
        self.fates: dict[str, bool] = {}

    def push(self, told: OnDone) -> None:
        row = told.rows[-1]
        if row.type in CONTROL_TYPES:
            body = decode_control(row.type, row.body)
            if not isinstance(body, RaftState):
                self._decide(row.replica_id, body)
            return
        if row.type == RequestType.NOP:
            return
        entry = self._enter(told)
        if entry is None:
            self.fates[told.name] = True
        else:
            self._do(self.limbo.written(entry, told.lsn, 0.0))

    def _enter(self, told: OnDone) -> LimboEntry[str] | None:
        if told.replica_id == 0:
            return self.limbo.submit(told.name, is_synchronous=False, is_local=True)
        return self.limbo.receive(
            told.name, origin_id=told.replica_id, lsn=told.lsn, is_synchronous=told.touches_synchronous
        )

    def _decide(self, origin_id: int, body: Confirm | Rollback | Promote | Demote) -> None:
        self._do(self.limbo.request(SettlingRequest(origin_id, body)))

    def _do(self, actions: list[Action[str]]) -> None:
        for action in actions:
            match action:
                case Write(request):
                    self._do(self.limbo.request_written(request))
                case Commit(entries):
                    self.fates.update({entry.transaction: True for entry in entries})
                case Undo(entry):
                    assert entry.transaction not in self.fates
                    self.fates[entry.transaction] = False


@given(STEPS)
def test_follower_agrees_with_a_reader_of_the_log(steps: list[tuple[str, int]]) -> None:
    log = write_log(steps, has_flags=True)
    tracker: SettledTracker[OnDone] = SettledTracker()
    tracker.start(tracker.vclock, Promote(1, 0, 1))
    follower, expected = Follower(), dict[str, bool]()
    for told in log:
        follower.push(told)
        decisions = tracker.push(told)
        expected.update({each.transaction.name: each.kept for each in decisions if each.transaction.rows[0].type == 2})
        # The reader reports in log order: a rollback after a pending transaction comes later.
        limbo = follower.limbo
        assert expected.items() <= follower.fates.items(), told.name
        assert tracker.is_quiet == (len(limbo) == 0)
        assert not tracker.is_quiet or expected == follower.fates, told.name
        assert (limbo.owner_id, limbo.term, limbo.confirmed_lsn) == (
            tracker.owner_id,
            tracker.term,
            tracker.confirmed_lsn,
        )
