"""Memory of a master and a replica that stream large blobs, and many blobs of one entry.

Both are processes, which report their peak.
"""

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

PEAK = r"""
import re, sys
def peak():
    with open("/proc/self/status") as status:
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read())[1]) * 1024
"""
"""The peak from /proc, not `ru_maxrss`: a process inherits that value from its parent, and a large parent would hide
its own.
"""

REPLICA = (
    PEAK
    + """
import asyncio
from flowstone.limestone.format.endpoint import Endpoint
from flowstone.limestone.replica.replica import Replica
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
from flowstone.limestone.format.endpoint import Endpoint

path, port, small, large, count = sys.argv[1:]
with Datastore(path, replicas=(Endpoint("127.0.0.1", int(port)),)) as store:
    channel = store.create_channel()
    store.ready()
    store.switch_epoch(1)
    pool = store.blob_pool()
    for epoch, sources in enumerate(([small], [large] * int(count)), 1):
        channel.begin_session()
        channel.add_entry(1, b"k%d" % epoch, b"", (epoch, 0), [pool.register_file(source) for source in sources])
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
@pytest.mark.parametrize("count", [1, SIZE // MEBIBYTE], ids=["one blob", "many blobs"])
def test_blobs_of_an_entry_are_streamed_by_master_and_replica(tmp_path: Path, count: int) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    small.write_bytes(bytes(3 * MEBIBYTE))
    with large.open("wb") as file:
        file.truncate(SIZE // count)
    with program(REPLICA, str(tmp_path / "replica")) as replica:
        port = replica[1].readline().strip()
        with program(MASTER, str(tmp_path / "master"), port, str(small), str(large), str(count)) as master:
            before = int(master[1].readline()), ask(*replica)
            after = ask(*master), ask(*replica)
    extra = [late - early for early, late in zip(before, after, strict=True)]
    sizes = [path.stat().st_size for path in (tmp_path / "replica").rglob("*.blob")]
    assert sorted(sizes) == sorted([small.stat().st_size, *[SIZE // count] * count])
    assert max(extra) < EXTRA_MAX, [f"{each / MEBIBYTE:.0f} MiB" for each in extra]
