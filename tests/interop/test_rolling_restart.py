"""Three processes are restarted in turn while a client writes: the set has a leader nearly all the time."""

from __future__ import annotations

import time
from contextlib import suppress
from threading import Event, Thread

from flowstone.iproto.errors import TarantoolError
from tests.interop.cluster import Cluster, not_for_stand_ins
from tests.interop.member import SECONDS, eventually
from tests.interop.mesh import SYNCHRONOUS, Mesh, keys

PAUSE_SECONDS = 0.005


@not_for_stand_ins
def test_processes_are_restarted_in_turn_without_a_gap(nodes: Cluster) -> None:
    # A leader that just disappears is missed after four times this timeout.
    mesh = Mesh(nodes, ("ours",) * 3, direct=True, replication_timeout=1, election_timeout=5)
    mesh.set_modes("candidate")
    mesh.wait_leader()
    writer = Writer(mesh)
    for _ in mesh:
        leader = mesh.wait_leader()
        writer.wait_for_another()
        leader.restart()
        leader.wait_follow(*mesh.others(leader))
    writer.stop()
    mesh.wait_same(mesh.wait_leader())
    for member in mesh:
        assert set(writer.written) <= set(keys(member))
    # Some 50 ms on an idle machine; here other tests use the processor, too.
    assert writer.gap < 2, f"no write for {writer.gap:.2f} s"


class Writer:
    """A thread that writes increasing keys to whichever member accepts them."""

    def __init__(self, mesh: Mesh) -> None:
        self._members = list(mesh)
        self._is_stopping = Event()
        self.written: list[int] = []
        self.gap = 0.0
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        key, last = 0, time.monotonic()
        while not self._is_stopping.is_set():
            for member in self._members:
                with suppress(TarantoolError, OSError), member.connect() as client:
                    while not self._is_stopping.wait(PAUSE_SECONDS):
                        key += 1
                        client.replace(SYNCHRONOUS, key)
                        self.written.append(key)
                        now = time.monotonic()
                        self.gap, last = max(self.gap, now - last), now

    def wait_for_another(self) -> None:
        count = len(self.written)
        eventually("another write", lambda: len(self.written) > count)

    def stop(self) -> None:
        self.wait_for_another()
        self._is_stopping.set()
        self._thread.join(SECONDS)
