"""Libraries that only some commands need, and how to install them.

The package itself requires the libraries for logs, nodes and archives; libraries for typed columns, Spark and the web
are extras. A command that needs an extra calls `need` before it does any work. `pip install 'flowstone[web]'` works
wherever the package came from, even a clone: pip reads the extras of the installed package, and looks for no other.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final, Literal

from flowstone.cli.console import UsageError

Extra = Literal["arrow", "spark", "web"]

MODULES: Final[dict[Extra, tuple[str, ...]]] = {
    "arrow": ("pyarrow",),
    "spark": ("pyspark", "pandas", "deltalake", "pyarrow"),
    "web": ("starlette", "uvicorn", "prometheus_client"),
}


class MissingExtra(UsageError):
    """A command or an option needs a library that is not installed."""


def need(extra: Extra, what: str) -> None:
    """Raise MissingExtra if a library of `extra` is missing; `what` is the command or option that needs it."""
    for module in MODULES[extra]:
        if find_spec(module) is None:
            raise MissingExtra(
                f"{what} needs {module}, which is not installed", hint=f"pip install 'flowstone[{extra}]'"
            )
