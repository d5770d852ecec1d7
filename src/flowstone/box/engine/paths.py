"""JSON paths into documents: `name`, `.name`, `["name"]`, `[1]`, and `[*]` for every element of an array.

Used by index parts and update operations. Syntax and error positions are the same as in the server's lexer. Array
positions count from 1 in paths and from 0 in steps.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from enum import Enum
from typing import Any, Final, Literal

from flowstone.errors import FlowstoneError

INDEX_BASE: Final = 1
"""Positions in paths count from 1."""


class Every(Enum):
    """The step `[*]`."""

    ELEMENT = "*"


EVERY: Final = Every.ELEMENT
Step = int | str | Literal[Every.ELEMENT]
"""A position in an array (from 0), a key of a map, or EVERY."""


class PathError(FlowstoneError):
    """An invalid path. `position` is the position of the first invalid character, from 1."""

    def __init__(self, path: str, position: int) -> None:
        super().__init__(f"{path!r} is not a JSON path: invalid character at position {position}")
        self.position = position


def parse_path(path: str) -> tuple[Step, ...]:
    """Return the steps of `path`; an empty path has none."""
    steps = []
    at = 0
    while at < len(path):
        step, at = parse_step(path, at)
        steps.append(step)
    return tuple(steps)


def parse_step(path: str, at: int) -> tuple[Step, int]:
    """Return the step that starts at `at`, and its end offset."""
    first = path[at]
    if first == "[":
        return _bracket(path, at + 1)
    if first == ".":
        return _identifier(path, at + 1)
    if at:
        raise PathError(path, at + 1)
    return _identifier(path, at)


def _bracket(path: str, at: int) -> tuple[Step, int]:
    """Return the step after `[`, and the end offset of its `]`."""
    if at == len(path):
        raise PathError(path, at)
    step: Step
    if path[at] in "\"'":
        end = path.find(path[at], at + 1)
        if end < 0:
            raise PathError(path, len(path) + 1)
        step, end = path[at + 1 : end], end + 1
        if not step:
            raise PathError(path, end)
    elif path[at] == "*":
        step, end = EVERY, at + 1
    else:
        step, end = _position(path, at)
    if path[end : end + 1] != "]":
        raise PathError(path, end + 1)
    return step, end + 1


def _position(path: str, at: int) -> tuple[int, int]:
    end = at
    while end < len(path) and path[end] in "0123456789":
        end += 1
    position = int(path[at:end] or "0")
    if position < INDEX_BASE:
        raise PathError(path, at + 1)
    return position - INDEX_BASE, end


def _identifier(path: str, at: int) -> tuple[str, int]:
    if at == len(path) or not (path[at].isalpha() or path[at] == "_"):
        raise PathError(path, at + 1)
    end = at + 1
    while end < len(path) and _continues_identifier(path[end]):
        end += 1
    return path[at:end], end


def _continues_identifier(character: str) -> bool:
    if character == "_" or character.isalpha() or character.isdecimal():
        return True
    # Unicode counts letter numbers and spacing marks as alphabetic; `isalpha` does not.
    return unicodedata.category(character) in ("Nl", "Mc")


def format_path(steps: Sequence[Step]) -> str:
    """Return the steps as error messages spell them: `[1]["name"][*]`."""
    return "".join(_format_step(step) for step in steps)


def _format_step(step: Step) -> str:
    if isinstance(step, int):
        return f"[{step + INDEX_BASE}]"
    return f'["{step}"]' if isinstance(step, str) else "[*]"


def find(document: Any, steps: Sequence[Step]) -> Any:
    """Return the value at the end of the steps, or None if there is none. The steps must not contain EVERY."""
    for step in steps:
        if isinstance(step, int):
            if type(document) is not tuple or step >= len(document):
                return None
            document = document[step]
        else:
            if type(document) is not dict:
                return None
            document = document.get(step)
    return document
