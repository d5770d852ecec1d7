"""Errors of Flowstone are shown by their message, all others with their traceback."""

from __future__ import annotations

import io
import os

import pytest
from pyspark.util import handle_worker_exception

from flowstone.errors import FlowstoneError
from flowstone.spark.worker_errors import HIDE_TRACEBACK, clear_errors


def reported(error: Exception) -> str:
    """Return what a worker of Spark reports."""
    out = io.BytesIO()
    try:
        with clear_errors():
            raise error
    except Exception as caught:
        handle_worker_exception(caught, out)
    return out.getvalue()[8:].decode()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HIDE_TRACEBACK, "")


def test_flowstone_errors_are_reported_by_their_message() -> None:
    text = reported(FlowstoneError("no space 'x' in archive", hint="there are: y"))
    assert text == "flowstone.errors.FlowstoneError: no space 'x' in archive; there are: y\n"


def test_other_errors_keep_their_traceback() -> None:
    assert reported(KeyError("x")).startswith("Traceback (most recent call last):")
    assert not os.environ[HIDE_TRACEBACK]
