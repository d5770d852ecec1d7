"""One option of a node: its name, types and default, and how its values are parsed, checked and shown.

The table of all options is in `configuration.py`, the checks of single values are in `option_checks.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flowstone.iproto import errors
from flowstone.iproto.uri import parse_uri
from flowstone.node.option_checks import Check
from flowstone.replication.membership.bootstrap_leader import leader_text


@dataclass(frozen=True, slots=True)
class Option:
    """One option. `types` are the Lua names of the allowed types; `is_dynamic`: it can change while the node runs."""

    name: str
    types: tuple[str, ...]
    default: Any
    check: Check | None
    is_dynamic: bool
    help: str
    is_integral: bool = False
    """True if a number must be an integer."""
    is_text: bool = False
    """True if a number is stored as text."""
    is_secret: bool = False
    """True if the value is never shown, not even by `box.cfg`."""
    allowed: str | None = None
    """Allowed values, if Tarantool's error message does not name them."""

    @property
    def variable(self) -> str:
        """The name of the environment variable."""
        return f"FLOWSTONE_{self.name.upper()}"

    @property
    def dashed(self) -> str:
        """The name of the command-line option."""
        return f"--{self.name.replace('_', '-')}"

    def parse(self, text: str) -> Any:
        """Parse `text` from the command line or environment. An empty string is None, the default."""
        if text == "":
            return None
        if self.types == ("boolean",):
            return {"true": True, "false": False}.get(text.lower(), text)
        if "table" in self.types:
            return [part.strip() for part in text.split(",")]
        if "number" in self.types:
            return _number(text)
        return text

    def shown(self, value: Any) -> Any:
        """Return the value without passwords, for display."""
        if "table" in self.types:
            return [parse_uri(uri).shown for uri in value]
        return leader_text(value) if self.name == "bootstrap_leader" and value is not None else value

    def accept(self, value: Any) -> Any:
        """Check `value` and return it as the configuration stores it; raise error 59 if it is not allowed."""
        if value is None or value == "":
            return self.default
        if not any(_is_of(value, kind) for kind in self.types):
            wanted = ", ".join(self.types)
            raise self.refuse(
                f"should be of type {wanted}" if len(self.types) == 1 else f"should be one of types {wanted}"
            )
        if "table" in self.types:
            value = tuple(value) if isinstance(value, list | tuple) else tuple(self.parse(str(value)))
        elif self.is_text and not isinstance(value, str):
            value = str(value)
        if self.is_integral and not isinstance(value, str):
            if value != int(value):
                raise self.refuse("should be a whole number")
            value = int(value)
        problem = self.check(value) if self.check is not None else None
        if problem is not None:
            raise self.refuse(problem)
        return value

    def refuse(self, problem: str) -> errors.TarantoolError:
        return incorrect(self.name, problem, hint=self.allowed)


def incorrect(name: str, problem: str, *, hint: str | None = None) -> errors.TarantoolError:
    """Return error 59 about option `name`."""
    return errors.Cfg(f"Incorrect value for option '{name}': {problem}", hint=hint)


def _number(text: str) -> Any:
    """Return the number in `text`, or else `text` itself, which `accept` rejects because of its type."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text


def _is_of(value: object, kind: str) -> bool:
    if kind == "number":
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")
    if kind == "table":
        return isinstance(value, list | tuple) and all(isinstance(part, str) for part in value)
    return isinstance(value, {"string": str, "boolean": bool}[kind])
