"""The list of scenarios names existing tests, and every test here belongs to a listed scenario."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path

import pytest

from tests.scenarios import KNOWN_KILLERS, SCENARIOS

TESTS = Path(__file__).parent.parent
HERE = Path(__file__)
REQUIRED = (
    "A2 A3 A4 A7 A10 A12 A13 A14 B1 B3 B4 B5 B6 B7 B10 B13 B14 C1 C2 C3 C4 C6 C8 C10 C12 C13 C14 D1 D2 D5 D6 E4 F1 F2"
    " G5 G6 H1 H2 H3 H5 H9 H12 H14 I1 I2 I5 I6 I8 J1 J3 J6 K1 K2 K3 K4 K5 K6 K7 K8 K9 L1 L3 L4 L6 L7"
).split()
"""The scenarios that need only the network and files."""

REQUIRED_KILLERS = (
    *(f"Tarantool #{number}" for number in (5441, 6099, 10087, 11028, 11180, 12018, 12076, 13085)),
    *(f"PySyncObj #{number}" for number in (84, 98, 197, 202)),
)

LISTED = SCENARIOS | KNOWN_KILLERS


@lru_cache
def docstrings_of(path: Path) -> dict[str, str]:
    """Return the docstrings of the tests of a file, by name."""
    nodes = ast.walk(ast.parse(path.read_text()))
    functions = (node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {node.name: ast.get_docstring(node) or "" for node in functions if node.name.startswith("test_")}


@pytest.mark.parametrize("scenario", sorted(LISTED))
def test_every_listed_test_exists(scenario: str) -> None:
    assert LISTED[scenario]
    for listed in LISTED[scenario]:
        path, _, name = listed.partition("::")
        assert name in docstrings_of(TESTS / path), f"{listed} of {scenario} is gone"


def test_every_scenario_that_must_be_tried_is_listed() -> None:
    assert set(REQUIRED) <= set(SCENARIOS)
    assert set(REQUIRED_KILLERS) <= set(KNOWN_KILLERS)


def test_every_scenario_test_is_listed_under_its_scenarios() -> None:
    listed = {(scenario, test) for scenario, tests in LISTED.items() for test in tests}
    for path in sorted(HERE.parent.glob("test_*.py")):
        if path == HERE:
            continue
        for name, text in docstrings_of(path).items():
            ids = re.findall(r"\b[A-L]\d{1,2}\b|^\w+ #\d+", text.splitlines()[0]) if text else []
            for scenario in ids:
                assert (scenario, f"scenarios/{path.name}::{name}") in listed, f"{name} says that it is of {scenario}"
