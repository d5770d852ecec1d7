"""Whole spaces of live servers, page by page: each row once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flowstone.box.definitions import IndexDefinition, IndexPart, SpaceDefinition
from flowstone.errors import RemoteProtocolError
from flowstone.iproto.constants import Key
from flowstone.iproto.msgpack import pack, unpack
from flowstone.iproto.scan import TUPLE_AT, TUPLE_END
from flowstone.iproto.uri import parse_uri
from flowstone.spark.sources.tarantool import index_scan
from flowstone.spark.sources.tarantool.index_scan import array_of, can_walk, key_of, scan_space, tuple_spans, tuples_of
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
def test_only_a_tree_on_plain_fields_is_walked(type: str, path: str | None, walks: bool) -> None:
    parts = (IndexPart(0, "unsigned"), IndexPart(1, "string", path=path))
    assert can_walk(IndexDefinition(512, 0, "pk", type, True, parts)) is walks
    assert not can_walk(None)


def test_a_server_that_is_not_there_is_one_error(real_server: str) -> None:
    with pytest.raises(CannotUse, match=r"cannot connect to 127.0.0.1:1: connection refused"):
        list(scan_space([parse_uri("127.0.0.1:1")], pairs(real_server)))


def test_tuples_are_found_in_answers() -> None:
    rows = [(1, "a"), (2, {"b": (None,)})]
    body = pack({0x31: "ignored", Key.DATA.value: rows})
    assert [unpack(raw) for raw in tuples_of(body)] == rows
    assert tuple_spans(np.frombuffer(body, np.uint8), np.empty(2, np.int64)) == -4
    assert len(tuples_of(pack({Key.DATA.value: [()] * 100}))) == 100
    for broken in (b"\x80", b"\x81\x30\xc0", body[:-3], b"\xc1"):
        with pytest.raises(RemoteProtocolError):
            tuples_of(broken)


def test_keys_are_taken_from_tuples_as_they_are(real_server: str) -> None:
    index = pairs(real_server).primary_key
    assert index is not None
    raw = b"\x93\xcd\x00\x01\xa1x\xc0"
    assert key_of(raw, index) == [b"\xcd\x00\x01", b"\xa1x"]
    assert unpack(array_of([b"\x01"] * 20)) == (1,) * 20
