"""pyright agrees with mypy about the public interface: valid calls have the stated types, invalid ones are errors.

basedpyright is pyright with its own Node.js in the wheel, so that it runs without a network. mypy reads the same file
with all others (`make check`).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.places import ROOT

SURFACE = ROOT / "tests" / "typed_surface.py"


def errors_in(directory: Path, **files: str) -> dict[str, set[int]]:
    """Return the line numbers of errors, from 1, by file name."""
    for name, text in files.items():
        (directory / f"{name}.py").write_text(text)
    options = {
        "include": ["."],
        "extraPaths": [str(ROOT / "src"), str(ROOT)],
        "pythonVersion": "3.11",
        "typeCheckingMode": "standard",
        "reportUnnecessaryTypeIgnoreComment": "error",
    }
    (directory / "pyrightconfig.json").write_text(json.dumps(options))
    command = [
        sys.executable,
        "-m",
        "basedpyright",
        "--outputjson",
        "--pythonpath",
        sys.executable,
        "-p",
        str(directory),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)["generalDiagnostics"]
    lines: dict[str, set[int]] = {name: set() for name in files}
    for each in found:
        if each["severity"] == "error":
            lines[Path(each["file"]).stem].add(each["range"]["start"]["line"] + 1)
    return lines


def test_pyright_accepts_valid_calls_and_rejects_wrong_ones(tmp_path: Path) -> None:
    text = SURFACE.read_text()
    bare = re.sub(r"  # type: ignore\[[\w-]+\]", "", text)
    wrong = {number for number, line in enumerate(text.splitlines(), 1) if "# type: ignore" in line}
    assert len(wrong) > 8
    assert errors_in(tmp_path, surface=text, bare=bare) == {"surface": set(), "bare": wrong}
