"""`kill -9` of the archive and of the server at random moments: at the end a real server recovers the same data.

A writer on the server changes two spaces in transactions, each of which puts the same number into both spaces.
"""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path

import pytest

from flowstone.archive.manifest import load
from flowstone.outside import production
from tests.conftest import FULL
from tests.interop.versions import ANY, Binary, parameters
from tests.node.archived_server import SCHEMA, RealServer
from tests.warm_process import WarmProcess

ROUNDS = 60 if FULL else 6
SECONDS = 120

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


class Archive:
    """A `flowstone archive` process of a server, with its output."""

    def __init__(self, server: RealServer, directory: Path, *options: str) -> None:
        command = ["flowstone.cli", "archive", server.uri, str(directory), "--wal-max-size=300000", *options]
        self._log = directory.with_suffix(".log")
        with self._log.open("wb") as log:
            self._process = WarmProcess(command, stdout=log)

    def wait_following(self) -> None:
        deadline = time.monotonic() + SECONDS
        while "following" not in self._log.read_text():
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.01)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def terminate(self) -> None:
        self._process.terminate()

    def assert_done(self) -> None:
        """Wait for the end of the process, or terminate it."""
        assert self._process.wait(SECONDS) == 0, self._log.read_text()


@pytest.mark.real
@pytest.mark.usefixtures("tarantool")
@pytest.mark.parametrize("binary", parameters(ANY))
@pytest.mark.parametrize("options", [("--snapshot-interval=0.2",), ("--register",)], ids=["anonymous", "registered"])
def test_archive_equals_the_server_after_kills(tmp_path: Path, options: tuple[str, ...], binary: Binary) -> None:
    rng = random.Random(len(options[0]))
    directory = tmp_path / "archive"
    real = RealServer(tmp_path / "master", setup=SCHEMA + WRITER, cfg="checkpoint_count=100", binary=binary.path)
    with real as server:
        archive = Archive(server, directory, *options)
        try:
            for _ in range(ROUNDS):
                if rng.random() < 0.8:
                    archive.wait_following()
                time.sleep(rng.uniform(0.0, 1.5))
                if rng.random() < 0.4:
                    server.kill()
                    server.start()
                else:
                    archive.kill()
                    archive = Archive(server, directory, *options)
            archive.kill()
            archive = Archive(server, directory, *options)
            archive.wait_following()
        finally:
            archive.terminate()
        archive.assert_done()
        server.setup = SCHEMA
        server.stop()
        server.start()
        Archive(server, directory, *options, "--once").assert_done()
        shutil.copytree(directory, tmp_path / "copy")
        dump, vclock, log = server.recovered(tmp_path / "copy")
        assert vclock == server.vclock()
        assert dump == server.dump()
        assert " E>" not in log
    manifest = load(production().disk, str(directory))
    assert manifest is not None
    assert manifest.gaps == []
    assert manifest.settled == vclock
