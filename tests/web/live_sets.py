"""Two live replica sets and a dashboard over them: three nodes with elections, and a real Tarantool 2.6 with two nodes.

All are processes. Every member follows every other; guests may do everything.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.interop.cluster import Cluster
from tests.interop.member import Member, eventually
from tests.interop.mesh import Mesh
from tests.interop.versions import Binary, binaries
from tests.real_tarantool import free_port
from tests.warm_process import WarmProcess

NODES: Final = Binary("no server", (2, 11, 0))
START_SECONDS: Final = 60.0


@dataclass
class Dashboard:
    """A `flowstone dashboard` process; a restarted one has the same address."""

    log: Path
    members: list[Member]
    port: int
    process: WarmProcess | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        addresses = [member.address for member in self.members]
        command = ["flowstone.cli", "dashboard", f"--listen=127.0.0.1:{self.port}", *addresses]
        with self.log.open("wb") as log:
            self.process = WarmProcess(command, stdout=log)
        eventually("the dashboard is up", self._is_up, seconds=START_SECONDS)

    def _is_up(self) -> bool:
        assert self.process is not None
        text = self.log.read_text(errors="replace")
        assert self.process.poll() is None, f"the dashboard ended:\n{text[-3000:]}"
        return self.url in text

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(START_SECONDS)


@dataclass
class LiveSets:
    """The sets `elections` and `mixed`, whose first member is the real server, and their dashboard."""

    elections: Mesh
    mixed: Mesh
    dashboard: Dashboard

    @property
    def leader(self) -> Member:
        return self.elections.wait_leader()


@contextmanager
def live_sets(directory: Path) -> Iterator[LiveSets]:
    """Start both sets concurrently: each mostly waits for its processes."""
    real = next(binary for binary in binaries() if binary.dialect == "2.6")
    clusters = [Cluster(directory / "elections", NODES), Cluster(directory / "mixed", real)]
    made: dict[int, Mesh] = {}

    def make(number: int, kinds: list[str], **options: Any) -> None:
        made[number] = Mesh(clusters[number], kinds, direct=True, **options)

    threads = [
        threading.Thread(target=make, args=(0, ["ours", "ours", "ours"])),
        threading.Thread(target=make, args=(1, ["real", "ours", "ours"])),
    ]
    dashboard: Dashboard | None = None
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(made) == 2, "\n".join(cluster.logs() for cluster in clusters)
        made[0].set_modes("candidate")
        made[0].wait_leader()
        dashboard = Dashboard(directory / "dashboard.log", [*made[0], *made[1]], free_port())
        dashboard.start()
        yield LiveSets(made[0], made[1], dashboard)
    finally:
        if dashboard is not None:
            dashboard.stop()
        for cluster in clusters:
            cluster.close()
