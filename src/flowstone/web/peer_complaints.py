"""The latest warnings and errors in a node's log about its configured upstreams.

`box.info` lists only upstreams that are members, and nothing while the node starts. The log, in contrast, says at once
why the node cannot join or log in, or that a peer belongs to another replica set. Messages about a single peer have the
field `peer` (docs/reference/configuration.md). No log message contains a password.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from flowstone.observation.report import printable

LOGGER: Final = logging.getLogger("flowstone.node")


class Complaint(msgspec.Struct, frozen=True, kw_only=True):
    """`is_final`: the node does not retry this peer; an operator has to act."""

    address: str
    text: str
    is_final: bool = False


class PeerComplaints(logging.Handler):
    """Listens to the log from `start` to `stop`. `addresses` returns the currently configured upstreams."""

    def __init__(self, addresses: Callable[[], Iterable[str]]) -> None:
        super().__init__(logging.INFO)
        self._addresses = addresses
        self._last: dict[str, Complaint] = {}

    def start(self) -> None:
        LOGGER.addHandler(self)

    def stop(self) -> None:
        LOGGER.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the last warning or error about a peer; a later message below WARNING clears it (the peer recovered)."""
        peer, level, text = getattr(record, "peer", None), record.levelno, record.getMessage()
        for address in self._addresses():
            if peer == address and level < logging.WARNING:
                self._last.pop(address, None)
            elif peer == address:
                self._note(address, text, is_final=level >= logging.ERROR)
            elif peer is None and level >= logging.WARNING and not self._is_final(address) and _names(text, address):
                # A complaint about several peers or the node does not replace a final one about this peer alone.
                self._note(address, text)

    def _note(self, address: str, text: str, *, is_final: bool = False) -> None:
        self._last[address] = Complaint(address=address, text=printable(text), is_final=is_final)

    def _is_final(self, address: str) -> bool:
        return address in self._last and self._last[address].is_final

    def now(self) -> tuple[Complaint, ...]:
        """Return the current complaints, in the order of `replication`."""
        return tuple(self._last[address] for address in self._addresses() if address in self._last)


def _names(text: str, address: str) -> bool:
    """Return True if the text contains the address as a whole word: db1:3301 does not name db1:330."""
    return re.search(rf"(?<![\w.-]){re.escape(address)}(?!\w)", text) is not None
