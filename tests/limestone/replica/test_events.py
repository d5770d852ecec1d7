"""Events of a replica: each has a sentence for users and an object for programs."""

from __future__ import annotations

import msgspec
import pytest

from flowstone.limestone.replica import events

EVERY = [
    events.Listening("data", "tcp://127.0.0.1:1", "u", 3, True),
    events.MasterConnected("10.0.0.1:5"),
    events.Identified("10.0.0.1:5", "u", 7),
    events.MasterDisconnected("10.0.0.1:5", 8),
    events.Resumed("u", 8),
    events.Seeding("u", 8),
    events.Seeded("u", 9),
    events.ReplicaRestored(2),
    events.EpochsWithdrawn(2, 8),
    events.MasterRefused("10.0.0.1:5", 22, "no session"),
    events.MasterRefused("10.0.0.1:5", None, "no message"),
    events.ReplicaCompacted(8, 2),
    events.Failed("no space"),
    events.ReplicaStopped(8),
]


KINDS = (
    "listening connected identified disconnected resumed seeding seeded restored withdrawn refused refused compacted "
    "failed stopped"
).split()
"""Kinds in JSON: programs rely on them, independently of the names of the classes."""


@pytest.mark.parametrize(("event", "kind"), list(zip(EVERY, KINDS, strict=True)), ids=KINDS)
def test_event_is_a_sentence_and_an_object_with_its_kind(event: events.Event, kind: str) -> None:
    fields = msgspec.json.decode(msgspec.json.encode(event))
    assert fields.pop("event") == kind
    sentence = str(event)
    assert "\n" not in sentence
    for name, value in fields.items():
        if name not in ("compatible", "code", "instance_uuid") and not isinstance(event, events.Listening):
            assert str(value) in sentence


def test_every_event_is_tested() -> None:
    assert {type(event) for event in EVERY} == set(events.Event.__subclasses__())


def test_rejection_has_its_code() -> None:
    assert "error 22: no session" in str(EVERY[9])
    assert "error" not in str(EVERY[10])
