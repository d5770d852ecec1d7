"""Constants that compiled modules take from headers (.pxd) have the same values in Python."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

from tests.native.twins import PACKAGE, compiled_names, interpreted_module

# The header of a .pyx declares what its own module has.
HEADERS = sorted(
    path for path in PACKAGE.rglob("*.pxd") if "cdef enum" in path.read_text() and not path.with_suffix(".pyx").exists()
)


def enumerations(header: Path) -> dict[str, dict[str, int]]:
    """Return the members of each `cdef enum` of a header, by the name of the enumeration ("" if it has none)."""
    found: dict[str, dict[str, int]] = {}
    for name, members in re.findall(r"^cdef enum ?(\w*):\n((?:    .*\n|\n)+)", header.read_text(), re.MULTILINE):
        for member, value in re.findall(r"^    (\w+) = (.+?)(?:  #.*)?$", members, re.MULTILINE):
            found.setdefault(name, {})[member] = ast.literal_eval(value)
    return found


@pytest.mark.parametrize("header", HEADERS, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_header_constants_equal_those_of_the_module(header: Path) -> None:
    name = "flowstone." + ".".join(header.relative_to(PACKAGE).with_suffix("").parts)
    module = interpreted_module(name) if name in compiled_names() else import_module(name)
    enums = enumerations(header)
    assert enums, f"no enumeration of {header} could be read"
    for name, members in enums.items():
        place = getattr(module, name) if name else module
        assert members == {member: int(getattr(place, member)) for member in members}
