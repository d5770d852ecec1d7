"""Rounds of a master and a replica, one of them the original's, that end in a kill and a check of both directories.

Three channels write sessions that overlap each other and the epoch switches; some sessions name blobs, some name a blob
of another session, and some are large. Both directories must have every session that the master acknowledged and whose
epoch the master reported durable. Any other session must be present as a whole or not at all.
"""

from __future__ import annotations

import random
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.limestone.independent_reader import blob_path, files_of, judge
from tests.limestone.interop.real_limestone import logutil
from tests.limestone.interop.real_master import Died, RealMaster, Refused, hexed, opened_by_the_original

CHANNELS: Final = 3
STORAGE: Final = 7
WAIT_SECONDS: Final = 60.0
Key = bytes


@dataclass
class Session:
    """The entries between a begin and an end.

    `is_acknowledged`: the end was answered.
    """

    epoch: int
    channel: int = 0
    rows: dict[Key, bytes] = field(default_factory=dict)
    blobs: dict[Key, int] = field(default_factory=dict)
    is_acknowledged: bool = False


class Round:
    """One life of a master.

    `name` makes its keys unique; `large`: maximum size of values in bytes.
    """

    def __init__(self, name: str, master: RealMaster, first_epoch: int, large: int) -> None:
        self.sessions: list[Session] = []
        self.durable = 0
        """The largest epoch that the master has reported durable."""
        self.blobs: dict[int, bytes] = {}
        self._name = name
        self._master = master
        self._large = large
        self._epoch = first_epoch
        self._has_begun = False
        self._change = threading.Condition()
        self._is_over = False
        self._errors: list[Exception] = []

    def run(self, epochs: int, kill: Callable[[], None]) -> None:
        """Write for this number of epochs, then kill; return when all threads have noticed the kill."""
        writers = [threading.Thread(target=self._guarded, args=(self._write, number)) for number in range(CHANNELS)]
        switcher = threading.Thread(target=self._guarded, args=(self._switch, epochs, kill))
        for thread in (*writers, switcher):
            thread.start()
        for thread in (switcher, *writers):
            thread.join(WAIT_SECONDS)
            assert not thread.is_alive(), "a thread is still waiting for an answer"
        if self._errors:
            raise self._errors[0]

    def _guarded(self, work: Callable[..., None], *arguments: object) -> None:
        try:
            work(*arguments)
        except (Died, Refused):
            pass
        except Exception as error:
            self._errors.append(error)
        finally:
            with self._change:
                self._is_over = True
                self._change.notify_all()

    def _switch(self, epochs: int, kill: Callable[[], None]) -> None:
        rng, master = random.Random(f"{self._name}/switch"), self._master
        for _ in range(epochs):
            master.ask(f"switch {self._epoch}")
            with self._change:
                self._epoch += 1
                self._has_begun = True
                self._change.notify_all()
            self.durable = max(self.durable, int(master.ask("durable")))
            if rng.random() < 0.7:  # some sessions of this epoch end, others stay open beyond it
                self._wait_for_sessions(len(self.sessions) + rng.randint(1, 4))
        kill()

    def _wait_for_sessions(self, count: int) -> None:
        with self._change:
            self._change.wait_for(lambda: self._is_over or len(self.sessions) >= count, 1.0)

    def _write(self, channel: int) -> None:
        rng, number, last_epoch = random.Random(f"{self._name}/{channel}"), 0, 0
        with self._change:
            self._change.wait_for(lambda: self._is_over or self._has_begun, WAIT_SECONDS)
        while not self._is_over:
            number += 1
            epoch = int(self._master.ask(f"begin {channel}"))
            session = Session(epoch, channel)
            self._fill(session, channel, number, rng, may_be_large=epoch > last_epoch)
            last_epoch = epoch
            if rng.random() < 0.5:
                self._outlive(rng.randint(1, 2))
            self._master.ask(f"end {channel}")
            session.is_acknowledged = True

    def _outlive(self, epochs: int) -> None:
        """Keep a session open for this number of epoch switches, or only briefly if a switch waits for the session."""
        with self._change:
            until = self._epoch + epochs
            self._change.wait_for(lambda: self._has_to_end(until), 0.2)

    def _has_to_end(self, epoch: int) -> bool:
        return self._is_over or self._epoch >= epoch

    def _fill(self, session: Session, channel: int, number: int, rng: random.Random, *, may_be_large: bool) -> None:
        with self._change:
            self.sessions.append(session)
            self._change.notify_all()
        size = self._large if may_be_large and rng.random() < 0.1 else 40
        for minor in range(rng.randint(1, 6)):
            key = f"{self._name}-{channel}-{number}-{minor}".encode()
            value = rng.randbytes(rng.randint(0, size))
            blob = self._blob(rng) if rng.random() < 0.3 else None
            session.rows[key] = value
            version = f"{session.epoch} {number * 10 + minor}"
            command = f"put {channel} {STORAGE} {hexed(key)} {hexed(value)} {version}"
            if blob is not None:
                session.blobs[key] = blob
                command += f" {blob}"
            self._master.ask(command)

    def _blob(self, rng: random.Random) -> int:
        """Return a new blob, or the newest one, which another channel may be sending at the same time."""
        if self.blobs and rng.random() < 0.5:
            return max(self.blobs)
        content = rng.randbytes(rng.choice((10, 3000, 60_000)))
        blob = int(self._master.ask(f"blob {content.hex()}"))
        self.blobs[blob] = content
        return blob


