"""One exception class per Tarantool error code, made from the table in `error_codes.py`.

Each class is an attribute of this module, named as in Tarantool without `ER_` (`ER_TUPLE_FOUND` is `TupleFound`), for
use in `except TupleFound`. `error_of` turns an error received from a server into its exception, with a hint for the
operator. Errors that this process raises itself have no hint from the table, whose hints are about another server.
"""

from __future__ import annotations

from flowstone.errors import FlowstoneError
from flowstone.iproto.error_codes import HINT_OF_EXPELLED, HINT_OF_ORPHANS, HINTS, NAMES
from flowstone.iproto.extensions import ErrorStack


class TarantoolError(FlowstoneError):
    """An error with a Tarantool code, received from a server or to be sent to a client.

    `message` is the plain text sent over the wire; `stack` holds the causes that the server reported.
    Errors with a code newer than the table are instances of this class itself.
    """

    code: int = 0
    name: str = "ER_UNKNOWN"

    def __init__(self, message: str, *, hint: str | None = None, stack: ErrorStack | None = None) -> None:
        super().__init__(message, hint=hint)
        self.stack = stack

    def __str__(self) -> str:
        text = f"{self.message} ({self.name}, {self.code})"
        return f"{text}; {self.hint}" if self.hint else text


def _class_of(code: int, name: str) -> type[TarantoolError]:
    camel = "".join(word.capitalize() for word in name.split("_"))
    members = {"code": code, "name": f"ER_{name}", "__module__": __name__, "__doc__": HINTS.get(code)}
    return type(camel, (TarantoolError,), members)


CLASSES: dict[int, type[TarantoolError]] = {code: _class_of(code, name) for code, name in NAMES.items()}
"""All classes by their code."""

_UNSUPPORTED, _READONLY, _XLOG_GAP = 5, 7, 219
_ORPHAN = "it is an orphan"
_EXPELLED = "was expelled from its replica set"
_BY_NAME = {kind.__name__: kind for kind in CLASSES.values()}


def __getattr__(name: str) -> type[TarantoolError]:
    try:
        return _BY_NAME[name]
    except KeyError:
        raise AttributeError(f"Tarantool has no error {name}") from None


def error_of(code: int, message: str, stack: ErrorStack | None = None) -> TarantoolError:
    """Return the exception for error `code` received from another server, with the table's hint.

    A code that is not in the table gives a plain TarantoolError.
    """
    kind = CLASSES.get(code)
    message = message or "an error without a message"
    if kind is not None:
        return kind(message, hint=_hint(code, message, stack), stack=stack)
    error = TarantoolError(message, stack=stack)
    error.code, error.name = code, f"ER_{code}"
    return error


def _hint(code: int, message: str, stack: ErrorStack | None) -> str | None:
    """Return the hint for an error: by its code or, if the code is ambiguous, by its message or class."""
    if code == _READONLY and _ORPHAN in message:
        return HINT_OF_ORPHANS
    if code == _UNSUPPORTED and _EXPELLED in message:
        return HINT_OF_EXPELLED
    # 2.6 reports a gap in its logs with the code of a Lua error; only the class identifies it.
    is_gap = stack is not None and bool(stack.errors) and stack.errors[0].type == "XlogGapError"
    return HINTS.get(_XLOG_GAP if is_gap else code)
