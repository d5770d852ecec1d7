"""Servers for the tests of spools: one, or two that replicate from each other, and recognisable rows."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from flowstone.columns.change_contract import ChangeContract
from flowstone.iproto.uri import Uri, parse_uri
from flowstone.outside import production
from flowstone.replication.vclock import VClock
from flowstone.spark.index.log_index import ArchiveIndex
from flowstone.spark.sources.change_batches import read_slice
from flowstone.spark.sources.tarantool.spool import Spool
from tests.node.archived_server import SCHEMA, RealServer

SECONDS = 60
SYNCHRONOUS = """
local s = box.schema.space.create('s', {is_sync=true, if_not_exists=true})
s:create_index('pk', {if_not_exists=true})
"""


def members(*servers: RealServer) -> list[Uri]:
    return [parse_uri(server.uri) for server in servers]


@contextmanager
def pair(directory: Path, binary: str = "tarantool") -> Iterator[tuple[RealServer, RealServer]]:
    """Yield two servers that are both writable; `b` has joined `a`."""
    cfg = "replication_connect_quorum=0, replication_connect_timeout=0.3, replication_timeout=0.3"
    cfg += ", replication_synchro_timeout=1000"
    a = RealServer(directory / "a", cfg=cfg, setup=SCHEMA + SYNCHRONOUS, binary=binary)
    b = RealServer(directory / "b", cfg=cfg, setup=SCHEMA + SYNCHRONOUS, binary=binary)
    a.cfg += f", replication={{'{a.address}', '{b.address}'}}"
    with a:
        b.cfg = cfg + f", replication={{'{a.address}', '{b.address}'}}"
        with b:
            until(lambda: a.vclock() == b.vclock())
            yield a, b


def until(condition: Callable[[], bool], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition not reached in time"
        time.sleep(0.02)


def reach(spool: Spool, *vclocks: dict[int, int]) -> None:
    """Wait until the spool has settled all these rows; raise errors of the spool."""
    deadline = time.monotonic() + SECONDS
    while not all(VClock(vclock) <= spool.index.settled for vclock in vclocks):
        spool.check()
        assert time.monotonic() < deadline, f"it is at {spool.index.settled}, not at {vclocks}"
        spool.wait(0.2)


def keys(index: ArchiveIndex, start: VClock, space: str = "t") -> list[int]:
    """Return the first fields of the rows of a space after `start`, in log order."""
    definition = index.schema_at(index.settled).schema.space(space)
    contract = ChangeContract(index.replicaset_uuid, None, wanted=("_space_id", "_tuple"))
    found: list[int] = []
    for part in index.slices(start, index.settled):
        for batch in read_slice(production().disk, part, start, index.settled, contract):
            rows = batch.to_pylist()
            found += [json.loads(row["_tuple"])[0] for row in rows if row["_space_id"] == definition.id]
    return found


def collect_logs(server: RealServer) -> None:
    """Make the server delete logs that no known replica needs."""
    server.eval("for i = 1, 3 do box.space.t:replace{i, 'again'} box.snapshot() end")
    until(lambda: len(list(server.directory.glob("*.xlog"))) <= 2)


def copy_of(server: RealServer, to: Path) -> None:
    shutil.copytree(server.directory, to)


def names(directory: Path, endings: Sequence[str] = (".xlog", ".snap")) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.suffix in endings)
