"""The coverage of an input: the edges between lines, and roughly how often each was taken.

Plain tracing of the functions in some directories; kernels count while they run as plain Python.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import flowstone

SOURCES: Final = str(Path(flowstone.__file__).parent)
TOKEN_SIZE_MAX: Final = 16

Edge = tuple[CodeType, int, int]
Feature = tuple[Edge, int]


class Coverage:
    """Runs inputs and reports new coverage. `tokens` are the constants of the executed code."""

    def __init__(self, *roots: str) -> None:
        self.tokens: list[bytes] = []
        self._roots = roots or (SOURCES,)
        self._is_ours: dict[CodeType, bool] = {}
        self._seen: set[Feature] = set()
        self._edges: set[Edge] = set()
        self._taken: dict[Edge, int] = {}
        self._lines: dict[FrameType, int] = {}

    @property
    def edge_count(self) -> int:
        return len(self._edges)

    def is_news(self, run: Callable[[bytes], object], data: bytes) -> bool:
        """Return True if the run took a new edge, or one far more often than before. Passes errors on."""
        self._taken = {}
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            run(data)
        finally:
            sys.settrace(before)
            self._lines.clear()
        features = {(edge, count.bit_length()) for edge, count in self._taken.items()}
        is_news = not features <= self._seen
        self._seen |= features
        self._edges |= self._taken.keys()
        return is_news

    def _enter(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        is_ours = self._is_ours.get(code)
        if is_ours is None:
            is_ours = self._is_ours[code] = code.co_filename.startswith(self._roots)
            if is_ours:
                self._take_tokens(code)
        if not is_ours:
            return None
        self._lines[frame] = 0
        return self._step

    def _step(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        if event == "line":
            line = frame.f_lineno
            edge = frame.f_code, self._lines.get(frame, 0), line
            self._taken[edge] = self._taken.get(edge, 0) + 1
            self._lines[frame] = line
        elif event == "return":
            self._lines.pop(frame, None)
        return self._step

    def _take_tokens(self, code: CodeType) -> None:
        for constant in code.co_consts:
            token = _token(constant)
            if token and token not in self.tokens:
                self.tokens.append(token)


def _token(constant: object) -> bytes:
    """Return a constant in the forms it can have in an input; nothing for impossible ones."""
    match constant:
        case bytes() if len(constant) <= TOKEN_SIZE_MAX:
            return constant
        case str() if len(constant) <= TOKEN_SIZE_MAX and constant.isascii():
            return constant.encode()
        case int() if 0 <= constant < 0x100:
            return bytes((constant,))
        case int() if 0 <= constant < 2**64:
            return constant.to_bytes(4 if constant < 2**32 else 8, "big")
    return b""
