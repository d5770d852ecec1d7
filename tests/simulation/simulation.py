"""Whole clusters of unmodified nodes in one process, in virtual time, from one seed.

    @simulated(seeds=range(5))
    async def test_acknowledged_rows_survive(sim: Simulation) -> None:
        node = await sim.start("a", wal_mode="fsync")
        …
        sim.crash("a")
        await sim.restart("a")

Each node has its own machine of the same name: a host with port 3301, and a disk, which outlive the node. The scenario
and its clients run on a host of their own and cannot crash. Equal seeds give equal runs: `sim.trace.hash` proves it.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable
from contextlib import suppress
from contextvars import Context, copy_context
from dataclasses import replace
from random import Random
from typing import Any, Final, Protocol, TypeVar, cast
from uuid import UUID

import pytest

from flowstone import Node
from flowstone.client.connection import Connection
from flowstone.errors import FlowstoneError
from flowstone.iproto.uri import Uri
from flowstone.outside import Blocking, Clock, Disk, Outside
from flowstone.outside import Random as RandomSource
from flowstone.outside.blocking import DEFAULT_WORKERS
from tests.conftest import FULL
from tests.simulation.counted_network import CountedNetwork
from tests.simulation.disk import Loss, SimulatedDisk, Storage
from tests.simulation.leftovers import left_behind
from tests.simulation.link import Fault
from tests.simulation.loop import LIFE, Died, Life, VirtualLoop
from tests.simulation.network import Host, Internet, SimulatedNetwork
from tests.simulation.trace import Trace, TraceHandler


class Process(Protocol):
    """A process other than a node that can run on a machine."""

    async def stop(self) -> None: ...


T = TypeVar("T")
P = TypeVar("P", bound=Process)
Item = TypeVar("Item")

PORT: Final = 3301
USER, PASSWORD = "first", "secret"
"""The superuser of bootstrapped nodes, and of those that join them."""

EPOCH: Final = 1_700_000_000.0
"""The wall clock at the start of a run."""

BLOCKING_SECONDS: Final = (0.00005, 0.003)
"""Minimum and maximum delay of a worker's start, and of its result."""

INTERRUPTED_MAX: Final = 3
"""Maximum number of disk operations in a worker call that can be interrupted: an append and a sync are two."""

LINES_SHOWN: Final = 120

SEEDS_MAX: Final = None if FULL else 1
"""Seeds per scenario below full scale: whole runs provide the variety (`run.py`)."""


class Crashed(Exception):
    """The node died while the scenario waited for it."""


class SimulatedClock:
    """A simulated Clock. `skew` is the error of the machine's wall clock."""

    def __init__(self, machine: Machine, life: Life | None) -> None:
        self._machine = machine
        self._life = life

    def monotonic(self) -> float:
        return self._machine.loop.time()

    def wall(self) -> float:
        return EPOCH + self._machine.loop.time() + self._machine.wall_skew

    async def sleep(self, seconds: float) -> None:
        _enter(self._life)
        await asyncio.sleep(max(seconds, 0.0))


class SimulatedRandom:
    """A simulated Random, from a seed."""

    def __init__(self, seed: str) -> None:
        self._source = Random(seed)

    def bytes(self, n: int) -> bytes:
        return self._source.randbytes(n)

    def uuid(self) -> UUID:
        return UUID(bytes=self._source.randbytes(16), version=4)

    def uniform(self, a: float, b: float) -> float:
        return self._source.uniform(a, b)

    def randrange(self, n: int) -> int:
        return self._source.randrange(n)


class SimulatedBlocking:
    """A simulated Blocking: each call takes effect at some moment before its return, atomically.

    A process that dies earlier may be interrupted in the middle of a call (`Machine.interrupt`).
    """

    def __init__(self, machine: Machine, life: Life | None, rng: Random) -> None:
        self._machine = machine
        self._life = life
        self._rng = rng

    async def __call__(self, fn: Callable[..., T], *args: object) -> T:
        _enter(self._life)
        self._machine.blocking_calls += 1
        answer: asyncio.Future[T] = self._machine.loop.create_future()
        self._machine.jobs[answer] = functools.partial(copy_context().run, fn, *args)
        self._machine.loop.call_later(self._seconds(), self._run, answer, fn, args)
        return await answer

    def map(
        self, fn: Callable[[Item], T], items: Iterable[Item], workers: int = DEFAULT_WORKERS
    ) -> Generator[T, None, None]:
        return (fn(item) for item in items)

    def _run(self, answer: asyncio.Future[T], fn: Callable[..., T], args: tuple[object, ...]) -> None:
        self._machine.jobs.pop(answer, None)
        try:
            result = fn(*args)
        except Exception as error:
            self._machine.loop.call_later(self._seconds(), _fail, answer, error)
        else:
            self._machine.loop.call_later(self._seconds(), _succeed, answer, result)

    def _seconds(self) -> float:
        return self._rng.uniform(*self._machine.blocking_seconds)


