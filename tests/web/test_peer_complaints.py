"""Log messages of a node about its peers, used by health during startup and if `box.info` has no message.

Served nodes are processes.
"""

from __future__ import annotations

import json
import logging
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from flowstone.web.peer_complaints import LOGGER, PeerComplaints
from tests.cli.node.test_serve import Serve, Served, connected, serve
from tests.interop.member import eventually
from tests.real_tarantool import free_port

__all__ = ["serve"]

USER = "app:secret"
PATIENT = ("--replication-connect-timeout=60", "--replication-sync-timeout=300")


@pytest.fixture
def complaints() -> Iterator[PeerComplaints]:
    listening = PeerComplaints(lambda: ["db1:330", "db1:3301"])
    listening.start()
    before = LOGGER.level
    LOGGER.setLevel(logging.INFO)
    yield listening
    LOGGER.setLevel(before)
    listening.stop()


def texts(complaints: PeerComplaints) -> list[tuple[str, str, bool]]:
    return [(one.address, one.text, one.is_final) for one in complaints.now()]


def test_last_complaint_about_a_peer_counts_until_the_peer_makes_progress(complaints: PeerComplaints) -> None:
    about = logging.LoggerAdapter(LOGGER, {"peer": "db1:3301"})
    LOGGER.warning("cannot join db1:3301: Incorrect password")
    assert texts(complaints) == [("db1:3301", "cannot join db1:3301: Incorrect password", False)]
    about.warning("db1:3301 closed the connection")
    assert texts(complaints) == [("db1:3301", "db1:3301 closed the connection", False)]
    about.info("subscribed to db1:3301")
    assert texts(complaints) == []


def test_summary_does_not_hide_that_a_peer_was_dropped(complaints: PeerComplaints) -> None:
    logging.LoggerAdapter(LOGGER, {"peer": "db1:3301"}).error("replication from db1:3301 is stopped: mismatch")
    LOGGER.error("failed to synchronize with enough replicas: db1:330: timed out, db1:3301: mismatch")
    assert texts(complaints) == [
        ("db1:330", "failed to synchronize with enough replicas: db1:330: timed out, db1:3301: mismatch", False),
        ("db1:3301", "replication from db1:3301 is stopped: mismatch", True),
    ]


def test_client_errors_and_lines_without_a_peer_are_not_complaints(complaints: PeerComplaints) -> None:
    LOGGER.warning("broken packet", extra={"peer": "db1:49152"})
    LOGGER.warning("user app not created: the data comes from peers")
    LOGGER.warning("cannot listen on mydb1:3301 or db1:33012")
    assert texts(complaints) == []


# --- served ---


def health(port: int) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            found = json.load(error)
    return found


def reason(port: int, state: str, *words: str) -> Callable[[], str | None]:
    """Wait for the reason with all these words in this state."""

    def find() -> str | None:
        found = health(port)
        told = [text for text in found["reasons"] if all(word in text for word in words)]
        return told[0] if told and found["state"] == state else None

    return find


def born(serve: Serve, *options: str) -> Served:
    served = serve(*options, FLOWSTONE_USER=USER)
    served.wait_for("ready")
    return served


def test_node_that_cannot_join_reports_the_reason_without_the_password(serve: Serve) -> None:
    master, port = born(serve, "--work-dir=a"), free_port()
    wrong = f"--replication=app:mistaken@127.0.0.1:{master.port}"
    served = serve("--work-dir=b", f"--http-listen={port}", wrong, *PATIENT)
    served.wait_for(f"metrics and health at http://127.0.0.1:{port}/")
    eventually("the refusal", reason(port, "starting", f"127.0.0.1:{master.port}", "Incorrect password"))
    found = health(port)
    assert found["reasons"][0] == "node has not started yet"
    assert "mistaken" not in json.dumps(found)
    assert "ready" not in served.lines


@pytest.mark.parametrize("dialect", ["2.6", "2.11"])
def test_expelled_node_reports_that_it_is_an_orphan_while_it_waits(serve: Serve, dialect: str) -> None:
    master, port = born(serve, "--work-dir=a", f"--dialect={dialect}"), free_port()
    follow = ("--work-dir=b", f"--replication={USER}@127.0.0.1:{master.port}", *PATIENT)
    born(serve, *follow).end()
    with connected(master) as client:
        client.delete("_cluster", 2)
    served = serve(*follow, f"--http-listen={port}")
    served.wait_for(f"metrics and health at http://127.0.0.1:{port}/")
    eventually("the orphan", reason(port, "orphan", "node is an orphan: it is not in sync with enough peers"))
    eventually("the refusal", reason(port, "orphan", f"127.0.0.1:{master.port}", "replica"))
    assert "ready" not in served.lines, "the node waits for its peer until replication_sync_timeout"
    with connected(served) as client:
        assert client.call("box.info")[0]["status"] == "orphan"


def test_peer_of_another_replica_set_is_reported(serve: Serve) -> None:
    master, port = born(serve, "--work-dir=a"), free_port()
    born(serve, "--work-dir=b").end()
    served = serve("--work-dir=b", f"--http-listen={port}", f"--replication={USER}@127.0.0.1:{master.port}", *PATIENT)
    served.wait_for(f"metrics and health at http://127.0.0.1:{port}/")
    stopped = (f"replication from 127.0.0.1:{master.port} is stopped", "Replica set UUID mismatch")
    eventually("the mistake", reason(port, "orphan", *stopped))
    with connected(served) as client:
        assert [peer for peer in client.call("box.info")[0]["replication"].values() if "upstream" in peer] == []
        client.call("box.cfg", {"replication": []})
    eventually("that all is well again", lambda: stopped[0] not in json.dumps(health(port)))
    assert health(port)["state"] == "running"
