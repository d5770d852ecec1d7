"""Trace five operations through a running system, and count what a reader of the code has to follow.

    python scripts/walks.py                  # a table of all five walks
    python scripts/walks.py --path 1         # the main line of the REPLACE; with --all, all calls
    python scripts/walks.py --lists          # the main lines of all five
    python scripts/walks.py --only 1,3 --json

The walks:

1. replace: a REPLACE on a served node with a log, from the client's bytes to the bytes of the reply.
2. replicated row: on a replica, from the bytes of the upstream to the bytes of the acknowledgement.
3. synchronous commit: on a leader with quorum 2, from the client's bytes to the reply after CONFIRM. The follower is
   another process.
4. change into the lake: a row of a live node on its way through `flowstone mirror`, from the first call in the
   mirror's process to the commit of the Delta table. Spark workers cannot be traced from here, and are not involved:
   the driver itself decodes and folds a batch this small, with the functions that executors call for larger ones.
5. limestone entry: from `add_entry` to the report that the epoch is durable, with one replica in the same process.

What is counted:

- A *call* is the start of a Python function that is defined in a module of `flowstone`, in any thread of this process.
  Comprehensions, generator expressions, lambdas, properties and generated methods (of dataclasses, of named tuples) are
  not calls: a reader does not leave the function for them. Compiled code is not seen; the Python code that calls it is.
- A coroutine or generator counts once per walk. If it was suspended before the walk, it counts when it continues;
  coroutines that merely await it do not.
- Calls are listed in the order in which they start; returning is not listed. Where threads run at the same time, all
  that one of them does in an outermost call is listed together.
- The *main line* is what a reader follows through the system: the functions that lead on into another package, directly
  or through what they call, each once, where it is called first. What begins and ends inside one package (an encoder, a
  look-up, a comparison of vclocks) is a detail that its name explains; its caller is on the main line.
- A *switch* is an entry whose top-level package (`node`, `box`, …) differs from that of the entry before it.
- Two modules *alternate* once whenever the list goes from one to the other and directly back: A B A is one alternation,
  A B A B A is three. Consecutive entries of one module count as one visit.

Both lists are counted, all calls and the main line. All calls show what the machine has to do; the main line can be
compared with what somebody finds who reads the code.

Each walk starts in a system that has done the same operation many times before, so that caches are full, and is traced
several times. The result has the most frequent main line and, of the lists with that, is the shortest one that occurred
more than once: timers that fire in between, and waits that take long, only add calls.

The systems are driven through the public interface only (sockets, `flowstone.Node`, `flowstone.limestone`, the command
line), so that one version of this script measures many versions of the code.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import dis
import functools
import hashlib
import inspect
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final, Protocol

import msgpack

import flowstone

PACKAGE: Final = flowstone.__name__ + "."
ROOT: Final = str(Path(flowstone.__file__).parent) + os.sep

WARM_UP: Final = 60
"""Operations before the first one that is traced; compiled code and caches are ready by then."""

REPETITIONS: Final = 31
"""Traced operations per walk: enough that some of them meet no timer and no slow disk, even on a busy machine."""

SECONDS: Final = 300.0
"""Deadline of every wait; only a broken system needs that long."""

QUIET_SECONDS: Final = 0.05
"""Pause before each operation, in which the effects of the one before it come to an end."""

OFTEN: Final = 2
"""Pairs of modules that alternate more often are named in the table."""

USER, PASSWORD, SPACE = "walker", "secret", "things"
HOST: Final = "127.0.0.1"

NO_HEARTBEATS: Final = 300.0
"""`replication_timeout` of the traced replica sets: their heartbeats would be part of some walks and not of others."""


# --- the tracer ---------------------------------------------------------------------------------------------------

SUSPENDABLE: Final = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
RESUME, YIELD_VALUE = dis.opmap["RESUME"], dis.opmap["YIELD_VALUE"]


@dataclass(eq=False)
class Call:
    """A call of a function: `label` is `package/module.py:function`, `caller` the call that it was made in, if any."""

    label: str
    caller: Call | None
    thread: int
    stretch: int
    """Number of the stretch of the path that it belongs to: all that a thread does in one outermost call."""
    is_listed: bool = False
    is_awaiting: bool = False
    """True if it was suspended before the walk, and another coroutine has continued in it."""


class Tracer:
    """Records the calls of all threads that start after `install`, and of the one that calls it.

    `record` begins a path and `stop` ends it. Between the two, `is_over` is asked at each call whether the operation
    has ended already; the calls after that are not part of the path.
    """

    def __init__(self) -> None:
        self._is_recording = False
        self._is_over: Callable[[], bool] = lambda: False
        self._calls: list[Call] = []
        self._unfinished: dict[int, Call] = {}
        """The coroutines and generators of this walk that have not returned, by the ids of their frames."""
        self._stacks: dict[int, list[Call]] = {}
        """By thread: the calls that it is in, outermost first."""
        self._stretches: dict[int, int] = {}
        """By thread: the number of its newest stretch."""
        self._stretch_count = 0
        self._lock = threading.Lock()

    def install(self) -> None:
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def uninstall(self) -> None:
        """End tracing in this thread; threads that are running keep the hook, which does nothing any more."""
        threading.setprofile(None)
        sys.setprofile(None)

    def record(self, is_over: Callable[[], bool] = lambda: False) -> None:
        with self._lock:
            self._calls, self._is_over = [], is_over
            self._unfinished.clear()
            self._stacks.clear()
            self._stretches.clear()
            self._stretch_count = 0
            self._is_recording = True

    def stop(self, last_thread: int | None = None) -> tuple[Step, ...]:
        """End the path and return it.

        With `last_thread`, the operation ends in the last stretch of that thread: what the others begin meanwhile is
        left out, except for threads that appear only then, because they work for it.
        """
        with self._lock:
            self._is_recording = False
            calls = self._calls
        end = max((call.stretch for call in calls if last_thread in (None, call.thread)), default=0)
        bystanders = {call.thread for call in calls if call.stretch < end} - {last_thread}
        kept = [call for call in calls if call.stretch <= end or call.thread not in bystanders]
        return steps_of(sorted(kept, key=lambda call: min(call.stretch, end)))

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        if not self._is_recording or event not in ("call", "return") or not _is_counted(frame):
            return
        with self._lock:
            if self._has_ended():
                return
            thread = threading.get_ident()
            stack = self._stacks.setdefault(thread, [])
            if event == "return":
                self._note_return(frame, stack)
            elif self._is_over():
                self._is_recording = False
            else:
                self._note_call(frame, stack, thread)

    def _has_ended(self) -> bool:
        return not self._is_recording  # another thread may have ended the path while this one waited for the lock

    def _note_call(self, frame: FrameType, stack: list[Call], thread: int) -> None:
        if not stack:
            self._stretch_count += 1
            self._stretches[thread] = self._stretch_count
        is_start = starts(frame)
        call = None if is_start else self._unfinished.get(id(frame))
        if call is None:
            call = Call(_label(frame.f_code), stack[-1] if stack else None, thread, self._stretches[thread])
        if stack and is_start:
            self._list(stack[-1])
        elif stack:
            stack[-1].is_awaiting = True
        if is_start:
            self._list(call)
        if frame.f_code.co_flags & SUSPENDABLE:
            self._unfinished[id(frame)] = call
        stack.append(call)

    def _note_return(self, frame: FrameType, stack: list[Call]) -> None:
        if stack:  # functions that were called before the walk return, too
            call = stack.pop()
            if not call.is_awaiting:
                self._list(call)
        if frame.f_code.co_code[frame.f_lasti] != YIELD_VALUE:
            self._unfinished.pop(id(frame), None)

    def _list(self, call: Call) -> None:
        """Add a call to the path, once. One that was suspended before the walk is added when it does something."""
        if not call.is_listed:
            call.is_listed = True
            self._calls.append(call)


def starts(frame: FrameType) -> bool:
    """Return True if a frame with a call event begins; False if a coroutine or generator continues."""
    code = frame.f_code.co_code
    return code[frame.f_lasti] != RESUME or not code[frame.f_lasti + 1] & 3


_COUNTED: Final[dict[CodeType, bool]] = {}


def _is_counted(frame: FrameType) -> bool:
    code = frame.f_code
    is_ours = _COUNTED.get(code)
    if is_ours is None:
        is_ours = code.co_filename.startswith(ROOT) and not code.co_name.startswith("<") and not _is_property(frame)
        _COUNTED[code] = is_ours
    return is_ours


def _is_property(frame: FrameType) -> bool:
    owner: Any = None
    names = frame.f_globals
    for part in frame.f_code.co_qualname.split("."):
        owner = names.get(part)
        names = getattr(owner, "__dict__", {})
    return isinstance(owner, (property, functools.cached_property))


def _label(code: CodeType) -> str:
    name = code.co_qualname.replace(".<locals>", "")
    return f"{code.co_filename.removeprefix(ROOT)}:{name}"


# --- what is counted ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """A call of a path: `label` is `package/module.py:function`, `caller` the number of the step that made it."""

    label: str
    caller: int | None = None


@dataclass(frozen=True)
class Counts:
    calls: int
    switches: int
    alternations: dict[tuple[str, str], int]
    """How often each pair of modules alternates, most often first; pairs that never do are left out."""

    @classmethod
    def of(cls, labels: Sequence[str]) -> Counts:
        switches = sum(one != other for one, other in pairwise(map(package_of, labels)))
        visits = [module for module, _ in groupby(map(module_of, labels))]
        found: Counter[tuple[str, str]] = Counter()
        for first, second, third in zip(visits, visits[1:], visits[2:], strict=False):
            if first == third:
                found[min(first, second), max(first, second)] += 1
        return cls(len(labels), switches, dict(found.most_common()))

    def to_json(self) -> dict[str, Any]:
        pairs = [{"modules": pair, "times": times} for pair, times in self.alternations.items()]
        return {"calls": self.calls, "switches": self.switches, "alternations": pairs}


@dataclass(frozen=True)
class Walk:
    """The path of one operation. `share` of the traced operations had its main line."""

    name: str
    path: tuple[Step, ...]
    share: float = 1.0

    @property
    def labels(self) -> list[str]:
        """All calls."""
        return [step.label for step in self.path]

    @property
    def main_line(self) -> list[str]:
        """The functions that lead on into another package, each once."""
        return list(dict.fromkeys(self.path[number].label for number in self._leading))

    @property
    def uses(self) -> dict[str, list[str]]:
        """By function of the main line: the modules of other packages that it calls and that lead nowhere else."""
        found: dict[str, list[str]] = {}
        leading = set(self._leading)
        for number, step in enumerate(self.path):
            if step.caller in leading and number not in leading:
                caller = self.path[step.caller].label
                module = module_of(step.label)
                if package_of(caller) != package_of(module) and module not in found.setdefault(caller, []):
                    found[caller].append(module)
        return found

    @property
    def _leading(self) -> list[int]:
        packages = [{package_of(step.label)} for step in self.path]
        for step in self.path:
            caller = step.caller
            while caller is not None:
                packages[caller].add(package_of(step.label))
                caller = self.path[caller].caller
        return [number for number, found in enumerate(packages) if len(found) > 1]

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "share": round(self.share, 2),
            "all": Counts.of(self.labels).to_json() | {"path": self.labels},
            "main_line": Counts.of(self.main_line).to_json() | {"path": self.main_line},
        }


def module_of(label: str) -> str:
    return label.partition(":")[0]


def package_of(label: str) -> str:
    return module_of(label).partition("/")[0].removesuffix(".py")


def steps_of(calls: Sequence[Call]) -> tuple[Step, ...]:
    numbers = {call: number for number, call in enumerate(calls)}
    steps = []
    for call in calls:
        caller = call.caller
        while caller is not None and caller not in numbers:
            caller = caller.caller
        steps.append(Step(call.label, None if caller is None else numbers[caller]))
    return tuple(steps)


def typical(name: str, paths: Sequence[tuple[Step, ...]]) -> Walk:
    """Return, of the paths with the most frequent main line, the shortest that occurred more than once, or at all."""
    by_line: dict[tuple[str, ...], list[tuple[Step, ...]]] = {}
    for path in paths:
        by_line.setdefault(tuple(Walk(name, path).main_line), []).append(path)
    usual = max(by_line.values(), key=len)
    occurrences = Counter(usual)
    repeated = [path for path, count in occurrences.items() if count > 1] or usual
    path = min(repeated, key=lambda path: (len(path), Counts.of([step.label for step in path]).switches))
    return Walk(name, path, len(usual) / len(paths))


# --- clients and processes ----------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.create_server((HOST, 0)) as server:
        port: int = server.getsockname()[1]
        return port


def is_readable(*sockets: socket.socket, seconds: float = 0) -> bool:
    return bool(select.select(sockets, (), (), seconds)[0])


def eventually(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.02)


class Client:
    """A connection that speaks just enough IPROTO: log in, call, replace. Shares no code with Flowstone."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection((HOST, port), SECONDS)
        self._sync = 0
        greeting = self._read(128)
        salt = base64.b64decode(greeting[64:108])[:20]
        first = hashlib.sha1(PASSWORD.encode()).digest()
        last = hashlib.sha1(salt + hashlib.sha1(first).digest()).digest()
        scramble = bytes(one ^ other for one, other in zip(first, last, strict=True))
        self._ask(7, {0x23: USER, 0x21: ["chap-sha1", scramble]})

    def call(self, function: str, *arguments: object) -> Any:
        return self._ask(10, {0x22: function, 0x21: arguments})

    def replace(self, space_id: int, *fields: object) -> None:
        self.send_replace(space_id, *fields)
        self.receive()

    def send_replace(self, space_id: int, *fields: object) -> None:
        self._send(3, {0x10: space_id, 0x21: fields})

    def receive(self) -> Any:
        """Read one reply. Raise RuntimeError if it is an error."""
        size = msgpack.unpackb(self._read(5))
        unpacker = msgpack.Unpacker(strict_map_key=False)
        unpacker.feed(self._read(size))
        header, body = unpacker.unpack(), unpacker.unpack()
        if header[0]:
            raise RuntimeError(f"the node replied {body}")
        return body.get(0x30)

    def close(self) -> None:
        self.socket.close()

    def _ask(self, kind: int, body: dict[int, Any]) -> Any:
        self._send(kind, body)
        return self.receive()

    def _send(self, kind: int, body: dict[int, Any]) -> None:
        self._sync += 1
        packet = msgpack.packb({0: kind, 1: self._sync}) + msgpack.packb(body)
        self.socket.sendall(b"\xce" + len(packet).to_bytes(4, "big") + packet)

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self.socket.recv(size - len(data))
            if not more:
                raise ConnectionError("the node closed the connection")
            data += more
        return data


