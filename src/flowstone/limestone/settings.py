"""The settings of a datastore: its directory, its replicas, and what happens if replicas are lost.

Pure. The caller passes the environment as a mapping; it has the variables of the original
(`docs/spec/limestone.md#environment-variables`). Never connects, never opens a file.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypedDict, Unpack, get_args

from flowstone.errors import LocalProtocolError
from flowstone.limestone.format.endpoint import Endpoint
from flowstone.outside import Tls

LOG: Final = logging.getLogger("flowstone.limestone")

OnLost = Literal["block", "degrade", "fail"]
GroupCommit = Literal["local_first", "replica_first", "concurrent"]
SessionClose = Literal["default", "async"]

ENDPOINT: Final = "TSURUGI_REPLICATION_ENDPOINT"
ASYNC_SESSION_CLOSE: Final = "REPLICATION_ASYNC_SESSION_CLOSE"
ASYNC_GROUP_COMMIT: Final = "REPLICATION_ASYNC_GROUP_COMMIT"
RDMA_SLOTS: Final = "REPLICATION_RDMA_SLOTS"
SECRET: Final = "FLOWSTONE_LIMESTONE_SECRET"
"""Specific to Flowstone: the original has no secret. A Flowstone replica requires the same one."""

SPILL: Final = 1 << 20
"""Bytes of a session that a channel buffers before it writes them to its file."""


class SettingsFields(TypedDict, total=False):
    """The fields of Settings besides the path, for calls that take them as keywords."""

    replicas: tuple[Endpoint, ...]
    quorum: int | None
    on_lost: OnLost
    group_commit: GroupCommit
    compatible: bool
    session_close: SessionClose
    spill: int
    no_delay: bool
    send_buffer: int | None
    receive_buffer: int | None
    tls: Tls | None
    secret: str | None


@dataclass(frozen=True)
class Settings:
    """The directory of a store, its replicas and its options.

    Args:
        path: Path of the data directory.
        replicas: Endpoints of the replicas that receive the log.
        quorum: Number of replicas that must acknowledge. By default, all.
        on_lost: What happens if fewer are available: "block" waits for them, "degrade" continues with the available
            ones, "fail" raises and stops the store.
        group_commit: The order of the epoch records here and on the replicas.
        compatible: Send exactly the bytes that the original sends; no replica is reconnected or seeded.
        session_close: Which of the original's two forms of that is sent.
        spill: Bytes of an open session that are kept in memory.
        no_delay: Socket option TCP_NODELAY.
        send_buffer: Size of the send buffer of sockets, in bytes.
        receive_buffer: Size of the receive buffer of sockets, in bytes.
        tls: Certificates, for encrypted endpoints.
        secret: Secret that is shared with the replicas.

    Raises:
        LocalProtocolError: A field has a value that is not allowed.

    Example:
        Settings("/var/lib/shop/log", replicas=(Endpoint.parse("tcp://db2:12346"),), on_lost="degrade")
    """

    path: str
    replicas: tuple[Endpoint, ...] = ()
    quorum: int | None = None
    on_lost: OnLost = "block"
    group_commit: GroupCommit = "local_first"
    compatible: bool = False
    session_close: SessionClose = "default"
    spill: int = SPILL
    no_delay: bool = True
    send_buffer: int | None = None
    receive_buffer: int | None = None
    tls: Tls | None = None
    secret: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("path", "secret"):
            text: object = getattr(self, name)
            if not (isinstance(text, str) and text) and not (name == "secret" and text is None):
                kind = "empty" if text == "" else f"of type {type(text).__name__}"
                raise LocalProtocolError(f"{name} of a datastore cannot be {kind}", hint="pass a string")
        for name, choices in (("on_lost", OnLost), ("group_commit", GroupCommit), ("session_close", SessionClose)):
            if getattr(self, name) not in get_args(choices):
                raise _refused(name, getattr(self, name), f"use one of {', '.join(get_args(choices))}")
        if self.quorum is not None and not 0 <= self.quorum <= len(self.replicas):
            raise _refused("quorum", self.quorum, f"use 0 to {len(self.replicas)}, the number of replicas")
        if len(set(self.replicas)) < len(self.replicas):
            raise LocalProtocolError("duplicate replica", hint="specify each replica once")
        if self.compatible and len(self.replicas) > 1:
            raise LocalProtocolError(
                "compatible mode supports one replica only", hint="unset compatible, or specify one replica"
            )
        if self.compatible and self.secret is not None:
            raise LocalProtocolError("compatible mode does not support a secret", hint="unset compatible or the secret")
        for name in ("spill", "send_buffer", "receive_buffer"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise _refused(name, value, "use 1 or more")

    @property
    def needed(self) -> int:
        """The number of replicas that must acknowledge."""
        return len(self.replicas) if self.quorum is None else self.quorum

    @classmethod
    def from_environment(cls, path: str, environment: Mapping[str, str], **others: Unpack[SettingsFields]) -> Settings:
        """Read the environment variables of the original, and the secret.

        REPLICATION_RDMA_SLOTS is not supported: a warning is logged, and replication uses TCP.

        Args:
            path: Path of the data directory.
            environment: `os.environ` or another mapping.
            others: Fields of Settings, which take precedence.
        """
        found = SettingsFields()
        if ENDPOINT in environment:
            found["replicas"] = (Endpoint.parse(environment[ENDPOINT]),)
        if ASYNC_SESSION_CLOSE in environment:
            found["session_close"] = "async"
        if ASYNC_GROUP_COMMIT in environment:
            found["group_commit"] = "concurrent"
        if RDMA_SLOTS in environment:
            LOG.warning(
                "ignoring %s=%s: RDMA is not supported, replicating over TCP", RDMA_SLOTS, environment[RDMA_SLOTS]
            )
        if SECRET in environment and "secret" not in others:
            found["secret"] = environment[SECRET]
            if not found["secret"]:
                raise LocalProtocolError(f"{SECRET} is empty", hint="unset it if there is no secret")
        return cls(path, **(found | others))


def _refused(name: str, value: object, hint: str) -> LocalProtocolError:
    return LocalProtocolError(f"{name} cannot be {value!r}", hint=hint)
