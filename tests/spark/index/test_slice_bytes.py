"""Transport of slices to executors: the same rows by every transport, and no bytes without the token."""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from flowstone.columns.change_contract import ChangeContract
from flowstone.errors import FlowstoneError
from flowstone.outside import production
from flowstone.replication.vclock import VClock
from flowstone.spark.index import slice_bytes
from flowstone.spark.index.log_index import ArchiveIndex, Slice
from flowstone.spark.index.slice_bytes import NoBytes, SliceServer, Transport, open_slice, with_transport
from flowstone.spark.sources.change_batches import read_slice
from tests.spark.archives import WrittenArchive
from tests.spark.change_rows import UUID, insert, whole

END = VClock({1: 400})
TRANSPORTS: tuple[Transport, ...] = ("file", "inline", "tcp", "auto")


@pytest.fixture
def slices(tmp_path: Path) -> list[Slice]:
    archive = WrittenArchive(production().disk, str(tmp_path / "archive"))
    archive.define_orders()
    for lsn in range(3, 401):
        archive.write(whole(insert(lsn, lsn, "x" * 50)))
    archive.save()
    index = ArchiveIndex.open(production().disk, archive.directory)
    return index.slices(VClock(), END, size=10_000)


@pytest.fixture
def server() -> Iterator[SliceServer]:
    server = SliceServer()
    yield server
    server.close()


def keys(parts: list[Slice]) -> list[int]:
    contract = ChangeContract(UUID, None, wanted=("_lsn",))
    batches = (batch for part in parts for batch in read_slice(production().disk, part, VClock(), END, contract))
    return [lsn for batch in batches for lsn in batch["_lsn"].to_pylist()]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_transport_delivers_the_same_rows(slices: list[Slice], server: SliceServer, transport: Transport) -> None:
    assert len(slices) > 2
    parts = pickle.loads(pickle.dumps(with_transport(slices, transport, server)))
    assert keys(parts) == list(range(3, 401))


def test_inline_and_tcp_slices_need_no_file(slices: list[Slice], server: SliceServer) -> None:
    inline, tcp = with_transport(slices, "inline"), with_transport(slices, "tcp", server)
    assert keys([replace(part, path="/nowhere.xlog") for part in inline]) == list(range(3, 401))
    assert keys([replace(part, path="/nowhere.xlog") for part in tcp]) == list(range(3, 401))
    with pytest.raises(FileNotFoundError):
        keys([replace(part, path="/nowhere.xlog") for part in with_transport(slices, "file")])


def test_auto_transport_sends_small_batches_inline(
    slices: list[Slice], server: SliceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(part.data is not None for part in with_transport(slices, "auto", server))
    monkeypatch.setattr(slice_bytes, "INLINE_BATCH_MAX", 10_000)
    assert all(part.data is None and part.remote is not None for part in with_transport(slices, "auto", server))


def test_slice_is_served_until_its_batch_is_over(slices: list[Slice], server: SliceServer) -> None:
    first = with_transport(slices[:1], "tcp", server)
    keys(first)
    server.next_batch()
    assert keys(first) == keys(slices[:1])  # the task is run again
    server.next_batch()
    with pytest.raises(NoBytes, match="no longer has this slice"):
        keys(first)


def test_request_without_the_token_gets_no_bytes(slices: list[Slice], server: SliceServer) -> None:
    with_transport(slices, "tcp", server)
    with socket.create_connection(server.address, 5) as stranger:
        stranger.sendall(b"\0" * 16)
        assert struct.unpack(">Q", stranger.recv(8)) == ((1 << 64) - 1,)
        assert stranger.recv(8) == b""


def test_unreachable_reader_is_one_clear_error(slices: list[Slice]) -> None:
    server = SliceServer()
    (part, *_) = with_transport(slices, "tcp", server)
    server.close()
    with pytest.raises(NoBytes, match=r"cannot fetch a slice of .* from reader at 127\.0\.0\.1.*transportAddress"):
        open_slice(production().disk, part)
    with pytest.raises(NoBytes, match=r"cannot listen on 203\.0\.113\.1"):
        SliceServer("203.0.113.1")
    with pytest.raises(FlowstoneError, match="needs a listening reader"):
        with_transport(slices, "tcp")


def test_truncated_file_is_an_error(slices: list[Slice]) -> None:
    last = slices[-1]
    with pytest.raises(NoBytes, match="file ends before byte"):
        with_transport([replace(last, end=last.end + 10)], "inline")
