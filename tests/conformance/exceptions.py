"""Deliberate differences between the replies of a node and of the real 2.6.0, with reasons. No other difference is
allowed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """`ours` is the beginning of the node's first reply."""

    reason: str
    ours: str


SAME_ERROR = "an unknown user and a wrong password give the same error, so that names cannot be probed"
UNKNOWN_USER = 'error 47 "Incorrect password supplied for user'
NO_LUA = "there is no Lua"
NO_SQL = "there is no SQL"
NO_UPPER_BITS = "the real server drops the upper half of numbers above 32 bits, and then means another number"
BY_VALUE = "keys are found by their value, however it is written; the real server's answer depends on the bytes"

EXCEPTIONS: dict[str, Difference] = {
    "AUTH: of an unknown user": Difference(SAME_ERROR, UNKNOWN_USER),
    "AUTH: as a role": Difference(SAME_ERROR, UNKNOWN_USER),
    "AUTH: with an empty name": Difference(SAME_ERROR, UNKNOWN_USER),
    "CALL: EXECUTE": Difference(NO_SQL, "error 5 'Flowstone does not support SQL"),
    "CALL: PREPARE": Difference(NO_SQL, "error 5 'Flowstone does not support SQL"),
    "create a secondary index: with a function that does not exist": Difference(
        NO_LUA, "error 5 'Flowstone does not support functional indexes'"
    ),
    "offset and limit: limit above 32 bits": Difference(NO_UPPER_BITS, "OK [(1,), (2,), (3,), (5,), (8,), (13,)]"),
    "offset and limit: offset above 32 bits": Difference(NO_UPPER_BITS, "OK []"),
    "iterator: above 32 bits": Difference(NO_UPPER_BITS, "error 1 'Illegal parameters, Invalid iterator type'"),
    "body: with a space id above 32 bits": Difference(NO_UPPER_BITS, "error 36 \"Space '4294967808' does not exist\""),
    "unsigned key: in a long head": Difference(BY_VALUE, "OK [(5,)]"),
    "unsigned key: with a signed head": Difference(BY_VALUE, "OK [(5,)]"),
    "mixed hash key: a decimal by an equal double": Difference(BY_VALUE, "OK [(Decimal('7.50'), 0)]"),
    "double key: not a number inserted": Difference(
        "NaN has its place below all numbers; to the real 2.6 it equals whatever it is compared with", "OK [(nan,)]"
    ),
    "system space: set the cluster's UUID": Difference(
        "a replica set keeps its UUID for life; the real server takes any", "error 65 "
    ),
    "framing: a length that is text": Difference(
        "the text names the byte that is no length", "error 20 'Invalid MsgPack - packet begins with byte 0xa5"
    ),
}
