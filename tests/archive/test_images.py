"""Images: each archived row with its old and new tuple, despite rollbacks in between."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest

from flowstone.archive.archive import Archive
from flowstone.archive.images import CannotImage, Images
from flowstone.archive.manifest import load
from flowstone.box import system
from flowstone.box.bootstrap import bootstrap_rows
from flowstone.box.box import Box
from flowstone.box.dialect import Dialect
from flowstone.box.engine import statements
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import pack, unpack_body
from flowstone.iproto.row import Row
from flowstone.node.wal.recovery import RecoveredBox
from flowstone.node.wal.replay import Synchro
from flowstone.outside import production
from flowstone.replication.row_stream import slab_of_rows
from flowstone.replication.vclock import VClock
from flowstone.xlog.directory import scan_directory
from flowstone.xlog.reader import LogFile
from flowstone.xlog.transactions import make_transaction
from tests.interop.versions import ANY, Binary, parameters
from tests.node.archived_rows import SYNC, confirm, rollback
from tests.node.archived_server import RealServer

SPACE, SYNC_SPACE = 512, 513

Change = tuple[int, Any, Any]
"""Return type, old tuple and new tuple of a row."""


def new_images(version: tuple[int, ...] = (2, 11, 9)) -> Images:
    box = Box(Dialect.V2_11)
    random = production().random
    box.is_recovering = True
    for space_id, raw in bootstrap_rows(box.dialect, random.uuid(), random.uuid()):
        statements.insert(box.begin(), box.space(space_id), raw)
    for number, flags in ((SPACE, {}), (SYNC_SPACE, {"is_sync": True})):
        space = [number, 1, f"s{number}", "memtx", 0, flags, []]
        statements.insert(box.begin(), box.space(system.SPACE_ID), pack(space))
        index = [number, 0, "pk", "tree", {"unique": True}, [[0, "unsigned"]]]
        statements.insert(box.begin(), box.space(system.INDEX_ID), pack(index))
    uuid = random.uuid()
    return Images(box, RecoveredBox(VClock(), uuid, uuid, 1, Synchro()), version)


def row(kind: RequestType, lsn: int, body: dict[Key, Any], space: int = SPACE) -> Row:
    packed = pack({Key.SPACE_ID.value: space} | {key.value: value for key, value in body.items()})
    return Row(kind, 1, lsn=lsn, timestamp=1.0, body=packed)


def put(lsn: int, *values: Any, kind: RequestType = RequestType.REPLACE, space: int = SPACE) -> Row:
    return row(kind, lsn, {Key.TUPLE: list(values)}, space)


def whole(*rows: Row, flags: int = 0) -> bytes:
    return b"".join(each.encode() for each in make_transaction(rows, flags).rows)


def changes(rows: bytes) -> list[Change]:
    return [_change(each) for each in slab_of_rows(rows, "").rows()]


def _change(each: Row) -> Change:
    body = unpack_body(each.body) if each.body else {}
    new = body.get(Key.NEW_TUPLE)
    if each.type in (RequestType.INSERT, RequestType.REPLACE):
        assert new is None
        new = body[Key.TUPLE]
    return each.type, body.get(Key.OLD_TUPLE), new


def test_each_row_type_gets_its_missing_images() -> None:
    images = new_images()
    update = {Key.KEY: [1], Key.TUPLE: [["=", 1, "c"]]}
    upsert = {Key.TUPLE: [1, "z"], Key.OPS: [["=", 1, "d"]]}
    rows = whole(put(1, 1, "a", kind=RequestType.INSERT)) + whole(put(2, 1, "b"))
    rows += whole(row(RequestType.UPDATE, 3, update), row(RequestType.UPSERT, 4, upsert))
    rows += whole(row(RequestType.UPSERT, 5, {Key.TUPLE: [2, "z"], Key.OPS: []}))
    rows += whole(row(RequestType.DELETE, 6, {Key.KEY: [1]})) + whole(row(RequestType.DELETE, 7, {Key.KEY: [1]}))
    rows += whole(Row(RequestType.NOP, 1, lsn=8, timestamp=1.0))
    assert changes(images.add(rows)) == [
        (RequestType.INSERT, None, (1, "a")),
        (RequestType.REPLACE, (1, "a"), (1, "b")),
        (RequestType.UPDATE, (1, "b"), (1, "c")),
        (RequestType.UPSERT, (1, "c"), (1, "d")),
        (RequestType.UPSERT, None, (2, "z")),
        (RequestType.DELETE, (1, "d"), None),
        (RequestType.DELETE, None, None),
        (RequestType.NOP, None, None),
    ]


def test_bulk_images_equal_images_row_by_row() -> None:
    rng = Random(5)
    rows = [whole(put(lsn, rng.randrange(9), lsn)) for lsn in range(1, 200)]
    one_by_one = new_images()
    assert new_images().add(b"".join(rows)) == b"".join(one_by_one.add(each) for each in rows)


def test_headers_and_bodies_are_unchanged() -> None:
    plain = whole(put(1, 1, "a"), put(2, 1, "b"))
    first, second = slab_of_rows(new_images().add(plain), "").rows()
    assert first.raw == next(iter(slab_of_rows(plain, "").rows())).raw
    assert (second.lsn, second.tsn, second.flags, second.timestamp) == (2, 1, 1, 1.0)
    assert unpack_body(second.body)[Key.TUPLE] == (1, "b")


@pytest.mark.parametrize("version", [(2, 6, 0), (2, 11, 9)])
def test_rolled_back_row_is_not_replaced(version: tuple[int, ...]) -> None:
    images = new_images(version)
    flags = 0 if version < (2, 8, 1) else SYNC
    images.add(whole(put(1, 1, "kept", space=SYNC_SPACE), flags=flags) + confirm(2, 1))
    images.add(whole(put(3, 1, "gone", space=SYNC_SPACE), flags=flags) + rollback(4, 3))
    (change,) = changes(images.add(whole(put(5, 1, "new", space=SYNC_SPACE), flags=flags)))
    assert change == (RequestType.REPLACE, (1, "kept"), (1, "new"))


def test_error_names_the_row_that_does_not_fit() -> None:
    with pytest.raises(CannotImage, match="LSN 1 of replica 1"):
        new_images().add(whole(put(1, "no number")))


@pytest.mark.real
@pytest.mark.usefixtures("tarantool")
@pytest.mark.parametrize("binary", parameters(ANY))
async def test_real_server_recovers_from_rows_with_images(tmp_path: Path, binary: Binary) -> None:
    directory = tmp_path / "archive"
    with RealServer(tmp_path / "master", binary=binary.path) as server:
        server.eval("fill(1, 50)")
        await Archive(server.uri, directory, images=True).run(once=True)
        server.eval("fill(1, 100) box.space.t:update(7, {{'=', 2, 'seven'}})")
        await Archive(server.uri, directory, images=True).run(once=True)
        server.eval(
            "box.space.t:upsert({7, 'x'}, {{'=', 2, 'eight'}}) box.space.t:delete(7)"
            " box.begin() box.space.t:delete(8) box.space.t:insert{8, 'y'} box.commit()"
            " claim() local s = box.schema.space.create('sync', {is_sync=true}) s:create_index('pk') s:insert{1}"
            " box.cfg{replication_synchro_quorum=2, replication_synchro_timeout=0.05} pcall(s.replace, s, {1, 'gone'})"
            " box.cfg{replication_synchro_quorum=1} s:replace{1, 'new'}"
        )
        await Archive(server.uri, directory, images=True).run(once=True)
        shutil.copytree(directory, tmp_path / "copy")
        dump, vclock, log = server.recovered(tmp_path / "copy")
        assert dump == server.dump()
        assert vclock == server.vclock()
        assert " E>" not in log
    found = changes_of(directory)
    assert (RequestType.UPDATE, (7, "v7"), (7, "seven")) in found
    assert (RequestType.UPSERT, (7, "seven"), (7, "eight")) in found
    assert (RequestType.DELETE, (7, "eight"), None) in found
    assert (RequestType.DELETE, (8, "v8"), None) in found
    assert (RequestType.REPLACE, (1,), (1, "new")) in found
    manifest = load(production().disk, str(directory))
    assert manifest is not None
    assert manifest.images_since == manifest.snapshots[0].vclock


def changes_of(directory: Path) -> list[Change]:
    found: list[Change] = []
    for listed in scan_directory(production().disk, str(directory)).logs:
        with LogFile.open(production().disk, listed.path) as log:
            found += [_change(each) for each in log.rows() if each.type < RequestType.RAFT]
    return found
