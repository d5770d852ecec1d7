"""Watchers: which events a client gets, and when."""

from __future__ import annotations

from typing import Any

import pytest

from flowstone.box.dialect import Dialect
from flowstone.iproto import errors
from flowstone.iproto.constants import BallotKey
from flowstone.iproto.msgpack import unpack_body
from flowstone.iproto.packet import decode_response, split
from flowstone.node.server.watchers import BALLOT, KEY_SIZE_MAX, Watchers, ballot, sources_of
from flowstone.replication.limbo.control_rows import RaftState
from tests.node.instances import REPLICASET_UUID, UUID, make_instance


class Screen:
    """A client that records its events: sync, key and value."""

    def __init__(self) -> None:
        self.events: list[tuple[int, str, Any]] = []

    def __call__(self, packet: bytes) -> None:
        ((body,), _) = split(packet)
        response = decode_response(body)
        assert response.type == 76
        values = unpack_body(response.body)
        self.events.append((response.sync, values[0x57], values.get(0x58, "nothing")))


class Numbers:
    def __init__(self) -> None:
        self.number = 1
        self.watchers = Watchers({"number": lambda: self.number})
        self.screen = Screen()

    def watch(self, key: str = "number", sync: int = 7) -> None:
        self.watchers.watch(self, self.screen, key, sync)

    def change(self, number: int) -> None:
        self.number = number
        self.watchers.check()


def test_new_watcher_gets_the_value_at_once() -> None:
    numbers = Numbers()
    numbers.watch()
    assert numbers.screen.events == [(7, "number", 1)]


def test_watcher_of_a_key_without_a_value_gets_an_empty_event() -> None:
    numbers = Numbers()
    numbers.watch("unknown")
    assert numbers.screen.events == [(7, "unknown", "nothing")]


def test_event_is_sent_only_after_the_last_one_is_acknowledged() -> None:
    numbers = Numbers()
    numbers.watch()
    numbers.change(2)
    numbers.change(3)
    assert len(numbers.screen.events) == 1


def test_acknowledgement_is_answered_with_the_newest_value_and_its_own_sync() -> None:
    numbers = Numbers()
    numbers.watch()
    numbers.change(2)
    numbers.change(3)
    numbers.watch(sync=8)
    assert numbers.screen.events[1:] == [(8, "number", 3)]


def test_acknowledgement_of_the_current_value_waits_for_a_change() -> None:
    numbers = Numbers()
    numbers.watch()
    numbers.watch(sync=9)
    numbers.watchers.check()
    assert len(numbers.screen.events) == 1
    numbers.change(5)
    assert numbers.screen.events[1:] == [(9, "number", 5)]


def test_watcher_gets_no_events_after_unwatch_or_disconnect() -> None:
    numbers, others = Numbers(), Screen()
    numbers.watch()
    numbers.watchers.watch(others, others, "number", 1)
    numbers.watchers.watch(others, others, "number", 2)
    numbers.watch()
    numbers.watchers.unwatch(numbers, "number")
    numbers.watchers.unwatch(numbers, "number")
    numbers.watchers.forget(others)
    numbers.change(2)
    assert len(numbers.screen.events) == len(others.events) == 1


def test_user_defined_keys_are_broadcast() -> None:
    numbers = Numbers()
    numbers.watch("mine")
    numbers.watch("mine")
    numbers.watchers.broadcast("mine", {"a": 1})
    numbers.watchers.check()
    numbers.watch("mine")
    numbers.watchers.broadcast("mine", None)
    numbers.watchers.check()
    assert [value for _, _, value in numbers.screen.events] == ["nothing", {"a": 1}, "nothing"]


def test_watcher_is_notified_again_when_a_value_changed_back_before_the_check() -> None:
    numbers, late = Numbers(), Screen()
    numbers.watch()
    numbers.watch()
    numbers.watchers.check()
    numbers.number = 2
    numbers.watchers.watch(late, late, "number", 1)
    numbers.watchers.watch(late, late, "number", 1)
    numbers.change(1)
    assert [value for _, _, value in numbers.screen.events] == [1]
    assert [value for _, _, value in late.events] == [2, 1]


