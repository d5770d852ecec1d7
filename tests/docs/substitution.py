"""Substitutes names of examples at run time: free ports for 3301, a page's own directory for /backup.

Examples use ports, hosts and paths of the reader. Each page gets its own; before a block runs,

- a port of `PORTS` becomes a free one, the same everywhere on the page; after a host of `HOSTS`, a port on loopback of
  that machine only: `db1:3301` and `db2:3301` are two servers, and neither is `127.0.0.1:3301`; the same holds for
  options of connectors, `{"host": "db1", "port": 3301}`;
- an absolute path below one of `PLACES` is that path below the page's directory;
- a node without an address listens on the substitute of 127.0.0.1:3301;
- `NOON` is the time at which a hidden block printed `noon`.

`shown` is the inverse, for output of commands.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from tests.real_tarantool import free_port

PORTS: Final = ("3301", "3302", "3303", "3304", "3305", "8080", "8081", "8082", "8083", "12346", "4000")
HOSTS: Final = ("db1", "db2", "db3", "db4", "replica", "10.0.0.2")
PLACES: Final = ("backup", "lake", "restored", "spool", "shared", "replica", "etc/flowstone", "huge", "var/lib")
NOON: Final = "2026-05-01T12:00:00Z"

_ADDRESS: Final = re.compile(
    rf"(?<![\w.])(?:(?P<host>{'|'.join(map(re.escape, HOSTS))})(?P<between>:|\", \"port\": ))?"
    rf"(?P<port>{'|'.join(PORTS)})(?![\w.])"
)
_PATH: Final = re.compile(rf"(?<![\w.:/}}*-])/(?=(?:{'|'.join(PLACES)})(?![\w.]))")


class Substitution:
    """The substitutions of one page, whose directory is `directory`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ports: dict[tuple[str, str], int] = {}

    def real(self, text: str) -> str:
        """Return an example in runnable form."""
        text = _PATH.sub(f"{self._directory}/", _ADDRESS.sub(self._address, text))
        noon = self._directory / ".run" / "noon"
        return text.replace(NOON, noon.read_text().strip()) if noon.exists() else text

    def shown(self, text: str) -> str:
        """Return its output as a reader would see it."""
        for (host, port), free in self._ports.items():
            if host:
                text = text.replace(f"127.0.0.1:{free}", f"{host}:{port}")
            text = re.sub(rf"(?<!\d){free}(?!\d)", port, text)
        return text.replace(f"{self._directory}/", "/")

    def _address(self, found: re.Match[str]) -> str:
        key = (found["host"] or "", found["port"])
        if key not in self._ports:
            self._ports[key] = free_port()
        return f"127.0.0.1{found['between']}{self._ports[key]}" if key[0] else str(self._ports[key])
