import os
import shutil
import subprocess
import sys
from pathlib import Path

import flowstone

CALL = "from flowstone.iproto.{module} import answer; print(answer())"


def copy_of_the_package(directory: Path) -> Path:
    """Our sources with two kernels added, one of which calls the other, and no cache."""
    package = directory / "flowstone"
    ours = Path(flowstone.__file__).parent
    shutil.copytree(ours, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "iproto" / "inner.py").write_text(
        "from flowstone.iproto.kernel import kernel\n\n@kernel\ndef answer():\n    return 41\n"
    )
    (package / "iproto" / "outer.py").write_text(
        "from flowstone.iproto import inner\nfrom flowstone.iproto.kernel import kernel\n\n"
        "inner_answer = inner.answer\n\n\n@kernel\ndef answer():\n    return inner_answer() + 1\n"
    )
    return package


def ask(directory: Path, **environment: str) -> str:
    code = CALL.format(module="outer")
    variables = os.environ | {"PYTHONPATH": str(directory)} | environment
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_cached_kernel_is_compiled_anew_when_one_that_it_calls_has_changed(tmp_path: Path) -> None:
    package = copy_of_the_package(tmp_path)
    assert ask(tmp_path) == "42"
    assert list((package / "iproto" / "__pycache__").glob("outer.answer-*.nbc"))
    inner = package / "iproto" / "inner.py"
    inner.write_text(inner.read_text().replace("41", "1"))
    assert ask(tmp_path) == "2"


def test_a_kernel_works_where_no_cache_can_be_written(tmp_path: Path) -> None:
    package = copy_of_the_package(tmp_path)
    (package / "iproto" / "__pycache__").write_text("a file where the directory would be")
    nowhere = str(package / "iproto" / "__pycache__" / "below")
    assert ask(tmp_path, HOME=nowhere, XDG_CACHE_HOME=nowhere, NUMBA_CACHE_DIR="") == "42"
