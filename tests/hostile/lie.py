"""What a lie is: one row of a table."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from tests.hostile.liar import Talk

BOTH: Final = ("2.6", "2.11")


@dataclass(frozen=True)
class Lie:
    """`tell` says it, on a connection that has just been opened; `reason` is a pattern of what its victim must say.

    A lie without a reason is one that nobody need notice: it changes nothing, and the connection goes on.
    """

    name: str
    tell: Callable[[Talk], Awaitable[None]]
    reason: str = ""
    dialects: tuple[str, ...] = BOTH
    is_known: bool = True
    """The victim has heard who it talks to, so that `info()` can show what it says; else its log does."""

    victim_leads: bool = False
    """Lies about synchronous transactions are told to whoever owns their queue."""
    ends_tenure: bool = False
    """It names a newer term, and whoever says that ends the tenure of a leader, until it is promoted again."""

    def __str__(self) -> str:
        return self.name.replace(" ", "-")


def after_subscribe(*packets: bytes, **reply: object) -> Callable[[Talk], Awaitable[None]]:
    """A lie in these packets, told by a master that is followed; `reply` are fields of its answer to SUBSCRIBE."""

    async def tell(talk: Talk) -> None:
        await talk.subscribed(**reply)
        await talk.say(*packets)

    return tell
