"""The libraries that only some commands need, and what to type where they are missing.

The package alone brings what logs, nodes and archives need; Spark and the web are extras. A command that needs one asks
here first, before it has done any work. `pip install 'flowstone[web]'` is right wherever the package came from, a clone
among others: pip knows from the installed one what its extras are, and looks for no other.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final, Literal

from flowstone.cli.console import UsageError

Extra = Literal["spark", "web"]

MODULES: Final[dict[Extra, tuple[str, ...]]] = {
    "spark": ("pyspark", "pandas", "deltalake"),
    "web": ("starlette", "uvicorn", "prometheus_client"),
}


class MissingExtra(UsageError):
    """What was asked for needs a library that is not installed."""


def need(extra: Extra, what: str) -> None:
    """MissingExtra where `what`, say a command, cannot be done for want of one of the extra's libraries."""
    for module in MODULES[extra]:
        if find_spec(module) is None:
            raise MissingExtra(
                f"{what} needs {module}, which is not installed", hint=f"pip install 'flowstone[{extra}]'"
            )
