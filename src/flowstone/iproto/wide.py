"""Moves wider than a byte, for kernels: words, literal texts and runs of bytes at any offset of a byte array.

Each function here has two bodies with one meaning: the plain one below, which checks its bounds and runs where
kernels run uncompiled (NUMBA_DISABLE_JIT), and the machine one at the end, which becomes one or two instructions and
checks nothing. So a kernel proves the bounds before it calls, and its tests run it uncompiled to prove the proof.
Numbers are int64, words are uint64: NumPy and numba turn a mix of the two into a float.

Kernels are made of `@inlined` and `@apart` functions. Neither counts references to the arrays it is given, and the
former becomes part of its caller; together that makes short steps several times faster. The latter is for what is
long or rare: a copy of it in every caller would make a kernel slow to compile and to load.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import lower_builtin, type_callable
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
P = ParamSpec("P")
R = TypeVar("R")
Scalar = TypeVar("Scalar", bound=np.generic)


def inlined(function: Callable[P, R]) -> Callable[P, R]:
    """A short part of a kernel. It takes arrays and numbers, allocates nothing and never raises."""
    compiled = numba.njit(nogil=True, error_model="numpy", forceinline=True, _nrt=False)(function)
    return cast("Callable[P, R]", compiled)


def apart(function: Callable[P, R]) -> Callable[P, R]:
    """A long or rare part of a kernel, called instead of copied; otherwise as `inlined`."""
    compiled = numba.njit(nogil=True, error_model="numpy", _nrt=False)(function)
    return cast("Callable[P, R]", compiled)


def readonly(array: NDArray[Scalar]) -> NDArray[Scalar]:
    """A contiguous view that cannot be written through.

    numba compiles a kernel anew for every mix of writable and read-only arrays; passing all inputs so makes it one.
    """
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view


def _span(array: Bytes, at: int, width: int) -> slice:
    if not 0 <= at <= array.size - width:
        raise IndexError(f"{width} bytes at {at} of {array.size}")
    return slice(int(at), int(at) + width)


def byte(buf: Bytes, at: int) -> int:
    """The byte at `at` as a number."""
    return int(buf[_span(buf, at, 1)][0])


def number(value: np.unsignedinteger[Any] | np.signedinteger[Any]) -> int:
    """An element of an integer array, or a word below 2^63, as a number."""
    return int(value)


def word(value: int) -> np.uint64:
    """A number as a word, a negative one in two's complement."""
    return np.uint64(int(value) & 0xFFFFFFFFFFFFFFFF)


def big16(buf: Bytes, at: int) -> int:
    """The unsigned 2-byte number at `at`, most significant byte first."""
    return int.from_bytes(buf[_span(buf, at, 2)].tobytes(), "big")


def big32(buf: Bytes, at: int) -> int:
    """The unsigned 4-byte number at `at`, most significant byte first."""
    return int.from_bytes(buf[_span(buf, at, 4)].tobytes(), "big")


def big64(buf: Bytes, at: int) -> np.uint64:
    """The 8-byte word at `at`, most significant byte first."""
    return np.uint64(int.from_bytes(buf[_span(buf, at, 8)].tobytes(), "big"))


def little64(buf: Bytes, at: int) -> np.uint64:
    """The 8-byte word at `at`, least significant byte first."""
    return np.uint64(int.from_bytes(buf[_span(buf, at, 8)].tobytes(), "little"))


def poke(out: Bytes, at: int, value: int) -> int:
    """Writes one byte; the offset behind it."""
    out[_span(out, at, 1)] = value
    return at + 1


def poke64(out: Bytes, at: int, value: np.uint64) -> None:
    """Writes the 8 bytes of `value`, least significant first."""
    out[_span(out, at, 8)] = np.frombuffer(int(value).to_bytes(8, "little"), np.uint8)


def put(out: Bytes, at: int, text: str) -> int:
    """Writes a literal text of ASCII characters; the offset behind it."""
    out[_span(out, at, len(text))] = np.frombuffer(text.encode("ascii"), np.uint8)
    return at + len(text)


def copy(out: Bytes, at: int, source: Bytes, start: int, count: int) -> int:
    """Copies `count` bytes between arrays that do not overlap; the offset behind them."""
    out[_span(out, at, int(count))] = source[_span(source, start, int(count))]
    return at + count


def copy32(out: Bytes, at: int, source: Bytes, start: int) -> None:
    """Copies 32 bytes, however many of them the caller will count as written."""
    out[_span(out, at, 32)] = source[_span(source, start, 32)]


def high_product(a: np.uint64, b: np.uint64) -> np.uint64:
    """The upper word of the product of two words."""
    return np.uint64((int(a) * int(b)) >> 64)


