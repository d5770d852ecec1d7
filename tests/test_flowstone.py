"""The public interface, as shown in the README."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import flowstone
from flowstone.box.schema import UnknownSpace
from tests.history.logs import SYNC_FLAGS, Log
from tests.places import ROOT


@pytest.fixture
def directory(tmp_path: Path) -> str:
    with Log(tmp_path) as log:
        log.create_space(512, "orders", ("id", "unsigned"), ("item", "string"))
        log.insert(512, 1, "tea")
        log.rollback(log.insert(512, 2, "gone", flags=SYNC_FLAGS))
        log.insert(512, 3, "cup")
    return str(tmp_path)


def test_settled_rows_of_a_space_are_read_into_a_table(directory: str) -> None:
    table = flowstone.read_log(directory, space="orders", columns=["id", "item"]).read_all()
    assert table.to_pylist() == [{"id": 1, "item": "tea"}, {"id": 3, "item": "cup"}]


def test_altered_space_has_the_columns_of_all_its_formats(tmp_path: Path) -> None:
    with Log(tmp_path) as log:
        log.create_space(512, "orders", ("id", "unsigned"))
        log.insert(512, 1)
        log.insert(280, 512, 1, "orders", "memtx", 0, {}, [{"name": "key", "type": "unsigned"}])
        log.insert(512, 2)
    rows = flowstone.read_log(tmp_path, space="orders", columns=["id", "key"]).read_all().to_pylist()
    assert rows == [{"id": 1, "key": None}, {"id": None, "key": 2}]


def test_space_without_rows_is_an_empty_table(tmp_path: Path) -> None:
    with Log(tmp_path) as log:
        log.create_space(512, "orders", ("id", "unsigned"))
    assert flowstone.read_log(tmp_path, space="orders").read_all().num_rows == 0


def test_omitted_transactions_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Log(tmp_path) as log:
        log.create_space(512, "orders", ("id", "unsigned"))
        log.insert(512, 1, flags=SYNC_FLAGS)
    assert flowstone.read_log(tmp_path, space="orders").read_all().num_rows == 0
    assert "1 row withheld" in caplog.text


def test_unsettled_rows_are_read_on_request(directory: str) -> None:
    rows = sum(batch.num_rows for batch in flowstone.read_log(directory, settled=False, show_system=True))
    assert rows == 6


def test_unknown_space_is_an_error(directory: str) -> None:
    with pytest.raises(UnknownSpace, match="known spaces: orders"):
        flowstone.read_log(directory, space="customers")


def test_import_loads_no_heavy_modules() -> None:
    code = "import sys, flowstone; print({'numpy', 'pyarrow'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_import_from_a_zip_file_is_rejected(tmp_path: Path) -> None:
    """--py-files of spark-submit puts a zip file into sys.path; compiled modules cannot be loaded from it."""
    with zipfile.ZipFile(tmp_path / "flowstone.zip", "w") as archive:
        for path in (ROOT / "src" / "flowstone").glob("*.py"):
            archive.write(path, f"flowstone/{path.name}")
    code = "import sys; sys.path.insert(0, sys.argv[1]); import flowstone"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "flowstone.zip")], capture_output=True, text=True, check=False
    )
    assert "ImportError: flowstone cannot be imported from a zip file" in done.stderr
