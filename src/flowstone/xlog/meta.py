"""The text header of a log file, the file's name, and the text form of vclocks.

Pure functions over bytes and text (`docs/spec/files.md#file-names`, `docs/spec/files.md#text-header`). A vclock here
is a plain mapping of replica id to LSN without zeros; the rules of comparing vclocks are in `replication/vclock.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from flowstone.iproto.constants import VCLOCK_MAX
from flowstone.xlog.errors import DamagedLog, NotALogFile, UnsupportedLogFormat

HEADER_SIZE_MAX = 2048
"""Limit on written headers. A header with two full vclocks stays below the 1858 bytes that all servers read."""

HEADER_READ_SIZE = HEADER_SIZE_MAX + 1024
"""Bytes of a file that `parse` needs: the limit, and slack for unknown keys of newer writers."""

FORMATS = ("0.12", "0.13")
LSN_MAX = (1 << 63) - 1
"""An LSN is a signed 64-bit number in every server."""

Vclock = Mapping[int, int]

_VCLOCK = re.compile(r"\{\s*(?:\d+\s*:\s*\d+\s*(?:,\s*\d+\s*:\s*\d+\s*)*)?\}", re.ASCII)
_COMPONENT = re.compile(r"(\d+)\s*:\s*(\d+)", re.ASCII)
_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


class FileType(Enum):
    """The first line of a log file; RUN, INDEX and VYLOG are vinyl files."""

    XLOG = "XLOG"
    SNAP = "SNAP"
    VYLOG = "VYLOG"
    RUN = "RUN"
    INDEX = "INDEX"

    @property
    def extension(self) -> str:
        return "." + self.value.lower()

    @property
    def has_vclock(self) -> bool:
        """Return False for run and index files of vinyl, which have no position in the log."""
        return self not in (FileType.RUN, FileType.INDEX)


@dataclass(frozen=True)
class Meta:
    """A text header. `vclock` is the position before the first row of an xlog, or of the content of a snap."""

    file_type: FileType
    instance_uuid: str
    vclock: Vclock
    prev_vclock: Vclock | None = None
    version: str = "Flowstone"
    format: str = "0.13"
    other: tuple[tuple[str, str], ...] = field(default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "vclock", without_zeros(self.vclock))
        if self.prev_vclock is not None:
            object.__setattr__(self, "prev_vclock", without_zeros(self.prev_vclock))


def without_zeros(vclock: Vclock) -> dict[int, int]:
    """Return a copy sorted by replica id, without components of 0, which equal missing ones."""
    return {replica_id: lsn for replica_id, lsn in sorted(vclock.items()) if lsn}


def signature(vclock: Vclock) -> int:
    """Return the sum of all components, the local one included; file names hold it."""
    return sum(vclock.values())


def file_name(vclock: Vclock, file_type: FileType) -> str:
    return f"{signature(vclock):020d}{file_type.extension}"


def format_vclock(vclock: Vclock) -> str:
    """Return the text form `{1: 10, 2: 3}`, sorted by id."""
    return "{" + ", ".join(f"{replica_id}: {lsn}" for replica_id, lsn in without_zeros(vclock).items()) + "}"


def parse_vclock(text: str) -> dict[int, int]:
    """Parse the text form `{1: 10, 2: 3}`. Raise ValueError, which says what is wrong, for any other text."""
    if not _VCLOCK.fullmatch(text.strip()):
        raise ValueError(f"{text[:100]!r} is not a vclock")
    vclock: dict[int, int] = {}
    for id_text, lsn_text in _COMPONENT.findall(text):
        if len(id_text) > 2 or (replica_id := int(id_text)) >= VCLOCK_MAX:
            raise ValueError(f"replica id {id_text[:20]} in a vclock is above {VCLOCK_MAX - 1}")
        if len(lsn_text) > 19 or (lsn := int(lsn_text)) > LSN_MAX:
            raise ValueError(f"LSN {lsn_text[:30]} of replica {replica_id} in a vclock does not fit 63 bits")
        if replica_id in vclock:
            raise ValueError(f"replica id {replica_id} occurs twice in a vclock")
        vclock[replica_id] = lsn
    return without_zeros(vclock)


def encode(meta: Meta) -> bytes:
    """Return the header in the layout of a real writer, with the empty line that ends it."""
    lines = [meta.file_type.value, meta.format, f"Version: {meta.version}"]
    lines.append(f"{'Server' if meta.format == '0.12' else 'Instance'}: {meta.instance_uuid}")
    if meta.file_type.has_vclock:
        lines.append(f"VClock: {format_vclock(meta.vclock)}")
    if meta.prev_vclock is not None:
        lines.append(f"PrevVClock: {format_vclock(meta.prev_vclock)}")
    lines.extend(f"{key}: {value}" for key, value in meta.other)
    return ("\n".join(lines) + "\n\n").encode()


def parse(data: bytes, path: str) -> tuple[Meta, int]:
    """Return the header at the start of `data` (the first HEADER_READ_SIZE bytes of a file) and its length.

    `path` is used in messages only.
    """
    file_type, format = _first_lines(data, path)
    end = data.find(b"\n\n", 0, HEADER_READ_SIZE)
    if end < 0:
        if len(data) < HEADER_READ_SIZE:
            raise DamagedLog(path, len(data), "file ends inside its text header")
        raise DamagedLog(path, 0, f"text header does not end within {HEADER_READ_SIZE} bytes")
    known: dict[str, str] = {}
    other: list[tuple[str, str]] = []
    offset = len(file_type.value) + len(format) + 2
    for line in data[offset:end].split(b"\n") if end > offset else ():
        key, value = _split_line(line, path, offset)
        if key not in ("Version", "Instance", "Server", "VClock", "PrevVClock"):
            other.append((key, value))
        elif known.setdefault(key, value) != value:
            raise DamagedLog(path, offset, f"text header has two different {key} lines")
        offset += len(line) + 1
    meta = Meta(
        file_type=file_type,
        instance_uuid=_instance(known, path),
        vclock=_vclock(known, "VClock", path) if file_type.has_vclock or "VClock" in known else {},
        prev_vclock=_vclock(known, "PrevVClock", path) if "PrevVClock" in known else None,
        version=known.get("Version", ""),
        format=format,
        other=tuple(other),
    )
    return meta, end + 2


def _first_lines(data: bytes, path: str) -> tuple[FileType, str]:
    if not data:
        raise NotALogFile(path, "the file is empty")
    first, _, rest = data[:64].partition(b"\n")
    try:
        file_type = FileType(first.decode("ascii"))
    except ValueError:
        raise NotALogFile(path, f"the file starts with {first[:16]!r}") from None
    format_line, newline, _ = rest.partition(b"\n")
    if not newline and len(data) < 64:
        raise DamagedLog(path, len(data), "file ends inside its text header")
    format = format_line[:16].decode("ascii", "replace")
    if format not in FORMATS:
        raise UnsupportedLogFormat(path, format)
    return file_type, format


def _split_line(line: bytes, path: str, offset: int) -> tuple[str, str]:
    try:
        key, colon, value = line.decode().partition(":")
    except UnicodeDecodeError:
        raise DamagedLog(path, offset, "text header is not UTF-8") from None
    if not colon:
        raise DamagedLog(path, offset, f"line {key[:40]!r} of the text header has no colon")
    return key, value.strip()


def _instance(known: Mapping[str, str], path: str) -> str:
    text = known.get("Instance", known.get("Server"))
    if text is None:
        raise DamagedLog(path, 0, "text header has no Instance line")
    if not _UUID.fullmatch(text):
        raise DamagedLog(path, 0, f"Instance {text[:40]!r} in the text header is not a UUID")
    return text.lower()


def _vclock(known: Mapping[str, str], key: str, path: str) -> dict[int, int]:
    if key not in known:
        raise DamagedLog(path, 0, f"text header has no {key} line")
    try:
        return parse_vclock(known[key])
    except ValueError as error:
        raise DamagedLog(path, 0, f"{key} in the text header: {error}") from None
