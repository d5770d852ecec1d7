"""The figures of the demo: a line and a table about nodes, shop and lake."""

from __future__ import annotations

import asyncio
import io
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from flowstone.cli.demo.board import Board, lake_text
from flowstone.cli.demo.cluster import DemoStatus

PROGRESS = {
    "changes": 12_345,
    "changes_per_second": 2_000.4,
    "lag": 1.25,
    "tables": {"orders": {"changes": 12_345, "version": 7}},
}


class Nodes:
    members = (SimpleNamespace(name="a", is_running=True), SimpleNamespace(name="b", is_running=False))

    async def statuses(self) -> dict[str, DemoStatus | None]:
        return {"a": DemoStatus("leader", 2, {1: 5}, True), "b": None}


class Sales:
    answered = 54_321


async def drawn(console: Console, until: str) -> str:
    board = Board(console)
    nodes: Any = Nodes()
    sales: Any = Sales()
    assert isinstance(console.file, io.StringIO)
    async with board.shown(nodes, sales, lambda: PROGRESS), asyncio.timeout(20):
        while until not in console.file.getvalue():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert (board.state("a"), board.state("b")) == ("leader", None)
    return console.file.getvalue()


async def test_a_terminal_has_a_table() -> None:
    text = await drawn(Console(file=io.StringIO(), force_terminal=True, color_system=None, width=100), "version 7")
    for part in ("● leads", "✕ dead", "54,321 changes acknowledged", "12,345 in the lake, lag 1.2 s"):
        assert part in text


async def test_output_to_a_file_has_occasional_lines() -> None:
    text = await drawn(Console(file=io.StringIO(), width=200), "lag 1.2 s\n")
    assert "a leads  b dead │ 54,321 acknowledged │ 12,345 in the lake" in text


class Busy:
    """Return samples: node `b` starts, answers once, and is then too busy to answer until it is killed."""

    def __init__(self) -> None:
        self.b = SimpleNamespace(name="b", is_running=True)
        self.members = (self.b,)
        self.answers: list[DemoStatus | None] = [None, DemoStatus("follower", 2, {1: 5}, False), None]

    async def statuses(self) -> dict[str, DemoStatus | None]:
        return {"b": self.answers.pop(0)}


async def test_running_process_that_does_not_answer_is_not_dead() -> None:
    board = Board(Console(file=io.StringIO()))
    nodes: Any = Busy()
    said = []
    for _ in range(3):
        board._note(nodes, await nodes.statuses())
        said.append(board._line(0, {}).split(" │ ")[0])
    assert said == ["b starts", "b follows", "b follows"]
    nodes.b.is_running = False
    board._note(nodes, {"b": None})
    assert board._line(0, {}).startswith("b dead")


def test_spark_is_shown_as_starting_before_the_first_report_of_the_mirror() -> None:
    assert lake_text({}) == "Spark is starting"
