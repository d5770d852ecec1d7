"""The options of the commands, for checks of files that start them."""

from __future__ import annotations

import typer.main

from flowstone.cli import app, serve


def options_of(command: str) -> set[str]:
    serve.declare_options(every=True)
    parameters = typer.main.get_command(app).commands[command].params  # type: ignore[attr-defined]
    return {name for parameter in parameters for name in parameter.opts}
