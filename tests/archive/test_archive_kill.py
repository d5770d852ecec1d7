"""`kill -9` of the archive and of the server at random moments: at the end a real server recovers the same data.

A writer on the server changes two spaces in transactions that must stay whole: each puts one number into both.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flowstone.archive.manifest import load
from flowstone.outside import production
from tests.conftest import FULL
from tests.interop.versions import ANY, Binary, parameters
from tests.node.archived_server import SCHEMA, RealServer

ROUNDS = 60 if FULL else 6

WRITER = r"""
box.schema.space.create('left', {if_not_exists=true}):create_index('pk', {if_not_exists=true})
box.schema.space.create('right', {if_not_exists=true}):create_index('pk', {if_not_exists=true})
require('fiber').create(function()
    local fiber = require('fiber')
    local i = (box.space.left.index.pk:max() or {0})[1]
    while true do
        i = i + 1
        box.begin()
        box.space.left:insert{i, string.rep('x', i % 300)}
        box.space.right:insert{i}
        box.commit()
        box.space.t:upsert({i % 50, 'new'}, {{'=', 2, 'old' .. i}})
        box.space.t:update(i % 50, {{'=', 2, 'upd' .. i}})
        if i % 3000 == 0 then box.snapshot() end
        if i % 20 == 0 then fiber.sleep(0) end
    end
end)
"""


def start_archive(server: RealServer, directory: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "flowstone.cli", "archive", server.uri, str(directory), "--wal-max-size=300000"]
    return subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def wait_for_following(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    seen = b""
    for line in process.stdout:
        seen += line
        if b"following" in line:
            return
    raise AssertionError(seen.decode())


@pytest.mark.real
@pytest.mark.usefixtures("tarantool")
@pytest.mark.parametrize("binary", parameters(ANY))
@pytest.mark.parametrize("options", [("--snapshot-interval=0.2",), ("--register",)], ids=["anonymous", "registered"])
def test_whatever_is_killed_the_archive_is_what_the_server_has(
    tmp_path: Path, options: tuple[str, ...], binary: Binary
) -> None:
    rng = random.Random(len(options[0]))
    directory = tmp_path / "archive"
    real = RealServer(tmp_path / "master", setup=SCHEMA + WRITER, cfg="checkpoint_count=100", binary=binary.path)
    with real as server:
        process = start_archive(server, directory, *options)
        try:
            for _ in range(ROUNDS):
                if rng.random() < 0.8:
                    wait_for_following(process)
                time.sleep(rng.uniform(0.0, 1.5))
                if rng.random() < 0.4:
                    server.kill()
                    server.start()
                else:
                    process.kill()
                    process.communicate()
                    process = start_archive(server, directory, *options)
            process.kill()
            process.communicate()
            process = start_archive(server, directory, *options)
            wait_for_following(process)
        finally:
            process.terminate()
            output = process.communicate(timeout=60)[0].decode()
        assert process.returncode == 0, output
        server.setup = SCHEMA
        server.stop()
        server.start()
        last = start_archive(server, directory, *options, "--once")
        output = last.communicate(timeout=120)[0].decode()
        assert last.returncode == 0, output
        shutil.copytree(directory, tmp_path / "copy")
        dump, vclock, log = server.recovered(tmp_path / "copy")
        assert vclock == server.vclock()
        assert dump == server.dump()
        assert " E>" not in log
    manifest = load(production().disk, str(directory))
    assert manifest is not None
    assert manifest.gaps == []
    assert manifest.settled == vclock
