"""A second reader of Limestone directories with the original's rules, independent of the code under test.

It follows the specification (data directory, log entries on disk, recovery, snapshot) and imports nothing from `src`,
so that an error in our own recovery cannot hide here. It takes a directory as a mapping from relative paths to
contents, from any kind of disk. Interop tests compare its verdicts and rows with the original's.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

MANIFEST: Final = "limestone-manifest.json"
CATALOG: Final = "compaction_catalog"
COMPACTED: Final = "pwal_0000.compacted"
EPOCH: Final = "epoch"

PUT, BEGIN, END, DURABLE, REMOVE, INVALIDATED, CLEAR, ADD, DROP, PUT_BLOBS = range(1, 11)
DATA: Final = frozenset({PUT, REMOVE, CLEAR, ADD, DROP, PUT_BLOBS})
_MARKER: Final = struct.Struct("<Q")
_END: Final = struct.Struct("<QB")
_STORAGE: Final = struct.Struct("<QQQ")
_PUT: Final = struct.Struct("<IIQ")
_REMOVE: Final = struct.Struct("<IQ")
_VERSION: Final = struct.Struct("<QQ")

OK, REPAIRED, NONDURABLE, BROKEN_MARKED, BROKEN, CORRUPTED, UNEXPECTED = 0, 1, 0x40, 0x11, 0x41, 0x42, 0x81
"""Severities of scan results (docs/spec/limestone.md#scanner)."""

Files = Mapping[str, bytes]
Version = tuple[int, int]


class Broken(Exception):
    """The original refuses to open the directory, for this reason."""


class Entry(NamedTuple):
    """An entry at an offset of a file.

    `is_short`: the file ends inside the entry, and only `kind` is known.
    """

    at: int
    kind: int
    epoch: int = 0
    storage: int = 0
    key: bytes = b""
    value: bytes = b""
    version: Version = (0, 0)
    blobs: tuple[int, ...] = ()
    is_short: bool = False


class Row(NamedTuple):
    storage: int
    key: bytes
    value: bytes
    blobs: tuple[int, ...]


@dataclass(frozen=True)
class Judgement:
    """The original's verdict on a directory.

    `problem`: why the original would abort at its start; None if it opens the directory, and then shows `rows`.
    `inspect`: the exit code of `tglogutil inspect`. `last_epoch`: the result of `datastore::last_epoch`.
    """

    problem: str | None
    inspect: int
    durable_epoch: int = 0
    last_epoch: int = 0
    rows: tuple[Row, ...] = ()
    missing_blobs: tuple[int, ...] = ()

    def plain_rows(self) -> list[tuple[int, bytes, bytes]]:
        return [(row.storage, row.key, row.value) for row in self.rows]


def files_of(directory: Path) -> dict[str, bytes]:
    """Return the content of a directory on this machine."""
    found = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in found}


def judge(files: Files) -> Judgement:
    """Return the original's verdict on a directory, which is not changed."""
    top = {name: content for name, content in files.items() if "/" not in name}
    if not top:
        return Judgement(None, 64)
    try:
        _check_manifest(top)
        durable = _durable_epoch(top)
    except Broken as error:
        return Judgement(str(error), 64)
    logs = {name: content for name, content in sorted(top.items()) if name.startswith("pwal_")}
    inspect = _inspected(logs, durable)
    try:
        compacted_files, detached = _catalog(top)
        inputs = [name for name in logs if name != COMPACTED and name not in detached]
        scans = {name: _Scan(logs[name], durable, is_startup=True) for name in inputs}
        for name, scan in scans.items():
            scan.refuse(name)
        compacted = list(_compacted(top[COMPACTED])) if COMPACTED in top else []
    except Broken as error:
        return Judgement(str(error), inspect, durable)
    entries = [entry for scan in scans.values() for entry in scan.delivered]
    rows = tuple(_rows(entries, compacted, hides_compacted=bool(compacted_files)))
    missing = {blob for row in rows for blob in row.blobs if blob_path(blob) not in files}
    last = max([durable, *(scan.max_epoch for scan in scans.values())])
    return Judgement(None, inspect, durable, last, rows, tuple(sorted(missing)))


def blob_path(blob_id: int) -> str:
    return f"blob/dir_{blob_id % 100:02d}/{blob_id:016x}.blob"


# --- small files ---


def _check_manifest(files: Files) -> None:
    found = [_manifest(files.get(name)) for name in (MANIFEST, f"{MANIFEST}.back")]
    version = next((each for each in found if each is not None), None)
    if MANIFEST not in files or version is None:
        raise Broken("the manifest is missing or unreadable")
    if not 1 <= version <= 7:
        raise Broken(f"persistent format version {version}")


def _manifest(data: bytes | None) -> int | None:
    try:
        read = json.loads(data or b"")
        version = read["persistent_format_version"]
        texts = [read["format_version"]] if read["format_version"] == "1.0" else [read["instance_uuid"]]
    except (ValueError, KeyError, TypeError):
        return None
    is_sound = type(version) in (int, float) and all(isinstance(text, str) for text in texts)
    return int(version) if is_sound else None


