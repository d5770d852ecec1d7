"""The errors of log files: problem, place and hint, and pickling."""

from __future__ import annotations

import errno
import pickle

import pytest

from flowstone.xlog.errors import (
    BY_FORCE,
    BlockTooLarge,
    DamagedLog,
    ForeignFile,
    LogGap,
    LsnUsedTwice,
    NotALogFile,
    UnsupportedLogFormat,
    WriteFailed,
    XlogError,
)

PATH = "data/00000000000000000010.xlog"
FULL = OSError(errno.ENOSPC, "No space left on device")
ERRORS = [
    (DamagedLog(PATH, 97, "no block starts here"), "damaged at byte 97: no block starts here"),
    (NotALogFile(PATH, "the file is empty"), "not a log file: the file is empty"),
    (UnsupportedLogFormat(PATH, "0.14"), "format '0.14' is not supported"),
    (BlockTooLarge(PATH, 97, 11, 10), "block at byte 97 holds 11 bytes: at most 10"),
    (ForeignFile(PATH, "b", "a"), "written by instance b, but the directory belongs to a"),
    (
        LogGap(PATH, {2: 3, 1: 4}, {1: 9}, [(1, 5, 9)]),
        "between {1: 4, 2: 3} and {1: 9}: LSN 5..9 of",
    ),
    (LsnUsedTwice(PATH, 1, 5, 6), "LSN 5 of replica 1 is used twice: the log is at 6"),
    (WriteFailed(PATH, 97, FULL, is_usable=True), "cannot write at byte 97: No space left on device"),
    (WriteFailed(PATH, 97, FULL, is_usable=False), "reopen the file"),
]


@pytest.mark.parametrize(("error", "words"), ERRORS, ids=lambda value: type(value).__name__)
def test_xlog_error_has_problem_place_and_hint(error: XlogError, words: str) -> None:
    text = str(error)
    assert text.startswith(f"{PATH}: ")
    assert words in text
    assert error.hint
    assert text.endswith(error.hint)
    assert "\n" not in text


@pytest.mark.parametrize("kind", [DamagedLog, ForeignFile, LogGap])
def test_hint_contains_the_force_text_once_when_force_skips_the_error(kind: type[XlogError]) -> None:
    (error,) = (error for error, _ in ERRORS if isinstance(error, kind))
    assert error.hint is not None
    assert error.hint.count(BY_FORCE) == 1


@pytest.mark.parametrize("error", [error for error, _ in ERRORS], ids=lambda value: type(value).__name__)
def test_errors_can_be_pickled(error: XlogError) -> None:
    restored = pickle.loads(pickle.dumps(error))
    assert type(restored) is type(error)
    assert str(restored) == str(error)
    assert restored.__dict__ == error.__dict__
