"""Where a replica is reached, or listens: `tcp://host:port` as the original writes it, `tls://host:port` encrypted.

Pure text. An IPv6 address stands in brackets. Never resolves a name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from flowstone.errors import FlowstoneError

FORMS: Final = "write it as tcp://host:port or tls://host:port, an IPv6 address in brackets"

_FORM: Final = re.compile(r"(tcp|tls)://(?:\[([0-9a-fA-F:.]+(?:%\w+)?)\]|([^:/\s\[\]@?#]+)):(\d{1,5})", re.ASCII)


class EndpointError(FlowstoneError):
    """The text is no endpoint."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A host and a port. `is_encrypted`: nothing is said there before a TLS handshake."""

    host: str
    port: int
    is_encrypted: bool = False

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """What `text` names; EndpointError where it names none. Port 0 is one for listening."""
        found = _FORM.fullmatch(text.strip())
        if found is None or int(found[4]) > 65535:
            raise EndpointError(f"{text.strip()[:100]!r} is no endpoint", hint=FORMS)
        return cls(found[2] or found[3], int(found[4]), found[1] == "tls")

    @property
    def address(self) -> str:
        """Host and port alone, for messages and logs."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{'tls' if self.is_encrypted else 'tcp'}://{self.address}"
