"""Object code on disk: found again by another process, replaced when its sources change, never trusted when damaged."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import flowstone

ASK = """
import sys
from flowstone.kernels import on_compile
on_compile(lambda name: print("compiled", name))
from flowstone.iproto.outer import answer
print(answer(1))
print("numba" if "numba" in sys.modules else "no compiler")
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Our sources with two kernels added, one of which calls the other, and no cache."""
    package = tmp_path / "flowstone"
    shutil.copytree(Path(flowstone.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    head = "from flowstone.kernels import kernel\n\n"
    (package / "iproto" / "inner.py").write_text(head + "@kernel\ndef inner(x):\n    return x + 40\n")
    (package / "iproto" / "outer.py").write_text(
        "from flowstone.iproto.inner import inner\n" + head + "@kernel\ndef answer(x):\n    return inner(x) + 1\n"
    )
    return package


def ask(package: Path, **environment: str) -> list[str]:
    variables = os.environ | {"PYTHONPATH": str(package.parent), "FLOWSTONE_KERNEL_CACHE": ""} | environment
    done = subprocess.run([sys.executable, "-c", ASK], env=variables, capture_output=True, text=True, check=True)
    return done.stdout.split("\n")[:-1]


def test_the_second_process_needs_no_compiler(package: Path) -> None:
    assert ask(package) == ["compiled answer", "42", "numba"]
    assert ask(package) == ["42", "no compiler"]


def test_code_is_compiled_anew_when_a_kernel_that_it_calls_has_changed(package: Path) -> None:
    ask(package)
    inner = package / "iproto" / "inner.py"
    inner.write_text(inner.read_text().replace("40", "1"))
    assert ask(package) == ["compiled answer", "3", "numba"]
    assert len(list((package / "kernels" / "__pycache__").glob("flowstone.iproto.outer.answer-*.o"))) == 1


def test_damaged_code_is_not_run(package: Path) -> None:
    ask(package)
    (saved,) = (package / "kernels" / "__pycache__").glob("flowstone.iproto.outer.answer-*.o")
    content = bytearray(saved.read_bytes())
    content[-100] ^= 0xFF
    saved.write_bytes(content)
    assert ask(package) == ["compiled answer", "42", "numba"]


def test_the_place_can_be_chosen(package: Path, tmp_path: Path) -> None:
    place = str(tmp_path / "elsewhere" / "deep")
    ask(package, FLOWSTONE_KERNEL_CACHE=place)
    assert ask(package, FLOWSTONE_KERNEL_CACHE=place) == ["42", "no compiler"]
    assert not list((package / "kernels" / "__pycache__").glob("*.o"))


def test_an_install_that_cannot_be_written_to_uses_the_users_cache(package: Path, tmp_path: Path) -> None:
    (package / "kernels" / "__pycache__").write_text("a file where the directory would be")
    home = str(tmp_path / "cache")
    ask(package, XDG_CACHE_HOME=home)
    assert ask(package, XDG_CACHE_HOME=home) == ["42", "no compiler"]


def test_without_any_place_kernels_work_and_are_compiled_each_time(package: Path) -> None:
    nowhere = package / "kernels" / "__pycache__"
    nowhere.write_text("a file where the directory would be")
    for _ in range(2):
        assert ask(package, XDG_CACHE_HOME=str(nowhere / "below")) == ["compiled answer", "42", "numba"]