def test_acknowledgement_after_a_change_is_answered_at_once_without_a_check() -> None:
    numbers = Numbers()
    numbers.watch()
    numbers.change(2)
    numbers.watchers.check()
    assert len(numbers.screen.events) == 1
    numbers.watch()
    numbers.watchers.check()
    assert [value for _, _, value in numbers.screen.events] == [1, 2]


def test_check_skips_keys_that_cannot_have_changed() -> None:
    looked: list[str] = []

    class Looking(Watchers):
        def value(self, key: str) -> bytes | None:
            looked.append(key)
            return super().value(key)

    watchers, screen = Looking({"one": lambda: 1, "two": lambda: 2}), Screen()
    for key in ("one", *(f"key {number}" for number in range(1000))):
        watchers.watch(screen, screen, key, 1)
        watchers.watch(screen, screen, key, 1)
    looked.clear()
    watchers.check()
    assert looked == ["one"]
    watchers.broadcast("key 7", "news")
    watchers.check()
    assert looked == ["one", "one", "key 7"]
    assert screen.events[-1] == (1, "key 7", "news")
    watchers.forget(screen)
    looked.clear()
    watchers.check()
    assert looked == []


def test_size_of_a_key_is_limited() -> None:
    numbers = Numbers()
    numbers.watch("ü" * (KEY_SIZE_MAX // 2))
    with pytest.raises(errors.Unsupported, match="keys longer than 1024 bytes"):
        numbers.watch("ü" * (KEY_SIZE_MAX // 2) + "x")


NOBODY = "00000000-0000-0000-0000-000000000000"


def test_node_has_the_keys_of_a_real_server() -> None:
    instance = make_instance()
    screen, watchers = Screen(), Watchers(sources_of(instance))
    for key in ("box.id", "box.status", "box.election", "box.schema", BALLOT):
        watchers.watch(screen, screen, key, 1)
    values = {key: value for _, key, value in screen.events}
    assert values["box.id"] == {"id": 1, "instance_uuid": UUID, "replicaset_uuid": REPLICASET_UUID}
    assert values["box.status"] == {"is_ro": False, "is_ro_cfg": False, "status": "running"}
    assert values["box.election"] == {"term": 1, "role": "follower", "is_ro": False, "leader": 0}
    assert values["box.schema"] == {"version": instance.box.schema_version}
    assert values[BALLOT] == {
        0x29: {1: False, 4: False, 5: False, 6: True, 2: {1: 1}, 3: {}, 7: False, 8: NOBODY, 9: (str(UUID),)}
    }


def test_election_status_has_the_term_of_the_files() -> None:
    instance = make_instance()
    instance.elections.start(RaftState(term=4, vote=1), 1)
    screen, watchers = Screen(), Watchers(sources_of(instance))
    watchers.watch(screen, screen, "box.election", 1)
    assert screen.events[0][2] == {"term": 4, "role": "follower", "is_ro": False, "leader": 0}


def test_vclock_changes_alone_notify_at_a_limited_rate() -> None:
    instance = make_instance()
    screen, watchers = Screen(), Watchers(sources_of(instance))
    watchers.watch(screen, screen, BALLOT, 1)
    watchers.watch(screen, screen, BALLOT, 1)
    instance.journal.submit(b"", 1, lambda error: None)
    instance.journal.flush()
    watchers.check()
    assert len(screen.events) == 1
    watchers.check(vclock_counts=True)
    assert screen.events[1][2][0x29][2] == {1: 2}


def test_ballot_of_2_6_has_four_keys() -> None:
    instance = make_instance(dialect=Dialect.V2_6)
    assert list(ballot(instance).items()) == [(1, False), (4, False), (2, {1: 1}), (3, {})]


@pytest.mark.parametrize(
    ("mode", "can_lead"), [("off", False), ("voter", False), ("candidate", True), ("manual", True)]
)
def test_ballot_states_whether_the_instance_may_lead(mode: str, can_lead: bool) -> None:
    assert ballot(make_instance(election_mode=mode))[BallotKey.CAN_LEAD.value] is can_lead
