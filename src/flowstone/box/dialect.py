"""The dialect of a node: the server version, protocol version and features that it presents to peers and in files.

Chosen when a replica set is bootstrapped; a node that joins takes it from the greeting of its upstream
(`from_greeting`), and a node that starts again from its files (`node/wal/recovery.py`). `_schema.version` is the
version of the data, which may differ.
"""

from __future__ import annotations

from enum import Enum

from flowstone.iproto.constants import RequestType
from flowstone.iproto.greeting import version_id

_FIRST_OF_2_11 = (2, 6, 1)
"""Elections were added in 2.6.1; an upstream of this version or later gets the newer dialect."""


class Dialect(Enum):
    """The supported dialects. Each value is a value of the option, as in `--dialect 2.11`."""

    V2_6 = "2.6"
    V2_11 = "2.11"

    @property
    def greeting_version(self) -> tuple[int, int, int]:
        return (2, 6, 0) if self is Dialect.V2_6 else (2, 11, 9)

    @property
    def version_text(self) -> str:
        """The version in `Version:` of file headers and in `box.info.version`."""
        return "2.6.0-0-g47aa4e01e" if self is Dialect.V2_6 else "2.11.9-0-g54aebb0960"

    @property
    def version_id(self) -> int:
        return version_id(*self.greeting_version)

    @property
    def schema_version(self) -> tuple[int, int, int]:
        """`_schema.version` of a replica set that is bootstrapped with this dialect."""
        return (2, 3, 1) if self is Dialect.V2_6 else (2, 11, 5)

    @property
    def has_id(self) -> bool:
        """True if IPROTO_ID is a known request; 2.6 replies with error 48."""
        return self is Dialect.V2_11

    @property
    def has_constraints(self) -> bool:
        """True if foreign keys and check functions in a format or in flags are enforced."""
        return self is Dialect.V2_11

    @property
    def protocol_version(self) -> int:
        return 6 if self.has_id else 0

    @property
    def features(self) -> tuple[int, ...]:
        """Features in replies to IPROTO_ID: streams, transactions, errors, watchers, pagination, names, watch once."""
        return (0, 1, 2, 3, 4, 5, 6) if self.has_id else ()

    @property
    def snapshot_states(self) -> tuple[RequestType, ...]:
        """Types of snapshot rows other than tuples, between system and user spaces; 2.6 rejects files with them."""
        return () if self is Dialect.V2_6 else (RequestType.RAFT, RequestType.RAFT_PROMOTE)

    @property
    def has_max_id(self) -> bool:
        """True if `_schema.max_id` determines the id of a new space; otherwise it is the lowest free id."""
        return self is Dialect.V2_6

    @property
    def fills_gaps(self) -> bool:
        """True if updates may write past the end of a tuple; the gap is filled with nils."""
        return self is Dialect.V2_11


def from_greeting(version: tuple[int, int, int]) -> Dialect:
    """Return the dialect for a replica set with a member whose greeting has `version`."""
    return Dialect.V2_6 if version < _FIRST_OF_2_11 else Dialect.V2_11
