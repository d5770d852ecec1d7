"""The settled position: whole stories, a model that knows the end of the log, and recorded logs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.errors import LocalProtocolError
from flowstone.replication.limbo.control_rows import (
    Confirm,
    Demote,
    Promote,
    Rollback,
    SynchroError,
    decode_control,
)
from flowstone.replication.settled_position import Decision, SettledError, SettledTracker
from flowstone.replication.vclock import VClock, VClockError
from flowstone.xlog.transactions import CONTROL_TYPES
from tests.places import TRANSCRIPTS
from tests.replication.stories import OnDone, tell


def replay(story: str) -> str:
    """Return the story with the tracker's current answers under every line that starts with `> `."""
    has_flags = "\n> without flags\n" not in story
    tracker: SettledTracker[OnDone] = SettledTracker(
        is_synchronous=None if has_flags else lambda told: told.touches_synchronous
    )
    lines: list[str] = []
    for line in story.splitlines():
        if line.startswith("  "):
            continue
        lines.append(line)
        if line.startswith("> ") and line != "> without flags":
            lines += [f"  {answer}" for answer in _answers(tracker, line[2:], has_flags)]
    return "\n".join(lines) + "\n"


def _answers(tracker: SettledTracker[OnDone], line: str, has_flags: bool) -> list[str]:
    start = re.match(r"start (\{.*?\})(?: owner (\d+) confirmed (\d+) term (\d+))?\Z", line)
    answers: list[str] = []
    if start:
        owner, confirmed, term = (int(number or 0) for number in start.groups()[1:])
        tracker.start(VClock.parse(start[1]), Promote(owner, confirmed, term) if start[2] else None)
    elif line.startswith("pass by to "):
        tracker.skip_to(VClock.parse(line.removeprefix("pass by to ")))
    else:
        for transaction, kept in tracker.push(tell(line, has_flags=has_flags)):
            answers.append(f"{'kept' if kept else 'rolled back'} {transaction.name}")
    waiting = " ".join(transaction.name for transaction in tracker.pending)
    owner_id, confirmed_lsn, term = tracker.owner_id, tracker.confirmed_lsn, tracker.term
    answers.append(
        f"settled {tracker.vclock}"
        + (f", waiting {waiting}" if waiting else "")
        + (f"; owner {owner_id} confirmed {confirmed_lsn} term {term}" if owner_id or term else "")
    )
    return answers


@pytest.mark.parametrize("path", sorted(TRANSCRIPTS.glob("settled_*.txt")), ids=lambda path: path.stem)
def test_story(path: Path) -> None:
    assert replay(path.read_text()) == path.read_text()


def test_synchronous_transaction_of_another_originator_is_an_error_while_the_owner_has_pending_ones() -> None:
    tracker: SettledTracker[OnDone] = SettledTracker()
    tracker.push(tell("1:1 insert sync"))
    with pytest.raises(SettledError, match="2:1 in the log while transactions of replica 1 are pending"):
        tracker.push(tell("2:1 insert sync"))


def test_rows_can_be_skipped_only_forward_and_without_pending_transactions() -> None:
    tracker: SettledTracker[OnDone] = SettledTracker()
    tracker.skip_to(VClock({1: 10}))
    with pytest.raises(LocalProtocolError, match=r"from \{1: 10\} to \{1: 9\}"):
        tracker.skip_to(VClock({1: 9}))
    assert tracker.is_quiet
    tracker.push(tell("1:11 insert sync"))
    assert not tracker.is_quiet
    with pytest.raises(LocalProtocolError, match="cannot skip rows while transactions are pending: 1"):
        tracker.skip_to(VClock({1: 20}))


def test_error_about_a_decreasing_lsn_names_both_lsns() -> None:
    tracker: SettledTracker[OnDone] = SettledTracker()
    tracker.push(tell("1:5 insert"))
    with pytest.raises(VClockError, match="replica 1 goes backwards: 5 comes after 5"):
        tracker.push(tell("1:5 insert"))


def test_undecodable_control_row_is_an_error_and_changes_nothing() -> None:
    tracker: SettledTracker[OnDone] = SettledTracker()
    tracker.push(tell("1:1 insert sync"))
    broken = tell("1:2 confirm 1:1")
    broken.rows[0].body = b"\x80"
    with pytest.raises(SynchroError):
        tracker.push(broken)
    assert [told.name for told in tracker.pending] == ["1:1"]


# The model knows the whole log. For each data transaction it looks ahead for the row that decides it.

WORDS = ["sync", "async", "local", "confirm", "rollback", "sync", "nop", "raft", "promote", "demote", "late"]
STEPS = st.lists(st.tuples(st.sampled_from(WORDS), st.integers(0, 4)), min_size=20, max_size=50)


