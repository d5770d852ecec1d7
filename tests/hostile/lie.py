"""The type of a lie: one row of a table."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from tests.hostile.liar import Talk

BOTH: Final = ("2.6", "2.11")


@dataclass(frozen=True)
class Lie:
    """`tell` sends the lie on a new connection; `reason` is a pattern of the victim's error.

    A lie without a reason may go unnoticed: it changes nothing, and the connection continues.
    """

    name: str
    tell: Callable[[Talk], Awaitable[None]]
    reason: str = ""
    dialects: tuple[str, ...] = BOTH
    is_known: bool = True
    """The victim knows its peer, so `info()` can show the error; otherwise the log does."""

    victim_leads: bool = False
    """Lies about synchronous transactions are sent to the owner of their queue."""
    ends_tenure: bool = False
    """It contains a newer term, which ends the leadership of any leader until its next promotion."""

    def __str__(self) -> str:
        return self.name.replace(" ", "-")


def after_subscribe(*packets: bytes, **reply: object) -> Callable[[Talk], Awaitable[None]]:
    """Return a lie in these packets of a followed master; `reply` has fields of its answer to SUBSCRIBE."""

    async def tell(talk: Talk) -> None:
        await talk.subscribed(**reply)
        await talk.say(*packets)

    return tell
