"""The stream of settled transactions: its buffer, its end and its errors."""

from __future__ import annotations

import pytest

from flowstone.replica.change_stream import ChangesMissed, ChangeStream


async def test_stream_returns_transactions_in_order_and_reports_room_when_it_was_full() -> None:
    rooms: list[int] = []
    stream = ChangeStream(2, lambda: rooms.append(1), lambda: None)
    first: list[list[object]] = [[], [], []]
    for changes in first:
        stream.put(changes)  # type: ignore[arg-type]
    assert stream.is_full
    stream.end(ChangesMissed("missed"))
    assert [await anext(stream) is changes for changes in first] == [True] * 3
    with pytest.raises(ChangesMissed, match="missed"):
        await anext(stream)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_closed_stream_does_not_stop_the_replica() -> None:
    rooms: list[str] = []
    stream = ChangeStream(1, lambda: rooms.append("room"), lambda: rooms.append("discarded"))
    stream.put([])
    stream.close()
    assert not stream.is_full
    assert [each async for each in stream] == []
    del stream
    assert rooms == ["room"]


async def test_dropped_stream_does_not_stop_the_replica() -> None:
    rooms: list[str] = []
    stream = ChangeStream(1, lambda: rooms.append("room"), lambda: rooms.append("discarded"))
    stream.put([])
    del stream
    assert rooms == ["discarded"]