class History:
    """All rounds of a directory: the sessions that the directory must have, and those that it may have."""

    def __init__(self) -> None:
        self.kept: dict[Key, bytes] = {}
        self.blobs: dict[Key, bytes] = {}
        self.figures: Counter[str] = Counter()

    def check(
        self, directory: Path, life: Round, *, recorded: int | None = None, rewrites_blobs: bool = False
    ) -> list[Session]:
        """Return the sessions of a round that are in a directory.

        The original opens a copy of the directory, which is repaired first if necessary. `recorded`: the durable epoch
        in the files of a master that is the original, which may have reported a larger one. `rewrites_blobs`: the
        directory is that of the original's replica, which truncates a blob and writes it again when a second channel
        sends it. A kill during that write leaves only a prefix of a blob that was complete before.
        """
        found = judge(files_of(directory))
        opened = Path(shutil.copytree(directory, directory.with_name(f"{directory.name}.opened")))
        theirs = opened_by_the_original(opened)
        assert (theirs is None) == (found.problem is not None), found
        if theirs is None:
            self.figures["repaired"] += 1
            said = logutil("repair", opened)
            assert said.code == 0, (found, said)
            found = judge(files_of(opened))
            theirs = opened_by_the_original(opened)
            assert theirs is not None, found
        rows = {key: value for _, key, value in theirs[1]}
        assert found.plain_rows() == theirs[1]
        assert not found.missing_blobs
        present = self._compare(rows, life, recorded)
        repeated = Counter(blob for session in life.sessions for blob in session.blobs.values())
        may_be_cut = {blob for blob, count in repeated.items() if count > 1} if rewrites_blobs else set()
        self._check_blobs(directory, life, present, {row.key: row.blobs for row in found.rows}, may_be_cut)
        shutil.rmtree(opened)
        return present

    def _compare(self, rows: dict[Key, bytes], life: Round, recorded: int | None) -> list[Session]:
        present: list[Session] = []
        rest = dict(rows)
        for key, value in self.kept.items():
            assert rest.pop(key, None) == value, f"{key!r} of an earlier round is lost"
        for session in life.sessions:
            here = {key: rest.pop(key) for key in session.rows if key in rest}
            if recorded is not None and not here and _is_reported_only(session, life, recorded):
                self.figures["reported and not recorded by the original"] += 1
            elif session.is_acknowledged and session.epoch <= life.durable:
                self.figures["acknowledged"] += 1
                assert here == session.rows, f"an acknowledged session of epoch {session.epoch} is lost"
            assert here in ({}, session.rows), f"a session of epoch {session.epoch} is incomplete"
            if here:
                present.append(session)
        assert not rest, f"unexpected rows: {sorted(rest)[:3]}"
        return present

    def _check_blobs(
        self,
        directory: Path,
        life: Round,
        present: list[Session],
        named: dict[Key, tuple[int, ...]],
        may_be_cut: set[int],
    ) -> None:
        expected = dict(self.blobs)
        for session in present:
            expected |= {key: life.blobs[blob] for key, blob in session.blobs.items()}
        for key, content in expected.items():
            (blob,) = named[key]
            found = (directory / blob_path(blob)).read_bytes()
            if blob in may_be_cut and len(found) < len(content):
                self.figures["cut by the original"] += 1
                assert content.startswith(found)
            else:
                assert found == content
        self.figures["blobs"] += len(expected)

    def go_on_with(self, present: list[Session], life: Round) -> None:
        """Start the next round from a directory with these sessions of the last one."""
        for session in present:
            self.kept |= session.rows
            self.blobs |= {key: life.blobs[blob] for key, blob in session.blobs.items()}


def _is_reported_only(session: Session, life: Round, recorded: int) -> bool:
    """Return True if the original may have reported the epoch of a session without recording it.

    The original keeps only the last finished epoch of each channel (docs/spec/limestone.md#original-defects). When a
    channel has ended a session of a later epoch, even if the kill left it unanswered, the earlier epoch is reported,
    but neither recorded nor sent to the replica.
    """
    return session.epoch > recorded and any(
        later.channel == session.channel and later.epoch > session.epoch for later in life.sessions
    )
