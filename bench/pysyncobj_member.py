"""A member of three that keep a dictionary by PySyncObj: `python -m bench.pysyncobj_member ME JOURNAL OTHERS…`.

It answers lines: `leads` with 1 or 0, `count` with the size of its dictionary, and on the leader `load FIRST COUNT
WINDOW` with the seconds until so many keys were set by the library's own call, each counted when its callback says
that it is committed, so many of them in flight. The library has no clients: the load is called inside of its leader,
which costs it no network, and from its own loop, which costs it no thread.

The fastest settings are used: entries sent each hundredth of a second instead of each tenth, and some 2000 in flight.
Its journal is a mapped file that is never synced, like `wal_mode=write`; it has no option for that. Its log is never
compacted here, because that serializes the whole dictionary again, and our nodes take no snapshots either. The election
timeout is longer than by default: on a busy machine an election would end the measurement.
"""

from __future__ import annotations

import select
import sys
import time
from typing import Any

from pysyncobj import SyncObj, SyncObjConf
from pysyncobj.batteries import ReplDict

from bench.load import person

NEVER = 1 << 40
CONF: dict[str, Any] = {
    "autoTick": False,
    "appendEntriesPeriod": 0.01,
    "raftMinTimeout": 2.0,
    "raftMaxTimeout": 3.0,
    "logCompactionMinEntries": NEVER,
    "logCompactionMinTime": NEVER,
}
BUSY_TICK_SECONDS, IDLE_TICK_SECONDS = 0.001, 0.01
SUCCESS = 0


class Member:
    """One of the three members, in its own process."""

    def __init__(self, address: str, journal: str, others: list[str]) -> None:
        self._address = address
        self._people = ReplDict()
        self._raft = SyncObj(address, others, SyncObjConf(journalFile=journal, **CONF), consumers=[self._people])

    def serve(self) -> None:
        """Run until the input ends."""
        while True:
            self._raft.doTick(IDLE_TICK_SECONDS)
            if not select.select([sys.stdin], [], [], 0)[0]:
                continue
            what, *numbers = sys.stdin.readline().split() or [""]
            if what == "leads":
                print(int(str(self._raft._getLeader()) == self._address), flush=True)
            elif what == "count":
                print(len(self._people), flush=True)
            elif what == "load":
                print(self._load(*map(int, numbers)), flush=True)
            else:
                return

    def _load(self, first: int, count: int, window: int) -> float:
        rows = iter([person(key) for key in range(first, first + count)])
        committed = 0

        def send() -> None:
            if row := next(rows, None):
                self._people.set(row[0], row, callback=answered)

        def answered(_result: object, failure: int) -> None:
            nonlocal committed
            if failure != SUCCESS:
                raise RuntimeError(f"PySyncObj gave up on a commit: reason {failure}")
            committed += 1
            send()

        started = time.perf_counter()
        for _ in range(window):
            send()
        while committed < count:
            self._raft.doTick(BUSY_TICK_SECONDS)
        return time.perf_counter() - started


if __name__ == "__main__":
    Member(sys.argv[1], sys.argv[2], sys.argv[3:]).serve()
