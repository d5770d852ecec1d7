"""The compiled modules: every module of Flowstone that imports `cython`, or has a `.pyx` beside it.

`python hatch_build.py` compiles those that changed, beside their sources, with those of tests/ and bench/; with --list
it names them. Hatchling calls the hook when it builds a wheel. FLOWSTONE_SANITIZE=1 adds the sanitizers for addresses
and undefined behaviour.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from Cython.Build import cythonize
from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from setuptools import Distribution, Extension
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
SOURCES = Path("src")
PACKAGE = SOURCES / "flowstone"
BESIDE = (Path("tests"), Path("bench"))  # with modules that are compiled for them alone
SHARED = "flowstone.native._shared"  # what Cython would otherwise put into every module: its views of arrays
# The limit lets GCC inline all steps of a loop: a call copies the 208 bytes of every view of an array that it passes.
FLAGS = ["-O3", "-finline-limit=6000", "-fno-strict-aliasing", "-g0", "-Wno-unused"]
# Python's own flags have -fwrapv, which would hide overflows. Without recovery, a finding ends the process.
SANITIZERS = [
    "-fsanitize=address,undefined,float-cast-overflow",
    "-fno-sanitize-recover=all",
    "-fno-wrapv",
    "-fno-omit-frame-pointer",
    "-g1",
]
DIRECTIVES = {
    "annotation_typing": False,  # annotations are Python's; the .pxd has the C types
    "boundscheck": False,
    "cdivision": True,
    "infer_types": True,
    "initializedcheck": False,
    "language_level": 3,
    "wraparound": False,
}


def compiled_modules(*folders: Path) -> list[Path]:
    """Return the sources of the compiled modules in `folders`, relative to the root."""
    found = [path.relative_to(ROOT) for folder in folders for path in (ROOT / folder).rglob("*.py*")]
    return sorted(path for path in found if path.suffix == ".pyx" or (path.suffix == ".py" and _is_kernel(ROOT / path)))


def _is_kernel(path: Path) -> bool:
    return re.search(r"^import cython$", path.read_text(), re.MULTILINE) is not None


def compile_in_place(*folders: Path) -> list[Path]:
    """Compile the modules that changed, beside their sources. Return the files of all compiled modules."""
    os.chdir(ROOT)
    sanitizers = SANITIZERS if os.environ.get("FLOWSTONE_SANITIZE") == "1" else []
    options: dict[str, Any] = {"extra_compile_args": FLAGS + sanitizers, "extra_link_args": sanitizers}
    shared = (SOURCES / SHARED.replace(".", "/")).with_suffix(".c")
    extensions = [Extension(SHARED, [str(shared)], **options)]
    for path in compiled_modules(*folders):
        parts = path.with_suffix("").parts
        extensions.append(Extension(".".join(parts[parts[0] == SOURCES.name :]), [str(path)], **options))
    distribution = Distribution(
        {
            "name": "flowstone",
            "package_dir": {"": str(SOURCES), **{folder.name: str(folder) for folder in BESIDE}},
            "ext_modules": cythonize(
                extensions,
                compiler_directives=DIRECTIVES,
                include_path=[str(SOURCES)],
                nthreads=os.cpu_count() or 1,
                quiet=True,
                shared_utility_qualified_name=SHARED,
            ),
        }
    )
    command = build_ext(distribution)
    command.inplace = True
    command.parallel = os.cpu_count()
    command.ensure_finalized()
    command.run()
    return [Path(command.get_ext_fullpath(extension.name)).relative_to(ROOT) for extension in extensions]


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Puts the compiled modules into the wheel, which is then one for this Python and platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":  # scripts/setup compiles them, and goes on where it cannot
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["artifacts"] += [path.as_posix() for path in compile_in_place(PACKAGE)]


if __name__ == "__main__":
    if "--list" in sys.argv[1:]:
        sys.stdout.writelines(f"{path}\n" for path in compiled_modules(PACKAGE))
    else:
        compile_in_place(PACKAGE, *BESIDE)
