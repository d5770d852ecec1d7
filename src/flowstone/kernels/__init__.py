"""Python functions as machine code: compiled by numba once, then loaded from disk without it.

`@kernel` makes one, `@inlined` one that is copied into those that call it. A kernel takes NumPy
arrays, tuples of them, and numbers; it returns numbers; it allocates nothing and never raises: it reports a status that
its caller turns into an error. It runs without the GIL. Importing numba and warming it up costs more than reading a
small log, so the object code is kept (`cache`) and called through ctypes; only a kernel that is not there yet, or whose
sources have changed, brings the compiler in (`compiler`).
"""

from flowstone.kernels.kernel import Kernel, inlined, kernel, on_compile

__all__ = ["Kernel", "inlined", "kernel", "on_compile"]
