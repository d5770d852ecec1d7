"""Addresses of replicas: `tcp://host:port` as in the original, or `tls://host:port` with encryption.

Pure text. An IPv6 address is written in brackets. Never resolves a name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from flowstone.errors import FlowstoneError

FORMS: Final = "use tcp://host:port or tls://host:port, with an IPv6 address in brackets"

_FORM: Final = re.compile(r"(tcp|tls)://(?:\[([0-9a-fA-F:.]+(?:%\w+)?)\]|([^:/\s\[\]@?#]+)):(\d{1,5})", re.ASCII)


class EndpointError(FlowstoneError):
    """The text is not an endpoint."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A host and a port. `is_encrypted`: a TLS handshake comes first."""

    host: str
    port: int
    is_encrypted: bool = False

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Parse an endpoint such as `tcp://db2:12345`. Port 0 is valid for listening.

        Raises:
            EndpointError: The text is not an endpoint.
        """
        found = _FORM.fullmatch(text.strip())
        if found is None or int(found[4]) > 65535:
            raise EndpointError(f"invalid endpoint {text.strip()[:100]!r}", hint=FORMS)
        return cls(found[2] or found[3], int(found[4]), found[1] == "tls")

    @property
    def address(self) -> str:
        """Host and port, for messages and logs."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{'tls' if self.is_encrypted else 'tcp'}://{self.address}"
