"""Writes the reference pages that are generated from the code: commands, errors, the public names of the library.

`make docs` runs it before it builds the site; tests/docs/test_reference.py fails if a page differs from its output.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from textwrap import indent
from typing import Any, Final

import flowstone
from flowstone.errors import FlowstoneError

DIRECTORY: Final = Path(__file__).resolve().parent.parent / "docs" / "reference"
MADE: Final = "<!-- made by scripts/reference.py from the code itself: change that -->"


# --- commands --------------------------------------------------------------------------------------------


COMMANDS: Final = f"""# Commands

{MADE}

Every command has `--help`, with an example. Output goes to stdout, messages to stderr, each error in one line.
The option `--json` of some commands is for programs: [JSON output](json-output.md) describes what they may rely on.
`flowstone completion` prints completion scripts for shells.

## Exit codes

| code | meaning |
|---|---|
| 0 | success; the reader of a pipe closed it; a long-running command was stopped by a signal |
| 1 | the log is damaged or unreadable, or a server rejected a row or is unreachable; `serve` cannot start |
| 2 | the command line or a path on it is wrong: an option, a missing file, a file of another kind, an unknown space |
| 3 | success with `--force`, but something was skipped |
| 130 | interrupted (0 for a long-running command) |

Exceptions are listed with the commands: `verify` exits with 1 if the sides differ and with 2 if they could not be
compared; the tools of `limestone` have the codes of `tglogutil`.
"""


def commands() -> str:
    from typer.main import get_command

    from flowstone.cli import app
    from flowstone.cli.node import serve

    serve.declare_options(every=True)
    root: Any = get_command(app)
    return "\n".join([COMMANDS, *_group(root, "flowstone")])


def _group(group: Any, name: str) -> Iterator[str]:
    for command_name, command in group.commands.items():
        full = f"{name} {command_name}"
        if hasattr(command, "commands"):
            yield from _group(command, full)
        elif not command.hidden:
            yield _command(command, full)


def _command(command: Any, name: str) -> str:
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    options = [
        parameter for parameter in command.params if parameter.param_type_name == "option" and not parameter.hidden
    ]
    usage = " ".join([name, "[OPTIONS]", *(_argument(argument) for argument in arguments)])
    parts = [f"## `{name}`", _paragraphs(command.help or ""), f"Usage: `{usage}`"]
    parts += [_paragraphs(command.epilog)] if command.epilog else []
    rows = [(_argument(argument), argument) for argument in arguments if argument.help]
    rows += [(_flags(option), option) for option in options if option.name != "help"]
    if rows:
        table = [f"| {_code(shown)} | {_cell(_help(parameter))} |" for shown, parameter in rows]
        parts.append("\n".join(["| option | what |", "|---|---|", *table]))
    return "\n\n".join(parts) + "\n"


def _argument(argument: Any) -> str:
    shown: str = argument.make_metavar(None) if _takes_context(argument) else argument.make_metavar()
    return shown


def _takes_context(parameter: Any) -> bool:
    return bool(inspect.signature(parameter.make_metavar).parameters)


def _flags(option: Any) -> str:
    names = ", ".join(option.opts)
    if option.is_flag:
        return names + "".join(f" / {name}" for name in option.secondary_opts)
    metavar = option.make_metavar(None) if _takes_context(option) else option.make_metavar()
    return f"{names} {metavar}"


def _help(parameter: Any) -> str:
    text = " ".join((parameter.help or "").split())
    default = parameter.default
    if getattr(default, "value", None) is not None:
        default = default.value
    shown = default not in (None, False, True, ...) and default != () and not callable(default)
    if shown and "efault" not in text and getattr(parameter, "show_default", False):
        text += f" Default: {default}."
    environment = getattr(parameter, "envvar", None)
    if environment and str(environment) not in text:
        text += f" Environment: {environment}."
    return text


def _paragraphs(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in re.split(r"\n\s*\n", inspect.cleandoc(text)) if part.strip())


def _cell(text: str) -> str:
    return text.replace("|", "&#124;")


def _code(text: str) -> str:
    """In a cell of a table: renderers differ about a bar between backticks."""
    return f"<code>{_cell(escape(text, quote=False))}</code>" if "|" in text else f"`{text}`"


# --- errors --------------------------------------------------------------------------------------------------


ERRORS: Final = f"""# Errors

{MADE}

Every error that Flowstone raises on purpose is a `flowstone.FlowstoneError`: `message` says what happened and to what,
`hint`, where there is one, what to do about it; as text it is both. Commands print it as one line on stderr.

Errors with a Tarantool code are `flowstone.TarantoolError`, with `code`, `name` and, from a server, `stack`. There is a
class for each code, in `flowstone.iproto.errors`:

```python
from flowstone import TarantoolError
from flowstone.iproto.errors import TupleFound

print(issubclass(TupleFound, TarantoolError), TupleFound.code, TupleFound.name)
```

