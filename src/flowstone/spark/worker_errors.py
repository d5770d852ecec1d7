"""Make Spark show Flowstone's errors without the traceback of the worker.

Spark prints the whole Python traceback before the message. A worker ends with the error that it raises, so hiding the
traceback affects this one error only. All other errors keep their traceback.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from flowstone.errors import FlowstoneError

HIDE_TRACEBACK: Final = "SPARK_HIDE_TRACEBACK"
"""Environment variable that workers check when they report an exception (pyspark.util.handle_worker_exception)."""


@contextmanager
def clear_errors() -> Iterator[None]:
    """Show errors of Flowstone that leave the block as their message only."""
    try:
        yield
    except FlowstoneError:
        os.environ[HIDE_TRACEBACK] = "1"
        raise
