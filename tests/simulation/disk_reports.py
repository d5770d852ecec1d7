"""A node that cannot write its log reports that until the log can be written again, and does not lead."""

from __future__ import annotations

from flowstone.replication.raft.election import ElectionState
from tests.simulation.simulation import Simulation


class DiskReports:
    """Call `look` periodically; violations are appended to `violations`, once per node and kind."""

    def __init__(self, sim: Simulation, violations: list[str]) -> None:
        self._sim = sim
        self._violations = violations
        self._told: dict[tuple[str, str], None] = {}

    def look(self, names: list[str]) -> None:
        for name in names:
            if self._sim.is_ready(name) and self._sim.storage(name).refused:
                self._look_at(name)

    def _look_at(self, name: str) -> None:
        instance = self._sim.node(name)._instance
        journal = instance.journal
        writer = journal._writer
        storage = self._sim.storage(name)
        if writer is None or storage.names.get(writer.path) not in storage.refused or not journal.is_idle:
            return
        if journal.counters.failure is None:
            self._tell(name, "reports that its log can be written, and the last write has failed")
        if instance.elections.raft.state is ElectionState.LEADER:
            self._tell(name, "leads, and cannot write its log")

    def _tell(self, name: str, what: str) -> None:
        if (name, what) not in self._told:
            self._told[name, what] = None
            self._violations.append(f"{name} {what}")
