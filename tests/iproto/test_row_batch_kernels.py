"""Rows encoded in bulk equal, byte for byte, those encoded one by one."""

from __future__ import annotations

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flowstone.iproto import row_scanner
from flowstone.iproto.msgpack import pack
from flowstone.iproto.packet import frame
from flowstone.iproto.row import Row, decode_row, encode_header
from flowstone.iproto.row_batch_kernels import build_log_rows, build_packets
from flowstone.iproto.row_batches import ALL, NEED, NO_ROOM, ROWS, WHOLE_ROWS, rows_bound
from flowstone.iproto.scan import Bytes, Cells
from tests.iproto.test_row_batches import Scanner

EDGES = (0, 1, 127, 128, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**63 - 1)
TIMES = st.sampled_from((0.0, -0.0, 1.7e9, 1e-300, -5.5))
BODIES = st.sampled_from([b"", *(pack(body) for body in ({0x10: 512, 0x21: (1, "x" * 300)}, {0x5A: 1}, {}))])


@st.composite
def rows(draw: st.DrawFn) -> Row:
    """Draw a row with any header that a table can represent, in a transaction or alone."""
    lsn = draw(st.sampled_from(EDGES))
    return Row(
        draw(st.sampled_from((0, 2, 30, 127, 128, 32767))),
        draw(st.sampled_from((0, 1, 31, 127, 128, 2**32 - 1))),
        draw(st.sampled_from((0, 0, 1, 300))),
        lsn,
        draw(TIMES),
        draw(st.sampled_from((lsn, lsn, *EDGES))),
        draw(st.sampled_from((0, 1, 2, 3, 6, 7, 255))),
        draw(st.sampled_from((0, 0, *EDGES))),
        body=draw(BODIES),
    )


def table(data: bytes) -> tuple[Bytes, Cells]:
    buf = np.frombuffer(data, np.uint8)
    found = row_scanner.scan(buf, np.array([[0, len(data)]], np.int64))
    assert not found.wrong
    return buf, found.cells


def built(kernel_size: int, out: Bytes) -> bytes:
    assert kernel_size >= 0
    return out[:kernel_size].tobytes()


@given(st.lists(rows().filter(lambda row: row.body), min_size=1, max_size=5), TIMES, st.data())
def test_log_rows_equal_those_of_the_plain_encoder(many: list[Row], timestamp: float, data: st.DataObject) -> None:
    encoded = [row.encode() for row in many]
    buf, cells = table(b"".join(encoded))
    first = data.draw(st.integers(0, len(many)))
    stop = data.draw(st.integers(first, len(many)))
    content = sum(map(len, encoded))
    out = np.empty(rows_bound(len(many), content), np.uint8)
    size = build_log_rows(buf, cells, first, stop, timestamp, out)
    expected = [
        encode_header(msgspec.structs.replace(decode_row(raw), timestamp=timestamp, sync=0)) + row.body
        for raw, row in zip(encoded[first:stop], many[first:stop], strict=True)
    ]
    assert built(size, out) == b"".join(expected)


def test_no_byte_is_written_after_the_end_of_a_small_output() -> None:
    buf, cells = table(b"".join(Row(2, 1, lsn=lsn, tsn=lsn, body=pack({0x10: 512})).encode() for lsn in (1, 2)))
    whole = np.full(400, 0xAA, np.uint8)
    assert build_log_rows(buf, cells, 0, 2, 5, whole[:100]) == NO_ROOM
    assert build_packets(buf, cells, ALL, 0, whole[:100]) == NO_ROOM
    assert (whole[100:] == 0xAA).all()


# --- Packets for a replica ---


def relayed(kept: list[Row], flags: int, sync: int) -> list[bytes]:
    """Return the packets of the selected rows of one transaction, by the plain encoder."""
    packets = []
    for row in kept:
        is_local = row.group_id == 1
        sent = Row(
            12 if is_local else row.type,
            row.replica_id,
            0 if is_local else row.group_id,
            row.lsn,
            row.timestamp,
            kept[0].lsn,
            flags if row is kept[-1] else 0,
            sync,
        )
        packets.append(frame(encode_header(sent) + (b"" if is_local else row.body)))
    return packets


@st.composite
def transactions(draw: st.DrawFn) -> list[list[Row]]:
    """Draw transactions of mixed rows: global, local, and local in the form of logs before 2.4.1."""
    found, lsn, local = [], draw(st.sampled_from((1, 120, 65530, 2**32 - 3))), 0
    for count in draw(st.lists(st.integers(1, 4), max_size=5)):
        kinds = draw(st.lists(st.sampled_from(("global", "global", "local", "old")), min_size=count, max_size=count))
        flags = draw(st.sampled_from((1, 3, 7)))
        numbers = []
        for kind in kinds:
            local, lsn = (local + 1, lsn) if kind == "local" else (local, lsn + 1)
            numbers.append(local if kind == "local" else lsn)
        globals_ = [number for kind, number in zip(kinds, numbers, strict=True) if kind != "local"]
        tsn = globals_[0] if globals_ else numbers[0]
        found.append(
            [
                Row(
                    2,
                    0 if kind == "local" else 3,
                    0 if kind == "global" else 1,
                    number,
                    1.5,
                    tsn,
                    flags if place == count - 1 else 0,
                    body=pack({0x10: 512, 0x21: (place,)}),
                )
                for place, (kind, number) in enumerate(zip(kinds, numbers, strict=True))
            ]
        )
    return found


@given(transactions(), st.sampled_from((0, 3, 300, 2**40)), st.data())
def test_selected_rows_form_complete_transactions(many: list[list[Row]], sync: int, data: st.DataObject) -> None:
    count = sum(map(len, many))
    chosen = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    keep = ALL if all(chosen) and data.draw(st.booleans()) else np.array(chosen, np.uint8)
    encoded = b"".join(row.encode() for rows in many for row in rows)
    buf, cells = table(encoded)
    out = np.empty(rows_bound(count, len(encoded)), np.uint8)
    packets = built(build_packets(buf, cells, keep, sync, out), out)
    choices = iter(chosen)
    expected = []
    for rows in many:
        kept = [row for row in rows if next(choices) and (row.group_id != 1 or row.replica_id)]
        expected += relayed(kept, rows[-1].flags, sync)
    assert packets == b"".join(expected)
    scanner = Scanner()
    assert scanner.scan(packets) == NEED
    assert scanner.value(WHOLE_ROWS) == scanner.value(ROWS) == len(expected)
