"""Limestone beside the real one: entries and epochs per second, local and replicated; recovery and compaction.

An epoch is what a caller makes of it: each channel has one session in it, all channels at the same time, then the next
one is switched to; the call returns when the one before is durable, on the replica too where there is one. Master and
replica are processes of their own. The peer is the real program: measured in turns where FLOWSTONE_LIMESTONE names a
directory that has `tgreplica`, `tglogutil` and `tgmaster`, a driver of its library with the commands that are used
here; elsewhere what it gave on a machine of two cores (`recorded`).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final, Literal

from bench.measure import Result, alternate, seconds
from flowstone.limestone import Datastore, Endpoint
from flowstone.limestone.format import manifest, names
from flowstone.limestone.format.entries import EntryType, Marker, WriteVersion, encode
from flowstone.limestone.format.epoch_file import record
from flowstone.limestone.format.manifest import Manifest
from flowstone.limestone.format.packing import packed_puts
from flowstone.limestone.settings import ENDPOINT
from flowstone.limestone.tools.offline_compaction import compact_offline
from flowstone.outside import production
from tests.limestone.interop import real_limestone

ROUNDS: Final = 3
ENTRIES_PER_SESSION: Final = 1000
VALUE: Final = b"v" * 100
EPOCHS: Final = 150
SHORT_EPOCHS: Final = 1000
FILES: Final = 8

RECORDED: Final = {1: 0.14e6, 2: 0.25e6}
"""Entries per second of the real program, replicated, by number of channels."""

RECORDED_EPOCHS, RECORDED_RECOVERY_SECONDS, RECORDED_COMPACTION_SECONDS = 1000.0, 8.0, 9.0
PROMISED: Final = {("many", 1): 1.5, ("single", 1): 0.8, ("single", 2): 0.6}
EPOCHS_RATIO, RECOVERY_RATIO = 0.5, 4.0

REPLICA: Final = """
import asyncio, sys
from flowstone.limestone.format.endpoint import Endpoint
from flowstone.limestone.replica.replica import Replica
from flowstone.outside import production

async def main():
    async with Replica(production(), sys.argv[1], Endpoint("127.0.0.1", 0)) as replica:
        print(replica.endpoint.port, flush=True)
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""

Form = Literal["many", "single"]
SAID: Final[dict[Form, str]] = {"many": "`add_entries`", "single": "single calls"}


def run(work: Path, entries: int = 1_000_000) -> Iterator[Result]:
    real = _real()
    for is_replicated in (False, True):
        for channels in (1, 2):
            for form in ("many", "single"):
                yield _writing(work, real, form, channels, is_replicated=is_replicated)
    yield _epochs(work, real)
    yield from _reading(work, real, entries)


def _writing(work: Path, real: Path | None, form: Form, channels: int, *, is_replicated: bool) -> Result:
    ours, peer = _alternated(work, real, form, channels, EPOCHS, ENTRIES_PER_SESSION, is_replicated)
    where = "to a replica" if is_replicated else "local"
    what = f"Limestone, {where}: sessions of 1000 × 100 B, {channels} channel{'s'[: channels - 1]}, {SAID[form]}"
    rate, said = ours * ENTRIES_PER_SESSION * channels, ""
    if peer is not None:
        peer *= ENTRIES_PER_SESSION * channels
        said = f"{peer / 1e6:.2f} M entries/s"
    elif is_replicated:
        peer = RECORDED[channels]
        said = f"recorded: {peer / 1e6:.2f} M entries/s"
    ratio = None if peer is None else rate / peer
    promised = PROMISED.get((form, channels)) if is_replicated else None
    holds = promised is None or (ratio is not None and ratio >= promised)
    target = "" if promised is None else f"≥ {promised:g}"
    return Result(what, f"{rate / 1e6:.2f} M entries/s", said, ratio, target, holds)


def _epochs(work: Path, real: Path | None) -> Result:
    ours, peer = _alternated(work, real, "single", 1, SHORT_EPOCHS, 1, True)
    said = f"{peer:.0f} epochs/s" if peer is not None else f"recorded: {RECORDED_EPOCHS:.0f} epochs/s"
    ratio = ours / (peer or RECORDED_EPOCHS)
    what = "Limestone, to a replica: epochs of one entry"
    return Result(what, f"{ours:.0f} epochs/s", said, ratio, f"≥ {EPOCHS_RATIO:g}", ratio >= EPOCHS_RATIO)


def _alternated(
    work: Path, real: Path | None, form: Form, channels: int, epochs: int, entries: int, is_replicated: bool
) -> tuple[float, float | None]:
    """Epochs per second, ours and the real program's."""

    def ours() -> float:
        with ExitStack() as stack:
            port = stack.enter_context(_our_replica(_fresh(work / "replica"))) if is_replicated else None
            return _write(_fresh(work / "master"), port, form, channels, epochs, entries)

    if real is None:
        return alternate(ROUNDS, ours)[0], None
    programs = real

    def theirs() -> float:
        with ExitStack() as stack:
            replica = _fresh(work / "replica")
            endpoint = stack.enter_context(real_limestone.replica(replica)) if is_replicated else None
            return _real_write(programs, _fresh(work / "master"), endpoint, channels, epochs, entries)

    found = alternate(ROUNDS, ours, theirs)
    return found[0], found[1]


