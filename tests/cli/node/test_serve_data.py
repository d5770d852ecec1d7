"""Options that conflict with the directories of a node: `serve` fails as `serve --check` predicts."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowstone.cli.console import UsageError
from flowstone.cli.node.serve_data import DataPlace
from flowstone.node.configuration import configure
from tests.cli.node.test_serve import SECONDS, Serve, serve
from tests.cli.node.test_serve_check import make_data

__all__ = ["serve"]

ANOTHER = "11111111-1111-4111-8111-111111111111"


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        ("--dialect=2.11", "dialect is 2.11, but the data in data has dialect 2.6; unset dialect"),
        (f"--instance-uuid={ANOTHER}", f"instance_uuid is {ANOTHER}, but the data in data belongs to "),
        (f"--replicaset-uuid={ANOTHER}", f"Replica set UUID mismatch: expected {ANOTHER}"),
        ("--election-mode=candidate", "Incorrect value for option 'election_mode': unexpected option: the data in"),
        ("--work-dir=file", "cannot create file: "),
        ("--work-dir=file/below", "cannot create file/below: "),
        ("--user=guest:x", "the first user cannot have the name 'guest'"),
        ("--read-only", "read_only is set, but there is no data in new yet; unset read_only"),
    ],
)
def test_permanent_errors_have_exit_code_2(serve: Serve, tmp_path: Path, option: str, complaint: str) -> None:
    """systemd restarts it after any other failure."""
    (tmp_path / "file").touch()
    make_data(tmp_path / "data", dialect="2.6")
    is_new = option.startswith(("--user", "--read-only"))
    served = serve(*(("--work-dir=new",) if is_new else ()), option)
    assert served.process.wait(SECONDS) == 2
    assert served.lines[-1].startswith(f"flowstone: {complaint}")
    if "file" in option:
        assert served.lines[-1].endswith("file is not a directory; choose another work_dir")


def test_options_that_match_the_data_are_accepted(tmp_path: Path) -> None:
    make_data(tmp_path, dialect="2.6")
    place = DataPlace(configure({"work_dir": str(tmp_path), "dialect": "2.6", "read_only": True}))
    files = place.files()
    assert files is not None
    assert list(place.missing()) == []
    place.check(files, ("guest", "x"))  # the directory is not created
    own = files.snapshots[-1].meta.instance_uuid
    DataPlace(configure({"work_dir": str(tmp_path), "instance_uuid": own.upper()})).check(files, None)


def test_missing_directories_are_reported_and_not_created(tmp_path: Path) -> None:
    place = DataPlace(configure({"work_dir": str(tmp_path / "a"), "wal_dir": "wal"}))
    assert list(place.missing()) == [str(tmp_path / "a" / "wal"), str(tmp_path / "a")]
    assert place.files() is None
    assert not (tmp_path / "a").exists()


def test_bootstrap_leader_must_be_writable_and_joining_members_need_not(tmp_path: Path) -> None:
    options = {"work_dir": str(tmp_path / "a"), "read_only": True}
    with pytest.raises(UsageError, match="read_only is set, but there is no data"):
        DataPlace(configure(options)).check(None, None)
    DataPlace(configure(options | {"replication": ["db1:3301"]})).check(None, None)
