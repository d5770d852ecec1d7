"""A limbo and its journal as text, for transcripts.

`> instance 1 of 2.11, quorum 2` begins. Its own transactions, each with a name: `sync a`, `async b`, `local c`; those
of others: `receives sync x 2:7`, `receives async y 2:8`. Control rows of others: `hears confirm 2:7 from 2`,
`hears promote 1:5 term 3 from 2`. The journal: `writes` (all that is in flight), `writes one`, `fails` (all of it).
ACKs: `ack 2 {1: 5}`, `forget 2`. Options: `quorum 3`, `timeout 1`, `max_size 100`. Commands: `promote term 3`,
`promote term 3 within 5`, `demote term 4`, `clear`, `fence`, `unfence`, `raft term 4`, `validate no`. Time: `at 5.0`.
Recovery: `restore owner 1 confirmed 5 term 2, sync a 6, async b 7`.
"""

from __future__ import annotations

import re
from collections import deque

from flowstone.box.dialect import Dialect
from flowstone.errors import FlowstoneError
from flowstone.replication.limbo.actions import (
    Action,
    Cleared,
    Commit,
    Proven,
    Reject,
    TransferFailed,
    Transferred,
    Undo,
    Write,
    WriteNop,
)
from flowstone.replication.limbo.control_rows import Confirm, Demote, Promote, Rollback
from flowstone.replication.limbo.limbo import Limbo
from flowstone.replication.limbo.queue import LimboEntry, Pending
from flowstone.replication.limbo.split_brain import Fate, SettlingRequest
from flowstone.replication.vclock import VClock


def control(words: str) -> SettlingRequest:
    """Parse `promote 1:5 term 3 from 2`."""
    match = re.fullmatch(r"(\w+) (\d+):(\d+)(?: term (\d+))? from (\d+)", words)
    assert match is not None, words
    owner_id, lsn, term, origin_id = (int(number or 0) for number in match.groups()[1:])
    if match[1] in ("confirm", "rollback"):
        return SettlingRequest(origin_id, Confirm(owner_id, lsn) if match[1] == "confirm" else Rollback(owner_id, lsn))
    return SettlingRequest(
        origin_id, Promote(owner_id, lsn, term) if match[1] == "promote" else Demote(owner_id, lsn, term)
    )


def describe(request: SettlingRequest) -> str:
    body = request.body
    term = f" term {body.term}" if isinstance(body, Promote | Demote) else ""
    return f"{type(body).__name__.upper()} {body.owner_id}:{body.lsn}{term}"


