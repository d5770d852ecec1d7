"""The limit on open files, for commands that serve many connections."""

from __future__ import annotations

import resource
from contextlib import suppress


def raise_limit() -> None:
    """Raise the soft limit to the hard limit: the usual soft limit, 1024, is for programs that call select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # macOS rejects the hard limit that it reports
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
