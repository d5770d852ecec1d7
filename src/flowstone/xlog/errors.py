"""Errors of log files: one class per kind, with the path and, if there is one, the offset.

Every message says what is wrong and where; `hint` says what to do. A hint to continue despite the error contains
`BY_FORCE`, named after the argument of our readers; commands and nodes replace it with the name of their own option.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flowstone.errors import FlowstoneError

BY_FORCE = "with force"
FORCE_HINT = f"read the rest of the file {BY_FORCE}, or copy the file from another replica"


class XlogError(FlowstoneError):
    """A log file or log directory cannot be used as requested. `offset` counts from the start of the file."""

    def __init__(self, message: str, *, path: str, offset: int | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.path = path
        self.offset = offset


class DamagedLog(XlogError):
    """Bytes at `offset` that no writer leaves, not even one that was killed; `what` says what is wrong."""

    def __init__(self, path: str, offset: int, what: str, *, hint: str = FORCE_HINT) -> None:
        super().__init__(f"{path}: damaged at byte {offset}: {what}", path=path, offset=offset, hint=hint)
        self.what = what


class NotALogFile(XlogError):
    """The file does not start like a Tarantool log file."""

    def __init__(self, path: str, what: str) -> None:
        hint = "log files start with the line XLOG, SNAP, VYLOG, RUN or INDEX; check the path"
        super().__init__(f"{path}: not a log file: {what}", path=path, offset=0, hint=hint)
        self.what = what


class UnsupportedLogFormat(XlogError):
    """The log file has an unknown format version."""

    def __init__(self, path: str, format: str) -> None:
        super().__init__(
            f"{path}: format {format!r} is not supported",
            path=path,
            offset=0,
            hint="supported formats are 0.12 and 0.13 (Tarantool 1.6.8 and later)",
        )
        self.format = format


class BlockTooLarge(XlogError):
    """A block claims more memory than the batch of any writer needs."""

    def __init__(self, path: str, offset: int, size: int, limit: int) -> None:
        super().__init__(
            f"{path}: block at byte {offset} holds {size} bytes: at most {limit} are allowed",
            path=path,
            offset=offset,
            hint="when writing, split the transaction; when reading, the file is damaged",
        )
        self.size = size
        self.limit = limit


class ForeignFile(XlogError):
    """A log was written by an instance other than the owner of the directory."""

    def __init__(self, path: str, instance_uuid: str, expected: str) -> None:
        super().__init__(
            f"{path}: written by instance {instance_uuid}, but the directory belongs to {expected}",
            path=path,
            hint=f"move the file away, or skip it {BY_FORCE}",
        )
        self.instance_uuid = instance_uuid
        self.expected = expected


class LogGap(XlogError):
    """Rows are missing between two positions. `missing` lists (replica id, first LSN, last LSN)."""

    def __init__(
        self,
        path: str,
        have: Mapping[int, int],
        need: Mapping[int, int],
        missing: Sequence[tuple[int, int, int]],
    ) -> None:
        ranges = ", ".join(f"{first}..{last} of replica {replica_id}" for replica_id, first, last in missing)
        super().__init__(
            f"{path}: log has a gap between {_text(have)} and {_text(need)}: LSN {ranges or 'unknown'} missing",
            path=path,
            hint=f"restore the missing .xlog files, or skip the missing rows {BY_FORCE}",
        )
        self.have = dict(have)
        self.need = dict(need)
        self.missing = tuple(missing)


class LsnUsedTwice(XlogError):
    """The LSN of a row is not above the log's LSN for its replica id."""

    def __init__(self, path: str, replica_id: int, lsn: int, known: int) -> None:
        super().__init__(
            f"{path}: LSN {lsn} of replica {replica_id} is used twice: the log is at {known}",
            path=path,
            hint="nothing was written; the caller must number its rows above the log's vclock",
        )
        self.replica_id = replica_id
        self.lsn = lsn
        self.known = known


class WriteFailed(XlogError):
    """A write to disk failed. If `is_usable`, the file ends with a whole block again and can be continued."""

    def __init__(self, path: str, offset: int, cause: OSError, *, is_usable: bool) -> None:
        state = (
            "the file was cut back to its last whole block and can be continued"
            if is_usable
            else "the end of the file is unknown; reopen the file before writing to it"
        )
        super().__init__(
            f"{path}: cannot write at byte {offset}: {cause.strerror or cause}",
            path=path,
            offset=offset,
            hint=state,
        )
        self.errno = cause.errno
        self.is_usable = is_usable


def _text(vclock: Mapping[int, int]) -> str:
    return "{" + ", ".join(f"{replica_id}: {lsn}" for replica_id, lsn in sorted(vclock.items())) + "}"
