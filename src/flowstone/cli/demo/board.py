"""The status board of `flowstone demo`: nodes, shop and lake, live on a terminal, and as lines elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from flowstone.cli.demo.cluster import Cluster, DemoStatus
    from flowstone.cli.demo.sales import Shop

REFRESH_SECONDS: Final = 0.5
LINE_SECONDS: Final = 3.0
SIGNS: Final = {"leader": "[bold green]● leads[/]", "follower": "○ follows", "candidate": "[yellow]◌ campaigns[/]"}
DEAD: Final = "[bold red]✕ dead[/]"
STARTING: Final = "[yellow]◌ starts[/]"
SHORT: Final = {"leader": "leads", "follower": "follows", "candidate": "campaigns"}


class Board:
    """Shows the state of nodes, shop and lake. It queries the nodes; the caller passes all other data."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._statuses: dict[str, DemoStatus | None] = {}
        self._running: frozenset[str] = frozenset()
        self._rate = 0.0
        self._last: tuple[float, int] | None = None
        self._said_at = 0.0

    def state(self, name: str) -> str | None:
        """Return the last known election state of a node; None if it is dead, or starting and has not answered yet."""
        status = self._statuses.get(name)
        return status.state if status is not None else None

    @asynccontextmanager
    async def shown(
        self, cluster: Cluster, shop: Shop, progress: Callable[[], Mapping[str, Any]]
    ) -> AsyncIterator[None]:
        """Show the board until the block ends."""
        task = asyncio.ensure_future(self._show(cluster, shop, progress))
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _show(self, cluster: Cluster, shop: Shop, progress: Callable[[], Mapping[str, Any]]) -> None:
        from rich.live import Live

        self._said_at = time.monotonic()
        with Live(console=self._console, auto_refresh=False, transient=True) as live:
            while True:
                self._note(cluster, await cluster.statuses())
                self._count(shop.answered)
                if self._console.is_terminal:
                    live.update(self._table(shop.answered, progress()), refresh=True)
                elif time.monotonic() - self._said_at >= LINE_SECONDS:
                    self._said_at = time.monotonic()
                    self._console.print(f"  {self._line(shop.answered, progress())}", highlight=False)
                await asyncio.sleep(REFRESH_SECONDS)

    def _note(self, cluster: Cluster, statuses: Mapping[str, DemoStatus | None]) -> None:
        """Record the statuses. A running node that is too busy to answer in time keeps its last one."""
        self._running = frozenset(member.name for member in cluster.members if member.is_running)
        for name, status in statuses.items():
            self._statuses[name] = status or (self._statuses.get(name) if name in self._running else None)

    def _state(self, name: str, words: Mapping[str, str], *, dead: str, starting: str) -> str:
        state = self.state(name)
        if state is None:
            return starting if name in self._running else dead
        return words.get(state, state)

    def _count(self, answered: int) -> None:
        now = time.monotonic()
        if self._last is not None and now > self._last[0]:
            rate = (answered - self._last[1]) / (now - self._last[0])
            self._rate = 0.6 * self._rate + 0.4 * rate if self._rate else rate
        self._last = (now, answered)

    def _nodes(self) -> list[str]:
        return [f"[bold]{name}[/] {self._state(name, SIGNS, dead=DEAD, starting=STARTING)}" for name in self._statuses]

    def _table(self, answered: int, progress: Mapping[str, Any]) -> Table:
        from rich.table import Table

        table = Table.grid(padding=(0, 3))
        table.add_row("  [cyan]nodes[/]", "   ".join(self._nodes()))
        table.add_row("  [cyan]shop[/]", f"{answered:,} changes acknowledged, {self._rate:,.0f}/s")
        table.add_row("  [cyan]lake[/]", lake_text(progress))
        for name, each in progress.get("tables", {}).items():
            table.add_row("", f"{name:<10} {each['changes']:>11,} rows merged, version {each['version'] or 0:,}")
        return table

    def _line(self, answered: int, progress: Mapping[str, Any]) -> str:
        nodes = "  ".join(
            f"{name} {self._state(name, SHORT, dead='dead', starting='starts')}" for name in self._statuses
        )
        return f"{nodes} │ {answered:,} acknowledged │ {lake_text(progress)}"


def lake_text(progress: Mapping[str, Any]) -> str:
    """Return the state of the lake as text, from the mirror's last progress event; empty `progress`: none came yet."""
    if not progress:
        return "Spark is starting"
    lag = progress.get("lag")
    lag_text = "" if lag is None else f", lag {lag:.1f} s"
    return f"{progress['changes']:,} in the lake{lag_text}"
