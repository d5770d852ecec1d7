"""numba, behind one function. Imported only when a kernel has to be compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import llvmlite.binding
import numba
import numpy as np
from numba import types
from numba.core import compiler as numba_compiler
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.extending import typeof_impl

from flowstone.kernels import machine
from flowstone.kernels.cache import ObjectCode
from flowstone.kernels.kernel import Kernel

_RETURNS = {types.int64: "q", types.uint64: "Q"}

ENTRY = ".words"

_EXCEPTION = ".const.picklebuf"
"""What numba names each exception, written down as a constant for the code that raises it."""

machine.teach()


def _type_of_kernel(called: Kernel[Any, Any], _: object) -> Any:
    """To the compiler, a kernel that is called by another is a function of numba's own."""
    return types.Dispatcher(_dispatcher(called))


typeof_impl.register(Kernel)(_type_of_kernel)


@cache
def _dispatcher(called: Kernel[Any, Any]) -> Any:
    return numba.njit(nogil=True, error_model="numpy", forceinline=called.forceinline, _nrt=False)(called.py_func)


def compile_kernel(function: Callable[..., Any], kind: tuple[Any, ...]) -> ObjectCode:
    """`function` for arguments of this kind (see `kernel._kind`); TypeError if it could raise. One thread at a time."""
    with global_compiler_lock:
        return _compile(function, kind)


def _compile(function: Callable[..., Any], kind: tuple[Any, ...]) -> ObjectCode:
    flags = numba_compiler.DEFAULT_FLAGS.copy()
    flags.nrt = False  # nothing is allocated, so references need not be counted
    flags.error_model = "numpy"
    flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    typing, target = cpu_target.typing_context, cpu_target.target_context
    typing.refresh()
    target.refresh()
    signature = tuple(_type(each) for each in kind[1:])
    result = numba_compiler.compile_extra(typing, target, function, signature, None, flags, {})
    library = result.library
    # Optimised, with all that it calls: an exception that is still there is one that can happen.
    if _EXCEPTION in str(library._final_module):
        raise TypeError(f"kernel {function.__name__} can raise: let it return a status instead")
    returns = _returns(result.signature.return_type, function.__name__)
    module, name = library._final_module, result.fndesc.llvm_func_name
    module.link_in(llvmlite.binding.parse_assembly(_entry(module.get_function(name))))
    code: bytes = library.codegen._tm.emit_object(module)
    return ObjectCode(code, name + ENTRY, returns)


def _entry(function: Any) -> str:
    """A function that takes all arguments of another from one array of words, in the language of LLVM.

    Handing over one pointer takes ctypes a fraction of a microsecond, fifty words fifteen.
    """
    types_, lines, values = [str(argument.type) for argument in function.arguments], [], []
    for i, kind in enumerate(types_):
        lines.append(f"%p{i} = getelementptr i64, ptr %words, i64 {i}")
        lines.append(f"%v{i} = load {kind}, ptr %p{i}")
        values.append(f"{kind} %v{i}")
    return f"""
        declare i32 @"{function.name}"({", ".join(types_)})
        define i32 @"{function.name}{ENTRY}"(ptr %words) {{
            {chr(10).join(lines)}
            %status = call i32 @"{function.name}"({", ".join(values)})
            ret i32 %status
        }}
    """


def _type(kind: tuple[Any, ...]) -> Any:
    match kind:
        case ("i",):
            return types.int64
        case ("u",):
            return types.uint64
        case ("f",):
            return types.float64
        case (str(dtype), int(dimensions), str(layout)):
            if not np.dtype(dtype).isnative:
                raise TypeError(f"an array of {dtype} is not in the byte order of this machine: convert it first")
            return types.Array(numba.from_dtype(np.dtype(dtype)), dimensions, layout)
        case _:
            return types.BaseTuple.from_types([_type(each) for each in kind[1:]], kind[0])


def _returns(returned: Any, name: str) -> str:
    """A letter per number; anything else than 64-bit numbers would need more of the calling convention than we know."""
    if returned == types.none:
        return ""
    members = list(returned) if isinstance(returned, types.BaseTuple) else [returned]
    try:
        letters = "".join(_RETURNS[types.unliteral(member)] for member in members)
    except KeyError as error:
        raise TypeError(f"kernel {name} returns {returned}: only 64-bit numbers are allowed") from error
    return f"({letters})" if isinstance(returned, types.BaseTuple) else letters