@contextmanager
def connected(port: int) -> Iterator[Client]:
    client = Client(port)
    try:
        yield client
    finally:
        client.close()


def made_space(client: Client, **options: object) -> int:
    """Create the space with a primary index, and return its id."""
    client.call("box.schema.space.create", SPACE, {"format": [["id", "unsigned"], ["name", "string"]], **options})
    client.call(f"box.space.{SPACE}:create_index", "primary")
    return int(client.call("box.space._space.index.name:get", [SPACE])[0][0])


@contextmanager
def served(directory: Path, *options: str, replication_timeout: float = NO_HEARTBEATS) -> Iterator[int]:
    """Run `flowstone serve` in another process; yield its port."""
    port = free_port()
    command = [sys.executable, "-m", "flowstone.cli", "serve", "--work-dir", str(directory)]
    command += ["--listen", f"{HOST}:{port}", "--replication-timeout", str(replication_timeout), *options]
    environment = os.environ | {"FLOWSTONE_USER": f"{USER}:{PASSWORD}"}
    with (directory.parent / f"{directory.name}.log").open("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            eventually(lambda: _is_ready(process, Path(log.name)), f"{directory.name} does not start: see {log.name}")
            yield port
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _is_ready(process: subprocess.Popen[bytes], log: Path) -> bool:
    text = log.read_text()
    if process.poll() is not None:
        raise RuntimeError(f"flowstone serve has ended:\n{text}")
    return "\nready" in text or text.startswith("ready")


def uri(port: int) -> str:
    return f"{USER}:{PASSWORD}@{HOST}:{port}"


@contextmanager
def running(manager: Callable[[], AbstractAsyncContextManager[Any]]) -> Iterator[Any]:
    """Run an asynchronous context manager in an event loop in a thread of its own; yield what it yields."""
    started, ending = threading.Event(), asyncio.Event()
    found: list[Any] = []

    async def live() -> None:
        async with manager() as running:
            found.extend((running, asyncio.get_running_loop()))
            started.set()
            await ending.wait()

    def run() -> None:
        try:
            asyncio.run(live())
        except BaseException as error:
            found.append(error)
            raise
        finally:
            started.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    started.wait(SECONDS)
    if len(found) != 2:
        raise RuntimeError("the traced system does not start")
    try:
        yield found[0]
    finally:
        found[1].call_soon_threadsafe(ending.set)
        thread.join(SECONDS)


def node(directory: Path, port: int, **options: Any) -> Callable[[], AbstractAsyncContextManager[Any]]:
    return lambda: flowstone.Node(
        str(directory),
        listen=f"{HOST}:{port}",
        user=(USER, PASSWORD),
        replication_timeout=NO_HEARTBEATS,
        **options,
    )


# --- the walks ----------------------------------------------------------------------------------------------------


class Operation(Protocol):
    def __call__(self, number: int, tracer: Tracer | None) -> tuple[Step, ...]:
        """Do the operation for the `number`th time. With a tracer, return the path."""
        ...


def repeated(
    name: str, tracer: Tracer, operation: Operation, *, warm_up: int = WARM_UP, repetitions: int = REPETITIONS
) -> Walk:
    for number in range(warm_up):
        operation(number, None)
    paths = []
    for number in range(warm_up, warm_up + repetitions):
        time.sleep(QUIET_SECONDS)
        paths.append(operation(number, tracer))
    return typical(name, paths)


def replaced(client: Client, space_id: int) -> Operation:
    """A REPLACE, from the bytes of the request to the bytes of the reply."""

    def operation(number: int, tracer: Tracer | None) -> tuple[Step, ...]:
        if tracer is None:
            client.replace(space_id, number % 7, "before")
            return ()
        tracer.record(lambda: is_readable(client.socket))
        client.send_replace(space_id, number % 7, "after")
        is_readable(client.socket, seconds=SECONDS)
        path = tracer.stop()
        client.receive()
        return path

    return operation


def walk_replace(tracer: Tracer, directory: Path) -> Walk:
    port = free_port()
    with running(node(directory / "node", port)), connected(port) as client:
        return repeated("replace", tracer, replaced(client, made_space(client)))


def walk_synchronous_commit(tracer: Tracer, directory: Path) -> Walk:
    port = free_port()
    with ExitStack() as stack:
        stack.enter_context(running(node(directory / "leader", port, replication_synchro_quorum=2)))
        client = stack.enter_context(connected(port))
        stack.enter_context(served(directory / "follower", "--replication", uri(port)))
        client.call("box.ctl.promote")
        space_id = made_space(client, is_sync=True)
        return repeated("synchronous commit", tracer, replaced(client, space_id))


class Tap:
    """A proxy between a replica and its upstream that can hold back the next bytes of the upstream.

    `catch` waits for these bytes; `release` passes them on. Everything else is passed on at once.
    """

    def __init__(self, upstream_port: int) -> None:
        self._upstream_port = upstream_port
        self._server = socket.create_server((HOST, 0))
        self.port: int = self._server.getsockname()[1]
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._upstreams: set[socket.socket] = set()
        self._is_closed = False
        self._is_armed = threading.Event()
        self._caught: list[tuple[socket.socket, bytes]] = []
        self._is_caught = threading.Event()
        self._is_free = threading.Event()
        self._thread = threading.Thread(target=self._pass_on, daemon=True)
        self._thread.start()

    def arm(self) -> None:
        self._is_free.clear()
        self._is_caught.clear()
        self._is_armed.set()

    def catch(self) -> socket.socket:
        """Return the connection to the replica that the caught bytes go to. Until `free`, nothing is passed on."""
        if not self._is_caught.wait(SECONDS):
            raise TimeoutError("the upstream sends nothing")
        return self._caught[0][0]

    def release(self) -> None:
        replica, data = self._caught.pop()
        replica.sendall(data)

    def free(self) -> None:
        self._is_free.set()

    def close(self) -> None:
        self._is_closed = True
        self._is_free.set()
        self._thread.join(SECONDS)
        for each in (self._server, *self._pairs):
            each.close()

    def _pass_on(self) -> None:
        while not self._is_closed:
            for ready in select.select((self._server, *self._pairs), (), (), 0.1)[0]:
                if ready is self._server:
                    self._accept()
                else:
                    self._pass(ready)

    def _accept(self) -> None:
        replica, _ = self._server.accept()
        upstream = socket.create_connection((HOST, self._upstream_port))
        for each in (replica, upstream):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._pairs |= {replica: upstream, upstream: replica}
        self._upstreams.add(upstream)

    def _pass(self, ready: socket.socket) -> None:
        other = self._pairs.get(ready)
        if other is None:
            return
        with contextlib.suppress(OSError):
            if data := ready.recv(1 << 20):
                if ready in self._upstreams and self._is_armed.is_set():
                    self._is_armed.clear()
                    self._caught.append((other, data))
                    self._is_caught.set()
                    self._is_free.wait(SECONDS)
                else:
                    other.sendall(data)
                return
        for each in (ready, other):
            del self._pairs[each]
            self._upstreams.discard(each)
            each.close()


def walk_replicated_row(tracer: Tracer, directory: Path) -> Walk:
    with ExitStack() as stack:
        upstream_port = stack.enter_context(served(directory / "upstream"))
        tap = Tap(upstream_port)
        stack.callback(tap.close)
        client = stack.enter_context(connected(upstream_port))
        space_id = made_space(client)
        port = free_port()
        stack.enter_context(running(node(directory / "replica", port, replication=[uri(tap.port)], read_only=True)))

        def operation(number: int, tracer: Tracer | None) -> tuple[Step, ...]:
            if tracer is None:
                client.replace(space_id, number % 7, "before")
                return ()
            tap.arm()
            client.replace(space_id, number % 7, "after")
            replica = tap.catch()
            tracer.record(lambda: is_readable(replica))
            tap.release()
            is_readable(replica, seconds=SECONDS)
            path = tracer.stop()
            tap.free()
            return path

        return repeated("replicated row", tracer, operation)


def walk_change_into_lake(tracer: Tracer, directory: Path) -> Walk:
    """`flowstone mirror` runs in the main thread, because it handles signals; the operations come from another."""
    from flowstone.cli import main

    lake = directory / "lake"
    walks: list[Walk] = []
    with ExitStack() as stack:
        port = stack.enter_context(served(directory / "server", replication_timeout=1))  # a mirror expects heartbeats
        client = stack.enter_context(connected(port))
        space_id = made_space(client)
        client.replace(space_id, 0, "first")

        def commit(number: int) -> Path:
            return lake / SPACE / "_delta_log" / f"{number:020}.json"

        def next_commit() -> Path:
            return commit(1 + max(int(each.stem) for each in (lake / SPACE / "_delta_log").glob("*.json")))

        def operation(number: int, tracer: Tracer | None) -> tuple[Step, ...]:
            awaited = next_commit()
            if tracer is not None:
                tracer.record(awaited.exists)
            client.replace(space_id, number % 7, f"number {number}")
            eventually(awaited.exists, f"the mirror writes no {awaited.name}")
            path = () if tracer is None else tracer.stop(threading.main_thread().ident)
            time.sleep(0.5)
            return path

        def drive() -> None:
            try:
                eventually(commit(0).exists, "the mirror does not create the table")
                walks.append(repeated("change into the lake", tracer, operation, warm_up=5, repetitions=11))
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

        driver = threading.Thread(target=drive, daemon=True)
        driver.start()
        arguments, sys.argv[1:] = sys.argv[1:], ["mirror", "--trigger-seconds", "0", "--master", "local[1]"]
        sys.argv += ["--compact-every", "0", "--vacuum-after", "0", uri(port), str(lake)]
        try:
            with contextlib.redirect_stderr(io.StringIO()) as messages, contextlib.suppress(SystemExit):
                main()
        finally:
            sys.argv[1:] = arguments
        driver.join(SECONDS)
    if not walks:
        raise RuntimeError(f"flowstone mirror has ended: {messages.getvalue()}")
    return walks[0]


def walk_limestone_entry(tracer: Tracer, directory: Path) -> Walk:
    from flowstone.limestone import Datastore, Endpoint, Replica
    from flowstone.outside import production

    @contextlib.asynccontextmanager
    async def replicating() -> AsyncIterator[Any]:
        (directory / "replica").mkdir()
        async with Replica(production(), str(directory / "replica"), Endpoint(HOST, 0)) as replica:
            yield replica

    (directory / "master").mkdir()
    with running(replicating) as replica, Datastore(str(directory / "master"), replicas=(replica.endpoint,)) as store:
        channel = store.create_channel()
        store.ready()
        paths: list[tuple[Step, ...]] = []
        store.add_persistent_callback(lambda epoch: paths.append(tracer.stop()))
        first = store.last_epoch + 1
        store.switch_epoch(first)

        def operation(number: int, tracer: Tracer | None) -> tuple[Step, ...]:
            paths.clear()
            channel.begin_session()
            if tracer is not None:
                tracer.record()
            channel.add_entry(1, b"key", b"value", (first + number, 0))
            channel.end_session()
            store.switch_epoch(first + number + 1)
            store.until_durable(first + number)
            return paths[0]

        return repeated("limestone entry", tracer, operation)


WALKS: Final[tuple[Callable[[Tracer, Path], Walk], ...]] = (
    walk_replace,
    walk_replicated_row,
    walk_synchronous_commit,
    walk_change_into_lake,
    walk_limestone_entry,
)


def traced(number: int) -> Walk:
    """Return walk `number`, counted from 1, of a system in a temporary directory."""
    tracer = Tracer()
    with tempfile.TemporaryDirectory(prefix="flowstone-walk-") as directory:
        tracer.install()
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1)  # threads take turns where they wait, and so in nearly the same order each time
        try:
            return WALKS[number - 1](tracer, Path(directory))
        finally:
            sys.setswitchinterval(interval)
            tracer.uninstall()


