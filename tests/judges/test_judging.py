"""A test fails if it leaves a directory from which no server starts, or two that differ."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

from tests.interop.versions import binaries, is_fit
from tests.judges.broken_directories import DEPOSED, nop, put, together, write
from tests.judges.judging import Refused, judge, judge_all, user_rows
from tests.judges.real_server import booted


def test_judge_imports_no_code_under_test() -> None:
    for name in ("files", "tuples", "recovery", "real_server", "judging"):
        tree = ast.parse((Path(__file__).parent / f"{name}.py").read_text())
        modules = [each.module or "" for each in ast.walk(tree) if isinstance(each, ast.ImportFrom)]
        modules += [alias.name for each in ast.walk(tree) if isinstance(each, ast.Import) for alias in each.names]
        assert not [module for module in modules if module.split(".")[0] == "flowstone"]


def test_directory_rejected_by_servers_is_rejected(tmp_path: Path) -> None:
    write(tmp_path, [*DEPOSED, together(nop(2), flags=6)])
    with pytest.raises(Refused, match="belongs to other instance with id 2"):
        judge(tmp_path)


def test_directories_with_different_rows_are_rejected(tmp_path: Path) -> None:
    for name, key in (("one", 1), ("two", 2), ("three", 1)):
        write(tmp_path / name, [together(put(1, key))])
    verdicts = judge_all({"one": tmp_path / "one", "three": tmp_path / "three"})
    assert user_rows(verdicts["one"])[513] == {(1,)}
    with pytest.raises(Refused, match="two and one recover to different rows: space 513: 1 and 1 alone"):
        judge_all({"one": tmp_path / "one", "two": tmp_path / "two"})


def test_empty_directory_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no snapshot"):
        judge(tmp_path)


SYNCHRONOUS_SNAPSHOT = """
box.cfg{log='server.log'}
box.schema.space.create('s', {id=513, is_sync=true}):create_index('pk')
for key = 1, 3 do box.space.s:replace{key} end
box.snapshot()
box.space.s:replace{4}
os.exit(0)
"""


@pytest.mark.real
@pytest.mark.usefixtures("tarantool")
def test_2_6_judges_by_an_older_snapshot_when_it_cannot_load_the_newest(tmp_path: Path) -> None:
    (binary,) = [each for each in binaries() if is_fit(each.version, "<2.11")]
    (tmp_path / "server.lua").write_text(SYNCHRONOUS_SNAPSHOT)
    subprocess.run([binary.path, "server.lua"], cwd=tmp_path, check=True, timeout=60)
    refusal = booted(binary.path, tmp_path, tmp_path / "copy").refusal
    assert "rolled back during snapshot recovery" in str(refusal)
    assert user_rows(judge(tmp_path))[513] == {(1,), (2,), (3,), (4,)}
    for path in tmp_path.glob("00000000000000000000.*"):
        path.unlink()
    assert not judge(tmp_path).rows