class Story:
    """One limbo; `tell` passes it a line, and returns its reaction and its state."""

    def __init__(self) -> None:
        self.limbo: Limbo[str] = Limbo(instance_id=1, dialect=Dialect.V2_11, quorum=1, timeout=5.0)
        self.lsn = 0
        self.now = 0.0
        self.local_lsn = 0
        # In flight: the write (None if it needs no answer), its LSN, and its number of our own LSNs.
        self.journal: deque[tuple[LimboEntry[str] | SettlingRequest | None, int, int]] = deque()

    def tell(self, line: str) -> list[str]:
        try:
            told = [self._told(action) for action in self._step(line)]
        except FlowstoneError as error:
            told = [f"refused: {error}"]
        return [*told, self._state()]

    def _step(self, line: str) -> list[Action[str] | Fate]:
        if match := re.fullmatch(r"instance (\d+) of (\S+), quorum (\d+)", line):
            instance_id, quorum = int(match[1]), int(match[3])
            self.limbo = Limbo(instance_id=instance_id, dialect=Dialect(match[2]), quorum=quorum, timeout=5.0)
            self.lsn, self.now = 0, 0.0
            self.journal.clear()
            return []
        word, _, rest = line.partition(" ")
        step = getattr(self, f"_{word}")
        actions: list[Action[str] | Fate] = list(step(rest))
        return actions

    # --- transactions ---

    def _sync(self, name: str) -> list[Action[str]]:
        return self._submit(self.limbo.submit(name, is_synchronous=True, size=60))

    def _async(self, name: str) -> list[Action[str]]:
        return self._submit(self.limbo.submit(name, is_synchronous=False, size=60))

    def _local(self, name: str) -> list[Action[str]]:
        self.local_lsn += 1
        self.journal.append((self.limbo.submit(name, is_synchronous=False, is_local=True), self.local_lsn, 0))
        return []

    def _submit(self, entry: LimboEntry[str] | None) -> list[Action[str]]:
        self.lsn += 1
        self.journal.append((entry, self.lsn, 1))
        return []

    def _receives(self, words: str) -> list[Action[str] | Fate]:
        match = re.fullmatch(r"(sync|async|nop) (\w+) (\d+):(\d+)(?: (behind))?", words)
        assert match is not None, words
        kind, name, origin_id, lsn = match[1], match[2], int(match[3]), int(match[4])
        flags = 6 * (kind == "sync") | 2 * (match[5] is not None)
        fate = self.limbo.admit(origin_id, lsn, flags=flags, has_effect=kind != "nop")
        entry = None
        if fate is Fate.ACCEPTED and kind != "nop":
            entry = self.limbo.receive(name, origin_id=origin_id, lsn=lsn, is_synchronous=kind == "sync")
        self.journal.append((entry, lsn, 0))
        return [fate] if fate is Fate.NOP else []

    def _hears(self, words: str) -> list[Action[str]]:
        return self.limbo.request(control(words))

    # --- the journal ---

    def _writes(self, words: str) -> list[Action[str]]:
        actions: list[Action[str]] = []
        for _ in range(min(1, len(self.journal)) if words == "one" else len(self.journal)):
            what, lsn, _ = self.journal.popleft()
            if isinstance(what, LimboEntry):
                actions += self.limbo.written(what, lsn, self.now)
            elif what is not None:
                actions += self.limbo.request_written(what)
        return actions

    def _fails(self, _: str) -> list[Action[str]]:
        actions: list[Action[str]] = []
        in_flight = list(self.journal)
        self.journal.clear()
        for what, _lsn, own_lsns in reversed(in_flight):
            self.lsn -= own_lsns
            if isinstance(what, LimboEntry):
                actions += self.limbo.write_failed(what)
            elif what is not None:
                actions += self.limbo.request_failed(what, self.now)
        return actions

    # --- other commands ---

    def _ack(self, words: str) -> list[Action[str]]:
        replica_id, _, vclock = words.partition(" ")
        return self.limbo.ack(int(replica_id), VClock.parse(vclock))

    def _forget(self, words: str) -> list[Action[str]]:
        self.limbo.forget(int(words))
        return []

    def _quorum(self, words: str) -> list[Action[str]]:
        return self.limbo.configure(quorum=int(words))

    def _timeout(self, words: str) -> list[Action[str]]:
        return self.limbo.configure(timeout=float(words))

    def _max_size(self, words: str) -> list[Action[str]]:
        return self.limbo.configure(max_size=int(words))

    def _at(self, words: str) -> list[Action[str]]:
        self.now = float(words)
        return self.limbo.tick(self.now)

    def _promote(self, words: str) -> list[Action[str]]:
        _, term, *within = words.split()
        return self.limbo.promote(int(term), self.now, timeout=float(within[1]) if within else None)

    def _demote(self, words: str) -> list[Action[str]]:
        return self.limbo.demote(int(words.removeprefix("term ")), self.now)

    def _clear(self, _: str) -> list[Action[str]]:
        return self.limbo.clear_synchro_queue(self.now)

    def _fence(self, _: str) -> list[Action[str]]:
        self.limbo.fence()
        return []

    def _unfence(self, _: str) -> list[Action[str]]:
        return self.limbo.unfence()

    def _raft(self, words: str) -> list[Action[str]]:
        self.limbo.see_term(int(words.removeprefix("term ")))
        return []

    def _validate(self, words: str) -> list[Action[str]]:
        self.limbo.is_validating = words == "yes"
        return []

    def _restore(self, words: str) -> list[Action[str]]:
        state, *pending = words.split(", ")
        match = re.fullmatch(r"owner (\d+) confirmed (\d+) term (\d+)", state)
        assert match is not None, words
        owner_id, lsn, term = map(int, match.groups())
        found = [Pending(name, int(at), kind == "sync") for kind, name, at in map(str.split, pending)]
        self.lsn = max([self.lsn, lsn, *(each.lsn for each in found)]) if owner_id == self.limbo.instance_id else 0
        return self.limbo.restore(Promote(owner_id, lsn, term, VClock({owner_id: lsn})), pending=found)

    # --- output ---

    def _told(self, action: Action[str] | Fate) -> str:
        match action:
            case Fate():
                return action.value
            case Commit(entries):
                return "commits " + " ".join(entry.transaction for entry in entries)
            case Proven(entries):
                return "may tell of " + " ".join(entry.transaction for entry in entries)
            case Undo(entry, error):
                return f"undoes {entry.transaction}: {error.name} {error.code}"
            case Write(request):
                is_own = request.origin_id == self.limbo.instance_id
                self.lsn += is_own
                self.journal.append((request, self.lsn, int(is_own)))
                return f"writes {describe(request)}" + ("" if is_own else f" of replica {request.origin_id}")
            case WriteNop(request):
                return f"writes a NOP for {describe(request)}"
            case Reject(_, error):
                return f"rejects: {error.message} ({error.name}, {error.code})" + (
                    "".join(f"\n    {part}" for part in error.hint.split("; ")) if error.hint else ""
                )
            case Transferred():
                return f"is told: owner {self.limbo.owner_id} in term {self.limbo.term}"
            case TransferFailed(error):
                return f"gives up: {error}"
            case Cleared():
                return "is cleared"

    def _state(self) -> str:
        limbo = self.limbo
        parts = [f"owner {limbo.owner_id} term {limbo.term} confirmed {limbo.confirmed_lsn}"]
        if limbo.pending:
            waiting = (f"{entry.transaction}{f':{entry.lsn}' if entry.lsn else ''}" for entry in limbo.pending)
            parts.append("waiting " + " ".join(waiting))
        if limbo.deadline is not None:
            parts.append(f"until {limbo.deadline:.1f}")
        if limbo.rollback_count:
            parts.append(f"{limbo.rollback_count} undone")
        flags = {"frozen": limbo.is_frozen and limbo.is_owner, "read-only": limbo.is_read_only, "busy": limbo.is_busy}
        parts += [name for name, is_set in flags.items() if is_set]
        return "; ".join(parts)


def replay(text: str) -> str:
    """Return the story with the limbo's current reactions under every line that starts with `> `."""
    story, lines = Story(), list[str]()
    for line in text.splitlines():
        if line.startswith("  "):
            continue
        lines.append(line)
        if line.startswith("> "):
            answers = story.tell(line[2:])
            lines += [f"  {answer}" for answer in (answers[-1:] if line.startswith("> instance ") else answers)]
    return "\n".join(lines) + "\n"
