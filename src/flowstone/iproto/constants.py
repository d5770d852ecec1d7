"""Numbers of the protocol, under Tarantool's own names.

Checked against servers 2.6.0, 2.11.9 and 3.8.0; comments name the release where releases differ.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag


class RequestType(IntEnum):
    """Values of the header key REQUEST_TYPE in requests and rows."""

    OK = 0
    SELECT = 1
    INSERT = 2
    REPLACE = 3
    UPDATE = 4
    DELETE = 5
    CALL_16 = 6
    AUTH = 7
    EVAL = 8
    UPSERT = 9
    CALL = 10
    EXECUTE = 11
    NOP = 12  # a row without a body
    PREPARE = 13
    BEGIN = 14
    COMMIT = 15
    ROLLBACK = 16  # of a stream's transaction; RAFT_ROLLBACK rolls back synchronous transactions
    INSERT_ARROW = 17
    RAFT = 30
    RAFT_PROMOTE = 31
    RAFT_DEMOTE = 32
    RAFT_CONFIRM = 40
    RAFT_ROLLBACK = 41
    PING = 64
    JOIN = 65
    SUBSCRIBE = 66
    VOTE_DEPRECATED = 67
    VOTE = 68
    FETCH_SNAPSHOT = 69
    REGISTER = 70
    JOIN_META = 71
    JOIN_SNAPSHOT = 72
    ID = 73
    WATCH = 74
    UNWATCH = 75
    EVENT = 76
    WATCH_ONCE = 77
    VY_INDEX_RUN_INFO = 100  # in vinyl files only
    VY_INDEX_PAGE_INFO = 101
    VY_RUN_ROW_INDEX = 102
    CHUNK = 128


_LOG_NAMES = {31: "PROMOTE", 32: "DEMOTE", 40: "CONFIRM", 41: "ROLLBACK"}
_TYPE_NAMES = {kind.value: kind.name for kind in RequestType} | _LOG_NAMES


def type_name(code: int) -> str:
    """Return the usual name of a row type: CONFIRM for RAFT_CONFIRM, the number for an unknown type."""
    return _TYPE_NAMES.get(code, str(code))


TYPE_PUSH = 0x80
"""A message that precedes the response to its request."""

TYPE_ERROR = 0x8000
"""Responses of this type or above are errors; the error code is `type - TYPE_ERROR`."""


class Key(IntEnum):
    """Keys of header and body maps."""

    REQUEST_TYPE = 0x00
    SYNC = 0x01
    REPLICA_ID = 0x02
    LSN = 0x03
    TIMESTAMP = 0x04
    SCHEMA_VERSION = 0x05
    SERVER_VERSION = 0x06
    GROUP_ID = 0x07
    TSN = 0x08
    FLAGS = 0x09
    STREAM_ID = 0x0A
    THREAD_ID = 0x0B
    SPACE_ID = 0x10
    INDEX_ID = 0x11
    LIMIT = 0x12
    OFFSET = 0x13
    ITERATOR = 0x14
    INDEX_BASE = 0x15
    FETCH_POSITION = 0x1F
    KEY = 0x20
    TUPLE = 0x21
    FUNCTION_NAME = 0x22
    USER_NAME = 0x23
    INSTANCE_UUID = 0x24
    REPLICASET_UUID = 0x25
    VCLOCK = 0x26
    EXPR = 0x27
    OPS = 0x28
    BALLOT = 0x29
    TUPLE_META = 0x2A
    OPTIONS = 0x2B
    OLD_TUPLE = 0x2C
    NEW_TUPLE = 0x2D
    AFTER_POSITION = 0x2E
    AFTER_TUPLE = 0x2F
    DATA = 0x30
    ERROR_24 = 0x31
    METADATA = 0x32
    BIND_METADATA = 0x33
    BIND_COUNT = 0x34
    POSITION = 0x35
    ARROW = 0x36
    SQL_TEXT = 0x40
    SQL_BIND = 0x41
    SQL_INFO = 0x42
    STMT_ID = 0x43
    REPLICA_ANON = 0x50
    ID_FILTER = 0x51
    ERROR = 0x52
    TERM = 0x53
    VERSION = 0x54
    FEATURES = 0x55
    TIMEOUT = 0x56
    EVENT_KEY = 0x57
    EVENT_DATA = 0x58
    TXN_ISOLATION = 0x59
    VCLOCK_SYNC = 0x5A
    AUTH_TYPE = 0x5B
    REPLICASET_NAME = 0x5C
    INSTANCE_NAME = 0x5D
    SPACE_NAME = 0x5E
    INDEX_NAME = 0x5F
    TUPLE_FORMATS = 0x60
    IS_SYNC = 0x61
    IS_CHECKPOINT_JOIN = 0x62
    CHECKPOINT_VCLOCK = 0x63
    CHECKPOINT_LSN = 0x64


class RaftKey(IntEnum):
    """Keys in the body of a RAFT row."""

    TERM = 0
    VOTE = 1
    STATE = 2
    VCLOCK = 3
    LEADER_ID = 4
    IS_LEADER_SEEN = 5


class BallotKey(IntEnum):
    """Keys in a ballot, with their meaning since 2.6.1. In 2.6.0, 0x01 is IS_RO and 0x04 is IS_LOADING."""

    IS_RO_CFG = 0x01
    VCLOCK = 0x02
    GC_VCLOCK = 0x03
    IS_RO = 0x04
    IS_ANON = 0x05
    IS_BOOTED = 0x06
    CAN_LEAD = 0x07
    BOOTSTRAP_LEADER_UUID = 0x08
    REGISTERED_REPLICA_UUIDS = 0x09
    INSTANCE_NAME = 0x0A


class Flag(IntFlag):
    """Row flags, set only on the last row of a transaction. WAIT_SYNC and WAIT_ACK exist since 2.8.1."""

    COMMIT = 1
    WAIT_SYNC = 2  # the transaction was in the limbo
    WAIT_ACK = 4  # the transaction itself is synchronous


class Feature(IntEnum):
    """Feature ids of the ID request."""

    STREAMS = 0
    TRANSACTIONS = 1
    ERROR_EXTENSION = 2
    WATCHERS = 3
    PAGINATION = 4
    SPACE_AND_INDEX_NAMES = 5
    WATCH_ONCE = 6
    DML_TUPLE_EXTENSION = 7
    CALL_RET_TUPLE_EXTENSION = 8
    CALL_ARG_TUPLE_EXTENSION = 9
    FETCH_SNAPSHOT_CURSOR = 10
    IS_SYNC = 11
    INSERT_ARROW = 12


GROUP_LOCAL = 1
"""GROUP_ID of rows that are never replicated."""

VCLOCK_MAX = 32
"""Number of vclock components: replica ids are 0 to 31, and component 0 counts local rows."""
