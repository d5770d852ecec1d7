"""The public names: each exists, is documented in one form, and returns only types that are public, too.

`typed_surface.py` has their types.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from dataclasses import fields
from types import ModuleType
from typing import Any

import pytest

import flowstone
import flowstone.limestone
import flowstone.spark
from flowstone.limestone.settings import Settings, SettingsFields
from flowstone.node.configuration import Configuration, NodeOptions

PACKAGES = (flowstone, flowstone.limestone, flowstone.spark)

INTERNAL = {
    "AsyncDatastore.abort",
    "AsyncDatastore.done",
    "AsyncDatastore.finish",
    "AsyncLogChannel.finish",
    "AsyncLogChannel.write_end",
    "Configuration.election",
    "Node.box",
    "Replica.admit_channel",
    "Replica.admit_control",
    "Replica.box",
    "StoreSnapshot.gathered",
}
"""Seams between our own modules on public classes. They may change without notice."""


def members(package: ModuleType) -> Iterator[tuple[str, Any]]:
    """Return functions, methods and properties of the public names of `package`."""
    for name in package.__all__:
        thing = getattr(package, name)
        if not isinstance(thing, type):
            yield name, thing
            continue
        for inner, member in inspect.getmembers(thing):
            if not inner.startswith("_") or inner in ("__enter__", "__aenter__"):
                yield f"{name}.{inner}", member.fget if isinstance(member, property) else member


def types_in(hint: Any) -> Iterator[type]:
    if isinstance(hint, list):
        for each in hint:
            yield from types_in(each)
        return
    if isinstance(hint, type):
        yield hint
    for part in (typing.get_origin(hint), *typing.get_args(hint)):
        if part is not None:
            yield from types_in(part)


def returned(member: Any) -> Iterator[type]:
    annotation = getattr(member, "__annotations__", {}).get("return")
    if annotation is None or (member.__module__ or "").split(".")[0] != "flowstone":
        return
    module = inspect.getmodule(member)
    try:
        hint = eval(annotation, vars(module)) if isinstance(annotation, str) else annotation
    except NameError:  # a name imported only for type checkers
        return
    yield from types_in(hint)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_every_public_name_can_be_imported(package: ModuleType) -> None:
    assert all(getattr(package, name) is not None for name in package.__all__)
    assert package.__all__ == sorted(package.__all__)


def test_public_calls_return_exported_types_only() -> None:
    public = {getattr(package, name) for package in PACKAGES for name in package.__all__ if name != "__version__"}
    hidden = {
        f"{name} returns {found.__module__}.{found.__qualname__}"
        for package in PACKAGES
        for name, member in members(package)
        if name not in INTERNAL
        for found in returned(member)
        if found.__module__.startswith("flowstone.") and found not in public
    }
    assert hidden == set()


def test_node_options_equal_those_of_the_configuration() -> None:
    assert list(NodeOptions.__annotations__) == [each.name for each in fields(Configuration) if each.name != "work_dir"]


def test_settings_fields_equal_those_of_the_settings() -> None:
    wanted = {each.name: each.type for each in fields(Settings) if each.name != "path"}
    assert {name: hint.__forward_arg__ for name, hint in SettingsFields.__annotations__.items()} == wanted


ORDER = ("Args", "Returns", "Raises", "Example")
EXAMPLES = (
    "Archive",
    "Datastore",
    "Mirror",
    "Node",
    "connect",
    "follow",
    "lake_tables",
    "read_log",
    "restore",
    "session",
    "verify",
)


def sections(thing: Any) -> dict[str, str]:
    """Return the sections of a docstring by title, in order."""
    _, *parts = re.split(r"^(\w+):$", inspect.getdoc(thing) or "", flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def documented() -> Iterator[tuple[str, Any]]:
    """Return our public classes, functions and methods."""
    for package in PACKAGES:
        things = [(name, getattr(package, name)) for name in package.__all__ if name != "__version__"]
        for name, thing in [*things, *members(package)]:
            if name not in INTERNAL and (getattr(thing, "__module__", None) or "").startswith("flowstone"):
                yield name, thing


def test_docstrings_have_the_same_form() -> None:
    wrong = []
    for name, thing in documented():
        found = sections(thing)
        if list(found) != [title for title in ORDER if title in found]:
            wrong.append(f"{name}: sections {list(found)}")
        if "Args" in found:
            named = re.findall(r"^    (\w+): ", found["Args"], flags=re.MULTILINE)
            taken = [each for each in inspect.signature(thing).parameters if each not in ("self", "cls")]
            if named != taken:
                wrong.append(f"{name}: describes {named}, takes {taken}")
    assert wrong == []


def test_main_calls_have_an_example() -> None:
    known = {name: thing for name, thing in documented() if name in EXAMPLES}
    assert set(known) == set(EXAMPLES)
    assert [name for name, thing in known.items() if "Example" not in sections(thing)] == []


def test_documented_errors_are_exported() -> None:
    public = {name for package in PACKAGES for name in package.__all__} | {"OSError", "IndexError", "KeyError"}
    hidden = {
        f"{name} raises {error}"
        for name, thing in documented()
        for error in re.findall(r"^    (\w+): ", sections(thing).get("Raises", ""), flags=re.MULTILINE)
        if error not in public
    }
    assert hidden == set()


def test_importing_the_package_does_not_import_pyspark() -> None:
    program = "import sys, flowstone.spark; flowstone.spark.Mirror; sys.exit('pyspark' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
