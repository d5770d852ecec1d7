"""Writers of row headers and numbers, whose bytes go to logs and the wire."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.iproto.constants import Flag
from flowstone.iproto.row import Row, encode_header, encode_lone_header, encode_uint

EDGES = st.sampled_from((1, 127, 128, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**64 - 1))


@given(EDGES, EDGES, st.sampled_from((1.7e9, 1e-300, 5)), st.sampled_from((0, 2, 6)))
def test_lone_header_equals_that_of_a_row(replica_id: int, lsn: int, timestamp: float, flags: int) -> None:
    row = Row(2, replica_id, 0, lsn, timestamp, lsn, flags | Flag.COMMIT.value)
    assert encode_lone_header(2, replica_id, lsn, timestamp, flags) == encode_header(row)


@pytest.mark.parametrize(("replica_id", "lsn", "timestamp"), [(0, 1, 1.0), (1, 0, 1.0), (1, 1, 0.0), (-1, 1, 1.0)])
def test_lone_header_rejects_numbers_that_would_be_omitted(replica_id: int, lsn: int, timestamp: float) -> None:
    with pytest.raises(AssertionError, match=r"has an? (origin|LSN|time)"):
        encode_lone_header(2, replica_id, lsn, timestamp)


@pytest.mark.parametrize("value", [-1, None, 2**64])
def test_encode_uint_rejects_values_that_are_not_unsigned(value: Any) -> None:
    with pytest.raises((AssertionError, TypeError, OverflowError)):
        encode_uint(value)
