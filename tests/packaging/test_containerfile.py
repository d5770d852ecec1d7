"""The Containerfile: stages, user, health check and commands. No engine runs here: it is read, not built."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from flowstone.cli import extras
from tests.packaging.commands import options_of
from tests.places import ROOT

FILE: Final = ROOT / "packaging" / "Containerfile"
INSTRUCTIONS: Final = frozenset(
    "FROM ARG RUN COPY ENV USER VOLUME WORKDIR EXPOSE STOPSIGNAL HEALTHCHECK ENTRYPOINT CMD".split()
)


def instructions() -> list[tuple[str, str]]:
    """Return instruction and arguments, without comments and continuations."""
    lines = [line for line in FILE.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def stages() -> dict[str, list[tuple[str, str]]]:
    found: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for instruction, rest in instructions():
        if instruction == "FROM":
            base, _, name = rest.partition(" AS ")
            found[name] = [("FROM", base)]
        elif name:
            found[name].append((instruction, rest))
    return found


def last(stage: str, instruction: str) -> str:
    return [rest for name, rest in stages()[stage] if name == instruction][-1]


def form(text: str) -> Any:
    """Return the value of an exec form."""
    return json.loads(text)


def test_every_line_is_an_instruction() -> None:
    assert {name for name, _ in instructions()} <= INSTRUCTIONS


def test_compiler_stays_in_its_stage_and_nobody_is_root() -> None:
    found = stages()
    assert list(found) == ["build", "node", "mirror"]
    assert found["mirror"][0] == ("FROM", "node")
    assert found["node"][0] == found["build"][0] == ("FROM", "${PYTHON}")
    for stage in ("node", "mirror"):
        assert "gcc" not in str(found[stage])
        user, _, group = last(stage, "USER").partition(":")
        assert int(user) == int(group) >= 1000
        # The last instruction that changes the user is not followed by one that needs root.
        names = [name for name, _ in found[stage]]
        after = names[len(names) - 1 - names[::-1].index("USER") :]
        assert not {"RUN", "COPY"} & set(after)


def test_sources_of_the_build_exist() -> None:
    for name, rest in stages()["build"]:
        if name == "COPY":
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source


def test_images_install_extras_of_the_package() -> None:
    for stage, wanted in (("node", {"web", "arrow"}), ("mirror", {"web", "spark"})):
        (found,) = (match for _, rest in stages()[stage] if (match := re.search(r"\)\[([\w,]+)\]", rest)))
        assert set(found[1].split(",")) == wanted <= extras.MODULES.keys()


def test_health_check_asks_the_port_that_the_command_serves() -> None:
    command, *arguments = form(last("node", "CMD"))
    options = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert options.keys() <= options_of(command)
    health = last("node", "HEALTHCHECK")
    _, _, program = form(health[health.index("[") :])
    compile(program, "healthcheck", "exec")
    port = options["--http-listen"].rpartition(":")[2]
    assert f"http://127.0.0.1:{port}/health/live" in program
    assert last("node", "EXPOSE").split() == [options["--listen"].rpartition(":")[2], port]
    assert form(last("node", "ENTRYPOINT")) == ["flowstone"]
