"""A mirror that is killed at random moments while its source keeps changing.

Snapshot, then changes of all kinds (all operations, transactions, definitions, synchronous transactions of which some
roll back); the mirror is killed with SIGKILL, with its JVM and workers, and restarted. At the end each table equals its
space, byte by byte and column by column; a history and the change tables have each settled change once, whatever its
operation, and the changes, replayed, give the tables; and no file of any version of any table ever contained a
rolled-back row.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from threading import Semaphore, Thread
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flowstone.box.system import FIRST_USER_SPACE_ID
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import unpack
from flowstone.lake import change_table
from flowstone.outside import production
from flowstone.replication.vclock import VClock
from flowstone.spark.lake import Lake
from tests.conftest import FULL
from tests.interop import workload
from tests.interop.client import Request
from tests.interop.cluster import Cluster
from tests.interop.member import Member
from tests.interop.versions import Binary, binaries
from tests.interop.workload import HASH, NUMBERED, PAIRS, PLAIN, SURE, Workload
from tests.real_tarantool import free_port
from tests.spark.archives import WrittenArchive
from tests.spark.change_rows import insert, update, whole
from tests.spark.history_model import differences, expected, found_in
from tests.spark.lakes import rows_of, tuples_of
from tests.spark.mirror_process import MirrorProcess, descendants
from tests.spark.replayed_changes import changes_in, check_changes, effects_in, tuple_in
from tests.web.exposition import checked

ROWS_BEFORE = 20_000 if FULL else 1_000
CHANGES = 200_000 if FULL else 7_000
KILLS = ("opened", "progress") * (5 if FULL else 1)
"""The event before the kill: either the mirror is open, before its first snapshot or batch; or a batch is complete."""

HISTORY_KILLS = KILLS if FULL else KILLS[1:]
SECONDS_LEFT_MAX = 4.0 if FULL else 2.0
CHUNK = 250
GHOST = "ghost"
"""Text in every row that will be rolled back, and in no other row."""

LATE = 660
OPTIONS = ["--trigger-seconds=0.2", "--strings-as=binary", "--changes"]
"""Text that some changes cut in the middle of characters."""

STEADY = {PLAIN: "plain", PAIRS: "pairs", HASH: "hash", NUMBERED: "numbered", SURE: "sure"}

pytestmark = [pytest.mark.real, pytest.mark.timeout(10_000 if FULL else 1200)]


def ddl() -> list[list[Any]]:
    """Create a space, fill it, change its fields and name, truncate it, drop it, create it again and drop it."""
    space, index = "box.schema.space.create", {"parts": [1, "unsigned"]}
    fields = [{"name": "id", "type": "unsigned"}, {"name": "text", "type": "string"}]
    nullable = {"name": "more", "type": "any", "is_nullable": True}
    rows = [["replace", LATE, [number, f"t{number}", number]] for number in range(20)]
    return [
        ["call", space, ["late", {"id": LATE, "format": fields}]],
        ["call", "box.space.late:create_index", ["pk", index]],
        *rows,
        ["call", "box.space.late:format", [[*fields, nullable]]],
        ["update", LATE, [3], [["=", 2, "changed"], ["+", 3, 5]]],
        ["call", "box.space.late:rename", ["later"]],
        ["update", LATE, [4], [["=", 2, "changed"]]],
        ["call", "box.space.later:truncate", []],
        *rows[5:9],
        ["call", "box.space.later:drop", []],
        ["call", space, ["later", {"id": LATE, "format": fields}]],
        ["call", "box.space.later:create_index", ["pk", index]],
        *rows[:7],
        ["call", "box.space.later:drop", []],
    ]


class Load(Thread):
    """Makes all changes, with definitions and ghosts between them, in as many parts as there are mirrors.

    A part begins when it is released. `problem` is the error that ended the load early.
    """

    def __init__(self, member: Member, seed: int, parts: int) -> None:
        super().__init__(daemon=True)
        self.member = member
        self.parts = parts
        self.plain = Workload(seed, has_definitions=False, is_synchronous=True)
        self.defining = Workload(seed, writer=0)
        self.released = Semaphore(0)
        self.problem: BaseException | None = None
        self.ghosts = 0

    def run(self) -> None:
        chunks = CHANGES // CHUNK
        try:
            for number in range(chunks):
                if number * self.parts // chunks != (number - 1) * self.parts // chunks:
                    self.released.acquire()
                workload.run(self.member, self.plain.steps(CHUNK))
                if number % 8 == 1:
                    workload.run(self.member, self.defining.steps(25))
                if number % (12 if FULL else 28) == 3:
                    workload.run(self.member, ddl())
                self.withdraw(number)
                time.sleep(0.05 if FULL else 0.3)
        except BaseException as error:
            self.problem = error

    def withdraw(self, number: int) -> None:
        """Run synchronous transactions without a quorum, an asynchronous row that depends on them, and later rows."""
        self.member.configure(replication_synchro_quorum=9, replication_synchro_timeout=0.01)
        steps = [["replace", SURE, [number, GHOST, number]], ["replace", PLAIN, [number, GHOST, 0, 0, None]]]
        with self.member.connect() as client:
            requests = [
                Request(RequestType.CALL, {Key.FUNCTION_NAME: "interop.transaction", Key.TUPLE: [steps]}),
                Request(RequestType.REPLACE, {Key.SPACE_ID: SURE, Key.TUPLE: [number + 1, GHOST, 1]}),
            ]
            for answer in client.pipeline(requests):
                assert answer.is_error, "a ghost was confirmed"
                self.ghosts += 1
        self.member.configure(replication_synchro_quorum=1, replication_synchro_timeout=5)


def snapshot_first(member: Member) -> None:
    assert workload.define(member, "2.6")
    workload.run(member, Workload(1, has_definitions=False, is_synchronous=True).steps(ROWS_BEFORE))


def kill_often(
    arguments: list[str], directory: Path, load: Load, kills: Sequence[str], seed: int
) -> list[MirrorProcess]:
    """Run mirrors during the load, and kill all but the last one, which is stopped when it is in sync."""
    random = Random(seed)
    runs: list[MirrorProcess] = []
    load.start()
    for kill in kills:
        runs.append(MirrorProcess(arguments, directory))
        # The kill may come during the first snapshot, during a batch, or between two commits.
        runs[-1].wait_for("its beginning", lambda event: event["event"] == "opened")
        load.released.release()
        if kill == "progress":
            runs[-1].wait_for("its first batch", lambda event: event["event"] == "progress" and event["changes"] > 0)
        time.sleep(random.uniform(0.0, SECONDS_LEFT_MAX))
        runs[-1].kill()
    port = free_port()
    runs.append(MirrorProcess([f"--http-listen=127.0.0.1:{port}", *arguments], directory))
    load.released.release()
    load.join(3000)
    assert load.problem is None, load.problem
    assert not load.is_alive()
    runs[-1].wait_until(load.member.vclock())
    check_metrics(port, load.member.vclock())
    assert runs[-1].stop() == 0, runs[-1].said()
    assert runs[-1].events[-1]["event"] == "stopped"
    return runs


def check_metrics(port: int, position: dict[int, int]) -> None:
    """Check the Prometheus metrics of a mirror that is in sync."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        found = checked(answer.read().decode())
    for replica_id, lsn in VClock(position).without_zero():
        assert found.value("flowstone_mirror_position", id=str(replica_id)) >= lsn
    assert found.value("flowstone_mirror_tables") == len(found.labels("flowstone_mirror_table_changes_total"))


