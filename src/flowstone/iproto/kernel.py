"""The one way a function here becomes machine code: `@kernel`.

Kernels release the GIL and are cached on disk beside this package, or, where that cannot be written to, in the
user's cache directory; numba's own variable NUMBA_CACHE_DIR names another place. A kernel takes NumPy arrays
and numbers, returns numbers, and never raises: it reports a status that its caller turns into an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import numba

P = ParamSpec("P")
R = TypeVar("R")


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compiles `function` at its first call, or loads it from the cache."""
    compiled = numba.njit(cache=True, nogil=True, error_model="numpy")(function)
    return cast("Callable[P, R]", compiled)
