"""`flowstone dashboard`: its output, its authentication, and its end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flowstone.cli.http_options import TOKEN_VARIABLE
from flowstone.cli.node.process_options import PROCESS_OPTIONS
from tests import real_tarantool, served_node
from tests.cli.conftest import Command
from tests.interop.member import eventually
from tests.real_tarantool import free_port
from tests.warm_command import warm

SECONDS = 30
COMMAND = (sys.executable, "-m", "flowstone.cli", "dashboard")


@contextmanager
def running(*arguments: str, is_fresh: bool = False, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command and the address that it prints; with `is_fresh` in an interpreter of its own."""
    pipe = subprocess.PIPE
    command = COMMAND if is_fresh else (*warm("flowstone.cli"), "dashboard")
    process = subprocess.Popen(
        [*command, *arguments], stdout=pipe, stderr=pipe, text=True, env=os.environ | environment
    )
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


def state_at(page: str, **headers: str) -> dict[str, Any]:
    request = urllib.request.Request(f"{page}api/state", headers=headers)
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        return json.loads(answer.read())


def answered(page: str) -> dict[str, Any]:
    """Return the state once the first server has reported; it may be too slow for the first poll."""

    def look() -> dict[str, Any] | None:
        state = state_at(page)
        return state if state["sets"][0]["members"][0]["report"] else None

    state: dict[str, Any] = eventually("the server answers", look)
    return state


def test_help_has_an_example_and_the_exit_codes(flowstone: Command) -> None:
    text = flowstone("dashboard", "--help").text
    assert "Example:" in text
    assert "Exit codes:" in text


def test_dashboard_prints_the_address_of_a_page_and_runs_until_a_signal(tmp_path: Path) -> None:
    login = {"TT_CLI_USERNAME": served_node.USER, "TT_CLI_PASSWORD": served_node.PASSWORD}
    with served_node.serve(tmp_path, dialect="2.11") as node:
        arguments = ("--listen", "127.0.0.1:0", f"127.0.0.1:{node.port}")
        for number in (signal.SIGTERM, signal.SIGINT):
            with running(*arguments, is_fresh=True, **login) as (process, page):
                assert page.startswith("http://127.0.0.1:")
                state = answered(page)
                assert state["sets"][0]["members"][0]["mode"] == "rw"
                assert state["findings"] == []
                with urllib.request.urlopen(page, timeout=SECONDS) as answer:
                    assert b"<title>Flowstone</title>" in answer.read()
                process.send_signal(number)
                assert process.wait(SECONDS) == 0


def test_real_server_is_watched(tarantool: object, tmp_path: Path) -> None:
    with (
        real_tarantool.serve(tmp_path) as server,
        running("--listen", "127.0.0.1:0", server.uri) as (_, page),
    ):
        assert answered(page)["sets"][0]["members"][0]["report"]["package"] == "Tarantool"


def test_dashboard_off_loopback_requires_a_token(tmp_path: Path) -> None:
    silent = f"127.0.0.1:{free_port()}"
    with running("--listen", "0.0.0.0:0", silent) as (_, page):
        address, _, token = page.partition("?token=")
        assert len(token) >= 32
        address = address.replace("0.0.0.0", "127.0.0.1")
        with pytest.raises(urllib.error.HTTPError) as refused:
            state_at(address)
        assert refused.value.code == 401
        refused.value.close()
        assert state_at(address, Authorization=f"Bearer {token}")["sets"][0]["uuid"] is None
    with running("--listen", "127.0.0.1:0", silent, FLOWSTONE_HTTP_TOKEN="x" * 20) as (_, page):
        assert page.endswith(f"?token={'x' * 20}")


def test_advice_on_another_name_can_be_followed() -> None:
    silent, token = f"127.0.0.1:{free_port()}", "x" * 20
    with running("--listen", "127.0.0.1:0", silent) as (_, page):
        with pytest.raises(urllib.error.HTTPError) as refused:
            state_at(page, Host="board.example")
        with refused.value as answer:
            assert answer.code == 421
            advice = answer.read().decode()
    # The only option for names belongs to another command, and the advice says so.
    assert TOKEN_VARIABLE in advice
    assert "add the name to http_hosts of flowstone serve" in advice
    assert "http_hosts" in PROCESS_OPTIONS
    with running("--listen", "127.0.0.1:0", silent, is_fresh=False, **{TOKEN_VARIABLE: token}) as (_, page):
        assert state_at(page.partition("?")[0], Host="board.example", Authorization=f"Bearer {token}")["sets"]


def test_printed_link_opens_with_any_token() -> None:
    silent, token = f"127.0.0.1:{free_port()}", "100% correct+horse&battery#staple;"
    with running("--listen", "127.0.0.1:0", silent, FLOWSTONE_HTTP_TOKEN=token) as (_, page):
        browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with browser.open(page, timeout=SECONDS) as answer:
            assert b"<title>Flowstone</title>" in answer.read()


def test_rejected_login_is_logged_and_an_unreachable_server_is_not() -> None:
    arguments = ("--listen", "127.0.0.1:0", "--log-format", "json", f"127.0.0.1:{free_port()}")
    with running(*arguments, FLOWSTONE_HTTP_TOKEN="x" * 20) as (process, page):
        with pytest.raises(urllib.error.HTTPError) as refused:
            state_at(page.partition("?")[0])
        with refused.value as answer:
            request_id = answer.headers["x-request-id"]
        process.terminate()
        lines = process.communicate(timeout=SECONDS)[1].splitlines()
    told = [each for each in map(json.loads, lines) if each["logger"] != "flowstone"]
    assert [(each["logger"], each["message"], each["request_id"]) for each in told] == [
        ("flowstone.web", f"GET '/api/state' from {told[0]['peer']}: 401", request_id)
    ]


def test_usage_error_is_one_line(flowstone: Command, tmp_path: Path) -> None:
    wrong = flowstone("dashboard", "no address at all")
    assert (wrong.code, len(wrong.errors)) == (2, 1)
    short = flowstone("dashboard", "--listen", "127.0.0.1:0", "--token", "short", "127.0.0.1:1")
    assert (short.code, len(short.errors)) == (2, 1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        busy = flowstone("dashboard", "--listen", f"127.0.0.1:{taken.getsockname()[1]}", "127.0.0.1:1")
    assert busy.code == 1
    assert "cannot serve HTTP at" in busy.errors[0]
    assert busy.errors[0].endswith(": Address already in use; choose another --listen, or port 0 for any free port")
