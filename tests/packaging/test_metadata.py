"""The metadata of wheel and source distribution: what an index checks before it accepts them, and `twine check`."""

from __future__ import annotations

import email.message
import email.parser
import re
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Final

import flowstone
from flowstone.cli import extras
from tests.packaging.building import built
from tests.places import ROOT

REQUIRED: Final = ("Metadata-Version", "Name", "Version", "Summary", "License-Expression", "Requires-Python")


def of_wheel(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.parser.Parser().parsestr(archive.read(name).decode())


def of_source(source: Path) -> email.message.Message:
    with tarfile.open(source) as archive:
        (member,) = (each for each in archive.getmembers() if each.name.count("/") == 1 and "PKG-INFO" in each.name)
        file = archive.extractfile(member)
        assert file is not None
        return email.parser.Parser().parsestr(file.read().decode())


def test_metadata_is_complete_and_its_description_can_be_rendered(tree: Path, wheel: Path, tmp_path: Path) -> None:
    found = of_wheel(wheel)
    for name in REQUIRED:
        assert found[name] not in (None, "", "UNKNOWN"), name
    assert len(found["Summary"]) <= 512
    assert "\n" not in found["Summary"]
    assert found["Description-Content-Type"] == "text/markdown"
    assert str(found.get_payload()).strip() == (ROOT / "README.md").read_text().strip()
    assert set(extras.MODULES) <= set(found.get_all("Provides-Extra", []))
    assert sorted(of_source(built(tree, "sdist", tmp_path)).items()) == sorted(found.items())


def test_version_is_written_in_one_place(wheel: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert "version" not in project["project"]
    assert project["tool"]["hatch"]["version"]["path"] == "src/flowstone/__init__.py"
    assert of_wheel(wheel)["Version"] == flowstone.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", flowstone.__version__)


def test_python_versions_in_the_classifiers_satisfy_the_requirement(wheel: Path) -> None:
    found = of_wheel(wheel)
    oldest = tuple(map(int, found["Requires-Python"].removeprefix(">=").split(".")))
    classifiers = found.get_all("Classifier", [])
    named = [re.fullmatch(r"Programming Language :: Python :: (\d+)\.(\d+)", each) for each in classifiers]
    versions = [(int(match[1]), int(match[2])) for match in named if match]
    assert min(versions) == oldest
