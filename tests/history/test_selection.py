"""Selection of rows by LSN, time, space and origin."""

from pathlib import Path
from typing import Any

import pytest

from flowstone.history.log_reading import Reading
from flowstone.history.selection import Selection
from flowstone.iproto.scan import LSN
from flowstone.outside import production
from tests.history.logs import Log


@pytest.fixture
def path(tmp_path: Path) -> str:
    with Log(tmp_path) as log:
        log.create_space(512, "users", ("id", "unsigned"))  # 1, 2
        log.create_space(513, "orders", ("id", "unsigned"))  # 3, 4
        log.insert(512, 1)  # 5
        log.insert(513, 1)  # 6
        log.confirm(1)  # 7: has no space
        log.insert(512, 2)  # 8
    return log.path


@pytest.mark.parametrize(
    ("options", "lsns"),
    [
        ({}, [5, 6, 7, 8]),
        ({"show_system": True}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"spaces": ("users",)}, [5, 8]),
        ({"spaces": (513, "users")}, [5, 6, 8]),
        ({"spaces": ("_index",)}, [2, 4]),
        ({"from_lsn": 6}, [6, 7, 8]),
        ({"to_lsn": 7}, [5, 6]),  # exclusive, as in tt
        ({"timestamp": 1008.0}, [5, 6, 7]),  # exclusive, as in tt
        ({"replicas": (2,)}, []),
        ({"replicas": (1, 2), "from_lsn": 8}, [8]),
    ],
)
def test_selection_returns_matching_rows(path: str, options: dict[str, Any], lsns: list[int]) -> None:
    reading = Reading(production(), [path], selection=Selection(**options))
    assert [lsn for piece in reading.pieces() for lsn in piece.slab.cells[LSN, piece.rows].tolist()] == lsns
