"""The public surface, as the README shows it."""

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

import flowstone
from flowstone.box.schema import UnknownSpace
from tests.history.logs import SYNC_FLAGS, Log


@pytest.fixture
def directory(tmp_path: Path) -> str:
    with Log(tmp_path) as log:
        log.create_space(512, "orders", ("id", "unsigned"), ("item", "string"))
        log.insert(512, 1, "tea")
        log.rollback(log.insert(512, 2, "gone", flags=SYNC_FLAGS))
        log.insert(512, 3, "cup")
    return str(tmp_path)


def test_reads_the_settled_rows_of_a_space_into_a_table(directory: str) -> None:
    table = pa.Table.from_batches(flowstone.read_log(directory, space="orders", columns=["id", "item"]))
    assert table.to_pylist() == [{"id": 1, "item": "tea"}, {"id": 3, "item": "cup"}]


def test_reads_everything_when_told_so(directory: str) -> None:
    rows = sum(batch.num_rows for batch in flowstone.read_log(directory, settled=False, show_system=True))
    assert rows == 6


def test_an_unknown_space_is_an_error(directory: str) -> None:
    with pytest.raises(UnknownSpace, match="there are: orders"):
        list(flowstone.read_log(directory, space="customers"))


def test_importing_it_loads_nothing_heavy() -> None:
    code = "import sys, flowstone; print({'numpy', 'pyarrow', 'numba'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
