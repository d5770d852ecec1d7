"""Every fenced block is run, compared or checked, except for a few that state a reason."""

from __future__ import annotations

from tests.docs.blocks import RUN, page_at, paths

NOT_RUN_MAX = 14


def test_few_blocks_are_not_run_and_each_states_the_reason() -> None:
    blocks = [(path, block) for path in paths() for block in page_at(path).blocks]
    excused = [f"{path}:{block.line}: {block.reason_not_to_run}" for path, block in blocks if block.reason_not_to_run]
    assert len(excused) <= NOT_RUN_MAX, "\n".join(excused)
    assert all(len(line.rpartition(": ")[2]) > 8 for line in excused)
    assert sum(block.language in RUN and not block.is_hidden for _, block in blocks) > 5 * len(excused)
