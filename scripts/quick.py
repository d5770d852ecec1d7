"""`make quick`: lint and types of everything, and the tests of changed modules, in about two minutes.

The changes are the difference from the commit given as argument, or from HEAD, or in a clean tree from the previous
commit. A changed module runs the test module of its name, a changed test module runs itself. Tests that need a real
server, a JVM or a browser are left to `make test`, as is everything after the time limit.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
PYTHON: Final = sys.executable
CODE: Final = ("src", "tests", "bench", "examples", "scripts")
TYPED: Final = ("src", "tests", "bench")
LEFT_OUT: Final = ("interop", "spark", "judges", "chaos", "docs", "packaging", "browser", "scenarios", "conformance")
"""Parts of paths of tests that start servers, a JVM or a browser."""

TEST_SECONDS: Final = 90.0
"""For the tests; lint and types take the rest of two minutes."""


def changed(base: str | None) -> list[Path]:
    """Return the Python files that differ from `base`, untracked ones included."""
    untracked = _git("ls-files", "--others", "--exclude-standard")
    if base is not None:
        names = _git("diff", "--name-only", base) + untracked
    else:
        names = _git("diff", "--name-only", "HEAD") + untracked or _git("diff", "--name-only", "HEAD~1")
    return [Path(name) for name in sorted(set(names)) if name.endswith(".py") and (ROOT / name).exists()]


def _git(*arguments: str) -> list[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def tests_of(paths: Sequence[Path]) -> list[str]:
    """Return the test modules of the changed files, without those that need more than Python."""
    found: dict[str, None] = {}
    for path in paths:
        if path.parts[0] == "tests" and path.name.startswith("test_"):
            candidates = [path]
        elif path.parts[:2] == ("src", "flowstone"):
            room = Path("tests", *path.parts[2:-1])
            candidates = [room / f"test_{path.stem}.py"]
        else:
            continue
        for each in candidates:
            if (ROOT / each).exists() and not any(part in each.as_posix() for part in LEFT_OUT):
                found[each.as_posix()] = None
    return list(found)


def main() -> int:
    base = sys.argv[1] if len(sys.argv) > 1 else None
    begun = time.monotonic()
    steps = [
        [PYTHON, "-m", "ruff", "check", *CODE],
        [PYTHON, "-m", "ruff", "format", "--check", *CODE],
        [PYTHON, "-m", "mypy", "--strict", *TYPED],
        [PYTHON, "-m", "pytest", "-q", "tests/test_tidy.py"],
    ]
    for step in steps:
        print("+", " ".join(step[2:5]), flush=True)
        if subprocess.run(step, cwd=ROOT, check=False).returncode:
            return 1
    tests = tests_of(changed(base))
    if not tests:
        print("quick: no test module matches what has changed")
        return 0
    print(f"quick: {len(tests)} test modules", flush=True)
    command = [PYTHON, "-m", "pytest", "-q", "-x", "-n", "2", "--dist", "loadfile", *tests]
    with subprocess.Popen(command, cwd=ROOT) as running:
        try:
            code = running.wait(TEST_SECONDS)
        except subprocess.TimeoutExpired:
            running.send_signal(signal.SIGINT)  # fixtures stop the processes that they have started
            running.wait()
            print(f"quick: {TEST_SECONDS:.0f} s of tests passed without a failure; `make test` runs the rest")
            return 0
    print(f"quick: {time.monotonic() - begun:.0f} s")
    return code


if __name__ == "__main__":
    sys.exit(main())
