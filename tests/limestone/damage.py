"""Damaged files with the verdicts of the real tools: a clean file of epochs 4 and 5, with appended bytes.

The durable epoch is 5 (docs/spec/limestone.md#damage-matrix). The tests of the tools use these cases;
`test_log_scan.py` has the results of a scan.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from flowstone.limestone.format import catalog, epoch_file, manifest, names
from flowstone.limestone.format.catalog import Catalog
from flowstone.limestone.format.entries import EntryType, Marker, encode
from flowstone.limestone.format.manifest import Manifest
from flowstone.outside import production
from tests.limestone.store.test_compaction import session, set_key

UUID: Final = "7036c76f-ef9c-4258-9711-665964110f2a"


def begin(epoch: int) -> bytes:
    return encode(Marker(EntryType.MARKER_BEGIN, epoch))


def end(epoch: int) -> bytes:
    return encode(Marker(EntryType.MARKER_END, epoch))


ENTRY: Final = encode(set_key(b"key", b"value", 5))
CLEAN: Final = session(4, set_key(b"a", b"4", 4)) + session(5, set_key(b"b", b"5", 5))
SIX: Final = session(6, set_key(b"c", b"6", 6))


class Damage(NamedTuple):
    """Appended bytes, and what the real tools do with them.

    `inspect`: the exit code. `repair` and `cut`: the messages of repair. `repaired`: the appended bytes after a repair.
    """

    name: str
    appended: bytes
    inspect: int
    repair: str
    cut: str
    repaired: bytes
    after_cut: bytes = b""


def _marked(data: bytes) -> bytes:
    return b"\x06" + data[1:]


def _kept(name: str, data: bytes, code: int, status: str) -> Damage:
    """Return damage that repair does not change."""
    return Damage(name, data, code, status, status, data, data)


def _broken(name: str, data: bytes) -> Damage:
    return Damage(name, data, 1, "repaired", "repaired", _marked(data))


MATRIX: Final = [
    _kept("nothing", b"", 0, "OK"),
    Damage("complete snippet of epoch 6", SIX, 1, "repaired", "repaired", _marked(SIX), _marked(SIX)),
    Damage("same without end marker", SIX[:-10], 1, "repaired", "repaired", _marked(SIX[:-10]), _marked(SIX[:-10])),
    _broken("epoch 6 torn in an entry", SIX[:-11]),
    _broken("epoch 6 torn in the end marker", SIX[:-1]),
    _kept("epoch 5 without end marker", begin(5) + ENTRY, 0, "OK"),
    _kept("epoch 5 torn in an entry", begin(5) + ENTRY[:-1], 2, "unrepairable"),
    _kept("epoch 5 torn in the end marker", begin(5) + ENTRY + end(5)[:-1], 2, "unrepairable"),
    _broken("short begin marker", b"\x02\x05\x00"),
    _kept("short marked begin marker", b"\x06\x05\x00", 0, "OK"),
    _broken("zeros", bytes(40)),
    _broken("zeros in epoch 6", SIX[:-10] + bytes(40)),
    _kept("zeros in epoch 5", begin(5) + ENTRY + bytes(40), 2, "unrepairable"),
    _broken("unknown byte", b"\x55"),
    _kept("entry without begin", ENTRY, 2, "unrepairable"),
    _kept("torn entry without begin", ENTRY[:-1], 2, "unrepairable"),
    _kept("end marker without begin", end(5), 2, "unrepairable"),
    _kept("durable marker", epoch_file.record(5), 2, "unrepairable"),
    _kept("marked snippet, then a good one", _marked(SIX) + session(5, set_key(b"d", b"5", 5)), 0, "OK"),
    Damage("torn marked snippet", _marked(SIX[:-1]), 1, "OK", "repaired", _marked(SIX[:-1])),
]


def write(directory: Path, appended: bytes) -> Path:
    """Write a directory whose only log file is clean except for the appended bytes."""
    directory.mkdir()
    (directory / names.MANIFEST).write_bytes(manifest.encode(Manifest(UUID)))
    catalog.write(production().disk, str(directory), Catalog())
    (directory / names.EPOCH).write_bytes(epoch_file.record(5))
    (directory / "pwal_0000").write_bytes(CLEAN + appended)
    return directory
