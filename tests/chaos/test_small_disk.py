"""Small disks are full on request, and only for their own process."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.small_disk import GROWTH, LimitedFiles, SmallDisk, small_disk

APPENDING = """
import sys
path = sys.argv[1]
for line in sys.stdin:
    try:
        with open(path, "ab", buffering=0) as log:
            log.write(b"x" * 5000)
        print("written", flush=True)
    except OSError as error:
        print(error.errno, flush=True)
"""


class Writer:
    """Another process, which appends to a file on request."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.process = subprocess.Popen(
            [sys.executable, "-c", APPENDING, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def append(self) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(file=self.process.stdin, flush=True)
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.communicate()


@pytest.fixture(params=["the best there is", "a limit of file sizes"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[SmallDisk, Writer]]:
    place = tmp_path / "disk"
    writer = Writer(place / "1.xlog")
    log = tmp_path / "log"
    log.write_bytes(b"")
    kind = small_disk if request.param == "the best there is" else LimitedFiles
    made = kind(place, lambda: writer.process.pid, log)
    yield made, writer
    writer.end()
    made.close()


def test_full_disk_rejects_writes_until_it_is_empty(disk: tuple[SmallDisk, Writer]) -> None:
    small, writer = disk
    for _ in range(2):
        while writer.path.stat().st_size < GROWTH + 1 if writer.path.exists() else True:
            assert writer.append() == "written"
        assert small.fill()
        writer.append()  # into the rest of its last page
        assert writer.append() in {str(errno.ENOSPC), str(errno.EFBIG)}
        small.empty()
        assert writer.append() == "written"


def test_limit_is_not_set_while_it_could_stop_the_log_of_the_process(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "disk" / "1.xlog")
    log = tmp_path / "log"
    log.write_bytes(b"x" * 5000)
    limited = LimitedFiles(tmp_path / "disk", lambda: writer.process.pid, log)
    assert writer.append() == "written"
    assert not limited.fill()
    assert writer.append() == "written"
    writer.end()
