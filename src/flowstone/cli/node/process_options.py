"""The options of `flowstone serve` that belong to the process, not to the node: HTTP, and a module of procedures.

The table has the form of the one in `node/configuration.py`, and the options are read the same way: from the command
line, the environment and the file. A node in another program does not have these options and uses `web.WebServer`
instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

from flowstone.iproto.uri import UriError
from flowstone.node.option import Option, incorrect
from flowstone.web.address import TOKEN_LENGTH_MIN, http_address, is_token


def _no_address(value: str) -> str | None:
    try:
        http_address(value)
    except UriError:
        return "expected HOST:PORT"
    return None


def _no_token(value: str) -> str | None:
    return None if is_token(value) else f"expected at least {TOKEN_LENGTH_MIN} printable ASCII characters"


_TABLE: Final = (
    Option(
        name="http_listen",
        types=("string", "number"),
        default=None,
        check=_no_address,
        is_dynamic=False,
        allowed="ports end at 65535",
        help="Address for Prometheus metrics and health over HTTP: HOST:PORT, or a port on loopback; port 0 picks a"
        " free one. Default: no HTTP.",
        is_text=True,
    ),
    Option(
        name="http_token",
        types=("string",),
        default=None,
        check=_no_token,
        is_dynamic=False,
        help="Token that HTTP clients must send, as Authorization: Bearer or once as ?token=. If it is not set, the"
        " node generates and prints one, except on loopback. Prefer FLOWSTONE_HTTP_TOKEN: command lines can be seen by"
        " others.",
        is_secret=True,
    ),
    Option(
        name="http_hosts",
        types=("string",),
        default=None,
        check=None,
        is_dynamic=False,
        help="Comma-separated host names, such as that of a proxy, by which browsers may reach a loopback address.",
    ),
    Option(
        name="dashboard",
        types=("boolean",),
        default=False,
        check=None,
        is_dynamic=False,
        help="Also serve the dashboard of the replica set at http_listen.",
    ),
    Option(
        name="procedures",
        types=("string",),
        default=None,
        check=None,
        is_dynamic=False,
        help="Python module whose functions clients can CALL: MODULE, or MODULE:NAME,NAME for some of them. The current"
        " directory is searched first.",
    ),
)

PROCESS_OPTIONS: Final[Mapping[str, Option]] = {option.name: option for option in _TABLE}


@dataclass(frozen=True, slots=True)
class ProcessOptions:
    """The checked values of the options."""

    http_listen: str | None = None
    http_token: str | None = field(default=None, repr=False)
    http_hosts: tuple[str, ...] = ()
    dashboard: bool = False
    procedures: str | None = None

    @classmethod
    def of(cls, chosen: Mapping[str, Any]) -> Self:
        """Return the process options among `chosen`; raise TarantoolError 59 if one requires `http_listen`, not set."""
        given = {name: value for name, value in chosen.items() if name in PROCESS_OPTIONS and value is not None}
        hosts = tuple(part.strip() for part in given.pop("http_hosts", "").split(",") if part.strip())
        made = cls(**given, http_hosts=hosts)
        for name in ("http_token", "http_hosts", "dashboard"):
            if getattr(made, name) and made.http_listen is None:
                raise incorrect("http_listen", f"needed with {name}")
        return made

    def differences(self, other: ProcessOptions) -> list[str]:
        """Return the names of the options that have other values in `other`."""
        return [name for name in PROCESS_OPTIONS if getattr(self, name) != getattr(other, name)]
