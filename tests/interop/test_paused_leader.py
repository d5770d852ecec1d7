"""A leader that is suspended and resumed writes in an old term: late rows leave files that every server recovers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import FULL
from tests.interop.cluster import Cluster, not_for_stand_ins
from tests.interop.compare import assert_converged
from tests.interop.member import SECONDS, Member, eventually
from tests.interop.mesh import Mesh, election, wait_until
from tests.interop.test_killed_leader import Load
from tests.interop.versions import fits
from tests.judges.files import list_files
from tests.warm_process import WarmProcess

ROUNDS = 20 if FULL else 1
WRITERS = 30


@contextmanager
def archived(member: Member, directory: Path) -> Iterator[WarmProcess]:
    """Run `flowstone archive` of a member, stopped as by an operator."""
    with (directory.parent / "archive.log").open("wb") as log:
        process = WarmProcess(["flowstone.cli", "archive", member.uri, str(directory)], stdout=log)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(SECONDS)


def _pause_leaders(mesh: Mesh, directory: Path, *, loses_nothing: bool) -> None:
    # A real leader that resumes after this time rolls back rows that its successor has confirmed: a split brain.
    mesh.set_modes("candidate", replication_synchro_timeout=60)
    archive = directory / "archive"
    with archived(mesh.members[1], archive) as process:
        eventually("the archive has begun", lambda: any(archive.glob("*.snap")))
        with Load(mesh.members, WRITERS) as load:
            for _ in range(ROUNDS):
                leader = mesh.wait_leader()
                load.wait_writes("are acknowledged")
                leader = mesh.wait_leader()
                _pause(mesh, leader, load)
            load.wait_writes("are acknowledged at last")
        mesh.wait_leader()
        for member in mesh:
            member.wait_follow(*mesh.others(member))
        assert_converged(*mesh)
        if loses_nothing:
            for member in mesh:
                load.assert_kept(member)
        assert process.poll() is None, (directory / "archive.log").read_text()
        wanted = mesh.members[1].vclock()
        eventually("the archive has it all", lambda: has_all(archive, wanted))
    mesh.judge(archive=archive)


def _pause(mesh: Mesh, leader: Member, load: Load) -> None:
    term = election(leader)["term"]
    others = mesh.others(leader)
    leader.pause()
    try:
        mesh.wait_leader(*others)
        load.wait_writes("go on without it")
    finally:
        leader.resume()
    wait_until(leader, "knows the next term", lambda one: election(one)["term"] > term)
    wait_until(leader, "follows a leader", lambda one: election(one)["leader"] != 0)


def has_all(archive: Path, wanted: dict[int, int]) -> bool:
    """Return True if the logs of the archive reach `wanted`; they contain no local rows."""
    if not any(archive.glob("*.xlog")):
        return False
    _, logs = list_files(archive)
    reached = dict(logs[-1].vclock)
    for row in logs[-1].rows():
        reached[row.replica_id] = row.lsn
    return all(lsn <= reached.get(number, 0) for number, lsn in wanted.items() if number)


@not_for_stand_ins
def test_files_of_a_set_whose_leader_was_paused_are_recovered_by_servers(nodes: Cluster, tmp_path: Path) -> None:
    _pause_leaders(Mesh(nodes, ("ours", "ours", "ours"), direct=True), tmp_path, loses_nothing=True)


@pytest.mark.parametrize(
    "kinds", [("real", "ours", "real"), ("ours", "real", "ours"), ("real", "real", "real")], ids="-".join
)
@fits(">=2.11")
def test_files_of_a_mixed_set_whose_leader_was_paused_are_recovered_by_servers(
    cluster: Cluster, kinds: tuple[str, ...], tmp_path: Path
) -> None:
    _pause_leaders(Mesh(cluster, kinds, direct=True), tmp_path, loses_nothing="real" not in kinds)
