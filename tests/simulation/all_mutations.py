"""All deliberate bugs, the ordinary seed that finds each, and a readable table of them.

Importing the modules of mutations registers their mutations. `FOUND_BY` holds for the current plans and nodes: if a
seed no longer finds its mutation, `test_mutations.py` tries the next seeds, and the entry should be updated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from tests.simulation import mutations_elections, mutations_storage
from tests.simulation.mutations import CLIENTS_SAW, MUTATIONS

__all__ = ["FOUND_BY", "MUTATIONS", "mutations_elections", "mutations_storage", "table_lines"]

FOUND_BY: Final = {
    "ack_before_the_write": 0,
    "acknowledge_a_write_before_its_fsync": 2,
    "answer_before_a_promote_is_proven": 1,
    "apply_below_the_vclock": 0,
    "apply_half_a_transaction": 0,
    "collect_a_log_too_early": 5,
    "commit_in_spite_of_a_conflict": 0,
    "confirm_before_the_quorum": 1,
    "confirm_one_too_far": 0,
    "count_an_ack_twice": 1,
    "count_an_expelled_member": 16,
    "count_votes_of_terms_before": 16,
    "count_who_only_follows": 48,
    "forget_a_failed_write": 57,
    "forget_in_a_snapshot_what_was_confirmed": 43,
    "forget_the_order_of_rollbacks": 8,
    "keep_what_was_undone": 0,
    "lead_by_one_vote_too_few": 73,
    "leave_a_recovered_log_unsynced": 2,
    "lose_rows_on_the_way": 0,
    "lose_the_commit_flag": 5,
    "promote_without_waiting": 10,
    "promote_by_one_too_few": 50,
    "read_before_it_is_here": 5,
    "read_before_the_verdict": 34,
    "read_what_is_not_confirmed": 0,
    "read_without_asking_others": 5,
    "reuse_a_term": 0,
    "roll_back_one_too_few": 0,
    "settle_one_too_far": 3,
    "settle_what_an_archive_has": 1,
    "skip_the_fsync_of_a_vote": 0,
    "skip_the_fsync_of_a_vote_in_mode_write": 5,
    "take_a_rollback_for_a_confirmation": 20,
    "take_what_waits_for_a_fact_at_the_start": 4,
    "vote_for_who_is_behind": 0,
    "vote_twice_in_a_term": 34,
    "vote_without_a_second_look": 94,
    "write_behind_a_failed_write": 7,
    "write_behind_a_torn_end": 2,
}
"""Per mutation, an ordinary seed that finds it."""

_PHRASES: Final = {
    CLIENTS_SAW: "checker of histories",
    mutations_elections.DIFFERENT_DATA: "data differs",
    mutations_elections.TWO_LEADERS: "X leads term N, which Y does",
    mutations_storage.UNREADABLE: "does not start",
}
"""Expressions that several mutations share, as readable text."""


def table_lines() -> Iterator[str]:
    """Return the lines of a Markdown table: each mutation, its effect, the seed that finds it, and the message of the
    run."""
    yield "| mutation | what it does | seed | found by the words |"
    yield "|---|---|---|---|"
    for name, mutation in sorted(MUTATIONS.items()):
        what = " ".join((mutation.make.__doc__ or "").split()).rstrip(".")
        yield f"| `{name}` | {what} | {FOUND_BY[name]} | {readable(mutation.words)} |"


def readable(words: str) -> str:
    """Return a regular expression as readable text."""
    said = []
    for expression, phrase in _PHRASES.items():
        if expression in words:
            words = words.replace(expression, "")
            said.append(phrase)
    said += [_in_words(each) for each in _alternatives(words) if each]
    return " / ".join(said)


def _alternatives(words: str) -> list[str]:
    """Split at bars outside groups."""
    parts, depth = [""], 0
    for character in words:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "|" and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _in_words(expression: str) -> str:
    text = re.sub(r"\((?:\?:)?([^()|]*)[^()]*\)[*?]?", r"\1", expression)
    for pattern, word in ((r"\\[dw]\+|\\S\+", "…"), (r"\.\*", "…"), (r"\\s|\.\|\\n", " "), (r"[\^$\\\[\]]", "")):
        text = re.sub(pattern, word, text)
    return " ".join(text.split())
