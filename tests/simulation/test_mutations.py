"""The ordinary seeds find each deliberate bug, in order, within a hundred runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Final
from unittest.mock import patch

import pytest

from flowstone.node.upstream.row_applier import Applying
from flowstone.node.wal.journal import Journal
from flowstone.replication.limbo.queue import Acks
from flowstone.replication.raft.raft import Raft
from tests.conftest import FULL
from tests.limestone.mutants import MUTANTS
from tests.places import ROOT
from tests.simulation.all_mutations import FOUND_BY, MUTATIONS, readable, table_lines
from tests.simulation.consensus import Consensus
from tests.simulation.member_promises import MemberPromises
from tests.simulation.mutations import CLIENTS_SAW, DOES_NOT_FIT
from tests.simulation.run import Outcome, run
from tests.simulation.watchers import Watchers

RUNS_MAX: Final = 100

UNWATCHED: Final = {
    "promote_without_waiting": (26, CLIENTS_SAW),
    "skip_the_fsync_of_a_vote": (4, r"voted for \d+ in term \d+, and then for \d+"),
}
"""Bugs that are found without the watchers: an ordinary seed as above, and the message then."""


def search(name: str, first: int, words: str = "") -> Outcome:
    """Return the first run that finds the bug by its message. Try ordinary seeds from `first` on, then earlier ones.

    Below full scale a run ends when it has found the bug.
    """
    mutation = replace(MUTATIONS[name], words=words or MUTATIONS[name].words)
    with mutation():
        for seed in (*range(first, RUNS_MAX), *range(first)):
            outcome = run(seed, until=None if FULL else mutation.is_found)
            if misfits := [each for each in outcome.violations if DOES_NOT_FIT.search(each)]:
                pytest.fail(f"the patch {name} does not fit the code, by seed {seed}: {misfits[0]}")
            if mutation.is_found(outcome.violations):
                return outcome
    pytest.fail(f"{name} is not found by the seeds 0 to {RUNS_MAX - 1}")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", MUTATIONS)
def test_every_mutation_is_found_by_an_ordinary_seed(name: str) -> None:
    assert search(name, 0 if FULL else FOUND_BY[name]).violations


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", UNWATCHED)
def test_mutation_is_found_without_periodic_checks(name: str) -> None:
    with (
        patch.object(Consensus, "look", lambda *_: None),
        patch.object(MemberPromises, "look", lambda *_: None),
        patch.object(Watchers, "_look_at_acks", lambda _: None),
    ):
        assert search(name, *UNWATCHED[name]).violations


@pytest.mark.parametrize(
    ("target", "name"),
    [(Acks, "quorum_lsn"), (Journal, "_write"), (Raft, "_start_election"), (Applying, "_execute")],
)
def test_patch_that_raises_does_not_count_as_found(target: type, name: str) -> None:
    def raise_it(*_: object, **__: object) -> None:
        raise KeyError("no such mutation any more")

    with patch.object(target, name, raise_it):
        violations = run(0).violations
    assert violations
    assert [name for name, mutation in MUTATIONS.items() if mutation.is_found(violations)] == []


CIRCLE = "bank: each of these must come before the next, in a circle: …"
ORDER = "rows of one originator come in their order, each once"


@pytest.mark.parametrize(
    ("name", "violations", "is_found"),
    [
        ("read_without_asking_others", [CIRCLE], True),
        ("read_without_asking_others", ["only 3 faults took effect"], False),
        ("read_without_asking_others", ["RuntimeError: set: … (_newest, line 1 of mutations.py)"], False),
        ("read_without_asking_others", ["1.234567 set: a logged 'a task': KeyError(1)"], False),
        (
            "read_without_asking_others",
            [CIRCLE, "TypeError: one argument less (_newest, line 1 of mutations.py)"],
            False,
        ),
        ("count_an_ack_twice", [CIRCLE], False),
        ("apply_below_the_vclock", [f"AssertionError: 6.7 a logged:\n{ORDER} (run, line 1 of simulation.py)"], True),
        ("apply_below_the_vclock", ["AssertionError: another (run, line 1 of simulation.py)"], False),
    ],
)
def test_mutation_is_found_only_by_its_own_message(name: str, violations: list[str], is_found: bool) -> None:
    assert MUTATIONS[name].is_found(violations) is is_found


def test_there_are_at_least_fifty_mutations() -> None:
    assert len(MUTATIONS) + len(MUTANTS) >= 50  # those of Limestone are raised errors
    assert set(FOUND_BY) == set(MUTATIONS)


def test_documented_table_of_mutations_matches_the_command() -> None:
    documented = (ROOT / "docs" / "explanation" / "reliability.md").read_text()
    assert "\n".join(table_lines()) in documented


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (CLIENTS_SAW, "checker of histories"),
        (r"^\w+ has row \d+ of \d+ confirmed, which only .* have", "… has row … of … confirmed, which only … have"),
        (rf"{CLIENTS_SAW}|^archive\d+ |(a|b) c", "checker of histories / archive… / a c"),
    ],
)
def test_message_pattern_is_shown_as_readable_text(words: str, said: str) -> None:
    assert readable(words) == said


def test_mutation_ends_with_its_context() -> None:
    original = Acks.quorum_lsn
    for mutate in MUTATIONS.values():
        with mutate():
            pass
    assert Acks.quorum_lsn is original
