"""The files of the dashboard's page: complete, local, and unable to interpret text as markup."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

import flowstone.web

PAGE: Final = Path(flowstone.web.__file__).parent / "page"
SCRIPTS: Final = sorted(PAGE.glob("*.js"))
FILES: Final = [PAGE / "index.html", PAGE / "dashboard.css", *SCRIPTS]

FORBIDDEN: Final = {
    "markup from text": r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment",
    "code from text": r"\beval\(|new Function|set(?:Timeout|Interval)\(\s*[\"'`]",
    "what the policy forbids": r"setAttribute\(\s*\"style\"|\sstyle=|\son\w+=\"",
    "another machine": r"https?://(?!www\.w3\.org/2000/svg)|[\"'(]//\w",
    "what is unfinished": r"\bTO" + r"DO\b|\bFIX" + r"ME\b|console\.\w+\(",
}
LINE_LENGTH_MAX: Final = 120


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_files_contain_nothing_forbidden(path: Path) -> None:
    text = path.read_text("utf-8")
    assert {what: re.findall(pattern, text) for what, pattern in FORBIDDEN.items() if re.search(pattern, text)} == {}


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("markup from text", "node.innerHTML = text"),
        ("code from text", "setTimeout('go()', 1)"),
        ("what the policy forbids", '<p onclick="go()">'),
        ("what the policy forbids", '<p style="color: red">'),
        ("another machine", 'import "https://example.com/chart.js"'),
        ("another machine", 'fetch("//example.com")'),
        ("what is unfinished", "console.log(state)"),
    ],
)
def test_forbidden_content_is_found(what: str, text: str) -> None:
    assert re.search(FORBIDDEN[what], text)


def test_every_referenced_file_exists() -> None:
    wanted = {name for path in SCRIPTS for name in re.findall(r'from "\./([\w.]+)"', path.read_text("utf-8"))}
    wanted |= set(re.findall(r'(?:src|href)="assets/([\w.]+)"', (PAGE / "index.html").read_text("utf-8")))
    assert wanted == {path.name for path in FILES} - {"index.html"}


def test_every_element_that_a_script_looks_up_is_in_the_page() -> None:
    markup = (PAGE / "index.html").read_text("utf-8")
    looked_up = {
        name
        for path in SCRIPTS
        for name in re.findall(r'(?:byId|getElementById)\("([\w-]+)"\)', path.read_text("utf-8"))
        if not name.startswith("filter-")
    }
    assert [name for name in sorted(looked_up) if f'id="{name}"' not in markup] == []


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_have_a_header_and_limited_length(path: Path) -> None:
    lines = path.read_text("utf-8").splitlines()
    assert lines[0].startswith("// ")
    assert [number for number, line in enumerate(lines, 1) if len(line) > LINE_LENGTH_MAX] == []
