"""Every case of the table, on the real Tarantool 2.6 and on a node: the replies are the same.

Deliberate differences are in `exceptions.py`, each with its reason and the reply of the node.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.conformance.case import Case
from tests.conformance.cases import ALL_CASES, DATA_THEMES
from tests.conformance.exceptions import EXCEPTIONS
from tests.conformance.reply import Reply
from tests.conformance.servers import node_target, real_target
from tests.conformance.target import Target

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def real(tarantool: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with real_target(tmp_path_factory.mktemp("real")) as target:
        yield target


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with node_target(tmp_path_factory.mktemp("node"), dialect="2.6") as target:
        yield target


def described(case: Case, replies: list[Reply]) -> list[str]:
    """Return replies as text, each after its request, so that a failure shows a readable diff."""
    asked = [f"request {number}" for number in range(1, len(case.requests) + 1)]
    asked += [f"content {number}" for number in range(1, len(replies) - len(case.requests) + 1)]
    return [f"{what}: {reply}" for what, reply in zip(asked, replies, strict=True)]


@pytest.mark.parametrize(
    "case", [case for case in ALL_CASES if case.name not in EXCEPTIONS], ids=lambda case: case.name
)
def test_node_replies_like_the_real_server(case: Case, real: Target, node: Target) -> None:
    theirs, ours = real.run(case), node.run(case)
    assert described(case, ours) == described(case, theirs)
    assert ours == theirs


BATCHED = [case for theme in DATA_THEMES for case in theme.CASES if case.name not in EXCEPTIONS]
COPIES = 24
"""More than a node executes one by one."""


@pytest.mark.parametrize("case", BATCHED, ids=lambda case: case.name)
def test_bulk_execution_on_the_node_equals_single_execution_on_the_real_server(
    case: Case, real: Target, node: Target
) -> None:
    theirs, ours = real.run_in_batches(case, COPIES), node.run_in_batches(case, COPIES)
    assert [str(reply) for reply in ours] == [str(reply) for reply in theirs]
    assert ours == theirs


@pytest.mark.parametrize("case", [case for case in ALL_CASES if case.name in EXCEPTIONS], ids=lambda case: case.name)
def test_documented_differences_of_the_node_exist(case: Case, real: Target, node: Target) -> None:
    theirs, ours = real.run(case), node.run(case)
    assert ours[0] != theirs[0], "no longer an exception"
    assert str(ours[0]).startswith(EXCEPTIONS[case.name].ours), f"{ours[0]} where the real server says {theirs[0]}"


def test_table_is_large_and_has_no_duplicate_cases() -> None:
    names = [case.name for case in ALL_CASES]
    assert len(names) == len(set(names))
    contents = {(str(case.spaces), str(case.before), str(case.requests)) for case in ALL_CASES}
    assert len(contents) == len(ALL_CASES), "two cases are equal"
    assert len(ALL_CASES) - len(EXCEPTIONS) >= 300


def test_every_exception_names_a_case() -> None:
    assert sorted(EXCEPTIONS.keys() - {case.name for case in ALL_CASES}) == []
