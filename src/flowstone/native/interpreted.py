"""Import of compiled modules from their Python sources: for debuggers, coverage and tests that compare both forms.

A process with FLOWSTONE_INTERPRETED=1 in its environment runs all compiled modules interpreted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, ModuleSpec, SourceFileLoader
from types import ModuleType


class SourceFinder:
    """Finds the source of a module of Flowstone, never its compiled file."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of the source of module `name`, or None if it is not a module of Flowstone."""
        if path is None or not name.startswith("flowstone."):
            return None
        for folder in path:
            spec = FileFinder(folder, (SourceFileLoader, SOURCE_SUFFIXES)).find_spec(name)
            if spec is not None:
                return spec
        return None


def install() -> None:
    """Make this process import modules of Flowstone from source. Must precede the import of compiled modules."""
    if SourceFinder not in sys.meta_path:
        sys.meta_path.insert(0, SourceFinder)
