"""A member of a replica set as a process: a real Tarantool or a Flowstone node, with the same interface.

Options are those of `box.cfg`. Guests have all privileges on every member, and `REPLICATOR` may replicate: the first
member (id 1) grants that, and all others receive it. Every wait has a deadline, and its error names the condition.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any, Final

from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.msgpack import unpack
from tests.interop.client import Client, Disconnected
from tests.real_tarantool import free_port
from tests.served_node import GUEST_IS_SUPER, PASSWORD, PRIVILEGE, USER
from tests.warm_process import WarmProcess

REPLICATOR: Final = ("replicator", "secret")
SERVER_LUA: Final = Path(__file__).with_name("server.lua")
USERS: Final = 304
ADMIN, REPLICATION_ROLE, EXECUTE = 1, 3, 4
SECONDS: Final = 60.0
"""How long a condition may take before the test fails."""

POLL_SECONDS: Final = 0.01
OF_TESTS: Final = ("FLOWSTONE_TARANTOOL", "FLOWSTONE_INTEROP_OURS", "FLOWSTONE_SCALE")


class Timeout(AssertionError):
    """A condition did not hold in time."""


def eventually(what: str, condition: Callable[[], Any], *, seconds: float = SECONDS) -> Any:
    """Return the first true value of `condition`, retried until the deadline, also while a member cannot answer."""
    deadline = time.monotonic() + seconds
    last: object = None
    while True:
        try:
            value = condition()
            if value:
                return value
            last = value
        except (TarantoolError, OSError) as error:
            last = error
        if time.monotonic() > deadline:
            raise Timeout(f"{what}: not within {seconds:g} s; at last {last!r}")
        time.sleep(POLL_SECONDS)


def wait_ready(*members: Member, seconds: float = SECONDS) -> None:
    """Wait until all launched members serve: each may wait for others, and for the setup by the first one."""
    waiting = list(members)

    def all_ready() -> bool:
        for member in [one for one in waiting if one.check_ready()]:
            member.settle()
            waiting.remove(member)
        return not waiting

    eventually(f"{members} are ready", all_ready, seconds=seconds)
    for member in members:
        eventually(f"{member} lets guests in", member.info, seconds=seconds)


def let_replicate(client: Client, user: str) -> None:
    """Grant the role `replication` as its owner, admin."""
    number = next(one[0] for one in map(unpack, client.tuples(USERS)) if one[2] == user)
    client.insert(PRIVILEGE, ADMIN, number, "role", REPLICATION_ROLE, EXECUTE)


class Member(ABC):
    """One process. `start` uses a new directory or that of an earlier run; the port stays the same."""

    kind: str

    def __init__(self, name: str, directory: Path, **options: Any) -> None:
        self.name = name
        self.directory = directory
        self.port = free_port()
        self.options = options
        self._process: subprocess.Popen[bytes] | WarmProcess | None = None
        self._client: Client | None = None
        directory.mkdir(parents=True)

    def __repr__(self) -> str:
        return f"<{self.kind} {self.name} at {self.address}>"

    # --- addresses ---

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def uri(self) -> str:
        """The URI for `replication` of others."""
        return self.uri_at(self.port)

    @staticmethod
    def uri_at(port: int) -> str:
        """Return the same URI through a proxy that listens on `port`."""
        return f"{REPLICATOR[0]}:{REPLICATOR[1]}@127.0.0.1:{port}"

    def log(self) -> str:
        """The log of all its runs so far."""
        path = self.directory / "member.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def files(self, suffix: str) -> list[Path]:
        return sorted(self.directory.glob(f"*.{suffix}"))

    # --- start and stop ---

    @abstractmethod
    def _start_process(self, log: IO[bytes]) -> subprocess.Popen[bytes] | WarmProcess: ...

    @abstractmethod
    def _is_ready(self, log: str) -> bool: ...

    @abstractmethod
    def settle(self) -> None:
        """Let the first member perform the setup for all, from outside."""

    def launch(self, **options: Any) -> None:
        """Start the process without waiting; `options` are kept for later starts."""
        assert not self.is_running, f"{self} runs already"
        self.options |= options
        self._forget()
        self._log_before = len(self.log())
        with (self.directory / "member.log").open("ab") as log:
            self._process = self._start_process(log)

    def start(self, **options: Any) -> None:
        """Start the process and wait until it serves."""
        self.launch(**options)
        self.wait_ready()

    def wait_ready(self, *, seconds: float = SECONDS) -> None:
        wait_ready(self, seconds=seconds)

    def check_ready(self) -> bool:
        """Return True once it is ready; raise if it has ended."""
        log = self.log()[self._log_before :]
        if not self.is_running:
            raise AssertionError(f"{self} exited with {self.exit_code()} before it was ready:\n{log[-3000:]}")
        return self._is_ready(log)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def exit_code(self, *, seconds: float = SECONDS) -> int:
        """Wait until the process ends by itself."""
        assert self._process is not None
        return self._process.wait(seconds)

    def stop(self) -> None:
        """Stop the process in order, as an operator does."""
        if self.is_running:
            assert self._process is not None
            self.resume()
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
        self._forget()

    def kill(self) -> None:
        """Kill the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._forget()

    def restart(self, **options: Any) -> None:
        self.stop()
        self.start(**options)

    def pause(self) -> None:
        """Suspend the process; its connections stay open, as on a hanging machine."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def _forget(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    # --- requests ---

    def connect(self, user: str | None = None, password: str = "") -> Client:
        """Return a new connection."""
        return Client(self.port, user, password)

    @property
    def client(self) -> Client:
        """Return a connection as guest, kept while it works."""
        if self._client is None:
            self._client = self.connect()
        return self._client

    def call(self, function: str, *arguments: Any) -> Any:
        try:
            return self.client.call(function, *arguments)
        except (Disconnected, OSError):
            self._forget()
            raise

    @abstractmethod
    def info(self) -> dict[str, Any]:
        """Return box.info."""

    @abstractmethod
    def configure(self, **options: Any) -> None:
        """Call box.cfg{…}."""

    @abstractmethod
    def gc(self) -> dict[str, Any]:
        """Return box.info.gc()."""

    def snapshot(self) -> None:
        self.call("box.snapshot")

    def tuples(self, space: int, index: int = 0) -> list[bytes]:
        return self.client.tuples(space, index)

    def count(self, space: int) -> int:
        return len(self.tuples(space))

    def vclock(self) -> dict[int, int]:
        """Return the vclock without the local component."""
        return {replica_id: lsn for replica_id, lsn in by_id(self.info()["vclock"]).items() if replica_id}

    @property
    def id(self) -> int:
        return self.info()["id"] or 0

    @property
    def uuid(self) -> str:
        return self.info()["uuid"]

    def replication(self) -> dict[int, dict[str, Any]]:
        """Return box.info.replication by id."""
        return by_id(self.info()["replication"])

    def upstream(self, of: Member | int) -> dict[str, Any]:
        """Return the upstream status of `of` (a member or an id); empty if there is none."""
        return self._peer(of).get("upstream") or {}

    def downstream(self, to: Member | int) -> dict[str, Any]:
        return self._peer(to).get("downstream") or {}

    def _peer(self, peer: Member | int) -> dict[str, Any]:
        number = peer if isinstance(peer, int) else peer.id
        return self.replication().get(number, {})

    # --- waits ---

    def wait_follow(self, *upstreams: Member, seconds: float = SECONDS) -> None:
        def is_following(upstream: Member) -> bool:
            return self.upstream(upstream).get("status") == "follow"

        for upstream in upstreams:
            eventually(f"{self} follows {upstream}", partial(is_following, upstream), seconds=seconds)

    def wait_vclock(self, vclock: dict[int, int], *, seconds: float = SECONDS) -> None:
        """Wait until the member has all rows that `vclock` covers."""

        def is_there() -> bool:
            mine = self.vclock()
            if all(mine.get(replica_id, 0) >= lsn for replica_id, lsn in vclock.items()):
                return True
            raise TimeoutError(f"it is at {mine}: {self.replication()}")

        eventually(f"{self} has {vclock}", is_there, seconds=seconds)

    def catch_up(self, *others: Member, seconds: float = SECONDS) -> None:
        """Wait until the member has all rows that the others have now."""
        for other in others:
            self.wait_vclock(other.vclock(), seconds=seconds)

    def wait_writable(self, *, seconds: float = SECONDS) -> None:
        eventually(f"{self} is writable", lambda: not self.info()["ro"], seconds=seconds)

    def wait_log(self, text: str, *, seconds: float = SECONDS) -> None:
        eventually(f"{self} logs {text!r}", lambda: text in self.log(), seconds=seconds)


class RealMember(Member):
    """A real server of the given binary."""

    kind = "tarantool"

    def __init__(self, name: str, directory: Path, binary: str, **options: Any) -> None:
        super().__init__(name, directory, **options)
        self.binary = binary

    def _start_process(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        options = {"listen": self.address, "log_level": 5, "memtx_memory": 64 * 1024 * 1024} | self.options
        (self.directory / "cfg.json").write_text(json.dumps(options))
        return subprocess.Popen(
            [self.binary, str(SERVER_LUA)],
            cwd=self.directory,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )

    def _is_ready(self, log: str) -> bool:
        return "READY" in log.splitlines()

    def discard_data(self) -> None:
        """Delete the files of a stopped server. It rejoins at its next start, with its UUID and so its id."""
        assert not self.is_running
        uuid = re.search(rb"\nInstance: (\S+)\n", self.files("snap")[-1].read_bytes()[:4096])
        assert uuid is not None
        self.options["instance_uuid"] = uuid[1].decode()
        for suffix in ("snap", "xlog", "inprogress"):
            for path in self.files(suffix):
                path.unlink()
        (self.directory / "member.log").rename(self.directory / f"member-{time.time_ns()}.log")

    def settle(self) -> None:
        """The setup is done by the node's program."""

    def info(self) -> dict[str, Any]:
        return self.call("interop.info")

    def gc(self) -> dict[str, Any]:
        return self.call("interop.gc")

    def configure(self, **options: Any) -> None:
        self.call("interop.cfg", options)

    def eval(self, expression: str, *arguments: Any) -> Any:
        return self.client.eval(expression, *arguments)


