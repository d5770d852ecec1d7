"""The one way a function here becomes machine code: `@kernel`.

Kernels release the GIL and are cached on disk beside this package, or, where that cannot be written to, in the
user's cache directory; numba's own variable NUMBA_CACHE_DIR names another place. Where none can be written to they
are compiled anew by every process. A kernel takes NumPy arrays and numbers, returns numbers, and never raises: it
reports a status that its caller turns into an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numba

P = ParamSpec("P")
R = TypeVar("R")

KERNEL_PACKAGES = ("iproto", "xlog")
"""Packages whose modules hold kernels or constants that kernels were compiled with."""


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compiles `function` at its first call, or loads it from the cache."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        compiled = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no place for a cache
        compiled = numba.njit(**options)(function)
    saved = getattr(compiled, "_cache", None)
    if hasattr(saved, "_cache_file"):
        # numba looks only at the function's own file, but a kernel contains the kernels and constants it uses.
        saved._cache_file._source_stamp = source_stamp()
    return cast("Callable[P, R]", compiled)


@cache
def source_stamp() -> str:
    """Changes with every source file that a kernel may have been compiled from."""
    digest = hashlib.sha256()
    root = Path(__file__).parent.parent
    for package in KERNEL_PACKAGES:
        for path in sorted((root / package).glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
