"""The options of a node: names, defaults and checks of `box.cfg`, and a few of our own.

`Configuration` is the only table of options: command line, environment, configuration file, reloading and documentation
are derived from its fields. Values are checked as in Tarantool, with the same errors (59). The same options as in
Tarantool can change while the node runs; for other options a change is error 58. This module applies no option.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, Final, Literal, TypedDict

from flowstone.box.dialect import Dialect
from flowstone.iproto import errors
from flowstone.iproto.uri import Uri, UriError, parse_uri
from flowstone.node.option import Option, incorrect
from flowstone.node.option_checks import (
    INTEGER_MAX,
    Check,
    below,
    no_log_level,
    no_mode_of,
    no_quorum,
    no_upstreams,
    no_uuid,
    not_above,
    not_among,
    outside,
)
from flowstone.replication.membership import quorum
from flowstone.replication.raft.election import Config as ElectionConfig
from flowstone.replication.raft.election import ElectionMode, Fencing

LOOPBACK: Final = "127.0.0.1"
ANY_ADDRESS: Final = "0.0.0.0"
"""The address of `*`. A port alone listens on loopback: listening on all interfaces has to be explicit."""

WAL_MODES: Final = ("none", "write", "fsync")
DIALECTS: Final = ("2.6", "2.11")
LOG_FORMATS: Final = ("plain", "json")
STRATEGIES: Final = ("auto", "config", "supervised", "legacy")
ELECTION_MODES: Final = tuple(mode.value for mode in ElectionMode)
FENCING_MODES: Final = tuple(mode.value for mode in Fencing)

A_UUID: Final = "a UUID such as 5313b8d5-82a0-4fb4-a280-9e8bf79e1cac, with dashes"

DEATH_FACTOR: Final = 4
"""Heartbeat intervals without a message after which a leader counts as dead."""

TOO_LONG_THRESHOLD: Final = 0.5

QUORUM_2_6: Final = 1
"""Default quorum of 2.6: the owner of the queue alone is enough."""


# --- the table ---------------------------------------------------------------------------------------------


def _no_listen_address(value: str) -> str | None:
    try:
        listen_uri(value)
    except UriError:
        return "expected host:service or /unix.socket"
    return None


def listen_uri(text: str) -> Uri:
    """Parse the option `listen`: `host:port`, `*:port` for all interfaces, a port alone for loopback, `unix/:/path`.

    Port 0 stands for any free port. Raise UriError if `text` is not an address.
    """
    place = text.strip()
    if place.startswith("/"):
        place = f"unix/:{place}"
    if place.isdecimal():
        place = f"{LOOPBACK}:{place}"
    elif place.startswith(("*:", ":")):
        place = f"{ANY_ADDRESS}{place.removeprefix('*')}"
    host, colon, port = place.rpartition(":")
    if colon and port.isdecimal() and int(port) == 0:
        return replace(parse_uri(f"{host}:1"), port=0)
    return parse_uri(place)


def _option(
    types: str,
    default: Any,
    help: str,
    check: Check | None = None,
    *,
    dynamic: bool = False,
    secret: bool = False,
    shown: bool = True,
    allowed: str | None = None,
) -> Any:
    settings = {
        "types": tuple(types.split(", ")),
        "check": check,
        "dynamic": dynamic,
        "help": help,
        "secret": secret,
        "allowed": allowed,
    }
    return field(default=default, metadata=settings, repr=shown and not secret)


class NodeOptions(TypedDict, total=False):
    """Types of the options that `Node` takes as keywords. `Configuration` describes and checks the options.

    Some types are wider than those of `Configuration`, as in `box.cfg`: a port for `listen`, one URI for `replication`.
    """

    listen: str | int | None
    memtx_dir: str
    wal_dir: str
    wal_mode: Literal["none", "write", "fsync"]
    wal_max_size: int
    wal_queue_max_size: int
    checkpoint_interval: float
    checkpoint_count: int
    checkpoint_wal_threshold: int
    force_recovery: bool
    read_only: bool
    instance_uuid: str | None
    replicaset_uuid: str | None
    net_msg_max: int
    connections_max: int
    packet_size_max: int
    guest_packet_size_max: int
    output_size_max: int
    slow_reader_timeout: float
    auth_timeout: float
    auth_delay: float
    auth_retries: int
    txn_timeout: float
    memtx_max_tuple_size: int
    log_level: str | int
    log_format: Literal["plain", "json"]
    too_long_threshold: float
    ssl_cert_file: str | None
    ssl_key_file: str | None
    ssl_password: str | None
    ssl_ca_file: str | None
    ssl_ciphers: str | None
    replication: str | int | Sequence[str]
    replication_timeout: float
    replication_connect_timeout: float
    replication_connect_quorum: int | None
    replication_sync_lag: float
    replication_sync_timeout: float
    replication_skip_conflict: bool
    replication_anon: bool
    bootstrap_strategy: Literal["auto", "config", "supervised", "legacy"]
    bootstrap_leader: str | None
    replication_synchro_quorum: int | str | None
    replication_synchro_timeout: float
    replication_synchro_queue_max_size: int
    election_mode: Literal["off", "voter", "candidate", "manual"]
    election_timeout: float
    election_fencing_mode: Literal["off", "soft", "strict"]
    election_transfer_timeout: float
    wal_cleanup_delay: float
    dialect: Literal["2.6", "2.11"] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """The options of a node. Create it with `configure`, which checks values; `changed` returns a changed copy."""

    listen: str | None = _option(
        "string, number",
        None,
        "Address to listen on: host:port, a port, or unix/:/path.",
        _no_listen_address,
        dynamic=True,
        allowed="host:port, unix/:/path, or a port; the highest port is 65535",
    )
    work_dir: str = _option("string", "data", "Directory of the node's files.")
    memtx_dir: str = _option("string", ".", "Directory of snapshots, relative to work_dir.")
    wal_dir: str = _option("string", ".", "Directory of logs, relative to work_dir.")
    wal_mode: str = _option(
        "string",
        "write",
        "When a write is acknowledged: none (no log), write (survives a process crash), fsync (survives a power loss).",
        not_among(WAL_MODES),
        allowed=f"one of {', '.join(WAL_MODES)}",
    )
    wal_max_size: int = _option(
        "number",
        256 * 1024 * 1024,
        "Size in bytes at which a new log is started.",
        not_above(1, "the value must be greater than one"),
    )
    wal_queue_max_size: int = _option(
        "number",
        16 * 1024 * 1024,
        "Bytes of requests that may wait for the log; further requests are not executed until it is written.",
        below(0, "wal_queue_max_size must be >= 0"),
        dynamic=True,
    )
    checkpoint_interval: float = _option(
        "number", 3600.0, "Seconds between snapshots; 0: no periodic snapshots.", dynamic=True
    )
    checkpoint_count: int = _option(
        "number",
        2,
        "Number of snapshots to keep, with the logs after them.",
        below(1, "the value must not be less than one"),
        dynamic=True,
    )
    checkpoint_wal_threshold: int = _option(
        "number", 10**18, "Bytes of log after which a snapshot is written.", dynamic=True
    )
    force_recovery: bool = _option(
        "boolean", False, "Start despite damaged snapshots and logs; skipped rows are logged.", dynamic=True
    )
    read_only: bool = _option("boolean", False, "Reject writes of clients.", dynamic=True)
    instance_uuid: str | None = _option(
        "string", None, "UUID of this instance; default: that of the snapshot, or a new one.", no_uuid, allowed=A_UUID
    )
    replicaset_uuid: str | None = _option(
        "string", None, "UUID of the replica set; default: that of the snapshot, or a new one.", no_uuid, allowed=A_UUID
    )
    net_msg_max: int = _option(
        "number",
        768,
        "Pending requests of one connection; further requests wait.",
        below(2, "minimal value is 2"),
        dynamic=True,
    )
    connections_max: int = _option(
        "number",
        10000,
        "Open connections; further ones are closed at once.",
        below(1, "the value must not be less than one"),
        dynamic=True,
    )
    packet_size_max: int = _option(
        "number",
        128 * 1024 * 1024,
        "Size in bytes of the largest packet.",
        outside(1024, INTEGER_MAX, "specified value is out of bounds"),
        dynamic=True,
    )
    guest_packet_size_max: int = _option(
        "number",
        64 * 1024,
        "Size in bytes of the largest packet of a client that has not authenticated.",
        outside(1024, INTEGER_MAX, "specified value is out of bounds"),
        dynamic=True,
    )
    output_size_max: int = _option(
        "number",
        1024 * 1024,
        "Bytes of unsent replies of one connection; further requests wait until they are sent.",
        outside(1024, INTEGER_MAX, "specified value is out of bounds"),
        dynamic=True,
    )
    slow_reader_timeout: float = _option(
        "number",
        60.0,
        "Seconds that a client may leave its replies unread before it is disconnected.",
        not_above(0, "the value must be greater than 0"),
        dynamic=True,
    )
    auth_timeout: float = _option(
        "number",
        60.0,
        "Seconds that a client may take to authenticate before it is disconnected, unless guests have been granted"
        " rights or it watches the ballot, as members do; 0: no limit.",
        below(0, "the value must not be less than 0"),
        dynamic=True,
    )
    auth_delay: float = _option(
        "number",
        1.0,
        "Seconds between two authentication attempts of one user from one address after auth_retries failures;"
        " 0: no delay.",
        below(0, "the value must not be less than 0"),
        dynamic=True,
    )
    auth_retries: int = _option(
        "number",
        5,
        "Failed authentication attempts of one user from one address before auth_delay applies.",
        below(0, "the value must not be less than 0"),
        dynamic=True,
    )
    txn_timeout: float = _option(
        "number",
        365 * 100 * 86400.0,
        "Seconds after which an open transaction is rolled back.",
        not_above(0, "the value must be greather than 0"),
        dynamic=True,
    )
    memtx_max_tuple_size: int = _option(
        "number",
        1024 * 1024,
        "Size in bytes of the largest tuple.",
        not_above(0, "specified value is out of bounds"),
        dynamic=True,
    )
    log_level: str = _option(
        "number, string",
        "info",
        "Log level: fatal, error, warn, info, verbose, debug, or 0 to 7.",
        no_log_level,
        dynamic=True,
    )
    log_format: str = _option(
        "string",
        "plain",
        "Format of log lines: plain, or json (one object per line).",
        not_among(LOG_FORMATS, "expected 'plain' or 'json'"),
        dynamic=True,
    )
    too_long_threshold: float = _option(
        "number",
        TOO_LONG_THRESHOLD,
        "Seconds after which a request or a write to the log is logged as too long.",
        dynamic=True,
    )
    ssl_cert_file: str | None = _option("string", None, "Certificate of the listener for TLS, with its chain (PEM).")
    ssl_key_file: str | None = _option("string", None, "Private key of the certificate (PEM).")
    ssl_password: str | None = _option(
        "string",
        None,
        "Password of the private key. Prefer FLOWSTONE_SSL_PASSWORD: command lines can be seen by others.",
        secret=True,
    )
    ssl_ca_file: str | None = _option("string", None, "CA certificates to verify clients with (PEM).")
    ssl_ciphers: str | None = _option("string", None, "Ciphers for TLS up to 1.2, in the syntax of OpenSSL.")
    replication: tuple[str, ...] = _option(
        "string, number, table",
        (),
        "Upstreams: URIs such as user:password@host:port, separated by commas; ?transport=ssl&ssl_ca_file=… for TLS."
        " For passwords, prefer FLOWSTONE_REPLICATION or the file: command lines can be seen by others.",
        no_upstreams,
        dynamic=True,
        shown=False,
    )
    replication_timeout: float = _option(
        "number",
        1.0,
        "Seconds between heartbeats; a peer that sends nothing for four times as long is disconnected.",
        not_above(0, "the value must be greather than 0"),
        dynamic=True,
    )
    replication_connect_timeout: float = _option(
        "number",
        30.0,
        "Seconds to wait for peers at startup.",
        not_above(0, "the value must be greather than 0"),
        dynamic=True,
    )
    replication_connect_quorum: int | None = _option(
        "number",
        None,
        "Peers that must answer and be in sync before writes are accepted (2.6, or strategy legacy); default: all.",
        below(0, "the value must be greater or equal to 0"),
        dynamic=True,
    )
    replication_sync_lag: float = _option(
        "number",
        10.0,
        "Lag in seconds up to which a peer counts as in sync.",
        not_above(0, "the value must be greater than 0"),
        dynamic=True,
    )
    replication_sync_timeout: float = _option(
        "number",
        300.0,
        "Seconds to wait for synchronization with peers; then the node becomes an orphan, which is read-only.",
        not_above(0, "the value must be greater than 0"),
        dynamic=True,
    )
    replication_skip_conflict: bool = _option(
        "boolean",
        False,
        "Skip replicated rows that violate a unique index, instead of stopping replication.",
        dynamic=True,
    )
    replication_anon: bool = _option(
        "boolean",
        False,
        "Replicate anonymously: read-only, without a replica id; can be switched off later.",
        dynamic=True,
    )
    bootstrap_strategy: str = _option(
        "string",
        "auto",
        "How the bootstrap leader is chosen (2.11): auto, legacy (replication_connect_quorum), config, supervised.",
        not_among(STRATEGIES, f"the value should be one of the following: {', '.join(map(repr, STRATEGIES))}"),
        dynamic=True,
    )
    bootstrap_leader: str | None = _option(
        "string",
        None,
        "Bootstrap leader of the strategy config: a URI, UUID or name.",
        dynamic=True,
        shown=False,
    )
    replication_synchro_quorum: int | str | None = _option(
        "string, number",
        None,
        "Members that must acknowledge a synchronous transaction before it is committed: a number, or (2.11) a formula"
        f" of N, the number of members; default: {quorum.DEFAULT} (2.11), {QUORUM_2_6} (2.6).",
        no_quorum,
        dynamic=True,
    )
    replication_synchro_timeout: float = _option(
        "number",
        5.0,
        "Seconds to wait for the quorum of a synchronous transaction before it is rolled back.",
        not_above(0, "the value must be greater than zero"),
        dynamic=True,
    )
    replication_synchro_queue_max_size: int = _option(
        "number",
        16 * 1024 * 1024,
        "Bytes of pending transactions in the synchronous queue; further transactions wait; 0: no limit.",
        below(0, "replication_synchro_queue_max_size must be >= 0"),
        dynamic=True,
    )
    election_mode: str = _option(
        "string",
        "off",
        "Role in elections (2.11): off, voter (only votes), candidate (may lead), manual (leads when promoted).",
        no_mode_of(ELECTION_MODES),
        dynamic=True,
    )
    election_timeout: float = _option(
        "number",
        5.0,
        "Seconds after which an election without a winner is repeated (2.11).",
        not_above(0, "the value must be a positive number"),
        dynamic=True,
    )
    election_fencing_mode: str = _option(
        "string",
        "soft",
        "When a leader that has lost its quorum of connections resigns (2.11): off (never), soft, strict (before"
        " another leader can be elected).",
        no_mode_of(FENCING_MODES),
        dynamic=True,
    )
    election_transfer_timeout: float = _option(
        "number",
        2.0,
        "Seconds that a leader may take, when it is stopped, to let another candidate lead (2.11); 0: it just stops.",
        below(0, "the value must be >= 0"),
        dynamic=True,
    )
    wal_cleanup_delay: float = _option(
        "number",
        14400.0,
        "Seconds after startup during which no logs are deleted, unless all members have connected.",
        below(0, "value must be >= 0"),
        dynamic=True,
    )
    dialect: str | None = _option(
        "string",
        None,
        "Tarantool version to behave as: 2.6 or 2.11; fixed when the data is created (default 2.11).",
        not_among(DIALECTS, f"expected one of {', '.join(DIALECTS)}"),
    )

    def changed(self, options: Mapping[str, Any]) -> Configuration:
        """Return a checked copy with `options` set.

        Raises:
            TarantoolError: An option cannot change at runtime (error 58), or a value is not allowed (error 59).
        """
        accepted = _accepted(options)
        if "replication" in accepted:
            # A URI that equals what `box.cfg` shows, without its password, keeps the password it has.
            known = {parse_uri(uri).shown: uri for uri in self.replication}
            accepted["replication"] = tuple(known.get(uri, uri) for uri in accepted["replication"])
        fixed = [name for name, value in accepted.items() if not self._can_become(name, value)]
        if fixed:
            hint = f"restart the node to change {', '.join(fixed)}"
            raise errors.ReloadCfg(f"Can't set option '{fixed[0]}' dynamically", hint=hint)
        return _consistent(replace(self, **accepted))

    @property
    def directories(self) -> tuple[str, str]:
        """The directories of snapshots and of logs."""
        memtx_dir, wal_dir = (
            posixpath.normpath(posixpath.join(self.work_dir, place)) for place in (self.memtx_dir, self.wal_dir)
        )
        return memtx_dir, wal_dir

    def _can_become(self, name: str, value: Any) -> bool:
        return OPTIONS[name].is_dynamic or value == getattr(self, name)

    def check_dialect(self, dialect: Dialect) -> None:
        """Check the options against `dialect`, which may be known from the data only.

        Raises:
            TarantoolError: An option does not exist in `dialect` (error 59).
        """
        if dialect is not Dialect.V2_6:
            return
        if isinstance(self.replication_synchro_quorum, str):
            hint = "dialect 2.6 does not support formulas; use a number"
            raise incorrect("replication_synchro_quorum", "should be of type number", hint=hint)
        if self.election_mode != ElectionMode.OFF.value:
            hint = "dialect 2.6 does not support elections; omit the option, or create new data with dialect 2.11"
            raise incorrect("election_mode", "unexpected option", hint=hint)

    def synchro_quorum(self, dialect: Dialect, members: int) -> int:
        """Return the quorum of synchronous transactions in a replica set with `members` registered members."""
        self.check_dialect(dialect)
        return quorum.Quorum(self._quorum(dialect)).of(members)

    def _quorum(self, dialect: Dialect) -> int | str:
        if self.replication_synchro_quorum is not None:
            return self.replication_synchro_quorum
        return QUORUM_2_6 if dialect is Dialect.V2_6 else quorum.DEFAULT

    def election(self, dialect: Dialect) -> ElectionConfig:
        """Return the options of elections; raise error 59 if they are enabled in dialect 2.6."""
        self.check_dialect(dialect)
        return ElectionConfig(
            mode=ElectionMode(self.election_mode),
            election_timeout=self.election_timeout,
            death_timeout=DEATH_FACTOR * self.replication_timeout,
            fencing=Fencing(self.election_fencing_mode),
        )

    def shown(self, dialect: Dialect) -> dict[str, Any]:
        """Return the map that `box.cfg` shows: the options that are set, without secrets."""
        chosen = replace(self, replication_synchro_quorum=self._quorum(dialect))
        given = {name: option.shown(getattr(chosen, name)) for name, option in OPTIONS.items() if not option.is_secret}
        return {name: value for name, value in given.items() if value not in (None, [])}

    def differences(self, other: Configuration) -> list[str]:
        """Return the names of the options whose values differ in `other`, in the order of the table."""
        return [name for name in OPTIONS if getattr(self, name) != getattr(other, name)]


def configure(options: Mapping[str, Any]) -> Configuration:
    """Return the configuration with `options`; None and the empty string stand for the default of an option.

    Raise error 59 if an option is unknown, or a value is not allowed.
    """
    return _consistent(Configuration(**_accepted(options)))


def _accepted(options: Mapping[str, Any]) -> dict[str, Any]:
    accepted = {}
    for name, value in options.items():
        option = OPTIONS.get(name)
        if option is None:
            raise incorrect(name, "unexpected option")
        accepted[name] = option.accept(value)
    return accepted


def _consistent(configuration: Configuration) -> Configuration:
    if (configuration.ssl_cert_file is None) != (configuration.ssl_key_file is None):
        missing, given = ("ssl_key_file", "ssl_cert_file")
        if configuration.ssl_cert_file is None:
            missing, given = given, missing
        raise incorrect(missing, f"needed with {given}")
    for name in ("ssl_password", "ssl_ca_file", "ssl_ciphers"):
        if getattr(configuration, name) is not None and configuration.ssl_cert_file is None:
            raise incorrect("ssl_cert_file", f"needed with {name}")
    if configuration.replication_anon and configuration.election_mode != ElectionMode.OFF.value:
        problem = "the value may only be set to 'off' when 'replication_anon' is set to true"
        raise incorrect("election_mode", problem)
    if configuration.dialect is not None:
        configuration.check_dialect(Dialect(configuration.dialect))
    if configuration.replication_anon and not configuration.read_only:
        raise incorrect("replication_anon", "the value may be set to true only when the instance is read-only")
    if configuration.bootstrap_leader is not None and configuration.bootstrap_strategy != "config":
        raise incorrect("bootstrap_leader", "the option takes no effect when bootstrap strategy is not 'config'")
    if configuration.bootstrap_leader is None and configuration.bootstrap_strategy == "config":
        raise incorrect("bootstrap_leader", "the option can't be empty when bootstrap strategy is 'config'")
    return configuration


def _read_table() -> dict[str, Option]:
    table = {}
    for entry in fields(Configuration):
        settings = entry.metadata
        assert entry.default is not MISSING, entry.name
        table[entry.name] = Option(
            name=entry.name,
            types=settings["types"],
            default=entry.default,
            check=settings["check"],
            is_dynamic=settings["dynamic"],
            help=settings["help"],
            is_integral="int" in str(entry.type).split(" | "),
            is_text="string" in settings["types"] and "int" not in str(entry.type).split(" | "),
            is_secret=settings["secret"],
            allowed="true or false" if settings["types"] == ("boolean",) else settings["allowed"],
        )
    return table


OPTIONS: Final[Mapping[str, Option]] = _read_table()
"""All options by name."""