```text
True 3 ER_TUPLE_FOUND
```
"""


def errors() -> str:
    from flowstone.iproto.error_codes import HINTS
    from flowstone.iproto.errors import CLASSES

    own = [f"| `{name}` | {_cell(text)} |" for name, text in sorted(_own_errors())]
    known = [
        f"| {code} | `{kind.name}` | `{kind.__name__}` | {_cell(HINTS.get(code, ''))} |"
        for code, kind in CLASSES.items()
    ]
    return "\n".join(
        [
            ERRORS,
            "## Flowstone's own\n",
            "| class | what |",
            "|---|---|",
            *own,
            "\n## By Tarantool's code\n",
            "What to do is said where an error means something to an operator; its text is the server's own.\n",
            "| code | name | class | what to do |",
            "|---|---|---|---|",
            *known,
            "",
        ]
    )


ROOMS: Final = (
    *("archive", "box", "client", "columns", "history", "iproto", "limestone"),
    *("node", "outside", "replica", "replication", "text", "xlog"),
)
"""The packages that need no extra."""


def _own_errors() -> Iterator[tuple[str, str]]:
    """Yield the error classes that a user of the library can meet, with their first sentences."""
    from importlib import import_module
    from pkgutil import walk_packages

    from flowstone.iproto.errors import TarantoolError

    for name in ROOMS:
        room = import_module(f"flowstone.{name}")
        for module in walk_packages(room.__path__, f"{room.__name__}."):
            for error, kind in vars(import_module(module.name)).items():
                if not isinstance(kind, type) or kind.__module__ != module.name or error.startswith("_"):
                    continue
                if issubclass(kind, FlowstoneError) and not issubclass(kind, TarantoolError):
                    yield f"{module.name}.{error}", _first_sentence(kind)
    for kind in (FlowstoneError, *FlowstoneError.__subclasses__()):
        if kind.__module__ == "flowstone.errors":
            yield f"flowstone.errors.{kind.__name__}", _first_sentence(kind)


def _first_sentence(thing: object) -> str:
    text = " ".join((inspect.getdoc(thing) or "").split())
    return re.split(r"(?<=\.) (?=[A-Z`])", text)[0].rstrip(":")


# --- the library --------------------------------------------------------------------------------------------


LIBRARY: Final = f"""# The library

{MADE}

The names of `import flowstone`, `flowstone.limestone` and `flowstone.spark`. Everything else may move. What is awaited
is marked `async`.
"""


def library() -> str:
    parts = [LIBRARY]
    described: set[object] = set()
    for name in sorted(flowstone.__all__, key=str.lower):
        thing = getattr(flowstone, name)
        if inspect.ismodule(thing):
            parts.append(f"## `flowstone.{name}`\n\n{_text(thing)}\n")
            inner_names = sorted(thing.__all__, key=str.lower)
            parts += [
                _entry(f"flowstone.{name}.{each}", getattr(thing, each), "###", described) for each in inner_names
            ]
        elif callable(thing):
            parts.append(_entry(f"flowstone.{name}", thing, "##", described))
    return "\n".join(parts)


def _entry(name: str, thing: Callable[..., Any], heading: str, described: set[object]) -> str:
    return _class(name, thing, heading, described) if isinstance(thing, type) else _function(name, thing, heading)


def _class(name: str, kind: type, heading: str, described: set[object]) -> str:
    """Return the description of a class, a table of its members, and the members that need more than a sentence.

    `described` collects those members: an inherited one is described at the first class that has it.
    """
    members = list(_members(kind))
    rows = [f"| {_code(shown)} | {_cell(_first_sentence(member))} |" for _, shown, member in members]
    head = f"{heading} `{name}`\n\n{_text(kind)}\n"
    table = "\n| | |\n|---|---|\n" + "\n".join(rows) + "\n" if rows else ""
    short = name.rpartition(".")[2]
    details = ""
    for member_name, _, member in members:
        if member not in described and _SECTION.search(inspect.getdoc(member) or ""):
            described.add(member)
            details += f"\n{heading}# `{short}.{member_name}`\n\n{_text(member)}\n"
    return head + table + details


def _members(kind: type) -> Iterator[tuple[str, str, object]]:
    """Yield the name of each public member, its signature, and the object that has its docstring."""
    for member in dict.fromkeys(
        name for base in kind.__mro__ if base.__module__.startswith("flowstone") for name in vars(base)
    ):
        value = inspect.getattr_static(kind, member)
        if member.startswith("_") or isinstance(value, type):
            continue
        if isinstance(value, property):
            yield member, member, value.fget
        elif isinstance(value, staticmethod | classmethod):
            yield member, f"{member}{_signature(value.__func__)}", value.__func__
        elif inspect.isfunction(value):
            marker = "async " if inspect.iscoroutinefunction(value) else ""
            yield member, f"{marker}{member}{_signature(value)}", value
        elif inspect.ismemberdescriptor(value):
            yield member, member, None


def _function(name: str, function: Callable[..., Any], heading: str) -> str:
    return f"{heading} `{name}`\n\n`{name.rpartition('.')[2]}{_signature(function)}`\n\n{_text(function)}\n"


def _signature(function: Callable[..., Any]) -> str:
    """Without annotations: they are in the code, for editors and type checkers."""
    signature = inspect.signature(function)
    plain = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for name, parameter in signature.parameters.items()
        if name not in {"self", "cls"}
    ]
    return str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))


_SECTION: Final = re.compile(r"^(Args|Returns|Raises|Example):$", re.MULTILINE)
_ENTRY: Final = re.compile(r"^([\w.]+): ", re.MULTILINE)


def _text(thing: object) -> str:
    """Return a docstring as Markdown: its sections become lists, and the example a block that no test runs."""
    text, *sections = _SECTION.split(inspect.getdoc(thing) or "")
    parts = [text.strip()]
    for title, content in zip(sections[::2], sections[1::2], strict=True):
        content = inspect.cleandoc(content)
        if title == "Example":
            parts.append("Example:\n\n" + indent(content, "    "))
        elif title == "Returns":
            parts.append(f"Returns: {content}")
        else:
            parts.append(("Arguments" if title == "Args" else title) + ":\n\n" + _ENTRY.sub(r"- `\1`: ", content))
    return "\n\n".join(parts)


PAGES: Final[dict[str, Callable[[], str]]] = {"commands.md": commands, "errors.md": errors, "library.md": library}


def main(directory: Path = DIRECTORY) -> None:
    for name, page in PAGES.items():
        (directory / name).write_text(page())


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
