"""The story of `flowstone demo`: Spark mirrors a shop into a lake, the leader is killed, the lake is verified.

Nodes, mirror and verification are processes that run the public commands. All processes end with the demo, even if it
is interrupted.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from flowstone.cli.demo.board import Board
from flowstone.cli.demo.cluster import Cluster, DemoMember, NotReady
from flowstone.cli.demo.replication import LOGIN
from flowstone.cli.demo.sales import Shop

if TYPE_CHECKING:
    from rich.console import Console

START_SECONDS: Final = 120.0
STOP_SECONDS: Final = 30.0
POLL_SECONDS: Final = 0.1
LOGIN_VARIABLES: Final = {"TT_CLI_USERNAME": LOGIN[0], "TT_CLI_PASSWORD": LOGIN[1]}


@dataclass(frozen=True)
class Scale:
    """Size of the demo: `seconds` is the duration of an act, `rate` the number of changes per second."""

    seconds: float = 15.0
    customers: int = 20_000
    rate: int = 2_000


@dataclass
class DemoMirror:
    """A `flowstone mirror` process, and the last events that it printed."""

    process: asyncio.subprocess.Process
    progress: dict[str, Any] = field(default_factory=dict)
    snapshot_rows: int | None = None
    stopped: dict[str, Any] | None = None

    @classmethod
    async def start(cls, members: list[DemoMember], lake: Path, log: Path) -> DemoMirror:
        uris = ",".join(member.address for member in members)
        with log.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                *_command("mirror", "--json", uris, str(lake)),
                env=os.environ | LOGIN_VARIABLES,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=file,
                start_new_session=True,
            )
        return cls(process)

    async def listen(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            event = json.loads(line)
            match event["event"]:
                case "progress":
                    self.progress = event
                case "snapshot" if event.get("rows") is not None:
                    self.snapshot_rows = event["rows"]
                case "stopped":
                    self.stopped = event

    def has(self, vclock: Mapping[int, int]) -> bool:
        """Return True if the lake has all rows up to `vclock`."""
        positions = self.progress.get("positions", {}).values()
        reached = [{int(number): lsn for number, lsn in place.items()} for place in positions]
        return bool(reached) and all(place.get(number, 0) >= lsn for place in reached for number, lsn in vclock.items())

    async def stop(self) -> None:
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.process.wait(), STOP_SECONDS)
        except TimeoutError:
            self.process.kill()
            await self.process.wait()


class Story:
    """The acts of the demo, in order. Files and logs are in `directory`."""

    def __init__(self, directory: Path, console: Console, scale: Scale) -> None:
        self._directory = directory
        self._console = console
        self._scale = scale
        self._cluster = Cluster(directory)
        self._shop = Shop(self._cluster.leader, scale.customers, scale.rate)
        self._lake = directory / "lake"
        self._mirror: DemoMirror | None = None
        self._board = Board(console)
        self._began = time.monotonic()

    async def tell(self) -> int:
        """Run all acts and return the exit code of the verification."""
        async with AsyncExitStack() as stack:
            await self._nodes(stack)
            await self._opening(stack)
            mirror = await self._mirroring(stack)
            await self._act(self._scale.seconds)
            killed = await self._killing()
            await self._act(self._scale.seconds)
            await self._returning(killed)
            await self._act(self._scale.seconds / 2)
            await self._closing(mirror)
            code = await self._verifying()
            self._querying()
        self._say(f"\nFinished after {time.monotonic() - self._began:.0f} s. All processes are stopped.")
        return code

    # --- the acts ---

    async def _nodes(self, stack: AsyncExitStack) -> None:
        self._title("Three nodes elect a leader")
        stack.callback(self._cluster.stop)
        self._cluster.start()
        for member in self._cluster.members:
            self._shell(f"flowstone serve --election-mode candidate --listen {member.address} … &    # {member.name}")
        leader = await self._cluster.leader()
        await self._cluster.until_equal()
        status = await leader.status()
        self._say(f"[bold]{leader.name}[/] leads in term {status.term if status else '?'}, the others follow.")

    async def _opening(self, stack: AsyncExitStack) -> None:
        self._title("A shop opens")
        await self._shop.open()
        await self._running(stack, self._shop.sell())
        self._say(
            f"{self._scale.customers:,} customers. Each sale adds an order, reduces the stock and raises the customer's"
            " total: REPLACE, UPDATE and UPSERT. One order in ten is cancelled: DELETE.\n"
            "All changes are synchronous: acknowledged when two of the three nodes have them."
        )

    async def _mirroring(self, stack: AsyncExitStack) -> DemoMirror:
        self._title("Spark mirrors the shop into Delta tables")
        leader = await self._cluster.leader()
        # Followers first: rows that the mirror reads from a follower are not lost with the leader.
        members = [each for each in self._cluster.members if each is not leader] + [leader]
        self._shell(f"flowstone mirror {','.join(each.address for each in members)} lake &")
        mirror = await DemoMirror.start(members, self._lake, self._directory / "mirror.log")
        stack.push_async_callback(mirror.stop)
        await self._running(stack, mirror.listen())
        self._mirror = mirror
        await self._until("the mirror to load a snapshot", lambda: bool(mirror.progress.get("positions")), mirror)
        self._say("The snapshot is in the lake. The mirror now follows the log, batch by batch.")
        return mirror

    async def _killing(self) -> DemoMember:
        leader = await self._cluster.leader()
        assert leader.process is not None
        self._title("The leader is killed")
        self._shell(f"kill -9 {leader.process.pid}    # {leader.name}")
        answered, began = self._shop.answered, time.monotonic()
        leader.kill()
        successor = await self._cluster.leader()
        status = await successor.status()
        self._say(
            f"[bold]{successor.name}[/] was elected {time.monotonic() - began:.1f} s later, in term"
            f" {status.term if status else '?'}. It has all {answered:,} acknowledged changes."
        )
        return leader

    async def _returning(self, killed: DemoMember) -> None:
        self._title("The killed node comes back")
        self._shell(f"flowstone serve --listen {killed.address} … &    # {killed.name}")
        killed.start()
        await self._until(f"{killed.name} to follow", lambda: self._board.state(killed.name) == "follower", None)
        self._say(f"[bold]{killed.name}[/] follows. It has rolled back the changes that no other node had.")

    async def _closing(self, mirror: DemoMirror) -> None:
        self._title("The shop closes")
        self._shop.is_open = False
        place = await self._cluster.until_equal()
        await self._until("the lake to catch up", lambda: mirror.has(place), mirror)
        await mirror.stop()
        versions = sum(table["version"] or 0 for table in mirror.progress["tables"].values())
        self._say(
            f"{self._shop.answered:,} changes were acknowledged. Folded by key, {mirror.progress['changes']:,} rows"
            f" were merged, in {versions:,} versions of {len(mirror.progress['tables'])} tables."
        )

    async def _verifying(self) -> int:
        self._title("The lake is compared with the cluster, row by row")
        leader = await self._cluster.leader()
        self._shell(f"flowstone verify {leader.address} lake")
        process = await asyncio.create_subprocess_exec(
            *_command("verify", leader.address, str(self._lake)),
            env=os.environ | LOGIN_VARIABLES,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output, _ = await process.communicate()
        except asyncio.CancelledError:
            with suppress(ProcessLookupError):
                process.kill()
            raise
        self._console.out(output.decode(errors="replace").rstrip(), highlight=False)
        code = process.returncode
        assert code is not None
        self._say("[bold green]Equal.[/]" if code == 0 else f"[bold red]verify failed with exit code {code}.[/]")
        return code

    def _querying(self) -> None:
        """Compare the lake with the shop's own records, and show a query of the tables."""
        from deltalake import DeltaTable

        orders = DeltaTable(self._lake / "orders").to_pyarrow_table(columns=["id", "customer", "price"])
        customers = DeltaTable(self._lake / "customers").to_pyarrow_table(columns=["id", "city"])
        there = set(orders["id"].to_pylist())
        lost = len(self._shop.orders - there)
        extra = len(there - self._shop.orders - self._shop.uncertain)
        self._say(
            f"The shop has a record of {len(self._shop.orders):,} orders;"
            f" {lost} of them are missing in the lake, {extra} are unexpected there."
        )
        joined = orders.join(customers, keys="customer", right_keys="id")
        best = (
            joined.group_by("city")
            .aggregate([("price", "sum"), ("price", "count")])
            .sort_by([("price_sum", "descending")])
        )
        self._title("The tables can be queried like any other")
        self._shell("SELECT city, sum(price), count(*) FROM orders JOIN customers ON … GROUP BY city")
        for row in best.to_pylist():
            self._say(f"  {row['city']:<10}{row['price_sum']:>14,}{row['price_count']:>10,}")

    # --- output ---

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False)

    def _title(self, text: str) -> None:
        seconds = time.monotonic() - self._began
        self._console.print(f"\n[bold cyan]{text}[/] [dim]({seconds:.0f} s)[/]\n", highlight=False)

    def _shell(self, command: str) -> None:
        self._console.print(f"  $ {command}", style="dim", markup=False, highlight=False)

    async def _act(self, seconds: float) -> None:
        """Show the board for `seconds`."""
        ends = time.monotonic() + seconds
        await self._until("the end of the act", lambda: time.monotonic() >= ends, self._mirror)

    async def _until(self, what: str, condition: Callable[[], bool], mirror: DemoMirror | None) -> None:
        """Show the board until `condition` holds; raise NotReady if the mirror exits, or on a timeout."""
        deadline = time.monotonic() + START_SECONDS + self._scale.seconds
        async with self._board.shown(self._cluster, self._shop, lambda: self._mirror.progress if self._mirror else {}):
            while not condition():
                if mirror is not None and mirror.process.returncode is not None:
                    said = (self._directory / "mirror.log").read_text(errors="replace").splitlines()
                    raise NotReady(f"mirror has exited: {' '.join(said[-3:])}")
                if time.monotonic() > deadline:
                    hint = f"see the logs in {self._directory}, which --keep keeps"
                    raise NotReady(f"timeout while waiting for {what}", hint=hint)
                await asyncio.sleep(POLL_SECONDS)

    async def _running(self, stack: AsyncExitStack, work: Any) -> None:
        await stack.enter_async_context(_task(work))


@asynccontextmanager
async def _task(work: Any) -> AsyncIterator[None]:
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "flowstone.cli", *arguments]


async def show_lake(directory: Path, console: Console, scale: Scale) -> int:
    """Run the story and return its exit code; SIGTERM ends it as Ctrl-C does."""
    task = asyncio.current_task()
    assert task is not None
    terminated = asyncio.Event()

    def terminate() -> None:
        terminated.set()
        task.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate)
    try:
        return await Story(directory, console, scale).tell()
    except asyncio.CancelledError as error:
        # Anything else that cancels the task, such as a caller's timeout, must not end the caller's process.
        if terminated.is_set():
            raise KeyboardInterrupt from error
        raise
