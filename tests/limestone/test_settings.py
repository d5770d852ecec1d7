"""Settings: the original's variables, contradictions, and a secret that is not shown."""

from __future__ import annotations

from typing import Any

import pytest

from flowstone.errors import FlowstoneError
from flowstone.limestone.format.endpoint import Endpoint
from flowstone.limestone.settings import Settings

HERE, THERE = Endpoint("localhost", 1), Endpoint("::1", 2)


def test_settings_without_variables_have_no_replica() -> None:
    assert Settings.from_environment("d", {}) == Settings("d")
    assert Settings("d").needed == 0


def test_variables_of_the_original_are_parsed() -> None:
    environment = {
        "TSURUGI_REPLICATION_ENDPOINT": "tcp://localhost:1",
        "REPLICATION_ASYNC_SESSION_CLOSE": "",
        "REPLICATION_ASYNC_GROUP_COMMIT": "no",
        "HOME": "x",
    }
    found = Settings.from_environment("d", environment, compatible=True)
    assert found == Settings("d", (HERE,), session_close="async", group_commit="concurrent", compatible=True)
    assert Settings.from_environment("d", environment, replicas=()).replicas == ()


def test_invalid_endpoint_is_refused() -> None:
    for text in ("localhost", ""):
        with pytest.raises(FlowstoneError, match="invalid endpoint"):
            Settings.from_environment("d", {"TSURUGI_REPLICATION_ENDPOINT": text})


def test_secret_of_a_replica_equals_that_of_its_master() -> None:
    environment = {"FLOWSTONE_LIMESTONE_SECRET": "hush"}
    assert Settings.from_environment("d", environment).secret == "hush"
    assert Settings.from_environment("d", environment, secret="other").secret == "other"
    with pytest.raises(FlowstoneError, match="FLOWSTONE_LIMESTONE_SECRET is empty; unset it"):
        Settings.from_environment("d", {"FLOWSTONE_LIMESTONE_SECRET": ""})


def test_quorum_defaults_to_all_replicas() -> None:
    assert Settings("d", (HERE, THERE)).needed == 2
    assert Settings("d", (HERE, THERE), quorum=1).needed == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"path": ""}, "path of a datastore cannot be empty"),
        ({"path": 5}, "path of a datastore cannot be of type int; pass a string"),
        ({"secret": b"s"}, "secret of a datastore cannot be of type bytes; pass a string"),
        ({"secret": ""}, "cannot be empty"),
        ({"on_lost": "cry"}, "on_lost cannot be 'cry'; use one of block"),
        ({"group_commit": "never"}, "group_commit"),
        ({"session_close": "late"}, "session_close"),
        ({"quorum": 3, "replicas": (HERE, THERE)}, "quorum cannot be 3; use 0 to 2"),
        ({"replicas": (HERE, HERE)}, "duplicate replica"),
        ({"replicas": (HERE, THERE), "compatible": True}, "one replica"),
        ({"secret": "s", "compatible": True}, "does not support a secret"),
        ({"spill": 0}, "spill cannot be 0"),
    ],
)
def test_contradictory_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(FlowstoneError, match=message):
        Settings(**({"path": "d"} | fields))


def test_secret_is_not_shown() -> None:
    assert "hush" not in repr(Settings("d", secret="hush"))


def test_rdma_slots_are_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert Settings.from_environment("d", {"REPLICATION_RDMA_SLOTS": "8"}) == Settings("d")
    assert caplog.messages == ["ignoring REPLICATION_RDMA_SLOTS=8: RDMA is not supported, replicating over TCP"]
