"""Machine bodies of the functions in `wide`, in LLVM's terms. Imported with the compiler, by nobody else."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import lower_builtin, type_callable

from flowstone.kernels import wide

# Gets numba's context, the LLVM builder, the signature and the arguments' LLVM values.
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


def teach() -> None:
    """Makes kernels use these bodies. Call it once, before the first kernel is compiled."""
    i64, u64 = types.int64, types.uint64
    _machine(wide.byte, i64, (None, i64), _loader(1, swap=False))
    _machine(wide.number, i64, (None,), _emit_number)
    _machine(wide.word, u64, (i64,), _emit_word)
    _machine(wide.big16, i64, (None, i64), _loader(2, swap=True))
    _machine(wide.big32, i64, (None, i64), _loader(4, swap=True))
    _machine(wide.big64, u64, (None, i64), _loader(8, swap=True))
    _machine(wide.little64, u64, (None, i64), _loader(8, swap=False))
    _machine(wide.poke, i64, (None, i64, i64), _emit_poke)
    _machine(wide.poke64, types.none, (None, i64, u64), _emit_poke64)
    _machine(wide.put, i64, (None, i64, None), _emit_put)
    _machine(wide.copy, i64, (None, i64, None, i64, i64), _emit_copy)
    _machine(wide.copy32, types.none, (None, i64, None, i64), _emit_copy32)
    _machine(wide.high_product, u64, (u64, u64), _emit_high_product)
    _machine(wide.trailing_zeros, i64, (u64,), _emit_trailing_zeros)
    _machine(wide.bit_length, i64, (u64,), _emit_bit_length)