def write_log(steps: list[tuple[str, int]], *, has_flags: bool) -> list[OnDone]:
    """Write a log that a server could have written: the owner writes; verdicts may come late."""
    log: list[OnDone] = []
    owner, term, lsns, waiting = 1, 1, {0: 0, 1: 0, 2: 0, 3: 0}, list[int]()

    def write(origin: int, text: str) -> int:
        lsns[origin] += 1
        name = f"{origin or 'local'}:{lsns[origin]} {text}"
        log.append(tell(name, has_flags=has_flags))
        return lsns[origin]

    for step, choice in steps:
        behind = " behind" if waiting else ""
        at = waiting[min(choice, len(waiting) - 1)] if waiting else lsns[owner]
        if step == "sync":
            waiting.append(write(owner, "insert sync"))
        elif step in ("async", "local"):
            write(owner if step == "async" else 0, "insert" + behind)
        elif step == "nop":
            write(owner, ("nop", "nop behind", "nop sync")[choice % 3])
        elif step == "raft":
            write(0, f"raft term {term}")
        elif step == "confirm":
            write(owner, f"confirm {owner}:{at}")
            waiting = [lsn for lsn in waiting if lsn > at]
        elif step == "rollback" and waiting:
            write(owner, f"rollback {owner}:{at}")
            waiting = [lsn for lsn in waiting if lsn < at]
        elif step == "late":
            former = owner % 3 + 1
            write(former, f"{'confirm' if choice % 2 else 'rollback'} {former}:{1 + choice * 3}")
        elif step == "promote":
            term, successor = term + 1, choice % 3 + 1
            write(successor, f"promote {owner}:{at} term {term}")
            owner, waiting = successor, []
        elif step == "demote" and waiting:
            term += 1
            write(owner, f"demote {owner}:{at} term {term}")
            # Nothing can be written synchronously now; the next promotion is by the same instance.
            term += 1
            write(owner, f"promote 0:0 term {term}")
            waiting = []
    return log


def fate(log: list[OnDone], index: int) -> bool | None:
    """Return kept, rolled back, or unknown (None), for the transaction at `index` of a whole log."""
    told = log[index]
    if told.rows[0].type != 2:
        return True
    # The outcome depends on the last synchronous transaction at or before this one that was pending when it was
    # written.
    anchor = next((i for i in range(index, -1, -1) if log[i].touches_synchronous), None)
    if anchor is None:
        return True
    for later in range(anchor + 1, len(log)):
        verdict = _verdict(log[later], log[anchor])
        if verdict is True:
            return True
        if verdict is False:
            if later > index:
                return False
            # Withdrawn before this one was written, which therefore depends on the one before.
            return fate_before(log, anchor, index)
    return None


def fate_before(log: list[OnDone], anchor: int, index: int) -> bool | None:
    """Return the outcome of the asynchronous transaction at `index`, ignoring synchronous ones from `anchor` on."""
    shortened = log[:anchor] + [told for told in log[anchor : index + 1] if not told.touches_synchronous]
    shortened += log[index + 1 :]
    return fate(shortened, shortened.index(log[index]))


def _verdict(control: OnDone, synchronous: OnDone) -> bool | None:
    """Return the verdict of `control` on `synchronous`, which is still pending then."""
    if control.rows[0].type not in CONTROL_TYPES:
        return None
    match decode_control(control.rows[0].type, control.rows[0].body):
        case Promote(owner_id, lsn) | Demote(owner_id, lsn):
            return owner_id == synchronous.replica_id and synchronous.lsn <= lsn
        case Confirm(owner_id, lsn) if owner_id == synchronous.replica_id and synchronous.lsn <= lsn:
            return True
        case Rollback(owner_id, lsn) if owner_id == synchronous.replica_id and synchronous.lsn >= lsn:
            return False
    return None


@given(STEPS, st.booleans())
def test_decisions_agree_with_a_reader_of_the_whole_log(steps: list[tuple[str, int]], has_flags: bool) -> None:
    log = write_log(steps, has_flags=has_flags)
    tracker: SettledTracker[OnDone] = SettledTracker(
        is_synchronous=None if has_flags else lambda told: told.touches_synchronous
    )
    decisions: list[Decision[OnDone]] = []
    for index, told in enumerate(log):
        decisions += tracker.push(told)
        # A prefix of the log, in order; the rest is pending.
        assert [decision.transaction for decision in decisions] + list(tracker.pending) == log[: index + 1]
        assert tracker.is_quiet == (not tracker.pending)
        # Everything that can be decided with the rows read so far was returned, and nothing else.
        seen = log[: index + 1]
        expected = [fate(seen, i) for i in range(len(seen))]
        decided = expected.index(None) if None in expected else len(expected)
        assert [decision.kept for decision in decisions] == expected[:decided]
    # No kept transaction is rolled back by later rows, or vice versa.
    final = [fate(log, i) for i in range(len(log))]
    assert [decision.kept for decision in decisions] == final[: len(decisions)]
    highest: dict[int, int] = {}
    for decision in decisions:
        for row in decision.transaction.rows:
            highest[row.replica_id] = row.lsn
    assert tracker.vclock == VClock(highest)
