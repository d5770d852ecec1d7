"""The site: built from the repository alone, with every page, and without resources from other hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.docs.blocks import paths
from tests.places import ROOT

FETCHED: Final = re.compile(r"""<(?:script|img|iframe|link)\b[^>]*?\b(?:src|href)=["']?(?:https?:)?//[^"'\s>]+""")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(directory)]
    # A proxy without a server: any download would fail.
    nowhere = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:1")
    done = subprocess.run(command, cwd=ROOT, env=os.environ | nowhere, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory


def test_site_builds_in_strict_mode_with_every_page(site: Path) -> None:
    pages = [path.removeprefix("docs/").replace(".md", ".html") for path in paths() if path.startswith("docs/")]
    assert [page for page in pages if not (site / page).is_file()] == []


def test_site_loads_nothing_from_other_hosts(site: Path) -> None:
    fetched = {found for page in site.rglob("*.html") for found in FETCHED.findall(page.read_text())}
    assert fetched == set()


def test_every_page_is_in_the_navigation() -> None:
    _, _, navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")
    named = sorted(f"docs/{page}" for page in re.findall(r"^ +- (\S+\.md)$", navigation, re.MULTILINE))
    assert named == sorted(path for path in paths() if path.startswith("docs/"))
