"""A large blob costs neither the master nor the replica much memory: both are processes, which say what they took."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from tests.conftest import FULL

MEBIBYTE = 1 << 20
SIZE = (200 if FULL else 48) * MEBIBYTE
EXTRA_MAX = (64 if FULL else 32) * MEBIBYTE

PEAK = """
import json, resource, sys
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
"""

REPLICA = (
    PEAK
    + """
import asyncio
from flowstone.limestone.endpoint import Endpoint
from flowstone.limestone.replica import Replica
from flowstone.outside import production

async def main():
    async with Replica(production(), sys.argv[1], Endpoint("127.0.0.1", 0)) as replica:
        print(replica.endpoint.port, flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            print(peak(), flush=True)

asyncio.run(main())
"""
)

MASTER = (
    PEAK
    + """
import itertools
from flowstone.limestone import Datastore
from flowstone.limestone.endpoint import Endpoint

path, port, small, large = sys.argv[1:]
with Datastore(path, replicas=(Endpoint("127.0.0.1", int(port)),)) as store:
    channel = store.create_channel()
    store.ready()
    store.switch_epoch(1)
    pool = store.blob_pool()
    for epoch, source in enumerate((small, large), 1):
        channel.begin_session()
        channel.add_entry(1, source.encode(), b"", (epoch, 0), [pool.register_file(source)])
        channel.end_session()
        store.switch_epoch(epoch + 1)
        print(peak(), flush=True)
        sys.stdin.readline()
"""
)


@contextmanager
def program(text: str, *arguments: str) -> Iterator[tuple[IO[str], IO[str]]]:
    command = [sys.executable, "-c", text, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdin, process.stdout
        finally:
            process.stdin.close()
            process.wait()


def ask(stdin: IO[str], stdout: IO[str]) -> int:
    stdin.write("\n")
    stdin.flush()
    return int(json.loads(stdout.readline()))


@pytest.mark.timeout(600)
def test_a_large_blob_is_streamed_by_master_and_replica(tmp_path: Path) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    small.write_bytes(bytes(3 * MEBIBYTE))
    with large.open("wb") as file:
        file.truncate(SIZE)
    with program(REPLICA, str(tmp_path / "replica")) as replica:
        port = replica[1].readline().strip()
        with program(MASTER, str(tmp_path / "master"), port, str(small), str(large)) as master:
            before = int(master[1].readline()), ask(*replica)
            after = ask(*master), ask(*replica)
    extra = [late - early for early, late in zip(before, after, strict=True)]
    (blob,) = (path for path in (tmp_path / "replica").rglob("*.blob") if path.stat().st_size > small.stat().st_size)
    assert blob.stat().st_size == SIZE
    assert max(extra) < EXTRA_MAX, [f"{each / MEBIBYTE:.0f} MiB" for each in extra]
