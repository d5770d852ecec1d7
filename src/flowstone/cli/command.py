"""Commands whose options are given once, or are lists: a repeated option never replaces an earlier value silently.

The rule holds for every command of an `App`. Options that take several values are declared as lists; giving any other
option twice is an error that names it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import typer
from typer.core import TyperCommand


class Command(TyperCommand):
    """A command that rejects a repeated option, unless the option is a list."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:
            # Parsed values keep only the last occurrence of an option; `given` has an item for each.
            _, _, given = self.make_parser(ctx).parse_args(args=list(args))
            for parameter, count in Counter(given).items():
                if count > 1 and is_given_once(parameter):
                    ctx.fail(f"option {_name(parameter)} is given {count} times; give it once")
        return super().parse_args(ctx, args)


def is_given_once(parameter: Any) -> bool:
    """Return True for an option that has one value. Eager options such as `--help` end the command and do not count."""
    if parameter.param_type_name != "option" or parameter.is_eager:
        return False
    return not (parameter.multiple or parameter.count)


def _name(parameter: Any) -> str:
    """Return all spellings of the option, separated by slashes."""
    return "/".join([*parameter.opts, *parameter.secondary_opts])


class App(typer.Typer):
    """A set of commands, each of them a `Command` unless it names another class."""

    def command(self, name: str | None = None, **settings: Any) -> Any:
        return super().command(name, **{"cls": Command, **settings})
