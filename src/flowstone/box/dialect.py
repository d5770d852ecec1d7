"""The age of server that a node presents: what it says in greetings, understands in requests and writes in files.

Chosen when a replica set is born. `_schema.version` says the age of the data, which may differ.
"""

from __future__ import annotations

from enum import Enum

from flowstone.iproto.constants import RequestType
from flowstone.iproto.greeting import version_id

_FIRST_OF_2_11 = (2, 6, 1)
"""Elections came with 2.6.1; an upstream from then on is met with the newer dialect."""


class Dialect(Enum):
    """Named by what users write: `--dialect 2.11`."""

    V2_6 = "2.6"
    V2_11 = "2.11"

    @property
    def greeting_version(self) -> tuple[int, int, int]:
        return (2, 6, 0) if self is Dialect.V2_6 else (2, 11, 9)

    @property
    def version_text(self) -> str:
        """What stands behind `Version:` in a file's header and in `box.info.version`."""
        return "2.6.0-0-g47aa4e01e" if self is Dialect.V2_6 else "2.11.9-0-g54aebb0960"

    @property
    def version_id(self) -> int:
        return version_id(*self.greeting_version)

    @property
    def schema_version(self) -> tuple[int, int, int]:
        """`_schema.version` of a replica set that is born with this dialect."""
        return (2, 3, 1) if self is Dialect.V2_6 else (2, 11, 5)

    @property
    def has_id(self) -> bool:
        """Whether IPROTO_ID is a known request; 2.6 answers error 48."""
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
        """What the reply to IPROTO_ID lists: streams, transactions, errors, watchers, pagination, names, watch once."""
        return (0, 1, 2, 3, 4, 5, 6) if self.has_id else ()

    @property
    def snapshot_states(self) -> tuple[RequestType, ...]:
        """Rows of a snapshot besides tuples, between system and user spaces; 2.6 refuses a file that has any."""
        return () if self is Dialect.V2_6 else (RequestType.RAFT, RequestType.RAFT_PROMOTE)

    @property
    def has_max_id(self) -> bool:
        """Whether ids of new spaces are counted in `_schema.max_id`; else the lowest free one is taken."""
        return self is Dialect.V2_6

    @property
    def fills_gaps(self) -> bool:
        """Whether updates may write behind the end of a tuple, with nils between."""
        return self is Dialect.V2_11


def from_greeting(version: tuple[int, int, int]) -> Dialect:
    """The dialect for a replica set whose member greets with `version`."""
    return Dialect.V2_6 if version < _FIRST_OF_2_11 else Dialect.V2_11