def _durable_epoch(files: Files) -> int:
    found = _records(files.get(EPOCH, b""))
    if not found:
        others = [content for name, content in files.items() if name.startswith(EPOCH) and name != EPOCH]
        found = [epoch for content in others for epoch in _records(content)]
    return max(found, default=0)


def _records(data: bytes) -> list[int]:
    if len(data) % 9 or any(data[at] != DURABLE for at in range(0, len(data), 9)):
        raise Broken("the epoch file is torn or damaged")
    return [epoch for _, epoch in struct.iter_unpack("<BQ", data)]


def _catalog(files: Files) -> tuple[set[str], set[str]]:
    """Return the compacted and detached files that count.

    A missing catalog is recreated empty; a damaged catalog is an error.
    """
    if CATALOG not in files:
        return set(), set()
    try:
        return _parsed_catalog(files[CATALOG])
    except Broken:
        if f"{CATALOG}.back" not in files:
            raise
        return _parsed_catalog(files[f"{CATALOG}.back"])


def _parsed_catalog(data: bytes) -> tuple[set[str], set[str]]:
    lines = data.decode("latin-1").split("\n")
    if lines[0] != "COMPACTION_CATALOG_HEADER":
        raise Broken("the catalog has no header")
    compacted: set[str] = set()
    detached: set[str] = set()
    has_epoch = False
    for line in lines[1:]:
        if line == "COMPACTION_CATALOG_FOOTER":
            if not has_epoch:
                raise Broken("the catalog has no MAX_EPOCH_ID")
            return compacted, detached
        match line.split():
            case []:
                pass
            case ["COMPACTED_FILE", name, version, *_] if re.match(r"[+-]?\d", version):
                compacted.add(name)
            case ["DETACHED_PWAL", name, *_]:
                detached.add(name)
            case ["MAX_EPOCH_ID", number, *_] if re.match(r"[+-]?\d", number):
                has_epoch = True
            case ["MAX_BLOB_ID", number, *_] if re.match(r"[+-]?\d", number):
                pass
            case _:
                raise Broken(f"the catalog has an invalid line {line!r}")
    raise Broken("the catalog has no footer")


# --- log files ---


def entries_of(data: bytes) -> Iterator[Entry]:
    """Yield entries and markers up to the end, or to the first incomplete or invalid one (kind 0 or above 10)."""
    at = 0
    while at < len(data):
        found, end = _entry(data, at)
        yield found
        if found.is_short or not PUT <= found.kind <= PUT_BLOBS:
            return
        at = end


def _entry(data: bytes, at: int) -> tuple[Entry, int]:
    kind, body = data[at], at + 1
    try:
        match kind:
            case 2 | 4 | 6:
                (epoch,) = _MARKER.unpack_from(data, body)
                return Entry(at, kind, epoch=epoch), body + 8
            case 3:
                epoch, _ = _END.unpack_from(data, body)
                return Entry(at, kind, epoch=epoch), body + 9
            case 7 | 8 | 9:
                storage, major, minor = _STORAGE.unpack_from(data, body)
                return Entry(at, kind, storage=storage, version=(major, minor)), body + 24
            case 1 | 10:
                return _put(data, at)
            case 5:
                key_size, storage = _REMOVE.unpack_from(data, body)
                key, body = _bytes(data, body + 12, key_size)
                version = _VERSION.unpack_from(data, body)
                return Entry(at, kind, storage=storage, key=key, version=version), body + 16
    except struct.error:
        return Entry(at, kind, is_short=True), len(data)
    return Entry(at, kind), len(data)


def _put(data: bytes, at: int) -> tuple[Entry, int]:
    kind = data[at]
    key_size, value_size, storage = _PUT.unpack_from(data, at + 1)
    key, body = _bytes(data, at + 17, key_size)
    version = _VERSION.unpack_from(data, body)
    value, body = _bytes(data, body + 16, value_size)
    blobs: tuple[int, ...] = ()
    if kind == PUT_BLOBS:
        (count,) = struct.unpack_from("<I", data, body)
        packed, body = _bytes(data, body + 4, 8 * count)
        blobs = tuple(blob for (blob,) in struct.iter_unpack("<Q", packed))
    return Entry(at, kind, storage=storage, key=key, value=value, version=version, blobs=blobs), body


def _bytes(data: bytes, at: int, size: int) -> tuple[bytes, int]:
    if at + size > len(data):
        raise struct.error("short")
    return data[at : at + size], at + size