def _write(directory: Path, port: int | None, form: Form, channels: int, epochs: int, entries: int) -> float:
    """Epochs per second."""
    replicas = () if port is None else (Endpoint("127.0.0.1", port),)
    keys = [b"key%06d" % number for number in range(entries)]
    values = [VALUE] * entries
    with Datastore(str(directory), replicas=replicas) as store, ThreadPoolExecutor(channels) as pool:
        logs = [store.create_channel() for _ in range(channels)]
        store.ready()

        def session(number: int) -> None:
            log = logs[number]
            log.begin_session()
            if form == "many":
                log.add_entries(1, keys, values, WriteVersion(epoch, 0))
            else:
                add = log.add_entry
                for minor, key in enumerate(keys):
                    add(1, key, VALUE, (epoch, minor))
            log.end_session()

        epoch = store.last_epoch + 1
        store.switch_epoch(epoch)
        started = time.perf_counter()
        for _ in range(epochs):
            if channels == 1:
                session(0)
            else:
                list(pool.map(session, range(channels)))
            epoch += 1
            store.switch_epoch(epoch)
        return epochs / (time.perf_counter() - started)


@contextmanager
def _our_replica(directory: Path) -> Iterator[int]:
    command = [sys.executable, "-c", REPLICA, str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.stdin.close()


# --- the real program ---


def _real() -> Path | None:
    if not real_limestone.available():
        return None
    programs = Path(os.environ[real_limestone.VARIABLE])
    return programs if (programs / "tgmaster").is_file() else None


def _driven(programs: Path, directory: Path, endpoint: str | None, channels: int, *commands: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TSURUGI_")}
    if endpoint is not None:
        environment[ENDPOINT] = endpoint
    said = subprocess.run(
        [programs / "tgmaster", directory, str(channels)],
        env=environment, input="".join(f"{command}\n" for command in (*commands, "shutdown")),
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True,
    )  # fmt: skip
    return said.stdout


def _real_write(
    programs: Path, directory: Path, endpoint: str | None, channels: int, epochs: int, entries: int
) -> float:
    directory.mkdir()
    said = _driven(programs, directory, endpoint, channels, f"bench {epochs} {entries} {len(VALUE)}")
    found = re.search(r"epochs/s ([\d.e+]+)", said)
    assert found is not None, said
    return float(found[1])


# --- reading ---


def _reading(work: Path, real: Path | None, entries: int) -> Iterator[Result]:
    source = _fresh(work / "log")
    _make_log(source, entries)

    def copied(action: Callable[[Path], float]) -> Callable[[], float]:
        return lambda: action(_copied(source, work / "copy"))

    contenders = [copied(_recovery), *([copied(partial(_real_recovery, real))] if real is not None else [])]
    found = alternate(ROUNDS, *contenders)
    yield _in_seconds("recovery", entries, found, RECORDED_RECOVERY_SECONDS, RECOVERY_RATIO)
    contenders = [copied(_compaction), *([copied(partial(_real_compaction, real))] if real is not None else [])]
    found = alternate(ROUNDS, *contenders)
    yield _in_seconds("offline compaction", entries, found, RECORDED_COMPACTION_SECONDS, None)


def _in_seconds(what: str, entries: int, found: list[float], recorded: float, promised: float | None) -> Result:
    is_measured = len(found) > 1
    peer = found[1] if is_measured else recorded * entries / 1e6
    ratio = peer / found[0]
    said = f"{peer:.1f} s" if is_measured else f"recorded: {peer:.1f} s"
    target = "" if promised is None else f"≥ {promised:g}"
    what = f"Limestone: {what} of {entries / 1e6:g} M entries in {FILES} files"
    return Result(what, f"{found[0]:.2f} s", said, ratio, target, promised is None or ratio >= promised)


def _recovery(directory: Path) -> float:
    with Datastore(str(directory)) as store:
        return seconds(store.ready)


def _compaction(directory: Path) -> float:
    return seconds(lambda: compact_offline(production(), str(directory), keeps_backup=False))


def _real_recovery(programs: Path, directory: Path) -> float:
    found = re.search(r"ready \d+ ([\d.e+-]+)", _driven(programs, directory, None, 1))
    assert found is not None
    return float(found[1])


def _real_compaction(programs: Path, directory: Path) -> float:
    command = [str(programs / "tglogutil"), "compaction", "--force", str(directory)]
    return seconds(lambda: subprocess.run(command, capture_output=True, check=True))


def _make_log(directory: Path, entries: int) -> None:
    """Write sessions of 1000 entries with keys in random order, distributed over FILES files."""
    directory.mkdir()
    per_file = entries // FILES
    for number in range(FILES):
        with (directory / f"pwal_{number:04d}").open("wb") as file:
            for first in range(0, per_file, ENTRIES_PER_SESSION):
                epoch = first // ENTRIES_PER_SESSION + 1
                places = range(first, min(first + ENTRIES_PER_SESSION, per_file))
                keys = [b"key%09d" % ((place * FILES + number) * 7919 % entries) for place in places]
                file.write(encode(Marker(EntryType.MARKER_BEGIN, epoch)))
                file.writelines(packed_puts(1, keys, [VALUE] * len(keys), WriteVersion(epoch, number * 10**6), 1 << 20))
                file.write(encode(Marker(EntryType.MARKER_END, epoch)))
    (directory / names.EPOCH).write_bytes(record(per_file // ENTRIES_PER_SESSION + 1))
    (directory / names.MANIFEST).write_bytes(manifest.encode(Manifest(str(uuid.uuid4()))))


def _copied(source: Path, target: Path) -> Path:
    """Log files are not changed, so links suffice."""
    _fresh(target).mkdir()
    for path in source.iterdir():
        if names.is_pwal(path.name):
            os.link(path, target / path.name)
        else:
            shutil.copy(path, target)
    return target


def _fresh(path: Path) -> Path:
    shutil.rmtree(path, ignore_errors=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
