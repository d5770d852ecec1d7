"""`flowstone completion`: print completion scripts for bash, zsh and fish.

A script contains all names, so that pressing Tab does not start Python. The names come from the declared commands;
none is listed a second time here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from string import Template
from typing import Annotated, Any, Final, Literal

import typer

from flowstone.cli.console import OK

Shell = Literal["bash", "zsh", "fish"]

EXAMPLE = (
    "Example: `flowstone completion bash > ~/.local/share/bash-completion/completions/flowstone`\n\n"
    "zsh: `flowstone completion zsh > ~/.zfunc/_flowstone`, where `~/.zfunc` is in `fpath`\n\n"
    "fish: `flowstone completion fish > ~/.config/fish/completions/flowstone.fish`"
)


def completion(
    context: typer.Context,
    shell: Annotated[Shell, typer.Argument(help="Shell to print the script for.", show_default=False)],
) -> int:
    """Print a script that lets a shell complete commands, options and their values.

    Print it again after an upgrade: the script contains the options of this version.
    """
    print(SCRIPTS[shell](list(_places(context.find_root().command))), end="")
    return OK


# --- names to complete ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Named:
    """A command, an argument's value, or an option under one of its names."""

    name: str
    help: str
    takes_value: bool = False
    values: tuple[str, ...] = ()
    """Possible values of an option; empty if they cannot be listed."""


@dataclass(frozen=True, slots=True)
class CommandPlace:
    """A command. `path` has the words that lead to it, separated by spaces; empty for `flowstone` itself."""

    path: str
    commands: tuple[Named, ...]
    """Subcommands, or the possible values of the first argument."""

    options: tuple[Named, ...]


def _places(command: Any, path: str = "") -> Iterator[CommandPlace]:
    inner = getattr(command, "commands", {})
    commands = tuple(Named(name, each.get_short_help_str(100)) for name, each in inner.items())
    words = commands or tuple(Named(value, "") for value in _first_argument(command))
    yield CommandPlace(path, words, (*_options(command), Named("--help", "Show this message and exit.")))
    for name, each in inner.items():
        yield from _places(each, f"{path} {name}".lstrip())


def _options(command: Any) -> Iterator[Named]:
    for option in command.params:
        if option.param_type_name == "option" and not option.hidden:
            values = () if option.is_flag else _known_values(command, option)
            for name in (*option.opts, *option.secondary_opts):
                yield Named(name, _line(option.help or ""), not option.is_flag, values)


def _first_argument(command: Any) -> tuple[str, ...]:
    """Return the possible values of the first argument; empty if they cannot be listed."""
    arguments = (each for each in command.params if each.param_type_name == "argument")
    return next((_known_values(command, each) for each in arguments), ())


def _known_values(command: Any, parameter: Any) -> tuple[str, ...]:
    """Return the values that the parameter lists itself; a parameter for files lists none."""
    context = typer.Context(command)
    return tuple(item.value for item in parameter.shell_complete(context, "") if item.type == "plain")


def _line(text: str) -> str:
    return " ".join(text.split())


# --- bash ----------------------------------------------------------------------------------------------------

BASH: Final = Template("""\
# bash completion for flowstone
_flowstone() {
    local current=$${COMP_WORDS[COMP_CWORD]} previous=$${COMP_WORDS[COMP_CWORD - 1]} place= words= word
    # bash splits --option=value into three words.
    if [ "$$current" = = ]; then
        current=
    elif [ "$$previous" = = ]; then
        previous=$${COMP_WORDS[COMP_CWORD - 2]}
    fi
    for word in "$${COMP_WORDS[@]:1:COMP_CWORD - 1}"; do
        case "$$place $$word" in
            $paths) place="$${place:+$$place }$$word" ;;
        esac
    done
    case "$$place $$previous" in
$values
    esac
    case "$$place" in
$words
    esac
    if [[ $$current == -* ]]; then
        COMPREPLY=($$(compgen -W "$$words" -- "$$current"))
        return
    fi
    case "$$place" in
$commands
    esac
}
complete -o default -F _flowstone flowstone
""")


