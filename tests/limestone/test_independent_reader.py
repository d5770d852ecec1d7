"""The independent reader agrees with the original's recorded verdicts, and our recovery agrees with the reader.

`interop/test_independent_reader.py` compares the reader with the original itself, if available.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from flowstone.limestone.errors import DamagedFile
from flowstone.limestone.format.log_scan import STARTUP
from flowstone.limestone.store.recovery import recover
from flowstone.outside import production
from tests.limestone import damage, independent_reader, recorded
from tests.limestone.independent_reader import CATALOG, COMPACTED, files_of, judge
from tests.limestone.mutations import mutated

DISK = production().disk
OPENS = {
    "nothing",
    "complete snippet of epoch 6",
    "same without end marker",
    "epoch 5 without end marker",
    "short marked begin marker",
    "marked snippet, then a good one",
}
"""The known damage with which the original opens a directory (docs/spec/limestone.md#damage-matrix)."""


def test_reader_imports_nothing_from_flowstone() -> None:
    assert "flowstone" not in Path(independent_reader.__file__).read_text()


@pytest.mark.parametrize("case", damage.MATRIX, ids=lambda case: case.name)
def test_known_damage_gets_the_recorded_verdict(case: damage.Damage, tmp_path: Path) -> None:
    found = judge(files_of(damage.write(tmp_path / "d", case.appended)))
    assert (found.problem is None, found.inspect) == (case.name in OPENS, case.inspect)
    if found.problem is None:
        assert [row.key for row in found.rows][:2] == [b"a", b"b"]


@pytest.mark.parametrize(
    ("directory", "listing"),
    [
        ("dirs-master/before", "before.rows.txt"),
        ("dirs-replica/before", "before.rows.txt"),
        ("dirs-replica/after-offline-compaction", "after-offline.rows.txt"),
    ],
)
def test_rows_equal_the_recorded_ones(directory: str, listing: str) -> None:
    expected = recorded.rows((recorded.HERE / directory).with_name(listing).read_text())
    assert judge(files_of(recorded.HERE / directory)).plain_rows() == expected


def test_remove_hides_a_compacted_row_only_if_the_catalog_lists_the_file() -> None:
    files = files_of(recorded.HERE / "quirk-offline-remove" / "dir")
    shown = judge(files).plain_rows()
    listed = files[CATALOG].replace(b"MAX_EPOCH_ID", f"COMPACTED_FILE {COMPACTED} 1\nMAX_EPOCH_ID".encode())
    assert len(judge(files | {CATALOG: listed}).plain_rows()) < len(shown)


def test_empty_directory_is_opened_as_a_new_one() -> None:
    assert judge({}).problem is None


@pytest.mark.parametrize("seed", range(40))
def test_our_recovery_agrees_on_damaged_log_files(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    source = rng.choice(sorted(path.parent for path in recorded.HERE.rglob("pwal_0000")))
    directory = Path(shutil.copytree(source, tmp_path / "d"))
    path = rng.choice(sorted(directory.glob("pwal_????")))
    path.write_bytes(mutated(path.read_bytes(), rng, [source.joinpath(path.name).read_bytes()]))
    found = judge(files_of(directory))
    try:
        ours = recover(DISK, str(directory), STARTUP, repairs=False)
    except DamagedFile:
        assert found.problem is not None
        return
    assert found.problem is None
    assert (found.durable_epoch, found.last_epoch) == (ours.durable_epoch, ours.last_epoch)
    if COMPACTED not in files_of(directory):
        assert found.plain_rows() == [(row.storage_id, row.key, row.value) for row in ours.snapshot.rows()]
