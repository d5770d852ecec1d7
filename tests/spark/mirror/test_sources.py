"""The sources of a mirror's log."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from flowstone.errors import FlowstoneError
from flowstone.iproto.uri import parse_uri
from flowstone.outside import production
from flowstone.replication.vclock import VClock
from flowstone.spark.index.log_index import ArchiveIndex
from flowstone.spark.mirror import mirror_run
from flowstone.spark.mirror.sources import DirectorySource, LiveSource, MirrorBusy
from flowstone.spark.sources.tarantool.spool import facts_of
from tests.node.archived_server import RealServer
from tests.real_tarantool import free_port
from tests.spark.archives import WrittenArchive
from tests.spark.change_rows import UUID, insert, whole


@pytest.fixture
def archive(tmp_path: Path) -> WrittenArchive:
    written = WrittenArchive(production().disk, str(tmp_path / "archive"))
    written.define_orders()
    written.save()
    return written


def test_directory_source_follows_the_log_and_keeps_it(archive: WrittenArchive) -> None:
    source = DirectorySource(archive.directory)
    assert (source.replicaset_uuid, source.target()) == (UUID, VClock({1: 2}))
    archive.write(whole(insert(3, 1, "a")))
    archive.save()
    source.wait(0.01)
    assert source.index.settled == VClock({1: 3})
    source.check()
    source.collect(VClock({1: 3}))
    source.close()
    assert ArchiveIndex.open(production().disk, archive.directory).earliest == VClock()


def test_server_version_is_that_of_the_log(archive: WrittenArchive) -> None:
    assert ArchiveIndex.open(production().disk, archive.directory).server_version == (2, 11, 9)


def test_spool_has_only_one_mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowstone.spark.sources.tarantool.spool.LOCK_SECONDS", 0.2)
    spool = tmp_path / "spools" / UUID
    spool.mkdir(parents=True)
    lock = production().disk.lock(str(spool))
    with pytest.raises(MirrorBusy, match="is in use by another mirror"):
        LiveSource(
            [parse_uri(f"127.0.0.1:{free_port()}")],
            UUID,
            str(spool),
            begin=None,
            definitions=None,
            fail_on_data_loss=True,
            register=False,
            on_event=lambda message: None,
        )
    lock.release()


def test_spool_that_cannot_begin_leaves_no_files(tmp_path: Path) -> None:
    with pytest.raises(FlowstoneError):
        LiveSource(
            [parse_uri(f"127.0.0.1:{free_port()}")],
            UUID,
            str(tmp_path / UUID),
            begin=None,
            definitions=None,
            fail_on_data_loss=True,
            register=False,
            on_event=lambda message: None,
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("tarantool")
def test_source_that_is_closed_sends_no_message(tmp_path: Path) -> None:
    """Only the mirror reports the stop: one message is enough."""
    said: list[str] = []
    with RealServer(tmp_path / "master") as server:
        members = [parse_uri(server.uri)]
        source = LiveSource(
            members,
            facts_of(members).replicaset_uuid,
            str(tmp_path / UUID),
            begin=None,
            definitions=None,
            fail_on_data_loss=True,
            register=False,
            on_event=said.append,
        )
        source.close()
    assert any(line.startswith("snapshot ") for line in said)
    assert not any("stopped" in line for line in said)


def test_once_does_not_wait_for_unsettled_rows() -> None:
    class Source:
        received = VClock({1: 9})
        index = SimpleNamespace(settled=VClock({1: 7}))

    stream = mirror_run._Stream(Source(), VClock({1: 6}), target=VClock({1: 9}))  # type: ignore[arg-type]
    assert not stream.is_done
    stream.position = VClock({1: 7})
    assert stream.is_done
    Source.received = VClock({1: 8})
    assert not stream.is_done
