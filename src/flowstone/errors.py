"""The root of every error Flowstone raises on purpose.

An error says what happened, to what, and (in `hint`) what to do about it. Errors that carry a
Tarantool code live in `iproto/errors.py`; every other package derives its own errors from these classes.
"""

from __future__ import annotations

from typing import Any


class FlowstoneError(Exception):
    """Base of our errors. `hint`, if not None, tells an operator what to do."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross process boundaries, and constructors of subclasses have arbitrary parameters.
        return _restore, (type(self), self.args, self.__dict__)


def _restore(kind: type[FlowstoneError], args: tuple[Any, ...], state: dict[str, Any]) -> FlowstoneError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


class LocalProtocolError(FlowstoneError):
    """We tried to send or write something that the protocol forbids: a bug or a wrong argument here."""


class RemoteProtocolError(FlowstoneError):
    """A peer or a file holds bytes that break the protocol. It closes a connection, never the process."""


class CannotListen(FlowstoneError):
    """The address is in use, or not an address of this machine, or a certificate cannot be read."""


class OutcomeUnknown(FlowstoneError):
    """The change may be committed or not, and whoever sent it will not learn which: read the data to find out."""
