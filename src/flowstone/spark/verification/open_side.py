"""Open a side of a comparison by its name.

The content of a directory decides whether it is an archive, a log directory, a Limestone directory or a lake. A URL is
a lake; anything else is the address of a node.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Final

from flowstone.archive.events import ArchiveEvent
from flowstone.archive.manifest import NAME as MANIFEST
from flowstone.iproto.uri import Uri, UriError, means_a_path, parse_uri
from flowstone.outside import production
from flowstone.spark.index.limestone_index import is_limestone
from flowstone.spark.verification.limestone_side import LimestoneSide
from flowstone.spark.verification.sides import LogSide, NodeSide, Side, SideError
from flowstone.xlog.directory import scan_directory

DELTA_LOG: Final = "_delta_log"
FORMS: Final = "specify a live node (host:port), an archive, a directory of logs, a Limestone data directory, or a lake"


def open_side(
    text: str,
    *,
    login: Callable[[str], Uri] = parse_uri,
    storage_options: Mapping[str, str] | None = None,
    salt: str | None = None,
    is_raw: bool = False,
    on_event: Callable[[ArchiveEvent], None] = lambda event: None,
) -> Side:
    """Open the side that `text` names. `login` adds the user to a node address; `salt` is the salt of a lake's
    masks. `is_raw`: Tsurugi's tables are compared as storages."""
    if os.path.isdir(text):
        return _directory(text, salt, is_raw)
    if "://" in text:
        return _lake(text, storage_options, salt)
    if os.path.lexists(text):
        raise SideError(f"{text}: is a file", hint=FORMS)
    try:
        uri = login(text)
    except UriError as error:
        if means_a_path(text):
            raise SideError(f"{text}: no such directory", hint=FORMS) from None
        raise SideError(error.message, hint=FORMS) from None
    return NodeSide(uri, on_event)


def _directory(path: str, salt: str | None, is_raw: bool) -> Side:
    if os.path.exists(os.path.join(path, MANIFEST)):
        return LogSide(path)
    if is_limestone(path):
        return LimestoneSide(path, is_raw)
    if any(os.path.isdir(os.path.join(path, each, DELTA_LOG)) for each in sorted(os.listdir(path))):
        return _lake(os.path.abspath(path), None, salt)
    found = scan_directory(production().disk, path)
    if found.snapshots or found.logs:
        return LogSide(path)
    raise SideError(f"{path}: neither an archive, nor a directory of logs, nor a lake", hint=FORMS)


def _lake(path: str, storage_options: Mapping[str, str] | None, salt: str | None) -> Side:
    from flowstone.spark.verification.lake_side import LakeSide  # only lakes need deltalake

    return LakeSide(path, dict(storage_options or {}), salt)
