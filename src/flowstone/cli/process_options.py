"""Options of `flowstone serve` that are the process's, not the node's: what it serves by HTTP beside IPROTO.

A table like that of `node/configuration.py`, and read in the same way: from the command line, the environment, the
file. A node in another program has none of these; it has `web.WebServer`.
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
    return None if is_token(value) else f"expected {TOKEN_LENGTH_MIN} letters of ASCII or more"


_TABLE: Final = (
    Option(
        name="http_listen",
        types=("string", "number"),
        default=None,
        check=_no_address,
        is_dynamic=False,
        allowed="ports end at 65535",
        help="Where metrics for Prometheus and health are served by HTTP: HOST:PORT, a port of loopback, or port 0 for"
        " any; default: nowhere.",
        is_text=True,
    ),
    Option(
        name="http_token",
        types=("string",),
        default=None,
        check=_no_token,
        is_dynamic=False,
        help="What has to be shown to be served by HTTP, as Authorization: Bearer, or once as ?token=. Elsewhere than"
        " on loopback one is made, and said, if none is given. Better in FLOWSTONE_HTTP_TOKEN: command lines can be"
        " seen by others.",
        is_secret=True,
    ),
    Option(
        name="http_hosts",
        types=("string",),
        default=None,
        check=None,
        is_dynamic=False,
        help="Names, separated by commas, by which browsers may ask for what is on loopback, such as that of a proxy.",
    ),
    Option(
        name="dashboard",
        types=("boolean",),
        default=False,
        check=None,
        is_dynamic=False,
        help="Serve a page about the replica set at http_listen, too.",
    ),
)

PROCESS_OPTIONS: Final[Mapping[str, Option]] = {option.name: option for option in _TABLE}


@dataclass(frozen=True, slots=True)
class ProcessOptions:
    """The values, checked."""

    http_listen: str | None = None
    http_token: str | None = field(default=None, repr=False)
    http_hosts: tuple[str, ...] = ()
    dashboard: bool = False

    @classmethod
    def of(cls, chosen: Mapping[str, Any]) -> Self:
        """Those among `chosen`; TarantoolError 59 where they do not go together."""
        given = {name: value for name, value in chosen.items() if name in PROCESS_OPTIONS and value is not None}
        hosts = tuple(part.strip() for part in given.pop("http_hosts", "").split(",") if part.strip())
        made = cls(**given, http_hosts=hosts)
        for name in ("http_token", "http_hosts", "dashboard"):
            if getattr(made, name) and made.http_listen is None:
                raise incorrect("http_listen", f"needed with {name}")
        return made

    def differences(self, other: ProcessOptions) -> list[str]:
        """Names of the options that `other` has other values for."""
        return [name for name in PROCESS_OPTIONS if getattr(self, name) != getattr(other, name)]