def trailing_zeros(value: np.uint64) -> int:
    """How many of the lowest bits are 0; 64 for 0."""
    bits = int(value)
    return (bits & -bits).bit_length() - 1 if bits else 64


def bit_length(value: np.uint64) -> int:
    """How many bits the number needs; 0 for 0."""
    return int(value).bit_length()


# The machine bodies. `Emit` gets the LLVM builder and the arguments' LLVM values.

Emit = Callable[[Any, Any, Any, Any], Any]
WORD, BYTE = ir.IntType(64), ir.IntType(8)


def _address(context: Any, builder: Any, array_type: Any, array: Any, at: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(builder.bitcast(data, BYTE.as_pointer()), [at])


def _loader(width: int, *, swap: bool) -> Emit:
    kind = ir.IntType(8 * width)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = _address(context, builder, signature.args[0], args[0], args[1])
        value = builder.load(builder.bitcast(address, kind.as_pointer()), align=1)
        if swap:
            value = builder.bswap(value)
        return value if width == 8 else builder.zext(value, WORD)

    return emit


def _emit_number(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return context.cast(builder, args[0], signature.args[0], types.int64)


def _emit_word(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return args[0]


def _emit_poke(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    address = _address(context, builder, signature.args[0], args[0], args[1])
    builder.store(builder.trunc(args[2], BYTE), address, align=1)
    return builder.add(args[1], WORD(1))


def _emit_poke64(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    address = _address(context, builder, signature.args[0], args[0], args[1])
    builder.store(args[2], builder.bitcast(address, WORD.as_pointer()), align=1)
    return context.get_dummy_value()


def _emit_put(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    text = signature.args[2].literal_value.encode("ascii")
    address = _address(context, builder, signature.args[0], args[0], args[1])
    constant = cgutils.global_constant(builder, "text", cgutils.make_bytearray(text))
    cgutils.raw_memcpy(builder, address, builder.bitcast(constant, BYTE.as_pointer()), WORD(len(text)), 1)
    return builder.add(args[1], WORD(len(text)))


def _emit_copy(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    to = _address(context, builder, signature.args[0], args[0], args[1])
    source = _address(context, builder, signature.args[2], args[2], args[3])
    cgutils.raw_memcpy(builder, to, source, args[4], 1)
    return builder.add(args[1], args[4])


def _emit_copy32(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    to = _address(context, builder, signature.args[0], args[0], args[1])
    source = _address(context, builder, signature.args[2], args[2], args[3])
    cgutils.raw_memcpy(builder, to, source, WORD(32), 1)
    return context.get_dummy_value()


def _emit_high_product(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    double = ir.IntType(128)
    product = builder.mul(builder.zext(args[0], double), builder.zext(args[1], double))
    return builder.trunc(builder.lshr(product, double(64)), WORD)


def _emit_trailing_zeros(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return builder.cttz(args[0], ir.IntType(1)(0))


def _emit_bit_length(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return builder.sub(WORD(64), builder.ctlz(args[0], ir.IntType(1)(0)))


def _machine(plain: Callable[..., Any], returns: Any, takes: tuple[Any, ...], emit: Emit) -> None:
    """Makes kernels that call `plain` use `emit`. None in `takes` is for arrays and texts: it takes what is given."""

    def typer(*given: Any) -> Any:
        if len(given) != len(takes) or given[-1] == types.unicode_type:
            return None  # numba asks again, with the literal's own type
        return returns(*(have if want is None else want for have, want in zip(given, takes, strict=True)))

    typer.__signature__ = inspect.signature(plain)  # type: ignore[attr-defined]
    type_callable(plain)(lambda context: typer)
    lower_builtin(plain, types.VarArg(types.Any))(emit)


_I, _U = types.int64, types.uint64
_machine(byte, _I, (None, _I), _loader(1, swap=False))
_machine(number, _I, (None,), _emit_number)
_machine(word, _U, (_I,), _emit_word)
_machine(big16, _I, (None, _I), _loader(2, swap=True))
_machine(big32, _I, (None, _I), _loader(4, swap=True))
_machine(big64, _U, (None, _I), _loader(8, swap=True))
_machine(little64, _U, (None, _I), _loader(8, swap=False))
_machine(poke, _I, (None, _I, _I), _emit_poke)
_machine(poke64, types.none, (None, _I, _U), _emit_poke64)
_machine(put, _I, (None, _I, None), _emit_put)
_machine(copy, _I, (None, _I, None, _I, _I), _emit_copy)
_machine(copy32, types.none, (None, _I, None, _I), _emit_copy32)
_machine(high_product, _U, (_U, _U), _emit_high_product)
_machine(trailing_zeros, _I, (_U,), _emit_trailing_zeros)
_machine(bit_length, _I, (_U,), _emit_bit_length)
