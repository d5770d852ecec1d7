"""Refusals (07-errors) and hand-made requests (08-probe) get the answers of real servers.

Dialect 2.6 answers as 2.6.0, byte for byte; dialect 2.11 as 2.11.9 did to the requests of 3.8; and as 3.8 itself except
for DIFFERENCES. Times, source locations and the schema version are masked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from flowstone.box.dialect import Dialect
from flowstone.iproto.constants import Key, RequestType
from tests.conversations import masters, recording
from tests.conversations.client import Played, play
from tests.conversations.record import PROBE_ORDER, PROBES, READ_ONLY, REFUSALS
from tests.conversations.recording import Conversation, Packet, shown

DIALECTS = ("2.6", "2.11")

Values = tuple[str, dict[str, Any], dict[str, Any] | None]


def conversation_names(version: str) -> list[tuple[str, str]]:
    refusals = [(REFUSALS, name) for name in recording.names(version, REFUSALS)]
    return refusals + [(PROBES, name) for name in PROBE_ORDER]


# --- answers of a node -----------------------------------------------------------------------------


async def _ask(dialect: str, directory: Path) -> dict[tuple[str, str], Played]:
    """Replay all conversations, in recorded order, to nodes on the files of the recorded masters."""
    answers = {}
    for scenario, read_only in ((REFUSALS, False), (REFUSALS, True), (PROBES, False)):
        names = PROBE_ORDER if scenario == PROBES else recording.names(dialect, scenario)
        place = directory / f"{scenario}-{read_only}"
        masters.copy_files(dialect, scenario, "master", place, masters.ALL_LOGS)
        async with masters.serving(place, read_only=read_only) as node:
            for name in names:
                if name.startswith(READ_ONLY) == read_only:
                    conversation = recording.load(dialect, scenario, name)
                    answers[scenario, name] = await play(conversation, masters.port_of(node))
    return answers


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[tuple[str, str], Played]]:
    """Return the answers of a node of a dialect in each conversation; every dialect is queried once."""
    return cache(lambda dialect: asyncio.run(_ask(dialect, tmp_path_factory.mktemp(f"dialect-{dialect}"))))


# --- as the server of the same version ---------------------------------------------------------------


def _is_answer_to(conversation: Conversation, answer: Packet, *types: RequestType) -> bool:
    syncs = {request.field(Key.SYNC, 0) for request in conversation.requests if request.type in types}
    return answer.field(Key.SYNC, 0) in syncs and answer.from_server


AUTHENTICATION_ERROR = "Incorrect password supplied for user '{}'"
"""The only authentication error, 47, in every dialect: it does not reveal whether the user exists."""

NIL_UUID = "join-nouuid-01"
"""Dialect 2.11 rejects it immediately, as 3.x; 2.6.0 and 2.11.9 sent a whole snapshot before they noticed."""

CHECKPOINT_JOINS = ("fetch-checkpoint-join-01", "fetch-checkpoint-join-cursor-01")
"""Dialect 2.11 rejects them with the messages of 3.x."""


def _is_other_on_purpose(dialect: str, conversation: Conversation, expected: Packet, answer: Packet) -> bool:
    """Check answers that intentionally differ from those of the server of the same version."""
    if expected.kind in ("ERROR 45", "ERROR 47"):
        user = next(r.content(Key.USER_NAME) for r in conversation.requests if r.type == RequestType.AUTH)
        assert (answer.kind, answer.content(Key.ERROR_24)) == ("ERROR 47", AUTHENTICATION_ERROR.format(user))
        return True
    if dialect == "2.6":
        return False
    is_id = _is_answer_to(conversation, expected, RequestType.ID) and expected.content(Key.VERSION) is not None
    return is_id or _is_answer_to(conversation, expected, RequestType.WATCH_ONCE)


def pairs(conversation: Conversation, played: Played) -> Iterator[tuple[Packet, Packet]]:
    """Pair recorded with current answers, without heartbeats."""
    expected = [packet for packet in conversation.answers if not packet.is_heartbeat]
    assert [str(p) for p in folded(played.answers)][len(expected) :] == []
    return zip(expected, played.answers, strict=True)


def folded(packets: list[Packet]) -> list[Packet]:
    """Merge consecutive snapshot rows into one."""
    return [p for i, p in enumerate(packets) if not (p.is_snapshot_row and i and packets[i - 1].is_snapshot_row)]


CASES = [
    (dialect, scenario, name)
    for dialect in DIALECTS
    for scenario, name in conversation_names(dialect)
    if dialect == "2.6" or name not in (NIL_UUID, *CHECKPOINT_JOINS)
]


@pytest.mark.parametrize(("dialect", "scenario", "name"), CASES, ids=[f"{case[0]}-{case[2]}" for case in CASES])
def test_answers_equal_those_of_the_server_of_the_same_version(
    dialect: str, scenario: str, name: str, answers: Callable[[str], dict[tuple[str, str], Played]]
) -> None:
    conversation, played = recording.load(dialect, scenario, name), answers(dialect)[scenario, name]
    assert played.greeting[:64] == conversation.greeting[:64]
    for expected, answer in pairs(conversation, played):
        if not _is_other_on_purpose(dialect, conversation, expected, answer):
            assert str(answer) == str(expected)
            assert answer.masked == expected.masked
    assert played.server_closed == conversation.was_refused
    heartbeats = [packet for packet in conversation.answers if packet.is_heartbeat]
    assert bool(played.heartbeats) == bool(heartbeats)
    if heartbeats:
        assert (
            played.heartbeats[0].body == heartbeats[0].body
        )  # the number of heartbeats depends on the replica, not on the connection


# --- as 3.8 -------------------------------------------------------------------------------------------

Difference = Callable[[str, Values], None]
DIFFERENCES: dict[str, Difference] = {}
"""Answers of dialect 2.11 that differ from 3.8, each with its reason; maps a recorded answer to the expected one."""


def difference(reason: str) -> Callable[[Difference], Difference]:
    def register(change: Difference) -> Difference:
        DIFFERENCES[reason] = change
        return change

    return register


@difference("2.11 announces fewer features: no tuple extensions, IS_SYNC or Arrow")
def _features(name: str, values: Values) -> None:
    _, _, body = values
    if body is not None and "FEATURES" in body:
        body["VERSION"] = Dialect.V2_11.protocol_version
        body["FEATURES"] = list(Dialect.V2_11.features)


@difference("only 3.x repeats the name of an error, and what its text is about, as fields of the error")
def _error_fields(name: str, values: Values) -> None:
    for error in _stack(values):
        fields = error.pop(6, {})
        kept = {key: fields[key] for key in ("object_type", "object_name", "access_type", "reason") if key in fields}
        if kept:
            error[6] = kept


@difference("3.8 asks whether the user may register somebody before it asks whether he may read; 2.6 and 2.11 do not")
def _rights(name: str, values: Values) -> None:
    for error in _stack(values):
        if error[0] == "AccessDeniedError":
            _, _, body = values
            assert body is not None
            text = error[3].replace("Write access to space '_cluster'", "Read access to universe ''")
            body["ERROR_24"] = error[3] = text
            error[6] = {"object_type": "universe", "object_name": "", "access_type": "Read"}


@difference("there is one error of authentication, which tells nobody whether there is such a user")
def _authentication(name: str, values: Values) -> None:
    _, _, body = values
    for error in _stack(values):
        if error[5] == 47 and body is not None:
            user = {"err-nouser-01": "ghost", "err-badpass-01": "replicator"}[name]
            body["ERROR_24"] = error[3] = AUTHENTICATION_ERROR.format(user)


@difference("3.8 keeps its log consumers in a local space: each joiner moves component 0 there")
def _local_rows(name: str, values: Values) -> None:
    _, _, body = values
    if body is not None and isinstance(body.get("VCLOCK"), dict):
        body["VCLOCK"].pop(0, None)


@difference("2.11 leaves TERM out of the limbo's state while nobody has been promoted")
def _limbo_term(name: str, values: Values) -> None:
    kind, _, body = values
    if kind == "RAFT_PROMOTE" and body is not None and body["TERM"] == 1:
        del body["TERM"]


@difference("the recorded master of 3.8 had just been bootstrapped; a restarted one names no bootstrap leader")
def _bootstrap_leader(name: str, values: Values) -> None:
    _, _, body = values
    data = (body or {}).get("EVENT_DATA", body) or {}
    ballot = data.get("BALLOT", data.get(Key.BALLOT.value))
    if ballot is not None:
        ballot[8] = "00000000-0000-0000-0000-000000000000"


@difference("instances and sets of 2.11 have no names, box.status no dd_version, and schemas change in other numbers")
def _events(name: str, values: Values) -> None:
    _, _, body = values
    for data in (body or {}).get("DATA", ()):
        if isinstance(data, dict):
            for key in ("instance_name", "replicaset_name", "cluster_name", "dd_version"):
                data.pop(key, None)
            if "version" in data:
                data["version"] = recording.MASK


def _stack(values: Values) -> list[dict[Any, Any]]:
    _, _, body = values
    return list((body or {}).get("ERROR", {}).get(0, ()))


def _schema_version_masked(values: Values) -> Values:
    for data in (values[2] or {}).get("DATA", ()):
        if isinstance(data, dict) and "version" in data:
            data["version"] = recording.MASK
    return values


@pytest.mark.parametrize(("scenario", "name"), conversation_names("3.8"), ids=[n for _, n in conversation_names("3.8")])
def test_dialect_2_11_answers_like_3_8_except_for_the_listed_differences(
    scenario: str, name: str, answers: Callable[[str], dict[tuple[str, str], Played]]
) -> None:
    conversation, played = recording.load("3.8", scenario, name), answers("2.11")[scenario, name]
    expected = []
    for packet in folded([packet for packet in conversation.answers if not packet.is_heartbeat]):
        values = deepcopy(packet.values)
        if not packet.is_snapshot_row:
            for change in DIFFERENCES.values():
                change(name, values)
        expected.append(packet.kind if packet.is_snapshot_row else shown(values))
    found = [
        packet.kind if packet.is_snapshot_row else shown(_schema_version_masked(packet.values))
        for packet in folded(played.answers)
    ]
    assert found == expected
    assert played.server_closed == conversation.was_refused
