"""A thousand directories with damaged files: each is read as far as possible, or rejected with the file's name."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from flowstone.errors import FlowstoneError
from flowstone.limestone.format import names
from flowstone.limestone.format.epoch_file import EpochWriter
from flowstone.limestone.format.log_scan import INSPECT, RECOVERY, REPAIR, REPAIR_CUT, STARTUP, ScanMode
from flowstone.limestone.store.recovery import RecoveredDirectory, recover
from flowstone.outside import Disk
from tests.limestone import recorded
from tests.limestone.crashes import DIRECTORY, fresh
from tests.limestone.mutations import mutated

DAMAGED: Final = 1000
GROWTH_MAX_KIB: Final = 200_000
SECONDS_MAX: Final = 60.0

Directory = dict[str, bytes]


def directories() -> list[Directory]:
    """Return every recorded directory, without blobs, which these tests do not read."""
    found = sorted(path.parent for path in recorded.HERE.rglob(names.MANIFEST))
    return [content(path) for path in found]


def content(root: Path) -> Directory:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.suffix != ".blob"
    }


def damaged(rng: random.Random, whole: list[Directory]) -> Directory:
    directory = dict(rng.choice(whole))
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        name = rng.choice(sorted(directory))
        others = [data for each in whole for other, data in each.items() if names.is_pwal(other)]
        directory[name] = mutated(directory[name], rng, others)
    return directory


def on_disk(directory: Directory, seed: int) -> Disk:
    _, disk = fresh(seed)
    for name, data in directory.items():
        path = f"{DIRECTORY}/{name}"
        disk.make_directory(path.rpartition("/")[0])
        with disk.create(path) as file:
            file.append(data)
            file.sync()
    return disk


def shown(found: RecoveredDirectory) -> list[tuple[int, bytes, bytes]]:
    return [(row.storage_id, row.key, row.value) for row in found.snapshot.rows()]


@contextmanager
def bounded() -> Iterator[None]:
    """Limit memory and processor time to the cost of small files and streams, however many there are."""
    # The peak is that of the whole process, and earlier tests may have raised it, so reset it.
    Path("/proc/self/clear_refs").write_text("5")
    before, start = memory_kib(), time.process_time()
    yield
    assert memory_kib() - before < GROWTH_MAX_KIB
    assert time.process_time() - start < SECONDS_MAX


def memory_kib() -> int:
    """Return the peak memory since the reset."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


def test_damaged_directory_is_recovered_or_rejected_and_recovered_data_persists() -> None:
    rng, whole = random.Random(1), directories()
    refused = 0
    with bounded():
        for number in range(DAMAGED):
            disk = on_disk(damaged(rng, whole), number)
            for mode in (INSPECT, STARTUP, REPAIR, REPAIR_CUT):
                attempt(disk, mode)
            found = attempt(disk, RECOVERY, repairs=True)
            if found is None:
                refused += 1
                continue
            EpochWriter.open(disk, DIRECTORY).write(found.last_epoch)
            again = recover(disk, DIRECTORY)
            assert shown(again) == shown(found), number
            assert not any(report.changes for report in again.files)
    assert DAMAGED // 10 < refused < DAMAGED * 9 // 10


def attempt(disk: Disk, mode: ScanMode, *, repairs: bool = False) -> RecoveredDirectory | None:
    try:
        return recover(disk, DIRECTORY, mode, repairs=repairs)
    except FlowstoneError:
        return None