def _succeed(answer: asyncio.Future[T], result: T) -> None:
    if not answer.done():
        answer.set_result(result)


def _fail(answer: asyncio.Future[Any], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)


def _enter(life: Life | None) -> None:
    if life is not None and life.is_dead:
        raise Died
    assert LIFE.get() is life, f"resource of {life} used by {LIFE.get()}: see Simulation.on"


class Machine:
    """The parts that outlive a node: its host, its disk, and its options."""

    def __init__(self, sim: Simulation, name: str) -> None:
        self.loop = sim.loop
        self.name = name
        self.host = Host(name)
        self.storage = Storage(name, sim.trace, Random(f"{sim.seed}/{name}/disk"))
        self.wall_skew = 0.0
        self.blocking_seconds = BLOCKING_SECONDS
        self.blocking_calls = 0
        self.options: dict[str, Any] = {}
        self.life: Life | None = None
        self.node: Node | None = None
        self.is_ready = False
        self.uuid = ""
        """The UUID of the node, once it has run."""
        self.refusal = ""
        """The reason of the last failed start."""
        self.waiting: dict[asyncio.Future[Any], None] = {}
        self.jobs: dict[asyncio.Future[Any], Callable[[], object]] = {}
        """Unfinished calls of its workers."""
        self._random = Random(f"{sim.seed}/{name}/interruptions")
        self._internet = sim.internet
        self._seed = sim.seed
        self._life_count = 0
        sim.internet.hosts[name] = self.host

    def outside(self, life: Life | None) -> Outside:
        """Return the Outside of one life on this machine; None means that of the scenario."""
        self._life_count += 1
        seed = f"{self._seed}/{self.name}/{self._life_count}"
        clock: Clock = SimulatedClock(self, life)
        source: RandomSource = SimulatedRandom(seed)
        blocking: Blocking = SimulatedBlocking(self, life, Random(f"{seed}/blocking"))
        disk = SimulatedDisk(self.storage, life if life is not None else Life(self.name))
        return Outside(disk, clock, source, blocking, SimulatedNetwork(self._internet, self.host, life))

    def interrupt(self) -> None:
        """Apply the death of the process to its worker calls: some, none or all disk operations of each are done."""
        life = self.life
        assert life is not None
        jobs, self.jobs = self.jobs, {}
        for job in jobs.values():
            if operations := self._random.randint(0, INTERRUPTED_MAX):
                self.storage.die_after(operations, lambda: setattr(life, "is_dead", True))
                with suppress(FlowstoneError, OSError, Died):  # nothing could receive the result any more
                    job()
                self.storage.spare()
                life.is_dead = False


