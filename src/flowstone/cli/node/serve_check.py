"""`flowstone serve --check`: report what a start with these options would do, and what would prevent it.

Makes all checks that are possible without a start: values, directories and their data, certificates, addresses. Writes
nothing, and never shows passwords or tokens. If a node is running in the directory, the options are checked for a
reload: the lock and the addresses of that node are not reported as problems, and the report names the options that need
a restart.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from flowstone.cli import event_loop, extras
from flowstone.cli.console import OK, USAGE, fail
from flowstone.cli.node.procedure_module import load_procedures
from flowstone.cli.node.process_options import PROCESS_OPTIONS
from flowstone.cli.node.serve_data import DataPlace
from flowstone.cli.node.settings import EVERY_OPTION, NodeSettings, read_settings
from flowstone.errors import FlowstoneError
from flowstone.iproto.uri import Uri
from flowstone.node.components import listen_hint, tls_of
from flowstone.node.configuration import OPTIONS, Configuration, configure, listen_uri
from flowstone.node.wal.membership_check import check_files
from flowstone.outside import production
from flowstone.outside.disk import AlreadyLocked
from flowstone.outside.network import check_tls
from flowstone.replication.vclock import VClock
from flowstone.web.address import http_address, is_loopback

FIXED: Final = tuple(name for name, option in OPTIONS.items() if not option.is_dynamic)
"""Options that a running node cannot change.

All such options are listed, even unchanged ones, because the values of the running node are unknown: it may have been
started with another file or environment.
"""


def check(arguments: Mapping[str, Any], environment: Mapping[str, str], defaults: Mapping[str, Any]) -> int:
    """Print the effective options and what a start would do; return 0, or 2 after printing one line per problem."""
    settings = read_settings(arguments, environment, defaults)
    return StartCheck(settings, defaults).run()


class StartCheck:
    """Checks the settings against this machine."""

    def __init__(self, settings: NodeSettings, defaults: Mapping[str, Any]) -> None:
        self._settings = settings
        self._configuration = configure({**defaults, **settings.options})
        self._place = DataPlace(self._configuration)
        self._problems: list[Exception] = []
        self._is_running = False

    def run(self) -> int:
        for line in self._lines():
            print(line)
        for look in (
            self._directories,
            self._lock,
            self._data,
            self._tls,
            self._extras,
            self._procedures,
            self._addresses,
        ):
            try:
                for line in look():
                    print(f"# {line}")
            except (FlowstoneError, OSError) as error:
                self._problems.append(error)
        for problem in self._problems:
            fail(problem)
        return USAGE if self._problems else OK

    # --- options ---

    def _lines(self) -> Iterator[str]:
        """Yield the options that differ from their defaults, as lines of a TOML file; secrets are named only."""
        chosen = _given(self._configuration, self._settings)
        for name, value in chosen.items():
            option = EVERY_OPTION[name]
            if option.is_secret:
                yield f"# {name} is set (not shown)"
            else:
                yield f"{name} = {msgspec.json.encode(option.shown(value)).decode()}"
        if self._settings.user is not None:
            yield f"# user {msgspec.json.encode(self._settings.user[0]).decode()} is set (password not shown)"
        for stranger in self._settings.strangers:
            yield f"# unknown option in environment: {stranger}"

    # --- checks: each yields remarks, and raises the first problem ---

    def _directories(self) -> Iterator[str]:
        for path in self._place.missing():
            yield f"{path} does not exist and would be created"

    def _lock(self) -> Iterator[str]:
        wal_dir = self._place.wal_dir
        if os.path.isdir(wal_dir):
            try:
                production().disk.lock(wal_dir).release()
            except AlreadyLocked:
                self._is_running = True
                yield f"a node is running in {wal_dir}: these options apply at its next start or on SIGHUP"
                yield f"SIGHUP applies all changes or none; restart the node to change any of {', '.join(FIXED)}"

    def _data(self) -> Iterator[str]:
        files, memtx_dir = self._place.files(), self._place.memtx_dir
        if files is None:
            wanted = self._configuration
            peers = len(wanted.replication)
            source = f"fetched from a peer ({peers} in replication), or created" if peers else "created"
            yield f"no data in {memtx_dir}: it would be {source}"
            self._place.check(files, self._settings.user)
            return
        snapshot = files.newest_snapshot()
        if snapshot is None:
            hint = "restore the .snap file that the logs start from"
            raise FlowstoneError(f"no snapshot in {memtx_dir}, but {len(files.logs)} logs", hint=hint)
        starts = [VClock(log.meta.vclock) for log in files.logs]  # raises if a header cannot be read
        self._place.check(files, self._settings.user)
        yield (
            f"data in {memtx_dir} belongs to instance {snapshot.meta.instance_uuid} (snapshots: "
            f"{len(files.snapshots)}, logs: {len(files.logs)}{f' starting at {starts[0]}' if starts else ''})"
        )
        if self._settings.user is not None:
            yield "user not created: the data directory is already initialized"
        wanted = self._configuration
        event_loop.run(
            check_files(production(), files, is_anonymous=wanted.replication_anon, force=wanted.force_recovery)
        )

    def _tls(self) -> Iterator[str]:
        tls = tls_of(self._configuration)
        if tls is not None:
            check_tls(tls)
            yield f"TLS with the certificate in {tls.cert_file}"

    def _extras(self) -> Iterator[str]:
        process = self._settings.process
        if process.http_listen is None:
            return
        extras.need("web", "--http-listen")
        place = http_address(process.http_listen)
        if process.http_token is None and not is_loopback(place):
            yield f"{place.address} is not a loopback address: a start would generate and print a token"

    def _procedures(self) -> Iterator[str]:
        module = self._settings.process.procedures
        if module is not None:
            names = ", ".join(procedure.name for procedure in load_procedures(module))
            yield f"procedures: {names}"

    def _addresses(self) -> Iterator[str]:
        if self._is_running:
            return
        listen, http = self._configuration.listen, self._settings.process.http_listen
        if listen is not None:
            _check_free(listen_uri(listen), "listen")
        if http is not None:
            _check_free(http_address(http), "http_listen")
        yield from ()


def _given(configuration: Configuration, settings: NodeSettings) -> dict[str, Any]:
    """Return the options, by name, that are set explicitly or differ from their defaults."""
    values = {name: getattr(configuration, name) for name in EVERY_OPTION if name not in PROCESS_OPTIONS}
    process = settings.process
    values |= {name: getattr(process, name) for name in PROCESS_OPTIONS} | {"http_hosts": ",".join(process.http_hosts)}
    return {
        name: value
        for name, value in values.items()
        if value not in (None, (), "") and (name in settings.options or value != EVERY_OPTION[name].default)
    }


def _check_free(place: Uri, option: str) -> None:
    """Raise FlowstoneError if the address cannot be bound. Binds it for a moment, without listening."""
    if place.port is None:
        return  # a start replaces a stale socket file, which cannot be told from one in use
    try:
        _take(place)
    except OSError as error:
        message = f"cannot listen on {place.address}: {error.strerror or error}"
        raise FlowstoneError(message, hint=listen_hint(error).replace("listen", option)) from error


def _take(place: Uri) -> None:
    found = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, kind, protocol, _, address in found[:1]:
        with socket.socket(family, kind, protocol) as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(address)
