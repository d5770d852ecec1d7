"""The options of a node: names, defaults and checks of `box.cfg`, and a few of our own.

`Configuration` is the one table of them: whoever adds an option adds one field, and the command line, the environment,
the file, reloading and the documentation know it. Values are checked as a Tarantool checks them, with its error (59);
whether an option may change while the node runs is Tarantool's choice, too (error 58). Applies nothing itself.
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
from flowstone.replication import quorum
from flowstone.replication.election import Config as ElectionConfig
from flowstone.replication.election import Fencing, Mode

LOOPBACK: Final = "127.0.0.1"
ANY_ADDRESS: Final = "0.0.0.0"
"""Where `*` listens: reaching others takes asking for it."""

WAL_MODES: Final = ("none", "write", "fsync")
DIALECTS: Final = ("2.6", "2.11")
LOG_FORMATS: Final = ("plain", "json")
STRATEGIES: Final = ("auto", "config", "supervised", "legacy")
ELECTION_MODES: Final = tuple(mode.value for mode in Mode)
FENCING_MODES: Final = tuple(mode.value for mode in Fencing)

A_UUID: Final = "a UUID such as 5313b8d5-82a0-4fb4-a280-9e8bf79e1cac, with its dashes"

DEATH_FACTOR: Final = 4
"""A leader that is silent for so many heartbeats counts as dead."""

TOO_LONG_THRESHOLD: Final = 0.5

QUORUM_2_6: Final = 1
"""What 2.6 takes where no quorum was given: the owner of the queue itself is enough."""


# --- the table ---------------------------------------------------------------------------------------------


def _no_listen_address(value: str) -> str | None:
    try:
        listen_uri(value)
    except UriError:
        return "expected host:service or /unix.socket"
    return None


def listen_uri(text: str) -> Uri:
    """Where `listen` asks to listen: `host:port`, `*:port` for all interfaces, a bare port for loopback, `unix/:/path`.

    Port 0 means any that is free.
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
    """Options that `Node` takes as keywords, as type checkers see them. `Configuration` describes and checks them.

    Wider than the fields of `Configuration` where `box.cfg` is: a port for `listen`, one URI for `replication`.
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
    wal_cleanup_delay: float
    dialect: Literal["2.6", "2.11"] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """What a node was told. Make it with `configure`, which checks; `changed` gives another one for a running node."""

    listen: str | None = _option(
        "string, number",
        None,
        "Address to listen on: host:port, a port, unix/:/path.",
        _no_listen_address,
        dynamic=True,
        allowed="host:port, unix/:/path, or a port; ports end at 65535",
    )
    work_dir: str = _option("string", "data", "Directory of the node's files.")
    memtx_dir: str = _option("string", ".", "Directory of snapshots, from work_dir.")
    wal_dir: str = _option("string", ".", "Directory of logs, from work_dir.")
    wal_mode: str = _option(
        "string",
        "write",
        "When a change is answered: none (no log), write (survives the process), fsync (survives power loss).",
        not_among(WAL_MODES),
        allowed=f"one of {', '.join(WAL_MODES)}",
    )
    wal_max_size: int = _option(
        "number",
        256 * 1024 * 1024,
        "Bytes after which a new log begins.",
        not_above(1, "the value must be greater than one"),
    )
    wal_queue_max_size: int = _option(
        "number",
        16 * 1024 * 1024,
        "Bytes that may wait for the log before writers have to.",
        below(0, "wal_queue_max_size must be >= 0"),
        dynamic=True,
    )
    checkpoint_interval: float = _option("number", 3600.0, "Seconds between snapshots; 0: none by time.", dynamic=True)
    checkpoint_count: int = _option(
        "number",
        2,
        "Snapshots that are kept, with the logs behind them.",
        below(1, "the value must not be less than one"),
        dynamic=True,
    )
    checkpoint_wal_threshold: int = _option(
        "number", 10**18, "Bytes of log after which a snapshot is made.", dynamic=True
    )
    force_recovery: bool = _option(
        "boolean", False, "Start over damage in snapshots and logs, and say what was skipped.", dynamic=True
    )
    read_only: bool = _option("boolean", False, "Refuse changes by clients.", dynamic=True)
    instance_uuid: str | None = _option(
        "string", None, "Name of this instance; default: a new one, or that of the snapshot.", no_uuid, allowed=A_UUID
    )
    replicaset_uuid: str | None = _option(
        "string", None, "Name of the replica set; default: a new one, or that of the snapshot.", no_uuid, allowed=A_UUID
    )
    net_msg_max: int = _option(
        "number",
        768,
        "Requests of one connection that may be in flight; the next ones wait.",
        below(2, "minimal value is 2"),
        dynamic=True,
    )
    connections_max: int = _option(
        "number",
        10000,
        "Connections at a time; more are closed at once.",
        below(1, "the value must not be less than one"),
        dynamic=True,
    )
    packet_size_max: int = _option(
        "number",
        128 * 1024 * 1024,
        "Bytes of the largest packet.",
        outside(1024, INTEGER_MAX, "specified value is out of bounds"),
        dynamic=True,
    )
    guest_packet_size_max: int = _option(
        "number",
        64 * 1024,
        "Bytes of the largest packet of a client that has not authenticated.",
        outside(1024, INTEGER_MAX, "specified value is out of bounds"),
        dynamic=True,
    )
    output_size_max: int = _option(
        "number",
        1024 * 1024,
        "Bytes of replies that wait for one connection; its next requests wait until they are sent.",
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
        "Bytes of the largest tuple.",
        not_above(0, "specified value is out of bounds"),
        dynamic=True,
    )
    log_level: str = _option(
        "number, string",
        "info",
        "What is logged: fatal, error, warn, info, verbose, debug, or 0 to 7.",
        no_log_level,
        dynamic=True,
    )
    log_format: str = _option(
        "string",
        "plain",
        "How lines of the log look: plain, or json, an object per line.",
        not_among(LOG_FORMATS, "expected 'plain' or 'json'"),
        dynamic=True,
    )
    too_long_threshold: float = _option(
        "number", TOO_LONG_THRESHOLD, "Seconds from which on a request or a write to the log is logged.", dynamic=True
    )
    ssl_cert_file: str | None = _option("string", None, "Certificate for TLS on the listener, with its chain (PEM).")
    ssl_key_file: str | None = _option("string", None, "Private key of the certificate (PEM).")
    ssl_password: str | None = _option(
        "string",
        None,
        "What opens the private key. Better in FLOWSTONE_SSL_PASSWORD: command lines can be seen by others.",
        secret=True,
    )
    ssl_ca_file: str | None = _option("string", None, "Authorities whose clients are let in (PEM).")
    ssl_ciphers: str | None = _option("string", None, "Ciphers for TLS up to 1.2, as OpenSSL lists them.")
    replication: tuple[str, ...] = _option(
        "string, number, table",
        (),
        "Whom to follow: URIs such as user:password@host:port, separated by commas; ?transport=ssl&ssl_ca_file=…"
        " for TLS. Passwords are better in FLOWSTONE_REPLICATION or the file: command lines can be seen by others.",
        no_upstreams,
        dynamic=True,
        shown=False,
    )
    replication_timeout: float = _option(
        "number",
        1.0,
        "Seconds between heartbeats; a peer that is silent for four times as long is disconnected.",
        not_above(0, "the value must be greather than 0"),
        dynamic=True,
    )
    replication_connect_timeout: float = _option(
        "number",
        30.0,
        "Seconds that a start waits for peers to answer.",
        not_above(0, "the value must be greather than 0"),
        dynamic=True,
    )
    replication_connect_quorum: int | None = _option(
        "number",
        None,
        "Peers that must answer, and be caught up with before changes are accepted; default: all (2.6 and legacy).",
        below(0, "the value must be greater or equal to 0"),
        dynamic=True,
    )
    replication_sync_lag: float = _option(
        "number",
        10.0,
        "Seconds behind a peer that count as caught up.",
        not_above(0, "the value must be greater than 0"),
        dynamic=True,
    )
    replication_sync_timeout: float = _option(
        "number",
        300.0,
        "Seconds that a start waits to catch up; then it goes on as an orphan, which is read-only.",
        not_above(0, "the value must be greater than 0"),
        dynamic=True,
    )
    replication_skip_conflict: bool = _option(
        "boolean", False, "Leave out replicated rows whose unique key is taken, instead of stopping.", dynamic=True
    )
    replication_anon: bool = _option(
        "boolean",
        False,
        "Follow without being a member: read-only, uses no id; can be switched off later.",
        dynamic=True,
    )
    bootstrap_strategy: str = _option(
        "string",
        "auto",
        "How the first data is found (2.11): auto, legacy (replication_connect_quorum), config, supervised.",
        not_among(STRATEGIES, f"the value should be one of the following: {', '.join(map(repr, STRATEGIES))}"),
        dynamic=True,
    )
    bootstrap_leader: str | None = _option(
        "string",
        None,
        "With the strategy config: whose data to take, by URI, UUID or name.",
        dynamic=True,
        shown=False,
    )
    replication_synchro_quorum: int | str | None = _option(
        "string, number",
        None,
        "Members that must have a synchronous transaction before it is committed: a number, or (2.11) a formula of N,"
        f" the number of members; default: {quorum.DEFAULT} (2.11), {QUORUM_2_6} (2.6).",
        no_quorum,
        dynamic=True,
    )
    replication_synchro_timeout: float = _option(
        "number",
        5.0,
        "Seconds that a synchronous transaction waits for its quorum before it is rolled back.",
        not_above(0, "the value must be greater than zero"),
        dynamic=True,
    )
    replication_synchro_queue_max_size: int = _option(
        "number",
        16 * 1024 * 1024,
        "Bytes of transactions that may wait for a quorum before writers have to; 0: any number.",
        below(0, "replication_synchro_queue_max_size must be >= 0"),
        dynamic=True,
    )
    election_mode: str = _option(
        "string",
        "off",
        "Part in elections (2.11): off, voter (elects others), candidate (may lead), manual (leads when promoted).",
        no_mode_of(ELECTION_MODES),
        dynamic=True,
    )
    election_timeout: float = _option(
        "number",
        5.0,
        "Seconds that an election may take before the next one (2.11).",
        not_above(0, "the value must be a positive number"),
        dynamic=True,
    )
    election_fencing_mode: str = _option(
        "string",
        "soft",
        "When a leader without a quorum of connected members resigns (2.11): off (never), soft, strict (before others"
        " can elect another).",
        no_mode_of(FENCING_MODES),
        dynamic=True,
    )
    wal_cleanup_delay: float = _option(
        "number",
        14400.0,
        "Seconds after a start before logs are deleted, if not all members have come back by then.",
        below(0, "value must be >= 0"),
        dynamic=True,
    )
    dialect: str | None = _option(
        "string",
        None,
        "Age of server to be: 2.6 or 2.11; chosen when the data is born (default 2.11).",
        not_among(DIALECTS, f"expected one of {', '.join(DIALECTS)}"),
    )

    def changed(self, options: Mapping[str, Any]) -> Configuration:
        """This one with `options` set, all of them checked; error 58 for what a running node cannot change."""
        accepted = _accepted(options)
        if "replication" in accepted:
            # Whoever sets what `box.cfg` shows means what is there, with the secrets that it does not show.
            known = {parse_uri(uri).shown: uri for uri in self.replication}
            accepted["replication"] = tuple(known.get(uri, uri) for uri in accepted["replication"])
        fixed = [name for name, value in accepted.items() if not self._can_become(name, value)]
        if fixed:
            hint = f"restart the node to change {', '.join(fixed)}"
            raise errors.ReloadCfg(f"Can't set option '{fixed[0]}' dynamically", hint=hint)
        return _consistent(replace(self, **accepted))

    @property
    def directories(self) -> tuple[str, str]:
        """Directories of snapshots and of logs."""
        memtx_dir, wal_dir = (
            posixpath.normpath(posixpath.join(self.work_dir, place)) for place in (self.memtx_dir, self.wal_dir)
        )
        return memtx_dir, wal_dir

    def _can_become(self, name: str, value: Any) -> bool:
        return OPTIONS[name].is_dynamic or value == getattr(self, name)

    def check_dialect(self, dialect: Dialect) -> None:
        """Error 59 for what `dialect`, which may be known from the data only, does not have."""
        if dialect is not Dialect.V2_6:
            return
        if isinstance(self.replication_synchro_quorum, str):
            hint = "dialect 2.6 has no formulas: give a number"
            raise incorrect("replication_synchro_quorum", "should be of type number", hint=hint)
        if self.election_mode != Mode.OFF.value:
            hint = "dialect 2.6 has no elections: leave it out, or begin new data with dialect 2.11"
            raise incorrect("election_mode", "unexpected option", hint=hint)

    def synchro_quorum(self, dialect: Dialect, members: int) -> int:
        """How many members make a synchronous transaction a fact, in a replica set with so many registered ones."""
        self.check_dialect(dialect)
        return quorum.Quorum(self._quorum(dialect)).of(members)

    def _quorum(self, dialect: Dialect) -> int | str:
        if self.replication_synchro_quorum is not None:
            return self.replication_synchro_quorum
        return QUORUM_2_6 if dialect is Dialect.V2_6 else quorum.DEFAULT

    def election(self, dialect: Dialect) -> ElectionConfig:
        """What is said of elections; 2.6 has none."""
        self.check_dialect(dialect)
        return ElectionConfig(
            mode=Mode(self.election_mode),
            election_timeout=self.election_timeout,
            death_timeout=DEATH_FACTOR * self.replication_timeout,
            fencing=Fencing(self.election_fencing_mode),
        )

    def shown(self, dialect: Dialect) -> dict[str, Any]:
        """What `box.cfg` shows: options that are set, without secrets."""
        chosen = replace(self, replication_synchro_quorum=self._quorum(dialect))
        given = {name: option.shown(getattr(chosen, name)) for name, option in OPTIONS.items() if not option.is_secret}
        return {name: value for name, value in given.items() if value not in (None, [])}

    def differences(self, other: Configuration) -> list[str]:
        """Names of the options that `other` has other values for, in the order of the table."""
        return [name for name in OPTIONS if getattr(self, name) != getattr(other, name)]


def configure(options: Mapping[str, Any]) -> Configuration:
    """The configuration that `options` ask for; None and the empty string mean an option's default."""
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
    if configuration.replication_anon and configuration.election_mode != Mode.OFF.value:
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
"""Every option by its name."""
