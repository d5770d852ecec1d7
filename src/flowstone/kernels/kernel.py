"""The decorators, and how a call reaches machine code.

A call is matched to object code by the kinds of its arguments (element type, dimensions and layout of arrays), then
made in numba's native convention: a pointer for the result, a pointer for an exception (which none of ours has: the
compiler refuses them), and each array as its seven or nine words. What machine code would misread is a TypeError or an
OverflowError here: unaligned arrays, other byte orders, numbers beyond 64 bits. Any thread may make any call.
With NUMBA_DISABLE_JIT=1, numba's own switch, everything here stays plain Python.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable
from threading import Lock
from typing import Any, Generic, ParamSpec, TypeVar, cast

import numpy as np

from flowstone.kernels import cache

P = ParamSpec("P")
R = TypeVar("R")
Kind = tuple[Any, ...]

PLAIN = os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0")

_LAYOUT = 0x101  # NumPy's flags for "C contiguous" and "aligned"

_on_compile: list[Callable[[str], None]] = []


def on_compile(callback: Callable[[str], None]) -> None:
    """`callback` is told the name of each kernel that has to be compiled, before that takes its seconds."""
    _on_compile.append(callback)


class Kernel(Generic[P, R]):
    """A function whose calls, from Python or from other kernels, run as machine code."""

    def __init__(self, function: Callable[P, R], *, forceinline: bool = False) -> None:
        self.py_func = function
        self.forceinline = forceinline
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__
        self.__module__ = function.__module__
        self._entries: dict[Kind, _Entry] = {}
        self._known: dict[tuple[Any, ...], _Entry] = {}
        self._lock = Lock()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if kwargs:
            raise TypeError(f"kernel {self.__name__} takes its arguments by position")
        looks = tuple(map(_looks, args))
        entry = self._known.get(looks)
        if entry is None:
            kind = _kind(args)
            entry = self._known[looks] = self._entries.get(kind) or self._prepare(kind)
        return cast("R", entry(args))

    def _prepare(self, kind: Kind) -> _Entry:
        with self._lock:
            entry = self._entries.get(kind)
            if entry is None:
                code = cache.load(self.py_func, kind)
                if code is None:
                    code = self._compile(kind)
                entry = self._entries[kind] = _Entry(code, kind)
            return entry

    def _compile(self, kind: Kind) -> cache.ObjectCode:
        for callback in _on_compile:
            callback(self.__name__)
        from flowstone.kernels.compiler import compile_kernel  # imports numba: only where it must

        code = compile_kernel(self.py_func, kind)
        cache.save(self.py_func, kind, code)
        return code


class _Entry:
    """Loaded object code for arguments of one kind."""

    def __init__(self, code: cache.ObjectCode, kind: Kind) -> None:
        self._returns = code.returns.strip("()")
        self._is_tuple = code.returns.startswith("(")
        self._result = ctypes.c_int64 * (len(self._returns) + 1)  # and the place of an exception
        self._has_unsigned = "Q" in code.returns
        self._pack = struct.Struct("=QQ" + _words(kind)).pack
        self._call = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_char_p)(cache.address(code))

    def __call__(self, args: tuple[Any, ...]) -> Any:
        result = self._result()
        start = ctypes.addressof(result)
        flat = [start, start + 8 * len(self._returns)]
        for arg in args:
            _flatten(arg, flat)
        if self._call(self._pack(*flat)):
            raise AssertionError("a kernel raised an exception")
        values = result[: len(self._returns)]
        if self._has_unsigned:
            values = [
                value & 0xFFFFFFFFFFFFFFFF if code == "Q" else value
                for value, code in zip(values, self._returns, strict=True)
            ]
        return tuple(values) if self._is_tuple else values[0] if values else None


def _looks(value: Any) -> object:
    """What decides an argument's kind, as far as that is quick to find; numbers of one class are of one kind."""
    if type(value) is np.ndarray:
        return value.dtype, value.ndim, value.flags.num & _LAYOUT
    return tuple(map(_looks, value)) if isinstance(value, tuple) else type(value)


def _kind(value: Any) -> Kind:
    """What machine code depends on. Whether an array may be written to is between kernel and caller."""
    if isinstance(value, np.ndarray):
        flags = value.flags
        if not flags.aligned:
            raise TypeError(f"an array of {value.dtype} is not aligned: copy it first")
        return (value.dtype.str, value.ndim, "C" if flags.c_contiguous else "A")
    if isinstance(value, tuple):
        return (type(value), *map(_kind, value))
    if isinstance(value, float):
        return ("f",)
    if isinstance(value, np.uint64):
        return ("u",)
    if isinstance(value, int | np.integer | np.bool_):
        return ("i",)
    raise TypeError(f"{type(value).__name__} is not a valid kernel argument")


def _words(kind: Kind) -> str:
    """The machine words that an argument of this kind is passed in, as the struct module names them."""
    match kind:
        case ("i",):
            return "q"
        case ("u",):
            return "Q"
        case ("f",):
            return "d"
        case (str(), int(dimensions), _):
            return "QQqqQ" + "q" * (2 * dimensions)  # two owners, size, item size, data; shape and strides
        case _:
            return "".join(map(_words, kind[1:]))


def _data_by_interface(array: Any) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _data_by_layout(array: Any) -> int:
    # `data` follows the object's head in NumPy's public PyArrayObject_fields.
    return ctypes.c_uint64.from_address(id(array) + object.__basicsize__).value


_PROBE = np.empty(1)
# Asking the interface takes 2 µs per array, more than all the rest of a call.
_data = _data_by_layout if _data_by_layout(_PROBE) == _data_by_interface(_PROBE) else _data_by_interface


def _flatten(value: Any, flat: list[Any]) -> None:
    if isinstance(value, np.ndarray):
        flat += (0, 0, value.size, value.itemsize, _data(value))
        flat += value.shape
        flat += value.strides
    elif isinstance(value, tuple):
        for member in value:
            _flatten(member, flat)
    elif isinstance(value, float):
        flat.append(value)
    else:
        number = int(value)
        if not -(2**63) <= number < 2**63 and not isinstance(value, np.uint64):
            raise OverflowError(f"{number} does not fit 64 bits")
        flat.append(number)


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Makes `function` a kernel: arrays and numbers in, by position, and numbers out."""
    return function if PLAIN else Kernel(function)


def inlined(function: Callable[P, R]) -> Callable[P, R]:
    """A kernel that is copied into each kernel that calls it: right for what is short and called often."""
    return function if PLAIN else Kernel(function, forceinline=True)
