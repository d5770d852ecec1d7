"""Planted differences: copies of an archive of a real server with one change each, at the same position.

`rewrite` writes a copy with the archive's own writers, so that its files have no other defect. Each `Plant` names the
expected report of `verify`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import tarantool

from flowstone.archive import manifest as archive_manifest
from flowstone.archive.archive import Archive
from flowstone.archive.archive_log import ArchiveLog
from flowstone.archive.settled_tracker import Verdicts
from flowstone.iproto.constants import RequestType
from flowstone.iproto.msgpack import pack, unpack_body
from flowstone.iproto.row import Row
from flowstone.outside import production
from flowstone.replication.vclock import VClock
from flowstone.spark.verification.digests import DIFFERS, MISSING_IN_A, MISSING_IN_B
from flowstone.xlog.meta import Meta
from flowstone.xlog.reader import LogFile
from flowstone.xlog.writer import SnapWriter
from tests import real_tarantool

ORDERS, EVENTS, PAIRS, EMPTY = 600, 601, 602, 603
SPACE, INDEX, SEQUENCE_DATA = 280, 288, 285
NAMES = {
    ORDERS: "orders", EVENTS: "events", PAIRS: "pairs", EMPTY: "empty",
    SPACE: "_space", INDEX: "_index", SEQUENCE_DATA: "_sequence_data",
}  # fmt: skip

SETUP = r"""
local format = {{'id', 'unsigned'}, {'name', 'string'}, {'total', 'any', is_nullable=true},
                {'more', 'any', is_nullable=true}}
local orders = box.schema.space.create('orders', {id=600, format=format})
orders:create_index('pk') orders:create_index('by_name', {parts={2, 'string'}, unique=false})
local events = box.schema.space.create('events', {id=601}) events:create_index('pk', {parts={1, 'string'}})
local pairs = box.schema.space.create('pairs', {id=602}) pairs:create_index('pk', {parts={1, 'unsigned', 2, 'string'}})
box.schema.space.create('empty', {id=603}):create_index('pk')
local mine = box.schema.space.create('mine', {id=604, is_local=true}) mine:create_index('pk') mine:insert{1, 'here'}
for _, name in ipairs{'numbers', 'tickets'} do
    box.schema.sequence.create(name) for i = 1, 5 do box.sequence[name]:next() end
end
local uuid, ffi = require('uuid'), require('ffi')
for i = 1, 120 do
    orders:insert{i, 'name ' .. i, i * 3, {a = {1, 2, {b = 'deep ' .. i}}, z = i}}
    events:insert{'k' .. i, i, box.NULL}
    pairs:insert{i % 5, 'p' .. i, uuid.fromstr(('00000000-0000-4000-8000-%012d'):format(i)), ffi.cast('double', i)}
end
function change()
    for i = 1, 10 do
        orders:update(i, {{'+', 3, 1}, {'=', 2, 'changed ' .. i}})
        events:upsert({'k' .. (i + 115), 7}, {{'+', 2, 5}})
        box.begin() pairs:replace{9, 'late ' .. i} orders:replace{200 + i, 'late', i, {a = {i}}} box.commit()
    end
    orders:delete(11) events:delete('k12') box.sequence.numbers:next()
