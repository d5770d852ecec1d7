"""Errors that stand at the front of what Spark shows: our own, without the stack of the worker that met them.

Spark prints the whole Python traceback before the message. A worker that raises ends with it, so telling it to leave
the traceback out concerns that one error only. Anything that is not an error of ours keeps its traceback.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from flowstone.errors import FlowstoneError

HIDE_TRACEBACK: Final = "SPARK_HIDE_TRACEBACK"
"""What Spark's workers look at when they report an exception (pyspark.util.handle_worker_exception)."""


@contextmanager
def clear_errors() -> Iterator[None]:
    """Errors of Flowstone that leave the block are shown as their message."""
    try:
        yield
    except FlowstoneError:
        os.environ[HIDE_TRACEBACK] = "1"
        raise
