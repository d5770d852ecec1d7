"""The state of an instance that several components share."""

from __future__ import annotations

import pytest

from flowstone.iproto.errors import TarantoolError
from flowstone.node.instance import NoFiles
from tests.node.instances import make_instance


def test_position_is_the_written_position() -> None:
    instance = make_instance()
    instance.journal.submit(b"", 3, lambda error: None)
    assert instance.vclock.to_mapping() == {1: 1}
    instance.journal.flush()
    assert instance.vclock.to_mapping() == {1: 4}
    assert instance.id == 1


def test_read_only_equals_that_of_the_box() -> None:
    instance = make_instance(read_only=True)
    assert instance.is_read_only
    instance.box.is_read_only = False
    assert not instance.is_read_only


async def test_instance_without_files_rejects_requests_that_need_them() -> None:
    files = NoFiles()
    with pytest.raises(TarantoolError, match="does not support snapshots"):
        await files.snapshot()
    with pytest.raises(TarantoolError, match="does not support backups"):
        files.start_backup(0)
    files.stop_backup()
    assert files.gc_info() == {}
    assert not files.gc_vclock


def test_new_instance_has_a_small_uptime() -> None:
    assert 0 <= make_instance().uptime() < 100
