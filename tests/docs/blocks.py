"""Parses pages of the documentation: every fenced block, every hidden one, and its comment.

A fenced block has a language. A comment on the line above it may have one of these forms:

    <!-- not run: REASON -->     the block is skipped; `test_coverage.py` limits the number of these
    <!-- keeps running -->       the block runs in the background: it must print the shown text, and ends with the page
    <!-- file: NAME -->          the block is written to that file in the page's directory
    <!-- on: ADDRESS -->         for Lua: the block is typed at the console of the Tarantool server there

A comment that starts with a language on its first line is a hidden block:

    <!-- sh
    mkdir -p /backup
    -->

`<!-- needs: spark -->`, anywhere, adds a page to those that share one Spark session. `running.py` describes the
execution of blocks.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from tests.places import ROOT

RUN: Final = frozenset("sh console python lua sql".split())
SHOWN: Final = frozenset("text json".split())
"""The output of the previous block."""
GIVEN: Final = frozenset("toml yaml ini".split())
"""Files, written for later blocks. A TOML file configures a node, which checks it."""
LANGUAGES: Final = RUN | SHOWN | GIVEN

_FENCE: Final = re.compile(r"(?P<indent> *)```(?P<language>\S*)\s*")
_SAYS: Final = re.compile(r" *<!-- (?P<text>(?:not run: |keeps running|file: |on: ).*?) ?-->\s*")
_HIDDEN: Final = re.compile(rf" *<!-- (?P<language>{'|'.join(sorted(RUN | GIVEN))})(?: (?P<text>(?:file|on): \S+))?\s*")
_NEEDS: Final = re.compile(r"<!-- needs: (?P<what>[a-z, ]+?) *-->")


class BadPage(Exception):
    """A page that breaks the rules above."""


@dataclass(frozen=True)
class Block:
    """One block: its line, language and text, and the comment above it."""

    line: int
    language: str
    text: str
    says: str = ""
    is_hidden: bool = False

    @property
    def reason_not_to_run(self) -> str | None:
        return self._said("not run: ")

    @property
    def file(self) -> str | None:
        return self._said("file: ")

    @property
    def server(self) -> str | None:
        return self._said("on: ")

    @property
    def keeps_running(self) -> bool:
        return self.says == "keeps running"

    def _said(self, what: str) -> str | None:
        return self.says.removeprefix(what) if self.says.startswith(what) else None


@dataclass(frozen=True)
class Page:
    """A page: its path from the repository's root, its blocks in order, and its requirements."""

    path: str
    blocks: tuple[Block, ...]
    needs: frozenset[str]


def paths() -> list[str]:
    """Return the README and all pages below `docs/`."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path.relative_to(ROOT).as_posix() for path in found]


def needs_of(text: str) -> frozenset[str]:
    return frozenset(what.strip() for found in _NEEDS.finditer(text) for what in found["what"].split(","))


def page_at(path: str) -> Page:
    return page_of(path, (ROOT / path).read_text())


def page_of(path: str, text: str) -> Page:
    needs = needs_of(text)
    if needs - {"spark"}:
        raise BadPage(f"{path}: needs {', '.join(sorted(needs))}, of which only spark is known")
    blocks = tuple(_blocks(path, text.splitlines()))
    if any(block.language == "sql" for block in blocks) and "spark" not in needs:
        raise BadPage(f"{path}: has SQL, and does not say <!-- needs: spark -->")
    return Page(path, blocks, needs)


def _blocks(path: str, lines: Sequence[str]) -> Iterator[Block]:
    number, says = 0, ""
    while number < len(lines):
        line, start = lines[number], number + 1
        number += 1
        if fence := _FENCE.fullmatch(line):
            body, number = _until(lines, number, f"{fence['indent']}```", f"{path}:{start}")
            if fence["language"] not in LANGUAGES:
                raise BadPage(f"{path}:{start}: a block of {fence['language'] or 'no language'}")
            yield Block(start, fence["language"], body, says)
        elif hidden := _HIDDEN.fullmatch(line):
            body, number = _until(lines, number, "-->", f"{path}:{start}")
            yield Block(start, hidden["language"], body, hidden["text"] or "", is_hidden=True)
        elif "```" in line:
            raise BadPage(f"{path}:{start}: a fence that is not understood: {line.strip()}")
        said = _SAYS.fullmatch(line)
        if says and not fence:
            raise BadPage(f"{path}:{start}: no block below the comment that says {says!r}")
        says = said["text"] if said else ""


def _until(lines: Sequence[str], begin: int, end: str, place: str) -> tuple[str, int]:
    for number in range(begin, len(lines)):
        if lines[number].rstrip() == end:
            return textwrap.dedent("\n".join(lines[begin:number]) + "\n"), number + 1
    raise BadPage(f"{place}: no end of the block")
