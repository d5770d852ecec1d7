"""`flowstone limestone replica`: run a replica for masters of the original and of Flowstone.

Parses the options, reports events and handles signals; the replica itself is `limestone/replica/replica.py`.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Final

import typer

from flowstone.cli.console import OK, UsageError, say
from flowstone.cli.log import JSON, PLAIN, LogFormat, say_event, set_format

if TYPE_CHECKING:
    from flowstone.limestone.format.endpoint import Endpoint
    from flowstone.limestone.replica.events import Event
    from flowstone.limestone.replica.replica import Replica
    from flowstone.outside import Tls

EXAMPLE = (
    "Example: `flowstone limestone replica /var/lib/tsurugi/replica --listen tcp://127.0.0.1:12346`, and on the master "
    "`export TSURUGI_REPLICATION_ENDPOINT=tcp://127.0.0.1:12346`"
)

EXIT_CODES = """Exit codes: 0 stopped by a signal; 1 cannot start: the directory is in use or damaged, or the address is
taken; 2 the command line, the environment or a path in them is wrong."""

ENDPOINT_VARIABLE: Final = "TSURUGI_REPLICATION_ENDPOINT"
SECRET_VARIABLE: Final = "FLOWSTONE_LIMESTONE_SECRET"
LOGGER: Final = "flowstone.limestone"
LISTEN: Final = "tcp://127.0.0.1:12346"
LOOPBACK: Final = ("127.", "localhost", "::1")


def replica(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="Data directory of the replica; created if missing.")],
    listen: Annotated[
        str | None,
        typer.Option(
            "--listen",
            metavar="ENDPOINT",
            help=f"tcp://host:port or tls://host:port; port 0 picks a free port. Default: {ENDPOINT_VARIABLE}, as for "
            f"the original, else {LISTEN}.",
        ),
    ] = None,
    compatible: Annotated[
        bool,
        typer.Option(
            "--compatible",
            help="Write and answer byte for byte as the original. Its markers have no epochs, so a crash may leave a "
            "directory that cannot be repaired, and Flowstone masters can neither resume nor seed the replica.",
        ),
    ] = False,
    secret_file: Annotated[
        str | None,
        typer.Option(
            "--secret-file",
            metavar="FILE",
            help="File whose first line is a secret shared with the masters; a master without it is rejected. Default: "
            f"{SECRET_VARIABLE}. Masters of the original Limestone do not support secrets.",
        ),
    ] = None,
    ssl_cert_file: Annotated[
        str | None, typer.Option("--ssl-cert-file", metavar="FILE", help="Certificate for TLS, with its chain (PEM).")
    ] = None,
    ssl_key_file: Annotated[
        str | None, typer.Option("--ssl-key-file", metavar="FILE", help="Private key of the certificate (PEM).")
    ] = None,
    ssl_ca_file: Annotated[
        str | None, typer.Option("--ssl-ca-file", metavar="FILE", help="CA certificates to verify masters with (PEM).")
    ] = None,
    ssl_ciphers: Annotated[
        str | None,
        typer.Option("--ssl-ciphers", metavar="TEXT", help="Ciphers for TLS up to 1.2, as OpenSSL lists them."),
    ] = None,
    receive_buffer: Annotated[
        int | None,
        typer.Option(
            "--receive-buffer", metavar="BYTES", min=1, help="Receive buffer per socket. Default: that of the system."
        ),
    ] = None,
    message_size_max: Annotated[
        int,
        typer.Option(
            "--message-size-max", metavar="BYTES", min=1 << 22, help="Maximum size of a message with its blobs."
        ),
    ] = 1 << 30,
    reseed: Annotated[
        bool,
        typer.Option(
            "--reseed",
            help="Let the next Flowstone master replace the data of another database, once; otherwise such a master is "
            "rejected. Omit the option at the next start.",
        ),
    ] = False,
    log_format: LogFormat = PLAIN,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print events as JSON, one object per line (docs/reference/limestone.md).")
    ] = False,
) -> int:
    """Run a replica of Tsurugi or of a Flowstone datastore; it keeps every epoch that its master has committed.

    Data is on disk before the replica acknowledges it. The replica serves one master at a time. SIGTERM and SIGINT stop
    it. `touch DIR/ctrl/start_compaction` compacts the directory while the replica runs.
    """
    from flowstone.cli import event_loop, open_files
    from flowstone.limestone.replica.replica import Replica
    from flowstone.outside import production
    from flowstone.outside.network import SocketOptions

    if os.path.exists(directory) and not os.path.isdir(directory):
        raise UsageError(f"{directory} is not a directory", hint="specify a directory, which is created if missing")
    open_files.raise_limit()  # each log channel of a master needs two open files
    set_format(log_format)
    endpoint = _endpoint(listen or os.environ.get(ENDPOINT_VARIABLE) or LISTEN)
    tls = _tls(endpoint, ssl_cert_file, ssl_key_file, ssl_ca_file, ssl_ciphers)
    secret = _secret(secret_file)
    if compatible and secret is not None:
        raise UsageError("--compatible does not support a secret", hint="omit --compatible or the secret")
    if not endpoint.host.startswith(LOOPBACK) and secret is None and ssl_ca_file is None:
        say(
            f"flowstone: any client that reaches {endpoint.address} can write to this replica; "
            "restrict access with --secret-file or --ssl-ca-file"
        )
    server = Replica(
        production(),
        directory,
        endpoint,
        compatible=compatible,
        secret=secret,
        tls=tls,
        socket_options=SocketOptions(receive_buffer=receive_buffer),
        message_size_max=message_size_max,
        reseed=reseed,
        on_event=_tell_json if as_json else _log_json if log_format == JSON else _tell,
    )
    event_loop.run(_run(server))
    return OK


def _endpoint(text: str) -> Endpoint:
    from flowstone.limestone.format.endpoint import Endpoint, EndpointError

    try:
        return Endpoint.parse(text)
    except EndpointError as error:
        raise UsageError(error.message, hint=error.hint) from error


def _tls(endpoint: Endpoint, cert: str | None, key: str | None, ca: str | None, ciphers: str | None) -> Tls | None:
    from flowstone.outside import Tls

    if cert is None:
        if endpoint.is_encrypted or key or ca or ciphers:
            raise UsageError("TLS needs a certificate", hint="set --ssl-cert-file and --ssl-key-file")
        return None
    return Tls(cert_file=cert, key_file=key or cert, ca_file=ca, ciphers=ciphers)


def _secret(path: str | None) -> str | None:
    if path is None:
        secret = os.environ.get(SECRET_VARIABLE)
        if secret == "":
            raise UsageError(f"{SECRET_VARIABLE} is empty", hint="set it to the secret, or unset it")
        return secret
    with open(path, encoding="utf-8") as file:
        line = file.readline().rstrip("\r\n")
    if not line:
        raise UsageError(f"first line of {path} is empty", hint="write the secret to it")
    return line


def _tell(event: Event) -> None:
    say(f"flowstone: {event}")


def _log_json(event: Event) -> None:
    say_event(event, LOGGER)


def _tell_json(event: Event) -> None:
    import msgspec

    with suppress(OSError, ValueError):  # stdout may be closed; the replica continues
        print(msgspec.json.encode(event).decode(), flush=True)


async def _run(server: Replica) -> None:
    import asyncio
    import signal

    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    try:
        await server.start()
        await stopping.wait()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)  # a second signal ends the process immediately
        await server.stop()
