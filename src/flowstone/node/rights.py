"""Which right a user lacks whom a server refuses, and how to give it to him: advice for operators.

Never to give anything to guests: whoever reaches the port is one, without a password. Who named no user is told to.
"""

from __future__ import annotations

from typing import Final

GUEST: Final = "guest"
NO_USER: Final = "no user was given: write user:password@… in the URI"
NO_USER_OF_COMMAND: Final = (
    "no user was given: set TT_CLI_USERNAME and TT_CLI_PASSWORD, or write user:password@… in the URI"
)
ANY_LUA: Final = "which lets the user run any Lua there"


def is_guest(user: str | None) -> bool:
    """Whether nobody has logged in; `user` is that of a URI."""
    return user is None or user == GUEST


def to_replicate(user: str | None) -> str:
    """For who may not follow a server."""
    if is_guest(user):
        return NO_USER_OF_COMMAND
    return f"{user!r} lacks the role replication: box.schema.user.grant('{user}', 'replication')"


def to_watch(user: str | None) -> str:
    """For who may not ask a server how it is. The right to call `box.info` is enough, and as little as there is."""
    if is_guest(user):
        return NO_USER_OF_COMMAND
    return (
        "on its master: box.schema.func.create('box.info', {if_not_exists = true}) and "
        f"box.schema.user.grant('{user}', 'execute', 'function', 'box.info'); or, to be shown options and kept logs, "
        f"too: box.schema.user.grant('{user}', 'execute', 'universe'), {ANY_LUA}"
    )


def to_run_transactions(user: str | None) -> str:
    """For who may not have a transaction run, which before 2.10 is Lua."""
    if is_guest(user):
        return NO_USER_OF_COMMAND
    return f"let the user run transactions: box.schema.user.grant('{user}', 'execute', 'universe'), {ANY_LUA}"
