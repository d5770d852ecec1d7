"""Object code on disk and in memory.

One file per kernel and kind of arguments, named after them and after a stamp of everything the code depends on: our
sources, the compiler's version, the processor. It lies beside the package; where that cannot be written to, in the
user's cache directory; FLOWSTONE_KERNEL_CACHE names another place. Without any place, code lives with its process.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

PACKAGE = Path(__file__).parent.parent
SOURCES = ("kernels", "iproto", "xlog")
"""Packages whose modules hold kernels, or constants that are compiled into them."""

_loaded: list[Any] = []
"""Engines that own the code kernels run in; dropping one would unmap it."""


@dataclass(frozen=True, slots=True)
class ObjectCode:
    """A compiled kernel: its object file, the name to call, and a letter per number it returns, in () if a tuple."""

    code: bytes
    symbol: str
    returns: str


@cache
def _package_stamp() -> bytes:
    digest = hashlib.sha256()
    for package in SOURCES:
        for path in sorted((PACKAGE / package).glob("*.py")):
            digest.update(path.read_bytes())
    features = llvm.get_host_cpu_features().flatten()
    for part in (version("numba"), version("llvmlite"), llvm.get_host_cpu_name(), features):
        digest.update(part.encode() + b"\0")
    return digest.digest()


def _file_name(function: Callable[..., Any], kind: tuple[Any, ...]) -> tuple[str, str]:
    """The name without its stamp, and the stamp."""
    described = hashlib.sha256(repr(kind).encode()).hexdigest()[:8]
    digest = hashlib.sha256(_package_stamp())
    source = Path(function.__code__.co_filename)
    if PACKAGE not in source.parents:
        digest.update(source.read_bytes())
    return f"{function.__module__}.{function.__qualname__}-{described}", digest.hexdigest()[:16]


def _places() -> Iterator[Path]:
    chosen = os.environ.get("FLOWSTONE_KERNEL_CACHE")
    if chosen:
        yield Path(chosen)
        return
    yield PACKAGE / "kernels" / "__pycache__"
    yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flowstone"


def load(function: Callable[..., Any], kind: tuple[Any, ...]) -> ObjectCode | None:
    """The saved object code, if there is one that is still good."""
    name, stamp = _file_name(function, kind)
    for place in _places():
        try:
            head, code = (place / f"{name}-{stamp}.o").read_bytes().split(b"\n", 1)
        except (OSError, ValueError):
            continue
        described = json.loads(head)
        if described["sha256"] == hashlib.sha256(code).hexdigest():
            return ObjectCode(code, described["symbol"], described["returns"])
    return None


def save(function: Callable[..., Any], kind: tuple[Any, ...], compiled: ObjectCode) -> None:
    """Keeps object code for other processes, in place of what its older sources had become."""
    name, stamp = _file_name(function, kind)
    digest = hashlib.sha256(compiled.code).hexdigest()
    head = json.dumps({"symbol": compiled.symbol, "returns": compiled.returns, "sha256": digest}).encode()
    for place in _places():
        try:
            place.mkdir(parents=True, exist_ok=True)
            mine = place / f"{name}-{stamp}.{os.getpid()}.tmp"
            mine.write_bytes(head + b"\n" + compiled.code)
            mine.replace(place / f"{name}-{stamp}.o")
            for older in place.glob(f"{name}-*.o"):
                if older.name != f"{name}-{stamp}.o":
                    older.unlink(missing_ok=True)
        except OSError:
            continue
        return


@cache
def _target_machine() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(codemodel="jitdefault")


def address(compiled: ObjectCode) -> int:
    """Maps the object code into this process; where its function starts."""
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(compiled.code))
    engine.finalize_object()
    _loaded.append(engine)
    found: int = engine.get_function_address(compiled.symbol)
    if not found:
        raise AssertionError(f"no function {compiled.symbol} in its own object code")
    return found
