"""What a node's log said last of those whom it follows, where that is a complaint.

`box.info` has upstreams of members only, and nothing while the node starts. But why it cannot join, or log in, and that
somebody belongs to another replica set, is in the log at once, with the field `peer` where it is about one alone
(docs/reference/configuration.md). No password is in any line of it.
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
    """`is_final`: the node has given this peer up, until somebody does something about it."""

    address: str
    text: str
    is_final: bool = False


class PeerComplaints(logging.Handler):
    """Listens to the log from `start` to `stop`. `addresses` tells those whom the node is to follow now."""

    def __init__(self, addresses: Callable[[], Iterable[str]]) -> None:
        super().__init__(logging.INFO)
        self._addresses = addresses
        self._last: dict[str, Complaint] = {}

    def start(self) -> None:
        LOGGER.addHandler(self)

    def stop(self) -> None:
        LOGGER.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Whatever is said of a peer and is no complaint takes back the one before: it has come further."""
        peer, level, text = getattr(record, "peer", None), record.levelno, record.getMessage()
        for address in self._addresses():
            if peer == address and level < logging.WARNING:
                self._last.pop(address, None)
            elif peer == address:
                self._note(address, text, is_final=level >= logging.ERROR)
            elif peer is None and level >= logging.WARNING and not self._is_final(address) and _names(text, address):
                self._note(address, text)  # of several peers, or of the node: less than what is said of this one alone

    def _note(self, address: str, text: str, *, is_final: bool = False) -> None:
        self._last[address] = Complaint(address=address, text=printable(text), is_final=is_final)

    def _is_final(self, address: str) -> bool:
        return address in self._last and self._last[address].is_final

    def now(self) -> tuple[Complaint, ...]:
        """In the order of `replication`."""
        return tuple(self._last[address] for address in self._addresses() if address in self._last)


def _names(text: str, address: str) -> bool:
    """As a word: db1:330 is not named by db1:3301."""
    return re.search(rf"(?<![\w.-]){re.escape(address)}(?!\w)", text) is not None
