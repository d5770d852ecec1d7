"""A served node and its HTTP side as one process: metrics, health, dashboard, token, and a log in JSON."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cli.node.test_serve import Serve, Served, connected, serve
from tests.interop.member import eventually
from tests.real_tarantool import free_port
from tests.web.exposition import checked

__all__ = ["serve"]

TOKEN = "a-token-of-sixteen-and-more"


def get(url: str, headers: Mapping[str, str] | None = None) -> tuple[int, dict[str, str], str]:
    request = urllib.request.Request(url, headers=dict(headers or {}))
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, dict(answer.headers), answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers), error.read().decode()


def told(served: Served) -> list[dict[str, Any]]:
    return [json.loads(line) for line in served.lines]


def members(base: str) -> list[str]:
    state = json.loads(get(f"{base}/api/state")[2])
    return [member["address"] for one in state["sets"] for member in one["members"]]


def test_node_serves_metrics_health_and_its_dashboard(serve: Serve) -> None:
    port = free_port()
    base = f"http://127.0.0.1:{port}"
    options = (f"--http-listen=127.0.0.1:{port}", "--dashboard", "--log-format=json", "--too-long-threshold=0")
    served = serve(*options, FLOWSTONE_USER="app:secret")
    eventually(
        "it is ready", lambda: [line for line in served.lines if '"message": "ready", "logger": "flowstone"' in line]
    )
    with connected(served) as connection:
        connection.ping()
    status, headers, body = get(f"{base}/metrics")
    assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    found = checked(body)
    assert found.value("tnt_read_only", alias=f"127.0.0.1:{served.port}") == 0
    assert found.value("tnt_stats_op_total", operation="auth") >= 1
    assert json.loads(get(f"{base}/health")[2]) == {"status": "ok", "state": "running", "reasons": []}
    assert [get(f"{base}/health/{probe}")[0] for probe in ("live", "ready")] == [200, 200]
    assert "<!doctype html>" in get(f"{base}/")[2]
    eventually("the page has the node", lambda: members(base) == [f"127.0.0.1:{served.port}"])
    assert get(f"{base}/metrics", {"Host": "evil.example"})[0] == 421
    assert served.end() == 0
    lines = told(served)
    fields = {"time", "level", "message", "logger", "pid", "cord_name", "file", "line"}
    assert fields <= set.intersection(*(set(line) for line in lines))
    assert lines[-1]["message"] == "stopped"
    assert "secret" not in json.dumps(lines)


def test_token_is_created_and_shown_once_off_loopback(serve: Serve) -> None:
    port = free_port()
    served = serve(f"--http-listen=0.0.0.0:{port}")
    served.wait_for("ready")
    [line] = [line for line in served.lines if "?token=" in line]
    token = line.partition("?token=")[2]
    base = f"http://127.0.0.1:{port}"
    assert get(f"{base}/metrics")[0] == 401
    assert get(f"{base}/health/ready")[0] == 200
    assert get(f"{base}/metrics", {"Authorization": f"Bearer {token}"})[0] == 200
    assert served.end() == 0


def test_node_waiting_for_peers_is_live_and_not_ready(serve: Serve) -> None:
    port = free_port()
    options = (f"--replication=app:secret@127.0.0.1:{free_port()}", "--replication-connect-timeout=60")
    served = serve(f"--http-listen={port}", *options)
    served.wait_for(f"metrics and health at http://127.0.0.1:{port}/")
    assert get(f"http://127.0.0.1:{port}/health/live")[0] == 200
    assert get(f"http://127.0.0.1:{port}/health/ready")[0] == 503
    status, _, body = get(f"http://127.0.0.1:{port}/health")
    assert (status, json.loads(body)["state"]) == (503, "starting")
    assert get(f"http://127.0.0.1:{port}/metrics")[0] == 200
    assert served.end() == 0


def test_address_in_use_is_one_line(serve: Serve, tmp_path: Path) -> None:
    first = serve(f"--http-listen=127.0.0.1:{(port := free_port())}")
    first.wait_for("ready")
    second = serve("--work-dir=other", f"--http-listen=127.0.0.1:{port}")
    assert second.process.wait(60) == 1
    assert second.lines[-1] == (
        f"flowstone: cannot serve HTTP at 127.0.0.1:{port}: Address already in use; "
        "choose another --http-listen, or port 0 for any free port"
    )
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("option", ["--dashboard", f"--http-token={TOKEN}"])
def test_dashboard_requires_an_address(serve: Serve, option: str) -> None:
    served = serve(option)
    assert served.process.wait(60) == 2
    assert "http_listen" in served.lines[-1]
