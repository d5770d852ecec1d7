"""Kill -9 of a master or replica, one of which is the original's: no acknowledged data is lost.

After each round the original opens every directory, and has the same rows as the independent reader. The next round
continues with the master's directory, or with the replica's in its place.
"""

from __future__ import annotations

import json
import logging
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.conftest import FULL
from tests.limestone.independent_reader import files_of, judge
from tests.limestone.interop import real_limestone
from tests.limestone.interop.kill_rounds import CHANNELS, WAIT_SECONDS, History, Round, Session
from tests.limestone.interop.real_limestone import logutil
from tests.limestone.interop.real_master import RealMaster, opened_by_the_original

LOG: Final = logging.getLogger(__name__)
ROUNDS: Final = 50 if FULL else 2
OUR_REPLICA: Final = [sys.executable, "-m", "flowstone.cli", "limestone", "replica"]
OUR_MASTER: Final = [sys.executable, "-m", "tests.limestone.interop.our_master"]
MODES: Final[dict[str, dict[str, str]]] = {
    "default": {},
    "async close": {"REPLICATION_ASYNC_SESSION_CLOSE": "1"},
    "async commit": {"REPLICATION_ASYNC_GROUP_COMMIT": "1"},
    "async": {"REPLICATION_ASYNC_SESSION_CLOSE": "1", "REPLICATION_ASYNC_GROUP_COMMIT": "1"},
}
LARGE: Final = 600_000
"""Size of values: with several of these, our replica writes a part of the session to its file before the end."""

SMALL: Final = 40
"""Size of values: with these, a session is not in the original's file before its end."""


class Rounds:
    """Two directories across rounds.

    `large`: see `Round`; `has_real_replica`: see `History.check`.
    """

    def __init__(self, root: Path, seed: str, *, has_real_replica: bool = False) -> None:
        self._has_real_replica = has_real_replica
        self.random = random.Random(seed)
        self.history = History()
        self.master, self.replica = root / "master", root / "replica"
        self._present: dict[Path, list[Session]] = {}
        self._last: Round | None = None
        self._count = 0
        self._cut_before = 0

    def prepare(self) -> None:
        """Start the next master from either side of the last round, and the replica from a copy of that directory.

        The original's library recovers the directory first: the original's replica does not, and would count a session
        after the durable epoch once that epoch number is reached again.
        """
        self._count += 1
        if self._last is None:
            return
        chosen = self.random.choice([self.master, self.replica])
        if self.history.figures["cut by the original"] > self._cut_before:
            chosen = self.master
        self.history.go_on_with(self._present[chosen], self._last)
        if judge(files_of(chosen)).problem is not None:
            assert logutil("repair", chosen).code == 0
        assert opened_by_the_original(chosen) is not None
        if chosen is self.replica:
            shutil.rmtree(self.master)
            self.replica.rename(self.master)
        else:
            shutil.rmtree(self.replica)
        shutil.copytree(self.master, self.replica)

    def live(self, master: RealMaster, kill: Callable[[], None], large: int) -> None:
        last_epoch = int(master.ask(f"open {self.master} {CHANNELS}"))
        self._last = Round(f"{self._count}", master, last_epoch + 1, large)
        self._last.run(self.random.randint(5, 40), kill)

    def check(self) -> None:
        """Check both directories after both processes have ended."""
        assert self._last is not None
        self._cut_before = self.history.figures["cut by the original"]
        recorded = None if self._has_real_replica else judge(files_of(self.master)).durable_epoch
        self._present = {
            self.master: self.history.check(self.master, self._last, recorded=recorded),
            self.replica: self.history.check(
                self.replica, self._last, recorded=recorded, rewrites_blobs=self._has_real_replica
            ),
        }

    def tell(self) -> None:
        assert self.history.figures["acknowledged"]
        LOG.info("%d rounds: %s", self._count, dict(self.history.figures))


@contextmanager
def our_replica(directory: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    command = [*OUR_REPLICA, str(directory), "--listen", "tcp://127.0.0.1:0", "--json", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["endpoint"], process
        finally:
            process.kill()


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("mode", MODES)
def test_real_master_and_our_replica_lose_no_acknowledged_data(mode: str, tmp_path: Path) -> None:
    rounds = Rounds(tmp_path, mode)
    for _ in range(ROUNDS):
        rounds.prepare()
        rng = rounds.random
        with ExitStack() as stack:
            options = ("--compatible",) if rng.random() < 0.2 else ()
            endpoint, process = stack.enter_context(our_replica(rounds.replica, *options))
            master = RealMaster(endpoint, **MODES[mode])
            stack.callback(master.kill)
            # A compatible replica cannot hide the written part of a session that never ends.
            large = SMALL if options else LARGE
            rounds.live(master, rng.choice([master.kill, process.kill, process.terminate]), large)
            master.kill()
            rng.choice([process.kill, process.terminate])()
            process.wait(WAIT_SECONDS)
        rounds.check()
    rounds.tell()


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("form", ["ours", "compatible"])
def test_our_master_and_the_real_replica_lose_no_acknowledged_data(form: str, tmp_path: Path) -> None:
    rounds = Rounds(tmp_path, form, has_real_replica=True)
    for _ in range(ROUNDS):
        rounds.prepare()
        with ExitStack() as stack:
            endpoint, process = stack.enter_context(real_limestone.replica_process(rounds.replica))
            master = RealMaster(endpoint, [*OUR_MASTER, form])
            stack.callback(master.kill)
            rounds.live(master, rounds.random.choice([master.kill, process.kill]), SMALL)
        rounds.check()
    rounds.tell()
