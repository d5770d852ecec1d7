"""What serving runs on is loaded before anybody waits for it."""

from __future__ import annotations

import pytest

from flowstone.box import tuple_kernels
from flowstone.iproto import batches, request_scan
from flowstone.kernels import Kernel
from flowstone.node.warm_up import REQUESTS, warm_up
from flowstone.outside import production

KERNELS = (
    request_scan.scan_requests,
    batches.build_rows,
    batches.build_replies,
    tuple_kernels.check_tuples,
    tuple_kernels.check_keys,
)


def test_every_kind_of_statement_is_done_in_bulk() -> None:
    assert warm_up(production()) == len(REQUESTS)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: str(kernel.__name__))
def test_the_kernels_of_a_turn_are_loaded(kernel: Kernel[..., object]) -> None:
    warm_up(production())
    assert kernel._entries
