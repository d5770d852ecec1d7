"""`python -m flowstone.cli`, for machines where the `flowstone` command is not on the path."""

from __future__ import annotations

from flowstone.cli import main

main()
