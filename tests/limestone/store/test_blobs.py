"""Blobs: registered durably, owned by the sessions that name them, and deleted only when no reader can see them."""

from __future__ import annotations

import hashlib
import hmac
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.limestone.format import names
from flowstone.limestone.format.entries import Entry, WriteVersion, put
from flowstone.limestone.store import blobs
from flowstone.limestone.store.blobs import ID_MAX, BlobError, Blobs
from flowstone.outside import production
from tests.limestone import recorded

OUTSIDE = production()
DISK = OUTSIDE.disk


@pytest.fixture
def registry(tmp_path: Path) -> Blobs:
    return Blobs(OUTSIDE, str(tmp_path / "data"), 1)


@pytest.fixture(autouse=True)
def directory(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


async def test_registered_data_has_the_path_of_the_real_program(registry: Blobs, directory: Path) -> None:
    pool = registry.pool()
    found = [await pool.register_data(b"hello-blob!"), await pool.register_data(b"")]
    assert found == [1, 2]
    assert (directory / "blob/dir_01/0000000000000001.blob").read_bytes() == b"hello-blob!"
    assert (directory / "blob/dir_02/0000000000000002.blob").read_bytes() == b""
    assert registry.content(1) == b"hello-blob!"
    assert blobs.stored_ids(DISK, str(directory)) == [1, 2]


async def test_registered_file_is_copied_and_a_temporary_one_moved(registry: Blobs, tmp_path: Path) -> None:
    pool = registry.pool()
    (tmp_path / "kept").write_bytes(b"kept")
    (tmp_path / "gone").write_bytes(b"gone")
    first = await pool.register_file(str(tmp_path / "kept"))
    second = await pool.register_file(str(tmp_path / "gone"), is_temporary=True)
    assert (registry.content(first), registry.content(second)) == (b"kept", b"gone")
    assert (tmp_path / "kept").exists()
    assert not (tmp_path / "gone").exists()
    with pytest.raises(BlobError, match="file does not exist"):
        await pool.register_file(str(tmp_path / "gone"))


async def test_temporary_file_on_another_file_system_is_copied_and_deleted(
    registry: Blobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: object, old: str, new: str) -> None:
        raise OSError(18, "Invalid cross-device link", old)

    (tmp_path / "gone").write_bytes(b"gone")
    monkeypatch.setattr(type(DISK), "rename", refuse)
    assert registry.content(await registry.pool().register_file(str(tmp_path / "gone"), is_temporary=True)) == b"gone"
    assert not (tmp_path / "gone").exists()


async def test_duplicate_outlives_its_original(registry: Blobs, directory: Path) -> None:
    pool = registry.pool()
    first = await pool.register_data(b"data")
    second = await pool.duplicate_data(first)
    blobs.delete(DISK, str(directory), [first, first])
    assert registry.content(second) == b"data"
    with pytest.raises(BlobError, match="cannot duplicate blob 1"):
        await pool.duplicate_data(first)
    with pytest.raises(BlobError, match="blob 1 does not exist"):
        registry.content(first)


async def test_release_deletes_unreferenced_blobs(registry: Blobs, directory: Path) -> None:
    pool, other = registry.pool(), registry.pool()
    used, unused = await pool.register_data(b"used"), await pool.register_data(b"unused")
    of_other = await other.register_data(b"other")
    registry.use({used})
    registry.log({used})
    await pool.release()
    await pool.release()
    assert blobs.stored_ids(DISK, str(directory)) == [used, of_other]
    assert unused not in registry.held()
    with pytest.raises(BlobError, match="released"):
        await pool.register_data(b"more")


async def test_leftover_file_of_a_crash_is_replaced_by_a_new_blob(registry: Blobs, directory: Path) -> None:
    (directory / "blob/dir_01").mkdir(parents=True)
    (directory / names.blob(1)).write_bytes(b"longer than the new one")
    assert registry.content(await registry.pool().register_data(b"new")) == b"new"


async def test_registration_fails_when_blob_ids_are_exhausted(tmp_path: Path) -> None:
    registry = Blobs(OUTSIDE, str(tmp_path / "data"), ID_MAX - 1)
    assert await registry.pool().register_data(b"last") == ID_MAX - 1
    with pytest.raises(BlobError, match="blob ids are exhausted"):
        await registry.pool().register_data(b"one too many")


async def test_blob_pending_for_its_entry_or_named_during_a_compaction_is_kept(registry: Blobs) -> None:
    pool = registry.pool()
    waiting, before, during = [await pool.register_data(b"") for _ in range(3)]
    registry.use({before})
    registry.log({before})
    with registry.watching():
        registry.use({during, before})
        registry.log({during, before})
        assert registry.held() == {waiting, during, before}
    assert registry.held() == {waiting}


async def test_blob_named_by_a_session_before_a_compaction_is_kept_until_both_end(
    registry: Blobs,
) -> None:
    blob_id = await registry.pool().register_data(b"")
    registry.use({blob_id})
    assert registry.held() == {blob_id}
    with registry.watching():
        registry.log({blob_id})
        assert registry.held() == {blob_id}
    assert registry.held() == set()


async def test_blob_of_an_aborted_session_returns_to_its_pool(registry: Blobs, directory: Path) -> None:
    pool = registry.pool()
    blob_id = await pool.register_data(b"data")
    registry.use({blob_id})
    assert registry.take_back({blob_id}) == []
    assert registry.held() == {blob_id}
    registry.use({blob_id})
    await pool.release()
    assert blobs.stored_ids(DISK, str(directory)) == [blob_id]
    assert registry.take_back({blob_id}) == [blob_id]
    assert registry.held() == set()


@pytest.mark.parametrize("is_logged_first", [True, False])
async def test_blob_is_kept_while_one_session_names_it(registry: Blobs, is_logged_first: bool) -> None:
    pool = registry.pool()
    blob_id = await pool.register_data(b"data")
    registry.use({blob_id})
    registry.use({blob_id})
    if is_logged_first:
        registry.log({blob_id})
        assert registry.take_back({blob_id}) == []
    else:
        assert registry.take_back({blob_id}) == []
        registry.log({blob_id})
    await pool.release()
    assert registry.content(blob_id) == b"data"


async def test_missing_blob_cannot_be_named(registry: Blobs, directory: Path) -> None:
    pool = registry.pool()
    released = await pool.register_data(b"")
    await pool.release()
    stored = await registry.pool().register_data(b"")
    for missing in (released, 12345, -1, 1 << 64):
        with pytest.raises(BlobError, match=f"blob {missing} does not exist in"):
            registry.use({stored, missing})
    assert registry.give_back([stored]) == [stored]
    registry.use({stored})  # no session owns it, but its file exists: a row may name it again


def test_reference_tag_is_a_keyed_hash_of_blob_and_transaction(registry: Blobs, tmp_path: Path) -> None:
    message = (7).to_bytes(8, "little") + (9).to_bytes(8, "little")
    digest = hmac.new(registry._key, message, hashlib.sha256).digest()
    assert registry.reference_tag(7, 9) == int.from_bytes(digest[:8], "little")
    assert registry.reference_tag(7, 9) != Blobs(OUTSIDE, str(tmp_path), 1).reference_tag(7, 9)


def test_collection_at_start_keeps_blobs_of_rows_and_of_larger_ids(directory: Path) -> None:
    shutil.copytree(recorded.HERE / "basic/master-dir/blob", directory / "blob")
    for name in ("blob/dir_05/0000000000000005.blob", "blob/dir_03/not-a-blob", "blob/stray", "blob/dir_09/x.blob"):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(b"")
    (directory / "blob/dir_04").mkdir()
    (directory / "blob/dir_04/0000000000000099.blob").write_bytes(b"")  # id 0x99 belongs in another directory
    assert blobs.stored_ids(DISK, str(directory)) == [1, 2, 3, 5]
    assert blobs.collect_at_start(DISK, str(directory), {2}, 3) == [1, 3]
    assert blobs.stored_ids(DISK, str(directory)) == [2, 5]
    assert (directory / "blob/dir_03/not-a-blob").exists()
    assert blobs.stored_ids(DISK, str(directory / "nothing")) == []


keys = st.sampled_from([b"a", b"b"])
versions = st.builds(WriteVersion, st.integers(0, 4), st.integers(0, 2))
with_blobs = st.builds(
    lambda key, version, ids: put(1, key, b"", version, tuple(ids)), keys, versions, st.lists(st.integers(1, 9))
)


@given(st.lists(with_blobs), versions)
def test_garbage_is_never_visible_to_a_reader_at_or_after_the_boundary(
    entries: list[Entry], boundary: WriteVersion
) -> None:
    found = blobs.visible_ids(entries, boundary)
    for at in {boundary, *(entry.version for entry in entries if entry.version >= boundary)}:
        for key in (b"a", b"b"):
            seen = [entry for entry in entries if entry.key == key and entry.version <= at]
            if seen:
                newest = max(entry.version for entry in seen)
                last = [entry for entry in seen if entry.version == newest][-1]
                assert found.issuperset(last.blob_ids)
    assert blobs.garbage(range(12), found, 8) == [each for each in range(9) if each not in found]
