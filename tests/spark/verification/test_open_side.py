"""The kind of side that a name means, and errors for invalid names."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowstone.outside import production
from flowstone.spark.verification.open_side import open_side
from flowstone.spark.verification.sides import NodeSide, SideError
from tests.spark.archives import WrittenArchive


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    written = WrittenArchive(production().disk, str(tmp_path / "archive"))
    written.define_orders()
    written.save()
    return tmp_path / "archive"


def test_directory_is_opened_by_its_content(archive: Path) -> None:
    assert open_side(str(archive)).kind == "archive"
    (archive / "manifest.json").unlink()
    assert open_side(str(archive)).kind == "log"


def test_address_is_a_node_and_its_password_is_hidden() -> None:
    side = open_side("app:secret@127.0.0.1:3301")
    try:
        assert isinstance(side, NodeSide)
        assert (side.kind, side.name) == ("node", "127.0.0.1:3301")
        assert "secret" not in repr(side)
        assert Path(side.directory).is_dir()
    finally:
        side.close()
    assert not Path(side.directory).exists()


def test_invalid_name_is_refused_with_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for name, said in (
        (str(tmp_path / "none"), "no such directory"),
        (str(tmp_path / "file"), "is a file"),
        (str(tmp_path / "empty"), "neither an archive, nor a directory of logs, nor a lake"),
        ("nonsense", "'nonsense' is not a valid address"),
        ("db1?transport=ssl&ssl_ca_file=/etc/ca.pem&ssl_password=secret", "'db1' is not a valid address"),
    ):
        with pytest.raises(SideError, match=said) as caught:
            open_side(name)
        assert "secret" not in str(caught.value)