@dataclass
class _Scan:
    """A scan of one log file.

    At startup the scan stops at the first error; an inspection continues. In an inspection, a later error replaces an
    earlier one, whichever is worse, as in the original.
    """

    data: bytes
    durable: int
    is_startup: bool
    severity: int = OK
    max_epoch: int = 0
    delivered: list[Entry] = field(default_factory=list)
    _is_first: bool = True
    _is_valid: bool = True
    _is_marked: bool = False
    _epoch: int = (1 << 64) - 1

    def __post_init__(self) -> None:
        for entry in entries_of(self.data):
            if not (self._take_short(entry) if entry.is_short else self._take(entry)):
                return

    def refuse(self, name: str) -> None:
        """Raise Broken if the original does not open a directory with this file."""
        is_detached = len(name) > 9
        tolerated = (OK, REPAIRED, BROKEN_MARKED) if is_detached else (OK, REPAIRED)
        if self.severity not in tolerated:
            raise Broken(f"{name}: {self.severity:#x}")

    def _worsen(self, severity: int) -> None:
        self.severity = max(self.severity, severity)

    def _take(self, entry: Entry) -> bool:
        """Process an entry; return False if the scan ends here."""
        if entry.kind in (BEGIN, INVALIDATED):
            self._open(entry)
        elif entry.kind in DATA:
            if self._is_first:
                self.severity = UNEXPECTED
                return not self.is_startup
            if self._is_valid:
                self.delivered.append(entry)
        elif entry.kind == END:
            if self._is_first:
                self.severity = UNEXPECTED
                return False
            self._is_first, self._is_valid = True, False
        elif entry.kind == DURABLE:
            self.severity = UNEXPECTED
            return not self.is_startup
        else:
            self._take_unknown()
            return False
        return True

    def _open(self, entry: Entry) -> None:
        self.max_epoch = max(self.max_epoch, entry.epoch)
        self._is_first, self._is_marked = False, entry.kind == INVALIDATED
        self._is_valid = entry.kind == BEGIN and entry.epoch <= self.durable
        if entry.kind == BEGIN:
            self._epoch = entry.epoch
            if not self._is_valid:
                self._is_marked = self.is_startup
                self._worsen(REPAIRED if self.is_startup else NONDURABLE)

    def _take_short(self, entry: Entry) -> bool:
        if entry.kind == INVALIDATED:
            return False
        if entry.kind == BEGIN:
            is_lost = not self._is_first and self._epoch <= self.durable
            self.severity = CORRUPTED if is_lost else BROKEN
        elif entry.kind == DURABLE or self._is_first:
            self.severity = UNEXPECTED
        else:
            self._take_broken_tail()
        return False

    def _take_unknown(self) -> None:
        if self._is_first:
            self.severity = BROKEN
        else:
            self._take_broken_tail()

    def _take_broken_tail(self) -> None:
        if self._is_valid and self._epoch <= self.durable:
            self.severity = CORRUPTED
        elif self._is_marked:
            self._worsen(BROKEN_MARKED)
        else:
            self.severity = BROKEN


def _inspected(logs: Files, durable: int) -> int:
    worst = OK
    for name, data in logs.items():
        scan = _Scan(data, durable, is_startup=False)
        is_forgiven = len(name) > 9 and scan.severity == BROKEN_MARKED
        worst = max(worst, OK if is_forgiven else scan.severity)
    return 0 if worst <= REPAIRED else 2 if worst >= CORRUPTED else 1


def _compacted(data: bytes) -> Iterator[Entry]:
    previous = b""
    for entry in entries_of(data):
        if entry.is_short or not PUT <= entry.kind <= PUT_BLOBS:
            raise Broken(f"{COMPACTED} is damaged at byte {entry.at}")
        if entry.kind in (PUT, REMOVE, PUT_BLOBS):
            if _sort_key(entry) < previous:
                raise Broken(f"{COMPACTED} is out of order at byte {entry.at}")
            previous = _sort_key(entry)
            yield entry


# --- rows ---


def _sort_key(entry: Entry) -> bytes:
    return _MARKER.pack(entry.storage) + entry.key


def _rows(entries: list[Entry], compacted: list[Entry], *, hides_compacted: bool) -> Iterator[Row]:
    """Return the rows that a cursor shows.

    A remove hides the compacted copy of its key only if the catalog lists that file.
    """
    cleared: dict[int, Version] = {}
    winners: dict[bytes, Entry] = {}
    for entry in entries:
        if entry.kind in (CLEAR, DROP):
            cleared[entry.storage] = max(cleared.get(entry.storage, (0, 0)), entry.version)
        elif entry.kind != ADD:
            before = winners.get(_sort_key(entry))
            if before is None or before.version <= entry.version:
                winners[_sort_key(entry)] = entry
    shown: dict[bytes, Entry] = {}
    for entry in reversed(compacted):  # of several rows with one key, the first one counts
        shown[_sort_key(entry)] = entry
    for key, entry in list(shown.items()):
        if entry.version < cleared.get(entry.storage, (0, 0)):
            del shown[key]
    for key, entry in winners.items():
        is_alive = entry.version >= cleared.get(entry.storage, (0, 0))
        if is_alive and (entry.kind != REMOVE or hides_compacted):
            shown[key] = entry
    for _, entry in sorted(shown.items()):
        if entry.kind != REMOVE:
            yield Row(entry.storage, entry.key, entry.value, entry.blobs)
