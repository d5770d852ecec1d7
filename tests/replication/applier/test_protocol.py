"""The applier's protocol as transcripts, and properties for any fragmentation of the bytes."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from flowstone.errors import LocalProtocolError
from flowstone.replication.applier.protocol import ApplierProtocol, Entered, FinalRows, Rows, SnapshotRows
from flowstone.replication.applier.states import TRANSITIONS, ApplierState
from flowstone.replication.messages import Join
from tests.places import TRANSCRIPTS
from tests.replication.applier_stories import US, Story, replay


@pytest.mark.parametrize("path", sorted(TRANSCRIPTS.glob("applier_*.txt")), ids=lambda path: path.stem)
def test_applier_matches_the_transcript(path: Path) -> None:
    story = path.read_text()
    assert replay(story) == story


def conversation() -> list[tuple[str, list[str]]]:
    """Return a whole conversation: the commands, and the input after each."""
    return [
        ("connects", ["greeting 2.6.0", "ballot {1: 10}"]),
        ("goes on", []),
        ("joins", ["vclock {1: 10}", "snapshot 5", "vclock {1: 12}", "row 1:11", "row 1:12", "vclock {1: 12}"]),
        ("subscribes at {1: 12}", ["subscribed 1 {1: 12}", "heartbeat 1", "rows 1:13..19", "row 1:20", "heartbeat 1"]),
    ]


@pytest.mark.parametrize("seed", range(20))
def test_result_does_not_depend_on_fragmentation(seed: int) -> None:
    rng, story = Random(seed), Story()
    states: list[ApplierState] = []
    counts = {SnapshotRows: 0, FinalRows: 0, Rows: 0}
    for command, lines in conversation():
        story._command(command)
        data = b"".join(story._said(line) for line in lines)
        while True:
            while (event := story.protocol.next_event()) is not None:
                if isinstance(event, Entered):
                    states.append(event.state)
                elif isinstance(event, SnapshotRows | FinalRows | Rows):
                    counts[type(event)] += len(event.slab)
            if not data:
                break
            size = rng.choice((1, 7, 50, 1000))
            story.protocol.receive(data[:size])
            data = data[size:]
    names = "connect connected ready initial_join final_join joined ready sync"
    assert [state.value for state in states] == names.split()
    assert counts == {SnapshotRows: 5, FinalRows: 2, Rows: 8}


def test_every_step_is_in_the_transition_table() -> None:
    story = Story()
    before = ApplierState.OFF
    for command, lines in conversation():
        story._command(command)
        story.protocol.receive(b"".join(story._said(line) for line in lines))
        while (event := story.protocol.next_event()) is not None:
            if isinstance(event, Entered):
                assert event.state in TRANSITIONS[before]
                before = event.state


def test_command_in_a_wrong_state_is_a_local_error() -> None:
    protocol = ApplierProtocol("upstream", instance_uuid=US)
    with pytest.raises(LocalProtocolError, match="invalid applier transition: connect to initial_join"):
        protocol.join(Join(US))
