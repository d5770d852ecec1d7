"""The interpreted twin of a compiled function, in the same process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, ParamSpec, TypeVar, cast

from flowstone.native.interpreted import SourceFinder

P = ParamSpec("P")
R = TypeVar("R")

PACKAGE = Path(__file__).parents[2] / "src" / "flowstone"


def compiled_names() -> list[str]:
    """Return the names of the modules that the build compiles."""
    found = [path for path in PACKAGE.rglob("*.py") if "\nimport cython\n" in path.read_text()]
    found += PACKAGE.rglob("*.pyx")
    return sorted("flowstone." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in found)


@cache
def interpreted_module(name: str) -> ModuleType:
    """Import a compiled module from its source, together with the compiled modules that it uses.

    Modules that are already imported remain compiled.
    """
    if not name.startswith("flowstone."):  # a module of the tests
        source = PACKAGE.parents[1].joinpath(*name.split(".")).with_suffix(".py")
        spec = spec_from_file_location(name, source)
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    names = compiled_names()
    kept = {each: sys.modules.pop(each) for each in names if each in sys.modules}
    sys.meta_path.insert(0, SourceFinder)
    try:
        return import_module(name)
    finally:
        sys.meta_path.remove(SourceFinder)
        for each in names:
            sys.modules.pop(each, None)
        sys.modules.update(kept)
        for each, module in kept.items():
            package, _, last = each.rpartition(".")
            setattr(sys.modules[package], last, module)


def twin(function: Callable[P, R]) -> Callable[P, R]:
    """Return the interpreted form of a compiled function."""
    found: Any = getattr(interpreted_module(function.__module__), function.__name__)
    return cast("Callable[P, R]", found)
