"""Flowstone makes Python a full member of a replicated log.

This module is the public surface: what is named here stays, everything below may move. It imports
nothing heavy, so that a command which needs no kernel and no Spark starts at once.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
