"""Compares output with the text of a page.

A page's text is compared literally, except for values that differ between runs: times, durations (`4.1 s`), UUIDs and
hashes match any value of their kind, `…` matches any text within a line, and a line with only `…` any number of lines.
Several spaces equal one, because column widths vary with their content and ports have more digits here. Trailing
spaces, empty lines at the end, and messages about compilation, which happens once per machine, are ignored.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

ANY: Final = "…"
COMPILING: Final = "flowstone: compiling "

_KINDS: Final = (
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|\+00:00)?",
    r"\d+(?:\.\d+)? m?s\b",
    r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    r"\b[0-9a-f]{64}\b",
)
_VARYING: Final = re.compile("|".join([f"({kind})" for kind in _KINDS] + [f"({ANY})"]))


def differs(shown: str, printed: str) -> str | None:
    """Return None if the output matches, otherwise a sentence about the first line that differs."""
    expected = [_narrow(line) for line in shown.rstrip().splitlines()]
    lines = [_narrow(line) for line in printed.rstrip().splitlines() if not line.startswith(COMPILING)]
    got = "".join(f"{line}\n" for line in lines)
    if re.fullmatch(_pattern(expected), got):
        return None
    matched = 0
    while matched < len(expected) and re.match(_pattern(expected[: matched + 1]), got):
        matched += 1
    line = expected[matched] if matched < len(expected) else "nothing more"
    return f"the page shows {line!r}, but what was printed is\n{printed.rstrip() or '(nothing)'}"


def says_something(shown: str) -> bool:
    """Return False if the pattern would match any text."""
    return any(line.strip() not in {"", ANY} for line in shown.splitlines())


def lacks(shown: str, printed: str) -> str | None:
    """Return None if the printed JSON has everything in these JSON texts, otherwise a sentence about the difference.

    Texts are one object, or one per line. The printed object must have the keys of the object on the page, with values
    of the same type; the values may differ, and `null` matches any value.
    """
    try:
        examples, found = _documents(shown), _documents(printed)
    except ValueError as error:
        return f"no JSON: {error}"
    for example in examples:
        reasons = [_lacking(example, candidate, "") for candidate in found]
        if all(reasons):
            return reasons[0]
        if not found:
            return "nothing was printed"
    return None


def _narrow(line: str) -> str:
    return re.sub(r" +", " ", line.rstrip())


def _pattern(lines: list[str]) -> str:
    return "".join(r"(?:.*\n)*?" if line.strip() == ANY else _line(line) + r"\n" for line in lines)


def _line(text: str) -> str:
    pattern, place = "", 0
    for found in _VARYING.finditer(text):
        kind = _KINDS[found.lastindex - 1] if found.lastindex and found[0] != ANY else ".*"
        pattern += re.escape(text[place : found.start()]) + kind
        place = found.end()
    return pattern + re.escape(text[place:])


def _documents(text: str) -> list[Any]:
    try:
        return [json.loads(text)]
    except ValueError:
        return [json.loads(line) for line in text.splitlines() if line.strip()]


def _lacking(example: Any, found: Any, path: str) -> str | None:
    if isinstance(example, dict) and isinstance(found, dict):
        for key, value in example.items():
            if key not in found:
                return f"{path}.{key} was not printed: {json.dumps(found)[:500]}"
            if reason := _lacking(value, found[key], f"{path}.{key}"):
                return reason
        return None
    if isinstance(example, list) and isinstance(found, list):
        if example and not found:
            return f"{path} was empty"
        return _lacking(example[0], found[0], f"{path}[0]") if example else None
    numbers = (int, float)
    alike = isinstance(found, type(example)) or (isinstance(example, numbers) and isinstance(found, numbers))
    return None if example is None or alike else f"{path} was {found!r}, which is no {type(example).__name__}"
