"""Whole spaces of live servers, page by page, with each row once."""

from __future__ import annotations

from typing import Any

import pytest

from flowstone.box.definitions import IndexDefinition, IndexPart, SpaceDefinition
from flowstone.errors import RemoteProtocolError
from flowstone.iproto.constants import Key
from flowstone.iproto.msgpack import pack, unpack
from flowstone.iproto.scan import TUPLE_AT, TUPLE_END
from flowstone.iproto.uri import parse_uri
from flowstone.spark.sources.tarantool import index_scan
from flowstone.spark.sources.tarantool.index_scan import array_of, can_walk, key_of, scan_space, tuples_of
from flowstone.spark.sources.tarantool.live_node import CannotUse, definitions
from tests.spark.live_servers import PAIR_ROWS


def pairs(address: str) -> SpaceDefinition:
    return definitions([parse_uri(address)]).space("pairs")


def scanned(address: str) -> list[tuple[Any, ...]]:
    found = []
    for slab in scan_space([parse_uri(address)], pairs(address)):
        for at, end in zip(slab.cells[TUPLE_AT].tolist(), slab.cells[TUPLE_END].tolist(), strict=True):
            found.append(unpack(slab.buf[at:end].tobytes()))
    return found


@pytest.mark.parametrize("page", [1, 3, 40, 256])
def test_scan_returns_each_row_once_with_any_page_size(
    address: str, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_scan, "FIRST_PAGE_ROWS", page)
    monkeypatch.setattr(index_scan, "PAGE_ROWS_MAX", page)
    monkeypatch.setattr(index_scan, "ROWS_MIN", 10)
    assert scanned(address) == list(PAIR_ROWS)


@pytest.mark.parametrize(
    ("type", "path", "walks"), [("tree", None, True), ("hash", None, False), ("tree", ".inside", False)]
)
def test_only_tree_indexes_on_plain_fields_can_be_walked(type: str, path: str | None, walks: bool) -> None:
    parts = (IndexPart(0, "unsigned"), IndexPart(1, "string", path=path))
    assert can_walk(IndexDefinition(512, 0, "pk", type, True, parts)) is walks
    assert not can_walk(None)


def test_unreachable_server_is_one_clear_error(real_server: str) -> None:
    with pytest.raises(CannotUse, match=r"cannot connect to 127.0.0.1:1: connection refused"):
        list(scan_space([parse_uri("127.0.0.1:1")], pairs(real_server)))


def test_tuples_are_found_in_responses() -> None:
    rows = [(1, "a"), (2, {"b": (None,)})]
    body = pack({0x31: "ignored", Key.DATA.value: rows})
    assert [unpack(raw) for raw in tuples_of(body)] == rows
    assert len(tuples_of(pack({Key.DATA.value: [()] * 100}))) == 100
    for broken in (b"\x80", b"\x81\x30\xc0", body[:-3], b"\xc1"):
        with pytest.raises(RemoteProtocolError):
            tuples_of(broken)


def test_keys_are_copied_from_tuples_byte_for_byte(real_server: str) -> None:
    index = pairs(real_server).primary_key
    assert index is not None
    raw = b"\x93\xcd\x00\x01\xa1x\xc0"
    assert key_of(raw, index) == [b"\xcd\x00\x01", b"\xa1x"]
    assert unpack(array_of([b"\x01"] * 20)) == (1,) * 20


@pytest.mark.parametrize("raw", [b"\x91\x01", b"\xdc", b"\x93\x01\xa5x", b"\xdd\x00\x00\x00\x03\xc1"])
def test_tuple_without_its_key_is_an_invalid_response(raw: bytes) -> None:
    parts = (IndexPart(0, "unsigned"), IndexPart(2, "string"))
    with pytest.raises(RemoteProtocolError, match="a tuple without its primary key"):
        key_of(raw, IndexDefinition(512, 0, "pk", "tree", True, parts))