# --- output -------------------------------------------------------------------------------------------------------


def table(walks: dict[int, Walk]) -> str:
    lines = [
        "| walk | functions | switches | alternating | all calls | switches | alternating |",
        "|---|---|---|---|---|---|---|",
    ]
    for number, walk in walks.items():
        cells = [f"{number} {walk.name}"]
        for counts in (Counts.of(walk.main_line), Counts.of(walk.labels)):
            often = [f"{one} and {other} ({n})" for (one, other), n in counts.alternations.items() if n > OFTEN]
            cells += [str(counts.calls), str(counts.switches), ", ".join(often) or "none"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def condensed(labels: Sequence[str]) -> Iterator[str]:
    """Yield one line per visit of a module, with the functions in order."""
    for module, visit in groupby(labels, module_of):
        functions = []
        for label, group in groupby(visit):
            count, function = len(list(group)), label.partition(":")[2]
            functions.append(function if count == 1 else f"{function} (×{count})")
        yield f"{module}: {', '.join(functions)}"


def described(walk: Walk) -> Iterator[str]:
    """Yield the main line as a Markdown list, with the modules of other packages that each visit uses."""
    uses = walk.uses
    for number, (module, visit) in enumerate(groupby(walk.main_line, module_of), 1):
        labels = list(visit)
        used = dict.fromkeys(each for label in labels for each in uses.get(label, ()))
        functions = ", ".join(f"`{label.partition(':')[2]}`" for label in labels)
        yield f"{number}. `{module}`: {functions}" + (f" (uses {', '.join(used)})" if used else "")


def main() -> None:
    parser = argparse.ArgumentParser(description="Count calls and switches of packages in five walks through the code.")
    parser.add_argument("--only", metavar="N,…", help="trace only these walks")
    parser.add_argument("--path", metavar="N", type=int, help="print the functions of one walk, in order")
    parser.add_argument("--all", action="store_true", help="with --path: print all calls, not only the main line")
    parser.add_argument(
        "--lists", action="store_true", help="print the main lines of all walks, as CONTRIBUTING.md has"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    options = parser.parse_args()
    numbers = range(1, len(WALKS) + 1)
    chosen = [options.path] if options.path else [int(each) for each in (options.only or "").split(",") if each]
    if any(each not in numbers for each in chosen):
        parser.error(f"the walks are {numbers[0]} to {numbers[-1]}")
    walks = {number: traced(number) for number in chosen or numbers}
    if options.json:
        print(json.dumps({str(number): walk.to_json() for number, walk in walks.items()}, indent=1))
    elif options.path:
        walk = walks[options.path]
        print(*(condensed(walk.labels) if options.all else described(walk)), sep="\n")
    elif options.lists:
        for walk in walks.values():
            print(f"**{walk.name.capitalize()}**\n", *described(walk), "", sep="\n")
    else:
        print(table(walks))


if __name__ == "__main__":
    main()