# --- checks -------------------------------------------------------------------------------------------------------


def check_same(lake: Path, member: Member, *, history: bool = False) -> None:
    """Check that tables equal the source's spaces: tuples as bytes, and columns by the tuples."""
    tables = Lake.open(str(lake)).tables()
    spaces = {row[2]: row[0] for row in map(unpack, member.tuples(280)) if row[0] >= FIRST_USER_SPACE_ID}
    keyed = {row[0] for row in map(unpack, member.tuples(288)) if row[1] == 0}
    wanted = {name for name, number in spaces.items() if number in keyed and name not in ("mine", "scratch")}
    assert set(tables) == wanted
    for name in sorted(wanted):
        rows = [row for row in rows_of(lake, name) if not history or row["_is_current"]]
        assert sorted(row["_tuple"] for row in rows) == sorted(member.tuples(spaces[name])), name
    for row in rows_of(lake, "plain"):
        values = unpack(row["_tuple"])
        text = values[1].encode("utf-8", "surrogateescape")
        assert (row["id"], row["text"], row["number"], row["bits"]) == (values[0], text, *values[2:4])


def check_no_ghosts(lake: Path) -> None:
    """Check all files of all versions of all tables, and orphaned files."""
    found = 0
    for file in lake.rglob("*.parquet"):
        if not {"_flowstone", "_flowstone_spool", "_tables", "_delta_log"}.isdisjoint(file.parts):
            continue
        try:
            tuples = tuples_in(file)
        except pa.ArrowInvalid:  # a file that a kill left incomplete
            commits = "".join(each.read_text() for each in sorted(file.parent.glob("_delta_log/*.json")))
            assert commits
            assert file.name not in commits, file
            continue
        assert not any(GHOST.encode() in each for each in tuples), file
        found += 1
    assert found > len(STEADY)