def _bash(places: list[CommandPlace]) -> str:
    def reply(names: Iterable[str]) -> str:
        return f'COMPREPLY=($(compgen -W "{" ".join(names)}" -- "$current"))'

    return BASH.substitute(
        paths=_paths(places),
        values="\n".join(
            f"        {pattern}) {f'{reply(values)}; ' if values else ''}return ;;"
            for pattern, values in _values(places)
        ),
        words="\n".join(f'        "{p.path}") words="{" ".join(o.name for o in p.options)}" ;;' for p in places),
        commands="\n".join(f'        "{p.path}") {reply(c.name for c in p.commands)} ;;' for p in places if p.commands),
    )


def _paths(places: list[CommandPlace]) -> str:
    """Return patterns for `case` in bash and zsh: the path of a command, and the word that leads to its subcommand."""
    return "|".join(f'"{before} {word}"' for before, _, word in (p.path.rpartition(" ") for p in places) if word)


def _values(places: list[CommandPlace]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield patterns of options that take a value, with the possible values.

    The values of most options cannot be listed: these options share one pattern per command, with no values.
    """
    for place in places:
        options = [(f'"{place.path} {option.name}"', option.values) for option in place.options if option.takes_value]
        yield from ((pattern, values) for pattern, values in options if values)
        if any_value := [pattern for pattern, values in options if not values]:
            yield "|".join(any_value), ()


# --- zsh -----------------------------------------------------------------------------------------------------

ZSH: Final = Template("""\
#compdef flowstone
_flowstone() {
    local place= word previous=$${words[CURRENT-1]}
    local -a commands options
    for word in "$${(@)words[2,CURRENT-1]}"; do
        case "$$place $$word" in
            $paths) place="$${place:+$$place }$$word" ;;
        esac
    done
    if [[ $$PREFIX == --*=* ]]; then
        previous=$${PREFIX%%=*}
        compset -P '*='
    fi
    case "$$place $$previous" in
$values
    esac
    case "$$place" in
$words
    esac
    if [[ $$PREFIX == -* ]]; then
        _describe -o option options
    elif (( $$#commands )); then
        _describe command commands
    else
        _files
    fi
}
if [ "$$funcstack[1]" = _flowstone ]; then _flowstone "$$@"; else compdef _flowstone flowstone; fi
""")


def _zsh(places: list[CommandPlace]) -> str:
    def listed(names: tuple[Named, ...]) -> str:
        return " ".join(_quoted(f"{each.name}:{each.help}") for each in names)

    def offer(values: tuple[str, ...]) -> str:
        return f"compadd -- {' '.join(values)}" if values else "_files"

    return ZSH.substitute(
        paths=_paths(places),
        values="\n".join(f"        {pattern}) {offer(values)}; return ;;" for pattern, values in _values(places)),
        words="\n".join(
            f'        "{place.path}") commands=({listed(place.commands)}) options=({listed(place.options)}) ;;'
            for place in places
        ),
    )


def _quoted(text: str) -> str:
    """Return `text` quoted as one word for zsh."""
    return "'" + text.replace("'", "'\\''") + "'"


# --- fish ----------------------------------------------------------------------------------------------------

FISH: Final = Template("""\
# fish completion for flowstone
function __flowstone_at
    set -l place
    for word in (commandline -opc)[2..]
        switch "$$place $$word"
            case $paths
                set place (string trim -- "$$place $$word")
        end
    end
    test "$$place" = "$$argv"
end
$lines
""")


def _fish(places: list[CommandPlace]) -> str:
    return FISH.substitute(
        paths=_paths(places).replace("|", " "),
        lines="\n".join(line for place in places for line in _fish_lines(place)),
    )


def _fish_lines(place: CommandPlace) -> Iterator[str]:
    at = f"complete -c flowstone -n '__flowstone_at {place.path}'"
    for command in place.commands:
        yield f"{at} -f -a {command.name} -d {_fish_quoted(command.help)}"
    for option in place.options:
        dashes = "-l" if option.name.startswith("--") else "-s"
        value = f" -x -a '{' '.join(option.values)}'" if option.values else " -r" if option.takes_value else ""
        yield f"{at} {dashes} {option.name.lstrip('-')}{value} -d {_fish_quoted(option.help)}"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SCRIPTS: Final[dict[Shell, Callable[[list[CommandPlace]], str]]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
