"""Public names of a package, each imported at its first use, so that importing the package loads nothing heavy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """Return the `__getattr__` of `package`.

    `homes` maps each name to its module, relative to `package`; an empty one is a subpackage of that name, and one with
    a leading dot is relative to the parent of `package`.
    """

    def get(name: str) -> object:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return import_module(f".{name}", package) if home == "" else getattr(import_module(f".{home}", package), name)

    return get