def tuples_in(file: Path) -> list[bytes]:
    """Return the tuples in a file of a table or of a change table."""
    if change_table.CHANGES not in file.parts:
        found: list[bytes] = pq.read_table(file, columns=["_tuple"])["_tuple"].to_pylist()
        return found
    images = pq.read_table(file, columns=["before", "after"])
    values = (tuple_in(each) for name in images.schema.names for each in images[name].to_pylist())
    return [each for each in values if each is not None]


def check_history(lake: Path, log: Path, begun: int) -> None:
    """Check that each settled change after the snapshot produced or ended exactly its states."""
    wanted = expected(log, begun, STEADY)
    for number, name in STEADY.items():
        assert not (said := differences(wanted[number].states, found_in(rows_of(lake, name)))), f"{name}: {said}"
        assert effects_in(changes_in(lake, name)) == wanted[number].effects, name
    states = {number: history.states for number, history in wanted.items()}
    operations = Counter(state.operation for each in states.values() for state in each if state.since > begun)
    assert set(operations) == {"insert", "replace", "update", "upsert"}
    assert any(state.until is not None and state.since > begun for state in states[HASH]), "nothing was truncated"


# --- the tests ----------------------------------------------------------------------------------------------------


@pytest.fixture
def real(tmp_path: Path, tarantool: object) -> Iterator[Cluster]:
    old = [each for each in binaries() if each.version < (2, 7)]
    if not old:
        pytest.skip("no Tarantool 2.6 on PATH or in FLOWSTONE_TARANTOOL")
    cluster = Cluster(tmp_path, old[0])
    yield cluster
    cluster.close()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, Binary("no server", (2, 6, 0)))
    yield cluster
    cluster.close()


def test_killed_mirror_equals_the_real_server(java: None, real: Cluster, tmp_path: Path) -> None:
    source, lake = real.real("source"), tmp_path / "lake"
    snapshot_first(source)
    load = Load(source, 2, len(KILLS) + 1)
    runs = kill_often([*OPTIONS, source.uri, str(lake)], tmp_path, load, KILLS, seed=3)
    check_same(lake, source)
    check_changes(lake)
    check_no_ghosts(lake)
    assert load.ghosts
    assert sum(event["event"] == "snapshot" and event["rows"] is not None for run in runs for event in run.events) <= 1


def test_killed_history_of_a_cluster_has_each_settled_change_once(java: None, nodes: Cluster, tmp_path: Path) -> None:
    options: dict[str, Any] = {"replication_synchro_quorum": 1, "replication_synchro_timeout": 5}
    leader = nodes.ours("a", **options)
    others = [nodes.ours(name, replication=[leader.uri], **options) for name in "bc"]
    lake = tmp_path / "lake"
    snapshot_first(leader)
    for each in others:
        each.catch_up(leader)
    load = Load(leader, 4, len(HISTORY_KILLS) + 1)
    members = ",".join(each.uri for each in (leader, *others))
    runs = kill_often(["--history", *OPTIONS, members, str(lake)], tmp_path, load, HISTORY_KILLS, seed=5)
    begun = next(event["position"]["1"] for run in runs for event in run.events if event["event"] == "snapshot")
    check_same(lake, leader, history=True)
    check_no_ghosts(lake)
    check_history(lake, leader.directory, begun)


@pytest.mark.full_scale(reason="needs a separate mirror for a single property")
def test_dying_worker_only_costs_its_task(java: None, tmp_path: Path) -> None:
    archive = WrittenArchive(production().disk, str(tmp_path / "archive"))
    archive.define_orders()
    keys = [(lsn * 7919) % 20_000 for lsn in range(3, 60_003)]
    rows = [
        whole(insert(lsn, key, f"n{lsn}") if lsn < 20_003 else update(lsn, key, ("=", 2, f"u{lsn}")))
        for lsn, key in enumerate(keys, 3)
    ]
    for first in range(0, len(rows), 1000):
        archive.write(*rows[first : first + 1000])
    archive.save()
    lake = tmp_path / "lake"
    run = MirrorProcess(["--once", "--max-rows=25000", archive.directory, str(lake)], tmp_path)
    run.wait_for("its beginning", lambda event: event["event"] == "opened")
    killed = 0
    while run.process.poll() is None and killed < 2:
        for pid in descendants(run.process.pid):
            with contextlib.suppress(OSError):
                if "pyspark.worker" in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(pid, signal.SIGKILL)
                    killed += 1
                    break
        time.sleep(0.5)
    assert run.process.wait(600) == 0, run.said()
    assert killed == 2
    last = {key: f"u{lsn}" for lsn, key in enumerate(keys, 3)}
    assert dict(tuples_of(lake, "orders")) == last
