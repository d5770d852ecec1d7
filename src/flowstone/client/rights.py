"""Hints for operators: the right that a user lacks on a server, and how to grant it.

No hint grants a right to guest: everyone who can connect is guest, without a password. If no user was given, the hint
says how to give one.
"""

from __future__ import annotations

import re
from typing import Final

GUEST: Final = "guest"
NO_USER: Final = "no user was given: write user:password@… in the URI"
NO_USER_OF_COMMAND: Final = (
    "no user was given: set TT_CLI_USERNAME and TT_CLI_PASSWORD, or write user:password@… in the URI"
)
ANY_LUA: Final = "which lets the user run any Lua on the server"

_PLAIN_NAME: Final = re.compile(r"[\w.:]+")
"""Names that a Lua string and a shell read as they are."""


def is_guest(user: str | None) -> bool:
    """Return True if `user`, from a URI, is guest or missing."""
    return user is None or user == GUEST


def to_replicate(user: str | None) -> str:
    """Return the hint for a user that may not replicate from a server."""
    if is_guest(user):
        return NO_USER_OF_COMMAND
    return f"{user!r} lacks the role replication: box.schema.user.grant('{user}', 'replication')"


def to_watch(user: str | None) -> str:
    """Return the hint for a user that may not query a server. The right to call `box.info` is enough."""
    if is_guest(user):
        return NO_USER_OF_COMMAND
    return (
        "on its master: box.schema.func.create('box.info', {if_not_exists = true}) and "
        f"box.schema.user.grant('{user}', 'execute', 'function', 'box.info'); or, to see options and kept logs as "
        f"well: box.schema.user.grant('{user}', 'execute', 'universe'), {ANY_LUA}"
    )


def to_run_transactions(user: str | None) -> str:
    """Return the hint for a user that may not run transactions, which need Lua before 2.10."""
    if is_guest(user):
        return NO_USER_OF_COMMAND
    return f"let the user run transactions: box.schema.user.grant('{user}', 'execute', 'universe'), {ANY_LUA}"


def to_call(user: str | None, function: str) -> str | None:
    """Return the hint for a user that may not call `function`; None if a name cannot be part of the hint."""
    if is_guest(user):
        return NO_USER_OF_COMMAND
    if not _PLAIN_NAME.fullmatch(function) or not _PLAIN_NAME.fullmatch(user or ""):
        return None
    return (
        f"on its master: box.schema.func.create('{function}', {{if_not_exists = true}}) and "
        f"box.schema.user.grant('{user}', 'execute', 'function', '{function}')"
    )
