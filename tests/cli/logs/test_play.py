"""`flowstone play` into the real server: filters, errors, resuming, and users."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import asynctnt
import pytest

from tests.cli.conftest import Command
from tests.history.logs import Log
from tests.interop.member import eventually
from tests.interop.proxy import Proxy
from tests.real_tarantool import Server

pytestmark = pytest.mark.real

BYTES_PER_SECOND = 200_000
"""So slow that an interrupted replay is far from its end, however late the interrupt arrives."""

SETUP = """
local t = box.schema.space.create('t', {id=512})
t:create_index('pk')
box.schema.space.create('other', {id=513}):create_index('pk')
box.schema.user.create('player', {password='secret'})
box.schema.user.grant('player', 'super')
"""


@pytest.fixture(scope="module")
def running(tarantool: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with tarantool.serve(tmp_path_factory.mktemp("server"), setup=SETUP) as server:
        yield server


def call(server: Server, expression: str) -> Any:
    async def ask() -> Any:
        connection = await asynctnt.connect(host="127.0.0.1", port=server.port, fetch_schema=False)
        try:
            return (await connection.eval(f"return {expression}")).body
        finally:
            await connection.disconnect()

    return asyncio.run(ask())


@pytest.fixture
def server(running: Server) -> Server:
    """Return a server with empty spaces `t` and `other`."""
    call(running, "box.space.t:truncate(), box.space.other:truncate()")
    return running


def ids(server: Server, space: str = "t") -> list[int]:
    return [each[0] for each in call(server, f"box.space.{space}:select()")[0]]


@pytest.fixture
def log(tmp_path: Path) -> Log:
    """Return a log: rows 1 and 2 alone, 3 and 4 in one transaction with a row of `other` between them, 5 alone."""
    log = Log(tmp_path)
    log.insert(512, 1)
    log.insert(512, 2)
    insert: Any = 2
    log.write(*((insert, {0x10: space, 0x21: (number,)}) for space, number in ((512, 3), (513, 3), (512, 4))))
    log.insert(512, 5)
    return log


def test_all_rows_are_replayed_and_counted(flowstone: Command, server: Server, log: Log) -> None:
    log.writer.close()
    done = flowstone("play", server.uri, log.path)
    assert done.code == 0
    assert done.text.startswith("replayed 4 transactions with 6 rows in ")
    assert done.text.endswith("resume with --from 7\n")
    assert (ids(server), ids(server, "other")) == ([1, 2, 3, 4, 5], [3])


def test_result_is_available_as_json(flowstone: Command, server: Server, log: Log) -> None:
    log.writer.close()
    result = json.loads(flowstone("play", "--json", server.uri, log.path).out)
    assert result.pop("seconds") >= 0
    assert result == {"transactions": 4, "rows": 6, "skipped": 0, "positions": {"1": 6}}


def test_filters_apply_within_transactions(flowstone: Command, server: Server, log: Log) -> None:
    log.writer.close()
    done = flowstone("play", "--from=2", "--to=6", "--space=512", server.uri, log.path)
    assert done.text.startswith("replayed 2 transactions with 3 rows in ")
    assert (ids(server), ids(server, "other")) == ([2, 3, 4], [])


def test_rejected_row_stops_play_and_from_resumes(flowstone: Command, server: Server, log: Log) -> None:
    log.writer.close()
    call(server, "box.space.other:insert{3}")
    stopped = flowstone("play", server.uri, log.path)
    assert stopped.code == 1
    assert len(stopped.errors) == 1
    assert f"{log.path}: row with LSN 4 of replica 1 (INSERT, space 513) was rejected by " in stopped.errors[0]
    assert stopped.errors[0].endswith("applied: retry it with --from 3, or skip it with --from 6")
    assert stopped.text.startswith("replayed 2 transactions with 2 rows in ")
    assert ids(server) == [1, 2]
    call(server, "box.space.other:delete{3}")
    assert flowstone("play", "--from=3", server.uri, log.path).code == 0
    assert ids(server) == [1, 2, 3, 4, 5]


def test_only_settled_rows_are_replayed_by_default(flowstone: Command, server: Server, tmp_path: Path) -> None:
    log = Log(tmp_path)
    promote: Any = 31
    log.write((promote, {2: 0, 3: 0, 0x53: 2}))
    log.rollback(log.insert(512, 1, flags=6))
    log.insert(512, 2)
    log.insert(512, 3, flags=6)
    log.writer.close()
    done = flowstone("play", server.uri, log.path)
    assert (done.code, ids(server)) == (0, [2])
    assert done.errors == [
        "note: 1 row skipped (all spaces): rolled back",
        "note: 1 row withheld (all spaces): neither confirmed nor rolled back in this log",
    ]
    assert flowstone("play", "--no-settled", "--space=512", "--to=3", server.uri, log.path).code == 0
    assert ids(server) == [1, 2]


def test_credentials_come_from_options_uri_or_environment(
    flowstone: Command, server: Server, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.writer.close()
    wrong = flowstone("play", "-u", "player", "-p", "wrong", server.uri, log.path)
    assert wrong.code == 1
    assert "wrong" not in wrong.errors[0]
    assert ids(server) == []
    assert flowstone("play", "--to=2", "-u", "player", "-p", "secret", server.uri, log.path).code == 0
    assert flowstone("play", "--from=2", "--to=3", f"player:secret@{server.uri}", log.path).code == 0
    monkeypatch.setenv("TT_CLI_USERNAME", "player")
    monkeypatch.setenv("TT_CLI_PASSWORD", "wrong")
    assert flowstone("play", "--from=3", server.uri, log.path).code == 1
    monkeypatch.setenv("TT_CLI_PASSWORD", "secret")
    assert flowstone("play", "--from=3", server.uri, log.path).code == 0
    assert ids(server) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["-u", "a", "b:c@127.0.0.1:1"], 2, "flowstone: credentials given both in the URI and as options; use one"),
        (["-p", "hush", "127.0.0.1:1"], 2, "flowstone: password given without a user; set the user with --username"),
        (["nowhere"], 2, "flowstone: 'nowhere' is not a valid address; "),
        (["127.0.0.1:1"], 1, "flowstone: cannot connect to 127.0.0.1:1: connection refused"),
    ],
)
def test_errors_are_one_line(flowstone: Command, log: Log, arguments: list[str], code: int, says: str) -> None:
    log.writer.close()
    refused = flowstone("play", *arguments, log.path)
    assert (refused.code, refused.out) == (code, b"")
    assert len(refused.errors) == 1
    assert refused.errors[0].startswith(says)


def test_space_with_another_name_is_rejected(flowstone: Command, server: Server, tmp_path: Path) -> None:
    with Log(tmp_path) as log:
        log.create_space(512, "t", ("id", "unsigned"))
        log.create_space(513, "users", ("id", "unsigned"))
        log.insert(512, 1)
        log.insert(513, 2)
    stopped = flowstone("play", "--json", server.uri, log.path)
    assert (stopped.code, json.loads(stopped.out)["rows"]) == (1, 1)
    assert len(stopped.errors) == 1
    assert "belongs to space 'users' with id 513, but space 513 is named 'other' at " in stopped.errors[0]
    assert (ids(server), ids(server, "other")) == ([1], [])


def test_a_truncate_is_replayed(flowstone: Command, server: Server, tmp_path: Path) -> None:
    upsert: Any = 9
    with Log(tmp_path) as log:
        log.insert(512, 1)
        log.insert(513, 1)
        log.write((upsert, {0x10: 330, 0x21: (512, 1), 0x28: [["+", 1, 1]]}))
        log.insert(512, 2)
    assert flowstone("play", "--space=512", server.uri, log.path).code == 0
    assert ids(server) == [2]
    assert flowstone("play", "--space=513", server.uri, log.path).code == 0
    assert (ids(server), ids(server, "other")) == ([2], [1])


def test_rows_replayed_before_damage_are_counted(flowstone: Command, server: Server, log: Log) -> None:
    log.writer.close()
    path = Path(log.path)
    data = bytearray(path.read_bytes())
    data[-20] ^= 0xFF
    path.write_bytes(bytes(data))
    stopped = flowstone("play", server.uri, log.path)
    assert (stopped.code, len(stopped.errors)) == (1, 1)
    assert stopped.text.startswith("replayed 2 transactions with 2 rows in ")
    assert stopped.text.endswith("; resume with --from 3\n")
    assert ids(server) == [1, 2]


@pytest.mark.parametrize("as_json", [True, False])
def test_interrupted_play_reports_its_position(server: Server, tmp_path: Path, as_json: bool) -> None:
    with Log(tmp_path) as log:
        for start in range(0, 240_000, 1000):
            rows: Any = [(3, {0x10: 512, 0x21: (start + number,)}) for number in range(1000)]
            log.write(*rows)
    wire = Proxy(server.port)
    wire.clog(BYTES_PER_SECOND)
    uri = f"127.0.0.1:{wire.port}"
    command = [sys.executable, "-m", "flowstone.cli", "play", *(["--json"] if as_json else []), uri, log.path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        eventually("it has begun", lambda: ids(server))
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=60)
    wire.close()
    assert process.returncode == 130
    applied = len(ids(server))
    assert 0 < applied < 240_000
    assert errors.decode().splitlines()[-1] == f"flowstone: interrupted; resume with --from {applied + 1}"
    if as_json:
        assert json.loads(out)["positions"] == {"1": applied}
    else:
        assert out.decode().endswith(f"; resume with --from {applied + 1}\n")
