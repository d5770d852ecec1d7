"""Kernels for serving are loaded before the first client needs them."""

from __future__ import annotations

import pytest

from flowstone.box.engine import tuple_kernels
from flowstone.iproto import batches, request_scan, row_batches
from flowstone.kernels import Kernel
from flowstone.node.warm_up import REQUESTS, warm_up
from flowstone.xlog.walk import walk

KERNELS = (
    request_scan.scan_requests,
    batches.build_rows,
    batches.build_replies,
    tuple_kernels.check_tuples,
    tuple_kernels.check_keys,
    walk,
)


def test_every_kind_of_statement_is_done_in_bulk() -> None:
    assert warm_up() == len(REQUESTS)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: str(kernel.__name__))
def test_the_kernels_of_a_turn_are_loaded(kernel: Kernel[..., object]) -> None:
    warm_up()
    assert kernel._entries


@pytest.mark.parametrize("kernel", [row_batches.build_log_rows, row_batches.build_packets])
def test_the_kernels_of_streams_are_loaded_for_tables_and_for_parts_of_them(kernel: Kernel[..., object]) -> None:
    warm_up()
    layouts = {cells[2] for _, _, cells, *_ in kernel._entries}
    assert layouts == {"A", "C"}
