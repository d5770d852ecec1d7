"""Object code on disk and in memory.

One file per kernel, kind of arguments and processor, named after them and after a stamp of all else that the code
depends on: our sources and the compiler's version. It lies beside the package; where that cannot be written to, in the
user's cache directory; FLOWSTONE_KERNEL_CACHE names another place. Without any place, code lives with its process.
Processors and versions may share a place: none removes what another has just compiled.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

PACKAGE = Path(__file__).parent.parent
SOURCES = ("kernels", "iproto", "xlog", "box")
"""Packages whose modules hold what other kernels call, or constants that are compiled into them."""

FURTHER_SOURCES = {
    "text": ("text",),
    "columns": ("text", "columns"),
    "limestone": ("limestone",),
    "archive": ("archive",),
    "spark": ("limestone", "spark"),
}
"""What kernels of other packages depend on besides; an edit there makes no kernel of a package above anew."""

KEPT_S = 24 * 3600
"""How long code of other sources is left alone. Two versions that share a place then compile once a day each at worst,
not in turns for ever; and what an edit of the sources left behind is gone the day after."""

_loaded: list[Any] = []
"""Engines that own the code kernels run in; dropping one would unmap it."""


@dataclass(frozen=True, slots=True)
class ObjectCode:
    """A compiled kernel: its object file, the name to call, and a letter per number it returns, in () if a tuple."""

    code: bytes
    symbol: str
    returns: str


@cache
def _package_stamp(packages: tuple[str, ...]) -> bytes:
    digest = hashlib.sha256()
    for package in packages:
        for path in sorted((PACKAGE / package).rglob("*.py")):
            digest.update(path.read_bytes())
    for part in (version("numba"), version("llvmlite")):
        digest.update(part.encode() + b"\0")
    return digest.digest()


@cache
def _processor() -> str:
    described = f"{llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()}"
    return hashlib.sha256(described.encode()).hexdigest()[:8]


def _file_name(function: Callable[..., Any], kind: tuple[Any, ...]) -> tuple[str, str]:
    """The name without its stamp, and the stamp."""
    described = hashlib.sha256(repr(kind).encode()).hexdigest()[:8]
    source = Path(function.__code__.co_filename)
    room = source.relative_to(PACKAGE).parts[0] if source.is_relative_to(PACKAGE) else ""
    digest = hashlib.sha256(_package_stamp((*SOURCES, *FURTHER_SOURCES.get(room, ()))))
    if room not in (*SOURCES, *FURTHER_SOURCES):
        digest.update(source.read_bytes())
    return f"{function.__module__}.{function.__qualname__}-{described}-{_processor()}", digest.hexdigest()[:16]


def _places() -> Iterator[Path]:
    chosen = os.environ.get("FLOWSTONE_KERNEL_CACHE")
    if chosen:
        yield Path(chosen)
        return
    yield PACKAGE / "kernels" / "__pycache__"
    # Without HOME, and as a user whom the system does not know, nobody is at home: usual in containers.
    with suppress(RuntimeError):
        yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flowstone"


def load(function: Callable[..., Any], kind: tuple[Any, ...]) -> ObjectCode | None:
    """The saved object code, if there is one that is still good."""
    name, stamp = _file_name(function, kind)
    for place in _places():
        try:
            digest, content = (place / f"{name}-{stamp}.o").read_bytes().split(b"\n", 1)
        except (OSError, ValueError):
            continue
        if digest == hashlib.sha256(content).hexdigest().encode():
            head, code = content.split(b"\n", 1)
            return ObjectCode(code, **json.loads(head))
    return None


def save(function: Callable[..., Any], kind: tuple[Any, ...], compiled: ObjectCode) -> None:
    """Keeps object code for other processes, and removes what older sources had become some time ago."""
    name, stamp = _file_name(function, kind)
    head = json.dumps({"symbol": compiled.symbol, "returns": compiled.returns}).encode()
    content = head + b"\n" + compiled.code
    digest = hashlib.sha256(content).hexdigest().encode()
    for place in _places():
        try:
            place.mkdir(parents=True, exist_ok=True)
            mine = place / f"{name}-{stamp}.{os.getpid()}.tmp"
            mine.write_bytes(digest + b"\n" + content)
            mine.replace(place / f"{name}-{stamp}.o")
        except OSError:
            continue
        _clean(place, name)
        return


def _clean(place: Path, name: str) -> None:
    with suppress(OSError):  # somebody else may own the files, or remove them just now
        for other in place.glob(f"{name}-*"):
            if other.stat().st_mtime < time.time() - KEPT_S:
                other.unlink()


@cache
def _target() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple()


def address(compiled: ObjectCode) -> int:
    """Maps the object code into this process; where its function starts."""
    # The engine takes over the machine it is given, so each gets its own.
    machine = _target().create_target_machine(codemodel="jitdefault")
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(compiled.code))
    engine.finalize_object()
    _loaded.append(engine)
    found: int = engine.get_function_address(compiled.symbol)
    if not found:
        raise AssertionError(f"no function {compiled.symbol} in its own object code")
    return found
