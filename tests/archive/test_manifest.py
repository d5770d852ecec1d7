"""The manifest: written atomically, and read back unchanged."""

from __future__ import annotations

import json
from contextlib import suppress
from random import Random

import pytest

from flowstone.archive.manifest import (
    NAME,
    ArchivedSnapshot,
    ArchivedUpstream,
    ArchiveManifest,
    Gap,
    NotAnArchive,
    load,
    save,
)
from flowstone.replication.vclock import VClock
from tests.node.archived_rows import INSTANCE, new_disk
from tests.node.fault_disk import Died


def a_manifest() -> ArchiveManifest:
    gap = Gap({1: 10}, {1: 20, 2: 5}, VClock({1: 10}).missing_rows(VClock({1: 20, 2: 5})), 3.5, "collected")
    return ArchiveManifest(
        INSTANCE,
        instance_uuid=INSTANCE,
        upstream=ArchivedUpstream(INSTANCE, "127.0.0.1:3301", "2.6.0"),
        position={1: 30},
        settled={1: 29},
        snapshots=[ArchivedSnapshot("00000000000000000010.snap", {1: 10}, 1.0, "first")],
        gaps=[gap],
    )


def test_manifest_round_trips() -> None:
    disk = new_disk()
    save(disk, "dir", a_manifest())
    assert load(disk, "dir") == a_manifest()
    assert disk.list_directory("dir") == [NAME]


def test_json_names_the_format_and_has_vclocks_as_objects() -> None:
    disk = new_disk()
    save(disk, "dir", a_manifest())
    read = json.loads(bytes(disk.names[f"dir/{NAME}"].data))
    assert read["format"] == "flowstone-archive"
    assert read["version"] == 1
    assert read["position"] == {"1": 30}
    assert read["gaps"][0]["missing"] == [[1, 11, 20], [2, 1, 5]]


def test_directory_without_a_manifest_is_not_an_archive() -> None:
    assert load(new_disk(), "dir") is None


def test_crash_during_a_save_keeps_the_old_or_the_new_manifest() -> None:
    changed = a_manifest()
    changed.position = {1: 31}
    for life in range(0, 1200, 100):
        disk = new_disk()
        save(disk, "dir", a_manifest())
        disk.life = life
        with suppress(Died):
            save(disk, "dir", changed)
        for after in (disk.after_death(), disk.after_power_loss(Random(life))):
            assert load(after, "dir") in (a_manifest(), changed)
            save(after, "dir", changed)
            assert load(after, "dir") == changed


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"replica_uuid": 1}', b'{"replica_uuid":"x","format":"else"}'])
def test_error_names_an_invalid_manifest(text: bytes) -> None:
    disk = new_disk()
    disk.create(f"dir/{NAME}").append(text)
    with pytest.raises(NotAnArchive, match=NAME):
        load(disk, "dir")


def test_manifest_of_a_later_release_is_rejected() -> None:
    disk = new_disk()
    manifest = a_manifest()
    manifest.version = 2
    save(disk, "dir", manifest)
    with pytest.raises(NotAnArchive, match="version 2"):
        load(disk, "dir")


def test_gap_names_the_missing_rows() -> None:
    assert str(a_manifest().gaps[0]) == "LSN 11 to 20 of replica 1, 1 to 5 of replica 2 are missing"
    one = Gap({1: 3}, {1: 4}, ((1, 4, 4),), 0.0, "")
    assert str(one) == "LSN 4 of replica 1 is missing"