class Simulation:
    """One run: `Simulation(seed).run(scenario)`. Times are in virtual seconds."""

    def __init__(self, seed: int | str, *, is_verbose: bool = False) -> None:
        self.seed = seed
        self.loop = VirtualLoop()
        self.trace = Trace(self.loop.time, is_verbose=is_verbose)
        self.random = Random(f"{seed}/scenario")
        self.internet = Internet(self.loop, Random(f"{seed}/network"), self.trace)
        self.failures: list[str] = []
        """Unhandled exceptions, and exceptions logged by nodes; a successful run has none."""
        self.before_death: list[Callable[[str, Loss], None]] = []
        """Called with the name of a machine whose process is about to die, and the kind of loss."""
        self.power_losses = 0
        self.unsynced_losses = 0
        """Number of power losses in which unsynced data existed."""
        self._machines: dict[str, Machine] = {}
        self._lives: list[Life] = []
        self._clients: list[Connection] = []
        self._conditions: dict[asyncio.Future[None], Callable[[], object]] = {}
        self._outside = Machine(self, "scenario").outside(None)
        self.loop.before_jump.append(self._look_at_conditions)
        self.loop.on_failure = self._failed

    # --- a run ---

    def run(self, scenario: Callable[[Simulation], Coroutine[Any, Any, T]]) -> T:
        """Run the scenario, then stop all nodes in order. A failure has the seed and the last events in a note."""
        logger = logging.getLogger("flowstone")
        handler = TraceHandler(self.trace, self._logged)
        level, was_collecting = logger.level, gc.isenabled()
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        gc.disable()  # the time and scope of collections would depend on earlier runs
        try:
            result = self.loop.run_until_complete(self._main(scenario))
            assert not self.failures, "\n".join(self.failures)
            return result
        except BaseException as error:
            lines = "\n".join(list(self.trace.story)[-LINES_SHOWN:])
            error.add_note(f"seed {self.seed}, at {self.now}:\n{lines}")
            raise
        finally:
            self.loop.bury(self._lives)
            logger.removeHandler(handler)
            logger.setLevel(level)
            if was_collecting:
                gc.enable()

    async def _main(self, scenario: Callable[[Simulation], Coroutine[Any, Any, T]]) -> T:
        try:
            result = await scenario(self)
        finally:
            for client in self._clients:
                await client.close()
        for name, machine in self._machines.items():
            if machine.life is not None:
                await self.stop(name)
        return result

    def _failed(self, context: dict[str, Any]) -> None:
        self._logged(str(context.get("message")), context.get("exception"))

    def _logged(self, message: str, error: BaseException | None) -> None:
        self.failures.append(f"{self.loop.time():.6f} {message}: {error!r}")
        if error is not None:
            self.trace.note("failure", f"{message}: {error!r}")

    # --- nodes ---

    async def start(self, name: str, **options: Any) -> Node:
        """Start a node on a new machine, or a stopped one in its directory with other options."""
        machine = self._machines.get(name)
        if machine is None:
            machine = self._machines[name] = Machine(self, name)
        assert machine.life is None, f"{name} is running"
        machine.options = {"listen": f"{name}:{PORT}"} | options
        return await self._start(machine)

    async def restart(self, name: str, **options: Any) -> Node:
        """Restart a node that crashed or was stopped, with its old options and the given ones."""
        machine = self._machines[name]
        if machine.life is not None:
            await self.stop(name)
        machine.options |= options
        return await self._start(machine)

    async def _start(self, machine: Machine) -> Node:
        machine.life = life = Life(machine.name)
        self.internet.boot(machine.host)
        self._lives.append(life)
        self.trace.note(machine.name, "start")
        options = dict(machine.options)
        if not machine.storage.names:
            options.setdefault("user", (USER, PASSWORD))
        outside = machine.outside(life)
        node = machine.node = Node(f"/{machine.name}", outside=outside, **options)
        try:
            await self.on(machine.name, node.start())
        except Crashed:
            raise
        except BaseException as error:
            machine.refusal = f"{error}"
            self._end(machine, life, is_quiet=False)
            raise
        machine.uuid = node.info()["uuid"]
        machine.is_ready = True
        return node

    def build(self, *names: str) -> None:
        """Create machines on which nothing runs yet."""
        for name in names:
            self._machines[name] = Machine(self, name)

    async def launch(self, name: str, start: Callable[[Outside], Coroutine[Any, Any, P]]) -> P:
        """Run a process other than a node until it is stopped or dies; raise Crashed if it dies before its start is
        complete.

        `kill`, `crash`, `stop` and `on` apply to it, too; its sends count among the operations of `crash_after`.
        """
        machine = self._machines[name]
        assert machine.life is None, f"{name} is running"
        machine.life = life = Life(name)
        self.internet.boot(machine.host)
        self._lives.append(life)
        self.trace.note(name, "start")
        outside = machine.outside(life)
        outside = replace(outside, network=CountedNetwork(outside.network, machine.storage))
        try:
            process = await self.on(name, start(outside))
        except BaseException:
            if machine.life is life:
                self._end(machine, life, is_quiet=False)
            raise
        machine.node = cast(Node, process)
        return process

    def look(self, name: str) -> Disk:
        """Return a machine's disk for reading, whatever runs there."""
        return SimulatedDisk(self._machines[name].storage, Life("scenario"))

    async def stop(self, name: str) -> None:
        """Stop a node in order. Resources that it does not release are a failure."""
        machine = self._machines[name]
        life, node = machine.life, machine.node
        assert life is not None
        assert node is not None
        box = node.box if machine.is_ready else None

        async def end() -> None:
            try:
                await node.stop()
            finally:
                machine.is_ready = False  # in the same step, so that nothing sees a stopped node

        try:
            await self.on(name, end())
        except Crashed:
            raise
        except BaseException:  # a process that cannot stop in order is ended anyway
            self._end(machine, life, is_quiet=False)
            raise
        await asyncio.sleep(0)
        remains = left_behind(self.loop, self.internet, machine.storage, life, box)
        self.failures += [f"{name} stopped and left behind {each}" for each in remains]
        self.trace.note(name, "stop")
        self._end(machine, life, is_quiet=False)

    def kill(self, name: str) -> None:
        """Kill the process: its written data remains, and its kernel closes its connections."""
        self._die(name, Loss.NOTHING)

    def crash(self, name: str, loss: Loss = Loss.ANY) -> None:
        """Cut the power of the machine: unsynced data is lost, and no peer is notified."""
        self._die(name, loss)

    def crash_after(self, name: str, operations: int, loss: Loss = Loss.ANY) -> None:
        """As `crash`, or `kill` with Loss.NOTHING, in the middle of the disk operation with this number from now on."""
        self._machines[name].storage.die_after(operations, lambda: self._die(name, loss))

    def freeze(self, name: str) -> None:
        """Suspend the process, as SIGSTOP does; its kernel keeps accepting connections and bytes."""
        life = self._machines[name].life
        assert life is not None, f"{name} is not running"
        self.trace.note(name, "freezes")
        life.is_frozen = True

    def thaw(self, name: str) -> int:
        """Resume the process if it still lives; return the number of suspended callbacks."""
        life = self._machines[name].life
        if life is None or not life.is_frozen:
            return 0
        self.trace.note(name, "thaws")
        held_count = len(life.held)
        self.loop.thaw(life)
        self.internet.thaw(life)
        return held_count

    def is_frozen(self, name: str) -> bool:
        life = self._machines[name].life
        return life is not None and life.is_frozen

    def is_running(self, name: str) -> bool:
        return self._machines[name].life is not None

    def is_ready(self, name: str) -> bool:
        """Return True if the node runs and has completed its start."""
        machine = self._machines.get(name)
        return machine is not None and machine.life is not None and machine.is_ready

    def _die(self, name: str, loss: Loss) -> None:
        machine = self._machines[name]
        life = machine.life
        assert life is not None, f"{name} is not running"
        for look in self.before_death:
            look(name, loss)
        self.trace.note(name, f"dies, loses {loss.value}")
        machine.interrupt()
        had_unsynced = machine.storage.crash(loss)
        if loss is not Loss.NOTHING:
            self.power_losses += 1
            self.unsynced_losses += had_unsynced
        machine.host.is_up = loss is Loss.NOTHING
        self._end(machine, life, is_quiet=loss is not Loss.NOTHING)

    def _end(self, machine: Machine, life: Life, *, is_quiet: bool) -> None:
        life.is_dead = True
        life.is_frozen = False
        life.held.clear()
        machine.life = machine.node = None
        machine.is_ready = False
        machine.storage.let_go()
        machine.jobs = {}
        self.internet.end_of_life(life, is_quiet=is_quiet)
        waiting, machine.waiting = machine.waiting, {}
        for answer in waiting:
            if not answer.done():
                answer.set_exception(Crashed(machine.name))

    def node(self, name: str) -> Node:
        """Return the running node for inspection. Use `on` for calls that wait."""
        node = self._machines[name].node
        assert node is not None, f"{name} is not running"
        return node

    def storage(self, name: str) -> Storage:
        return self._machines[name].storage

    def machine(self, name: str) -> Machine:
        return self._machines[name]

    async def on(self, name: str, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine as part of a node, so that it ends with the node, with Crashed."""
        machine = self._machines[name]
        life = machine.life
        assert life is not None, f"{name} is not running"
        answer: asyncio.Future[T] = self.loop.create_future()
        machine.waiting[answer] = None

        def done(task: asyncio.Task[T]) -> None:
            machine.waiting.pop(answer, None)
            if answer.done():
                return
            if task.cancelled():
                answer.cancel()
            elif (error := task.exception()) is not None:
                answer.set_exception(Crashed(name) if isinstance(error, Died) else error)
            else:
                answer.set_result(task.result())

        task = self.loop.create_task(work, context=life.context.copy())
        task.add_done_callback(done, context=Context())
        try:
            return await answer
        finally:
            if not task.done() and not life.is_dead:
                task.cancel()

    # --- the network ---

    def cut(self, one: str, other: str) -> None:
        """Reset connections between two hosts and reject new ones."""
        self._break(one, other, Fault.CUT)

    def black_hole(self, one: str, other: str, *, is_one_way: bool = False) -> None:
        """Drop packets between two hosts without an error; one way: only from `one` to `other`."""
        self.internet.break_link(one, other, Fault.BLACK_HOLE)
        if not is_one_way:
            self.internet.break_link(other, one, Fault.BLACK_HOLE)

    def _break(self, one: str, other: str, fault: Fault) -> None:
        self.internet.break_link(one, other, fault)
        self.internet.break_link(other, one, fault)

    def isolate(self, name: str, *, is_quiet: bool = False) -> None:
        """Cut a node off from all other nodes; with `is_quiet`, by black holes."""
        fault = Fault.BLACK_HOLE if is_quiet else Fault.CUT
        for other in self._machines:
            if other != name:
                self._break(name, other, fault)

    def heal(self, *names: str) -> None:
        """Heal all links, or those between the two named hosts."""
        for (source, target), link in list(self.internet.links.items()):
            if not names or (source in names and target in names):
                link.calm()
                self.internet.heal(source, target)

    def uri(self, name: str) -> str:
        """Return the URI of a node, with credentials."""
        return f"{USER}:{PASSWORD}@{name}:{PORT}"

    async def client(self, name: str, *, user: str | None = USER, password: str | None = PASSWORD) -> Connection:
        """Return a network connection to a node; it is closed at the end of the run."""
        connection = await Connection.open(self._outside, Uri(name, PORT, user, password))
        self._clients.append(connection)
        return connection

    @property
    def outside(self) -> Outside:
        """The Outside of the scenario itself."""
        return self._outside

    # --- time ---

    @property
    def now(self) -> float:
        return self.loop.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def until(self, condition: Callable[[], object], *, seconds: float = 60.0, what: str = "") -> None:
        """Wait until the condition holds, and return at that moment; raise TimeoutError if it never does."""
        found: asyncio.Future[None] = self.loop.create_future()
        self._conditions[found] = condition
        self.loop.call_soon(lambda: None)  # evaluate the condition before time advances
        try:
            async with asyncio.timeout(seconds):
                await found
        except TimeoutError as error:
            raise TimeoutError(f"not within {seconds:g} s: {what or _source(condition)}") from error
        finally:
            self._conditions.pop(found, None)

    def _look_at_conditions(self) -> None:
        if not self._conditions:  # the usual case
            return
        for found, condition in list(self._conditions.items()):
            if found.done():
                continue
            try:
                holds = bool(condition())
            except Exception as error:
                found.set_exception(error)
            else:
                if holds:
                    found.set_result(None)


def _source(condition: Callable[[], object]) -> str:
    try:
        return inspect.getsource(condition).strip()
    except (OSError, TypeError):
        return repr(condition)


def simulated(
    seeds: Iterable[int] = (0,),
) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Turn a scenario into a test: `async def test_…(sim, …)` runs once per seed (see SEEDS_MAX), in virtual time."""

    def decorate(scenario: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        @functools.wraps(scenario)
        def test(seed: int, **arguments: Any) -> None:
            async def run(sim: Simulation) -> None:
                await scenario(sim, **arguments)

            name = "/".join([scenario.__name__, *(f"{key}={value}" for key, value in arguments.items()), str(seed)])
            Simulation(name).run(run)

        signature = inspect.signature(scenario)
        others = list(signature.parameters.values())[1:]
        seed = inspect.Parameter("seed", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        del test.__wrapped__
        test.__signature__ = signature.replace(parameters=[seed, *others])  # type: ignore[attr-defined]
        return pytest.mark.parametrize("seed", list(seeds)[:SEEDS_MAX])(test)

    return decorate
