"""Where a node answers differently from the real 2.6.0 on purpose, and why. Nothing else may differ."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """`ours` is how the node's first reply begins."""

    reason: str
    ours: str


SAME_ERROR = "an unknown user and a wrong password give the same error, so that names cannot be probed"
NO_LUA = "there is no Lua"
NO_SQL = "there is no SQL"
UNKNOWN_USER = 'error 47 "Incorrect password supplied for user'

EXCEPTIONS: dict[str, Difference] = {
    "AUTH: of an unknown user": Difference(SAME_ERROR, UNKNOWN_USER),
    "AUTH: as a role": Difference(SAME_ERROR, UNKNOWN_USER),
    "AUTH: with an empty name": Difference(SAME_ERROR, UNKNOWN_USER),
    "CALL: EVAL": Difference(NO_LUA, "error 5 "),
    "CALL: EXECUTE": Difference(NO_SQL, "error 5 "),
    "CALL: PREPARE": Difference(NO_SQL, "error 5 "),
}
