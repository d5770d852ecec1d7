"""Names in a data directory, as the original writes and accepts them."""

from __future__ import annotations

from hypothesis import given

from flowstone.limestone.format import names
from tests.limestone import recorded


def test_log_files_are_recognized_as_active_or_detached() -> None:
    assert [names.pwal(number) for number in (0, 9999)] == ["pwal_0000", "pwal_9999"]
    assert [names.is_pwal(name) for name in ("pwal_0000", names.COMPACTED, "epoch", "xpwal_0000")] == [1, 1, 0, 0]
    assert [names.is_detached(name) for name in ("pwal_0000", "pwal_0000.01794772615522.0", "compaction_catalog")] == [
        False,
        True,
        False,
    ]


def test_rotated_files_keep_their_name_with_the_time_appended() -> None:
    assert names.rotated("pwal_0001", 1794772615522, 0) == "pwal_0001.01794772615522.0"
    assert names.is_epoch_file(names.rotated("epoch", 1, 7))
    assert not names.is_epoch_file(names.EPOCH_TEMPORARY)


def test_recorded_blobs_have_the_expected_paths() -> None:
    found = sorted(recorded.HERE.rglob("*.blob"))
    assert found
    for path in found:
        blob_id = names.blob_id(path.name)
        assert blob_id is not None
        assert path.as_posix().endswith(names.blob(blob_id))


@given(recorded.ids)
def test_blob_id_round_trips_through_its_name(blob_id: int) -> None:
    assert names.blob_id(names.blob(blob_id).rsplit("/", 1)[1]) == blob_id
    assert names.blob_id(f"{blob_id:016x}.blob.tmp") is None
