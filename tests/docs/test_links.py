"""Links between pages have an existing target: a file, and a heading in it."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Final

import pytest

from tests.docs.blocks import paths
from tests.places import ROOT

MORE: Final = ("CONTRIBUTING.md", "CHANGELOG.md", "packaging/README.md")
LINK: Final = re.compile(r"(?<!!)\[[^\]]*\]\((?P<target>[^)\s]+)\)")
FENCED: Final = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
HEADING: Final = re.compile(r"^#+ (?P<text>.*)$", re.MULTILINE)
MENTION: Final = re.compile(r"\bdocs/[a-z/-]+\.md\b")


def anchors(text: str) -> set[str]:
    """Return the anchors of a page in the form of GitHub; the strict build of the site checks its own form."""
    headings = (found["text"].lower() for found in HEADING.finditer(FENCED.sub("", text)))
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in headings}


def broken(path: str, text: str) -> list[str]:
    """Return the broken links of the page."""
    found = []
    for link in LINK.finditer(FENCED.sub("", text)):
        target, _, anchor = link["target"].partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        aim = (ROOT / PurePosixPath(path).parent / target).resolve() if target else ROOT / path
        if not aim.exists():
            found.append(f"{link['target']}: no such file")
        elif anchor and anchor not in anchors(aim.read_text()):
            found.append(f"{link['target']}: no such heading")
        elif path.startswith("docs/") and not aim.is_relative_to(ROOT / "docs"):
            found.append(f"{link['target']}: the site has nothing outside of docs/")
    return found


@pytest.mark.parametrize("path", [*paths(), *MORE])
def test_links_have_existing_targets(path: str) -> None:
    assert broken(path, (ROOT / path).read_text()) == []


def test_broken_link_is_found() -> None:
    page = "docs/reference/mirror.md"
    assert broken(page, "[a](nowhere.md) [b](lake.md#nothing) [c](../../README.md)\n```text\n[d](gone.md)\n```\n") == [
        "nowhere.md: no such file",
        "lake.md#nothing: no such heading",
        "../../README.md: the site has nothing outside of docs/",
    ]
    assert broken(page, "[a](lake.md#columns) [b](#limestone) [c](https://example.org/x)\n## Limestone\n") == []


def test_pages_mentioned_in_the_code_exist() -> None:
    modules = [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    mentioned = {name for path in modules if path.parent.name != "docs" for name in MENTION.findall(path.read_text())}
    assert mentioned
    assert sorted(name for name in mentioned if not (ROOT / name).exists()) == []
