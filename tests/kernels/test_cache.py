"""Object code on disk: shared between processes, rebuilt for changed sources, never trusted when damaged."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import flowstone
from flowstone.kernels import cache

ASK = """
import sys
import llvmlite.binding as llvm
processor = {processor!r}
if processor:
    llvm.get_host_cpu_name = lambda: processor
from flowstone.kernels import on_compile
on_compile(lambda name: print("compiled", name))
from flowstone.iproto.outer import answer
print(answer(1))
print("numba" if "numba" in sys.modules else "no compiler")
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Our sources with two more kernels, one of which calls the other, and no cache."""
    package = tmp_path / "flowstone"
    shutil.copytree(Path(flowstone.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    head = "from flowstone.kernels import kernel\n\n"
    (package / "iproto" / "inner.py").write_text(head + "@kernel\ndef inner(x):\n    return x + 40\n")
    (package / "iproto" / "outer.py").write_text(
        "from flowstone.iproto.inner import inner\n" + head + "@kernel\ndef answer(x):\n    return inner(x) + 1\n"
    )
    return package


def ask(package: Path, processor: str = "", **environment: str) -> list[str]:
    variables = os.environ | {"PYTHONPATH": str(package.parent), "FLOWSTONE_KERNEL_CACHE": ""} | environment
    script = ASK.format(processor=processor)
    done = subprocess.run([sys.executable, "-c", script], env=variables, capture_output=True, text=True, check=True)
    return done.stdout.split("\n")[:-1]


def saved(package: Path) -> list[Path]:
    return sorted((package / "kernels" / "__pycache__").glob("flowstone.iproto.outer.answer-*"))


def test_the_second_process_needs_no_compiler(package: Path) -> None:
    assert ask(package) == ["compiled answer", "42", "numba"]
    assert ask(package) == ["42", "no compiler"]


def test_code_is_recompiled_when_a_called_kernel_has_changed(package: Path) -> None:
    ask(package)
    inner = package / "iproto" / "inner.py"
    inner.write_text(inner.read_text().replace("40", "1"))
    assert ask(package) == ["compiled answer", "3", "numba"]


def test_processors_and_versions_that_share_a_place_do_not_remove_each_others_code(package: Path) -> None:
    inner = package / "iproto" / "inner.py"
    first = inner.read_text()
    for source in (first, first.replace("40", "1")):
        inner.write_text(source)
        for processor in ("", "another one"):
            assert ask(package, processor)[0] == "compiled answer"
    assert len(saved(package)) == 4
    inner.write_text(first)
    for processor in ("", "another one"):
        assert ask(package, processor) == ["42", "no compiler"]


def test_code_of_older_sources_is_removed_the_day_after_for_this_processor_only(package: Path) -> None:
    ask(package, "another one")
    others = saved(package)
    ask(package)
    for path in saved(package):
        os.utime(path, (0, time.time() - 25 * 3600))
    old = saved(package)
    inner = package / "iproto" / "inner.py"
    inner.write_text(inner.read_text().replace("40", "1"))
    ask(package)
    assert [path for path in saved(package) if path in old] == others
    assert len(saved(package)) == 2


def test_damaged_code_is_not_run_but_replaced(package: Path) -> None:
    ask(package)
    (path,) = saved(package)
    content = bytearray(path.read_bytes())
    content[-100] ^= 0xFF
    path.write_bytes(content)
    assert ask(package) == ["compiled answer", "42", "numba"]
    assert ask(package) == ["42", "no compiler"]


def test_corrupted_cache_file_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLOWSTONE_KERNEL_CACHE", str(tmp_path))
    code = cache.ObjectCode(b"machine\ncode", "symbol", "(qQ)")
    cache.save(ask, (("i",),), code)
    (path,) = tmp_path.iterdir()
    good = path.read_bytes()
    assert cache.load(ask, (("i",),)) == code
    changed = [good[:at] + bytes((good[at] ^ 1,)) + good[at + 1 :] for at in range(len(good))]
    for bad in (*changed, good[:-1], b"", b"\n", b"{}\n{}\n", b"\xff\xfe\n\x00", b"[" * 100_000 + b"\n\n"):
        path.write_bytes(bad)
        assert cache.load(ask, (("i",),)) is None


def test_removing_old_code_is_no_reason_to_save_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A directory with the file's name simulates a file that cannot be removed."""
    monkeypatch.setattr(cache, "_places", lambda: iter((tmp_path / "first", tmp_path / "second")))
    code = cache.ObjectCode(b"code", "symbol", "q")
    cache.save(ask, (("i",),), code)
    name, _ = cache._file_name(ask, (("i",),))
    (tmp_path / "first" / f"{name}-old.o").mkdir()
    os.utime(tmp_path / "first" / f"{name}-old.o", (0, 0))
    cache.save(ask, (("i",),), code)
    assert not (tmp_path / "second").exists()


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


def test_a_user_without_a_home_is_without_that_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for variable in ("FLOWSTONE_KERNEL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(Path, "home", nobody)
    assert list(cache._places()) == [cache.PACKAGE / "kernels" / "__pycache__"]


def test_every_package_that_has_kernels_has_a_stamp() -> None:
    """Code of one that had none would stay what it was, whatever becomes of its source."""
    rooms = {
        path.relative_to(cache.PACKAGE).parts[0]
        for path in cache.PACKAGE.rglob("*.py")
        if re.search(r"^@(kernel|inlined)$", path.read_text(), re.MULTILINE)
    }
    assert {"limestone", "spark", "text"} <= rooms
    assert sorted(rooms - {*cache.SOURCES, *(room for room, own in cache.FURTHER_SOURCES.items() if room in own)}) == []


def test_code_is_compiled_anew_when_a_package_of_its_own_has_changed(package: Path) -> None:
    for name in ("inner", "outer"):
        text = (package / "iproto" / f"{name}.py").read_text().replace("flowstone.iproto", "flowstone.limestone")
        (package / "limestone" / f"{name}.py").write_text(text)
    (package / "iproto" / "outer.py").write_text("from flowstone.limestone.outer import answer\n")
    ask(package)
    inner = package / "limestone" / "inner.py"
    inner.write_text(inner.read_text().replace("40", "1"))
    assert ask(package) == ["compiled answer", "3", "numba"]