class NodeMember(Member):
    """A `flowstone serve` process."""

    kind = "flowstone"

    def __init__(self, name: str, directory: Path, *, dialect: str | None = None, **options: Any) -> None:
        super().__init__(name, directory, **options)
        self.dialect = dialect

    def _start_process(self, log: IO[bytes]) -> WarmProcess:
        options = {"listen": self.address, "work_dir": str(self.directory), "dialect": self.dialect} | self.options
        command = ["tests.interop.node_program", "serve", f"--user={USER}:{PASSWORD}"]
        command += [_argument(name, value) for name, value in options.items() if value is not None]
        # Without the tests' variables: a node would take them for options.
        environment = {name: value for name, value in os.environ.items() if name not in OF_TESTS}
        return WarmProcess(command, cwd=self.directory, env=environment, stdout=log)

    def _is_ready(self, log: str) -> bool:
        return "ready" in log.splitlines()

    def settle(self) -> None:
        """Perform the setup on the first member, once it is writable, unless done already."""
        if self.options.get("replication_anon") or self.options.get("read_only"):
            return
        try:
            client = self.connect(USER, PASSWORD)
        except TarantoolError:
            return  # the node has joined others, and has their users
        with client:
            if client.call("box.info")["id"] != 1 or client.call("box.schema.user.exists", REPLICATOR[0]):
                return
            client.call("box.schema.user.create", REPLICATOR[0], {"password": REPLICATOR[1]})
            let_replicate(client, REPLICATOR[0])
            client.insert(PRIVILEGE, *GUEST_IS_SUPER)

    def info(self) -> dict[str, Any]:
        return self.call("box.info")

    def gc(self) -> dict[str, Any]:
        return self.call("box.info.gc")

    def configure(self, **options: Any) -> None:
        self.call("box.cfg", options)


def _argument(name: str, value: Any) -> str:
    dashed = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{dashed}" if value else f"--no-{dashed}"
    return f"--{dashed}={','.join(value) if isinstance(value, list) else value}"


def by_id(table: Any) -> dict[int, Any]:
    """Return a Lua table by id; one without gaps arrives as an array."""
    if isinstance(table, dict):
        return {int(number): value for number, value in table.items()}
    return dict(enumerate(table, 1))