end
function one_more() orders:replace{300, 'the last one'} end
"""


@dataclass(frozen=True)
class Source:
    """A real server and its archive, which has a snapshot and later changes."""

    server: real_tarantool.Server
    archive: Path

    def call(self, function: str) -> None:
        connection = tarantool.connect("127.0.0.1", self.server.port)
        connection.call(function)
        connection.close()

    def keep(self, directory: Path | None = None) -> None:
        asyncio.run(Archive(self.server.uri, str(directory or self.archive)).run(once=True))


@contextmanager
def source(directory: Path) -> Iterator[Source]:
    with real_tarantool.serve(directory / "server", setup=SETUP) as server:
        found = Source(server, directory / "archive")
        found.keep()
        found.call("change")
        found.keep()
        yield found


# --- plants ---

Tuples = list[bytes]
Edit = Callable[[Tuples], Tuples]


@dataclass(frozen=True)
class Plant:
    """A change in a space, and its expected report: key, kind (with the plant in B), place."""

    name: str
    space_id: int
    edit: Edit
    key: str
    kind: str = DIFFERS
    path: str | None = None

    def kind_on(self, side: str) -> str:
        """Return the kind if the plant is in side A or B."""
        other = {MISSING_IN_A: MISSING_IN_B, MISSING_IN_B: MISSING_IN_A}
        return self.kind if side == "B" else other.get(self.kind, self.kind)


def _is_key(data: bytes, key: Sequence[Any]) -> bool:
    return list(msgpack.unpackb(data, strict_map_key=False)[: len(key)]) == list(key)


def changed(*key: Any, to: Callable[[bytes], bytes]) -> Edit:
    def edit(tuples: Tuples) -> Tuples:
        found = [to(each) if _is_key(each, key) else each for each in tuples]
        assert found != tuples, f"nothing was planted at {key}"
        return found

    return edit


def field(number: int, value: Any) -> Callable[[bytes], bytes]:
    """Plant another value in a field; bytes are taken as MessagePack."""

    def to(data: bytes) -> bytes:
        parts = [msgpack.packb(each) for each in msgpack.unpackb(data, strict_map_key=False)]
        parts[number] = value if isinstance(value, bytes) else msgpack.packb(value)
        return bytes([0x90 + len(parts)]) + b"".join(parts)

    return to


def byte(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    """Replace some bytes of the tuple."""

    def to(data: bytes) -> bytes:
        assert data.count(old) == 1
        return data.replace(old, new)

    return to


def gone(*key: Any) -> Edit:
    return lambda tuples: [each for each in tuples if not _is_key(each, key)]


def added(*values: Any) -> Edit:
    data = msgpack.packb(values)
    return lambda tuples: sorted([*tuples, data], key=_order)


def _order(data: bytes) -> tuple[Any, ...]:
    values = msgpack.unpackb(data, strict_map_key=False)
    return tuple(values[:2]) if isinstance(values[1], str | int) and isinstance(values[0], int) else tuple(values[:1])


def exchanged(first: Any, second: Any) -> Edit:
    """Exchange the contents of two tuples, except their keys."""

    def edit(tuples: Tuples) -> Tuples:
        values = [msgpack.unpackb(each, strict_map_key=False) for each in tuples]
        a = next(number for number, each in enumerate(values) if each[0] == first)
        b = next(number for number, each in enumerate(values) if each[0] == second)
        values[a][1:], values[b][1:] = values[b][1:], values[a][1:]
        return [msgpack.packb(each) for each in values]

    return edit


def _without(*numbers: int) -> Callable[[bytes], bytes]:
    def to(data: bytes) -> bytes:
        values = msgpack.unpackb(data, strict_map_key=False)
        return msgpack.packb([each for number, each in enumerate(values) if number not in numbers])

    return to


def _more(*values: Any) -> Callable[[bytes], bytes]:
    return lambda data: msgpack.packb([*msgpack.unpackb(data, strict_map_key=False), *values])


def _format(edit: Callable[[list[Any]], None]) -> Callable[[bytes], bytes]:
    """Plant another format, in a row of `_space`."""

    def to(data: bytes) -> bytes:
        values = msgpack.unpackb(data, strict_map_key=False)
        edit(values)
        return msgpack.packb(values)

    return to


def _set(*path_and_value: Any) -> Callable[[list[Any]], None]:
    *path, last, value = path_and_value

    def edit(values: Any) -> None:
        for step in path:
            values = values[step]
        values[last] = value

    return edit


def _reordered(data: bytes) -> bytes:
    values = msgpack.unpackb(data, strict_map_key=False)
    values[3] = dict(reversed(values[3].items()))
    return msgpack.packb(values)


FLOAT_21 = b"\xca\x42\x28\x00\x00"  # 42.0

PLANTS = [
    Plant("the first row is missing", ORDERS, gone(21), "[21]", MISSING_IN_B),
    Plant("the last row of the snapshot is missing", ORDERS, gone(120), "[120]", MISSING_IN_B),
    Plant("a row is missing by its text key", EVENTS, gone("k50"), '["k50"]', MISSING_IN_B),
    Plant("a row is missing by its second part", PAIRS, gone(3, "p33"), '[3,"p33"]', MISSING_IN_B),
    Plant("a row is there that should not be", ORDERS, added(150, "extra"), "[150]", MISSING_IN_A),
    Plant("a row with a text key is there", EVENTS, added("k130", 1), '["k130"]', MISSING_IN_A),
    Plant("a row in a space that is empty", EMPTY, added(1, "x"), "[1]", MISSING_IN_A),
    Plant("a byte deep in a map", ORDERS, changed(30, to=byte(b"deep 30", b"deep 3O")), "[30]", path="more.a[3].b"),
    Plant("a number deep in an array", ORDERS, changed(31, to=byte(b"\x93\x01\x02", b"\x93\x01\x03")), "[31]",
          path="more.a[2]"),
    Plant("a key of a map", ORDERS, changed(32, to=byte(b"\xa1z", b"\xa1y")), "[32]", path="more.z"),
    Plant("the order of a map", ORDERS, changed(33, to=_reordered), "[33]", path="more"),
    Plant("an integer for a double", PAIRS, changed(0, "p40", to=field(3, 40)), '[0,"p40"]', path="[4]"),
    Plant("a double for an integer", ORDERS, changed(34, to=field(2, 102.0)), "[34]", path="total"),
    Plant("a float for an integer", ORDERS, changed(14, to=field(2, FLOAT_21)), "[14]", path="total"),
    Plant("null for absent", ORDERS, changed(35, to=_more(None)), "[35]", path="[5]"),
    Plant("absent for null", EVENTS, changed("k51", to=_without(2)), '["k51"]', path="[3]"),
    Plant("absent for a value", ORDERS, changed(36, to=_without(3)), "[36]", path="more"),
    Plant("null for a value", ORDERS, changed(37, to=field(2, None)), "[37]", path="total"),
    Plant("false for null", EVENTS, changed("k52", to=field(2, False)), '["k52"]', path="[3]"),
    Plant("zero for null", EVENTS, changed("k53", to=field(2, 0)), '["k53"]', path="[3]"),
    Plant("an empty text for null", EVENTS, changed("k54", to=field(2, "")), '["k54"]', path="[3]"),
    Plant("binary for a string", ORDERS, changed(38, to=field(2, b"\xc4\x01x")), "[38]", path="total"),
    Plant("a character of a text", ORDERS, changed(39, to=byte(b"name 39", b"name_39")), "[39]", path="name"),
    Plant("a number one too high", ORDERS, changed(40, to=field(2, 121)), "[40]", path="total"),
    Plant("a number of the other sign", EVENTS, changed("k55", to=field(1, -55)), '["k55"]', path="[2]"),
    Plant("a field more", EVENTS, changed("k56", to=_more(1)), '["k56"]', path="[4]"),
    Plant("a byte of a UUID", PAIRS, changed(1, "p41", to=byte(b"\x41", b"\x42")), '[1,"p41"]', path="[3]"),
    Plant("what two rows have is exchanged", EVENTS, exchanged("k57", "k58"), '["k57"]', path="[2]"),
    Plant(
        "a field is renamed",
        SPACE,
        changed(600, to=_format(_set(6, 0, "name", "number"))),
        "[600]",
        path="format[1].name",
    ),
    Plant("a field may be null", SPACE, changed(601, to=_format(_set(6, [{"name": "key", "type": "string"}]))), "[601]",
          path="format[1]"),
    Plant("a space has another engine option", SPACE, changed(603, to=_format(_set(5, {"is_sync": True}))), "[603]",
          path="flags"),
    Plant("an index is unique", INDEX, changed(600, 1, to=_format(_set(4, {"unique": True}))), "[600,1]",
          path="opts.unique"),
    Plant("an index is missing", INDEX, gone(600, 1), "[600,1]", MISSING_IN_B),
    Plant("a sequence stands elsewhere", SEQUENCE_DATA, changed(2, to=field(1, 99)), "[2]", path="value"),
]  # fmt: skip

FITTING = [plant for plant in PLANTS if plant.name != "an index is missing"]
"""The plants that one directory can have together."""


# --- rewritten archives ---


def rewrite(
    original: Path,
    copy: Path,
    plants: Sequence[Plant] = (),
    *,
    log: Callable[[Row], Row] = lambda row: row,
    lacking: int = 0,
) -> Path:
    """Copy the archive with the plants in its snapshot, and each row of its log as `log` returns it.

    `short` transactions are missing at its end.
    """
    copy.mkdir(parents=True)
    disk = production().disk
    (snapshot,) = original.glob("*.snap")
    meta = _write_snapshot(disk, str(snapshot), str(copy), plants)
    start, verdicts = VClock(meta.vclock), Verdicts()
    verdicts.start(start)
    how: dict[str, Any] = {"instance_uuid": meta.instance_uuid, "vclock": start, "version": meta.version}
    kept = ArchiveLog(disk, str(copy), verdicts=verdicts, **how)
    transactions: list[bytes] = []
    for path in sorted(original.glob("*.xlog")):
        with LogFile.open(disk, str(path)) as file:
            transactions += [b"".join(log(row).encode() for row in each.rows) for each in file.transactions()]
    kept.write(b"".join(transactions[: len(transactions) - lacking]))
    kept.flush()
    kept.close()
    manifest = archive_manifest.load(disk, str(original))
    assert manifest is not None
    manifest.position, manifest.settled = kept.vclock.to_mapping(), verdicts.settled.to_mapping()
    archive_manifest.save(disk, str(copy), manifest)
    return copy


def _write_snapshot(disk: Any, path: str, directory: str, plants: Sequence[Plant]) -> Meta:
    tuples: dict[int, Tuples] = {}
    groups: dict[int, int] = {}
    with LogFile.open(disk, path) as file:
        meta = file.meta
        for row in file.rows():
            body = unpack_body(row.body)
            start = row.body.index(b"\x21", 1) + 1  # skip the id of the space, which has no such byte
            tuples.setdefault(body[0x10], []).append(row.body[start:])
            groups[body[0x10]] = row.group_id
    for plant in plants:
        tuples[plant.space_id] = plant.edit(tuples.get(plant.space_id, []))
    with SnapWriter(disk, directory, meta, 1.0) as writer:
        for space_id, each in sorted(tuples.items()):
            writer.add_tuples(space_id, each, groups.get(space_id, 0))
    return meta


def as_nop(row: Row) -> Row:
    """Return the row without its effect; the LSN stays."""
    return Row(
        RequestType.NOP, row.replica_id, lsn=row.lsn, tsn=row.tsn, timestamp=row.timestamp, flags=row.flags, body=b""
    )


def with_body(row: Row, body: dict[int, Any]) -> Row:
    return Row(
        row.type, row.replica_id, lsn=row.lsn, tsn=row.tsn, timestamp=row.timestamp, flags=row.flags, body=pack(body)
    )
