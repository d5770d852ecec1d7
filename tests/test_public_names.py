"""The public names: each is there, typed to the end, and returns nothing that a program could not name."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterator
from dataclasses import fields
from types import ModuleType
from typing import TYPE_CHECKING, Any, assert_type

import pytest

import flowstone
import flowstone.limestone
import flowstone.spark
from flowstone import limestone
from flowstone.limestone.settings import Settings, SettingsFields
from flowstone.node.configuration import Configuration, NodeOptions
from flowstone.node.node import Node

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
    """Functions, methods and properties of the public names of `package`."""
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
    except NameError:  # a name that is imported for type checkers only
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


def test_node_options_are_those_of_the_configuration() -> None:
    assert list(NodeOptions.__annotations__) == [each.name for each in fields(Configuration) if each.name != "work_dir"]


def test_settings_fields_are_those_of_the_settings() -> None:
    wanted = {each.name: each.type for each in fields(Settings) if each.name != "path"}
    assert {name: hint.__forward_arg__ for name, hint in SettingsFields.__annotations__.items()} == wanted


if TYPE_CHECKING:

    async def checked_by_type_checkers(node: Node) -> None:
        """Never called: `make check` reads it."""
        assert_type(flowstone.Node("data", listen=3301, replication=["db1:3301"], election_mode="voter"), Node)
        flowstone.Node("data", lisen="127.0.0.1:3301")  # type: ignore[call-arg]
        flowstone.Node("data", read_only="yes")  # type: ignore[arg-type]
        assert_type(await node.reconfigure(read_only=True), list[str])
        assert_type(node.statistics(), flowstone.Statistics)
        assert_type(node.space("orders"), flowstone.Space)
        async with flowstone.follow("db1:3301") as replica:
            assert_type(replica, flowstone.Replica)
            assert_type(replica.vclock, flowstone.VClock)
        with flowstone.follow("db1:3301") as blocking:
            assert_type(blocking.space("orders"), flowstone.BlockingSpace)
        with limestone.Datastore("log", on_lost="degrade") as store:
            assert_type(store.create_channel(), limestone.LogChannel)
        limestone.Datastore("log", on_lost="never")  # type: ignore[arg-type]
