"""`flowstone serve --check`: what a start would do with these options, and what would keep it from starting.

Looks at everything that can be looked at without starting, and writes nothing anywhere: values, directories, what data
they hold, certificates, addresses. Where a node is running in the directory the question is whether the options could
be reloaded: its lock and its addresses are no problem then, and which options need a restart is said. Passwords and
tokens are never shown.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from flowstone.cli import event_loop, extras
from flowstone.cli.console import OK, USAGE, fail, note_compilation
from flowstone.cli.process_options import PROCESS_OPTIONS
from flowstone.cli.serve_data import DataPlace
from flowstone.cli.settings import EVERY_OPTION, Settings, read_settings
from flowstone.errors import FlowstoneError
from flowstone.iproto.uri import Uri
from flowstone.node.configuration import OPTIONS, Configuration, configure, listen_uri
from flowstone.node.membership_check import check_files
from flowstone.node.parts import listen_hint, tls_of
from flowstone.outside import production
from flowstone.outside.disk import AlreadyLocked
from flowstone.outside.network import check_tls
from flowstone.replication.vclock import VClock
from flowstone.web.address import http_address, is_loopback

FIXED: Final = tuple(name for name, option in OPTIONS.items() if not option.is_dynamic)
"""What a running node cannot change. What it has for them nobody can tell from outside: it may have been started with
another file, or in another environment."""


def check(arguments: Mapping[str, Any], environment: Mapping[str, str], defaults: Mapping[str, Any]) -> int:
    """Prints the options as they would be, and what they mean here; the exit code: 0, or 2 with a line per problem."""
    settings = read_settings(arguments, environment, defaults)
    return Check(settings, defaults).run()


class Check:
    """One look at the settings and at the machine."""

    def __init__(self, settings: Settings, defaults: Mapping[str, Any]) -> None:
        self._settings = settings
        self._configuration = configure({**defaults, **settings.options})
        self._place = DataPlace(self._configuration)
        self._problems: list[Exception] = []
        self._is_running = False

    def run(self) -> int:
        for line in self._lines():
            print(line)
        for look in (self._directories, self._lock, self._data, self._tls, self._extras, self._addresses):
            try:
                for line in look():
                    print(f"# {line}")
            except (FlowstoneError, OSError) as error:
                self._problems.append(error)
        for problem in self._problems:
            fail(problem)
        return USAGE if self._problems else OK

    # --- what would hold ---

    def _lines(self) -> Iterator[str]:
        """The options that are not as they always are, as a file could have them; secrets are only named."""
        chosen = _given(self._configuration, self._settings)
        for name, value in chosen.items():
            option = EVERY_OPTION[name]
            if option.is_secret:
                yield f"# {name} is given, and not shown"
            else:
                yield f"{name} = {msgspec.json.encode(option.shown(value)).decode()}"
        if self._settings.user is not None:
            yield f"# user {msgspec.json.encode(self._settings.user[0]).decode()} is given, the password is not shown"
        for stranger in self._settings.strangers:
            yield f"# the environment variable {stranger} is no option of a node"

    # --- what is there ---

    def _directories(self) -> Iterator[str]:
        for path in self._place.missing():
            yield f"{path} is not there, and would be made"

    def _lock(self) -> Iterator[str]:
        wal_dir = self._place.wal_dir
        if os.path.isdir(wal_dir):
            try:
                production().disk.lock(wal_dir).release()
            except AlreadyLocked:
                self._is_running = True
                yield f"a node is running in {wal_dir}: these options are for its next start, or for SIGHUP"
                yield (
                    f"SIGHUP applies all that has changed, or nothing: where one of {', '.join(FIXED)} has, restart"
                    " the node instead"
                )

    def _data(self) -> Iterator[str]:
        files, memtx_dir = self._place.files(), self._place.memtx_dir
        if files is None:
            wanted = self._configuration
            whence = f"from {len(wanted.replication)} peers, or new" if wanted.replication else "new"
            yield f"there is no data in {memtx_dir}: it would be {whence}"
            self._place.check(files, self._settings.user)
            return
        snapshot = files.newest_snapshot()
        if snapshot is None:
            hint = "bring the .snap file back that they start from"
            raise FlowstoneError(f"no snapshot in {memtx_dir}, but {len(files.logs)} logs", hint=hint)
        starts = [VClock(log.meta.vclock) for log in files.logs]  # a header that cannot be read is raised here
        self._place.check(files, self._settings.user)
        yield (
            f"there is data in {memtx_dir}: {len(files.snapshots)} snapshots and {len(files.logs)} logs"
            f"{f' from {starts[0]} on' if starts else ''}, of instance {snapshot.meta.instance_uuid}"
        )
        if self._settings.user is not None:
            yield "the user is not created: that is done for new data only"
        wanted = self._configuration
        note_compilation()
        event_loop.run(
            check_files(production(), files, is_anonymous=wanted.replication_anon, force=wanted.force_recovery)
        )

    def _tls(self) -> Iterator[str]:
        tls = tls_of(self._configuration)
        if tls is not None:
            check_tls(tls)
            yield f"TLS by the certificate in {tls.cert_file}"

    def _extras(self) -> Iterator[str]:
        process = self._settings.process
        if process.http_listen is None:
            return
        extras.need("web", "--http-listen")
        place = http_address(process.http_listen)
        if process.http_token is None and not is_loopback(place):
            yield f"{place.address} can be reached by others: a token would be made, and said, at the start"

    def _addresses(self) -> Iterator[str]:
        if self._is_running:
            return
        listen, http = self._configuration.listen, self._settings.process.http_listen
        if listen is not None:
            _check_free(listen_uri(listen), "listen")
        if http is not None:
            _check_free(http_address(http), "http_listen")
        yield from ()


def _given(configuration: Configuration, settings: Settings) -> dict[str, Any]:
    """Options by name, where they are not what a Tarantool has without them, or somebody asked for them."""
    values = {name: getattr(configuration, name) for name in EVERY_OPTION if name not in PROCESS_OPTIONS}
    process = settings.process
    values |= {name: getattr(process, name) for name in PROCESS_OPTIONS} | {"http_hosts": ",".join(process.http_hosts)}
    return {
        name: value
        for name, value in values.items()
        if value not in (None, (), "") and (name in settings.options or value != EVERY_OPTION[name].default)
    }


def _check_free(place: Uri, option: str) -> None:
    """Takes the address for a moment, without listening there."""
    if place.port is None:
        return  # a socket's file that is left from before is replaced, and nobody can tell it from one in use
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
