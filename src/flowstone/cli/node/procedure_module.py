"""Loads the Python module of `flowstone serve --procedures MODULE[:NAMES]`: its functions become procedures."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from flowstone.cli.console import UsageError
from flowstone.node.server.procedure_call import PythonProcedure


def load_procedures(wanted: str) -> list[PythonProcedure]:
    """Return the procedures that `wanted` names: `MODULE`, or `MODULE:NAME,NAME`. Raise UsageError for a mistake.

    Without names, they are the names of the module's `__all__`, or the public functions that the module defines. The
    current directory is searched first, then Python's path.
    """
    module_name, _, listed = wanted.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = import_module(module_name)
    except Exception as error:
        raise UsageError(
            f"cannot import {module_name}: {type(error).__name__}: {error}",
            hint="--procedures names a Python module on the path or in the current directory",
        ) from error
    names = [name.strip() for name in listed.split(",") if name.strip()] or _public_names(module)
    if not names:
        raise UsageError(f"module {module_name} defines no public function", hint="define one, or name it")
    return [_procedure(module_name, name, getattr(module, name, None)) for name in names]


def _public_names(module: Any) -> list[str]:
    declared = getattr(module, "__all__", None)
    if declared is not None:
        return [str(name) for name in declared if inspect.isfunction(getattr(module, str(name), None))]
    return [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]


def _procedure(module: str, name: str, function: Callable[..., Any] | None) -> PythonProcedure:
    if not inspect.isfunction(function):
        raise UsageError(f"module {module} has no function {name}")
    if not inspect.signature(function).parameters:
        raise UsageError(
            f"procedure {name} of module {module} has no parameters",
            hint=f"the first parameter is the call: def {name}(call: flowstone.ProcedureCall, ...)",
        )
    try:
        return PythonProcedure(name, function)
    except Exception as error:  # annotations are arbitrary code
        raise UsageError(f"annotations of procedure {name} of module {module}: {error}") from error
