"""Replay recorded refusals and probes to a real server and record its answers.

`python -m tests.conversations.record TARANTOOL FROM TO` replays the client side of the recordings of version FROM to
the binary TARANTOOL and writes recordings of version TO, with the files of the answering master. Run it for a release
without recordings; test_record.py replays them without keeping anything.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.conversations import recording
from tests.conversations.client import DEADLINE_SECONDS, Played, play
from tests.real_tarantool import free_port

PROBES, REFUSALS = "08-probe", "07-errors"
PATIENCE_SECONDS = 2.0
"""How long another release may take for further answers; it may have fewer of them."""

KEPT = ("00000000000000000000.snap", "*.xlog")
"""Of the master's files: the first snapshot and all logs contain everything that was prepared."""

PROBE_ORDER = tuple(
    f"{name}-01"
    for name in (
        "ping-vote-id join-noversion join-v276 join-nouuid join-nobody fetch-nobody fetch-emptymap fetch-version"
        " fetch-checkpoint-join fetch-checkpoint-join-cursor register-unknown subscribe-v26 subscribe-v25"
        " subscribe-unregistered subscribe-ahead subscribe-anon-uuidless"
    ).split()
)
"""These register replicas at the master: each expects the effects of the earlier ones."""

READ_ONLY = "err-romaster"
"""Recorded with a read-only master."""

_CFG = """
box.cfg{{listen = '127.0.0.1:{port}', log = 'server.log', instance_uuid = '11111111-0000-4000-8000-000000000001',
    replicaset_uuid = 'aaaaaaaa-0000-4000-8000-0000000000{set}', read_only = {read_only}}}
print('READY') io.stdout:flush()
"""
_USERS = """
box.schema.user.create('replicator', {password = 'secret'})
box.schema.user.grant('replicator', 'replication')
"""
_PREPARE = {
    REFUSALS: _USERS + "box.schema.user.create('nobody', {password = 'nopw'}) os.exit(0)",
    PROBES: _USERS
    + """
box.schema.space.create('t', {id = 512}):create_index('pk')
box.space.t:insert{1, 'x'}
box.snapshot()
box.space.t:insert{2, 'after snap'}
os.exit(0)
""",
}
_SETS = {REFUSALS: "07", PROBES: "11"}


def prepare(binary: str, scenario: str, directory: Path) -> None:
    """Create the files of a master like the recorded one."""
    directory.mkdir(parents=True)
    script = _CFG.format(port=free_port(), set=_SETS[scenario], read_only="false") + _PREPARE[scenario]
    (directory / "prepare.lua").write_text(script)
    subprocess.run([binary, "prepare.lua"], cwd=directory, check=True, stdout=subprocess.DEVNULL, timeout=60)


@contextmanager
def serve(binary: str, scenario: str, directory: Path, *, read_only: bool = False) -> Iterator[int]:
    """Run the real server on prepared files; yield its port."""
    port = free_port()
    script = _CFG.format(port=port, set=_SETS[scenario], read_only=str(read_only).lower())
    (directory / "serve.lua").write_text(script)
    process = subprocess.Popen([binary, "serve.lua"], cwd=directory, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        if process.stdout.readline().strip() != b"READY":
            raise RuntimeError((directory / "server.log").read_text(errors="replace")[-2000:])
        yield port
    finally:
        process.terminate()
        process.wait(60)
        process.stdin.close()
        process.stdout.close()


def play_all(
    binary: str, scenario: str, directory: Path, version: str, *, patience: float = DEADLINE_SECONDS
) -> Iterator[tuple[str, Played]]:
    """Replay each conversation of the recordings of `version` to the real server on prepared files."""
    names = PROBE_ORDER if scenario == PROBES else recording.names(version, scenario)
    for read_only in (False, True):
        chosen = [name for name in names if name.startswith(READ_ONLY) == read_only]
        if not chosen:
            continue
        with serve(binary, scenario, directory, read_only=read_only) as port:
            for name in chosen:
                yield name, _play_alone(recording.load(version, scenario, name), port, patience)


def _play_alone(conversation: recording.Conversation, port: int, patience: float) -> Played:
    """Replay again while the server still serves the previous conversation's replica, whose connection is closed."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while True:
        played = asyncio.run(play(conversation, port, patience=patience))
        is_early = any(b"duplicate connection with the same replica UUID" in data for _, data in played.transcript)
        if not is_early or time.monotonic() > deadline:
            return played


def keep(played: Played, target: Path) -> None:
    """Write a recording with the order of reads, but not their times."""
    offsets, lines = {"c2s": 0, "s2c": 0}, []
    for side, data in played.transcript:
        lines.append({"d": side, "t": 0.0, "off": offsets[side], "len": len(data)})
        offsets[side] += len(data)
    ends = ("s2c", "c2s") if played.server_closed else ("c2s", "s2c")
    lines += [{"d": side, "t": 0.0, "off": offsets[side], "len": 0} for side in ends]
    for side in offsets:
        path = target.with_name(f"{target.name}.{side}.bin")
        path.write_bytes(b"".join(data for other, data in played.transcript if other == side))
    target.with_name(f"{target.name}.idx").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def keep_files(directory: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for pattern in KEPT:
        for file in directory.glob(pattern):
            shutil.copy(file, target)


def main(binary: str, version: str, new_version: str) -> None:
    for scenario in (REFUSALS, PROBES):
        target = recording.scenario(new_version, scenario)
        with tempfile.TemporaryDirectory() as temporary:
            directory = Path(temporary) / "master"
            prepare(binary, scenario, directory)
            keep_files(directory, target / "files" / "master")
            for name, played in play_all(binary, scenario, directory, version, patience=PATIENCE_SECONDS):
                keep(played, target / name)


if __name__ == "__main__":
    main(*sys.argv[1:])
