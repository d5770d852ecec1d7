"""Texts that findings share: commands, positions, counts and durations.

Pure. Everything that a server reported and that becomes part of a command passes `for_command`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Final

from flowstone.observation.findings.finding import Finding, Kind, Severity
from flowstone.observation.replica_set import Member, ReplicaSet
from flowstone.xlog.meta import format_vclock

_SAFE_ADDRESS: Final = re.compile(r"(?!-)[\w.:\[\]%-]+|unix/:[\w./%-]+")
"""Addresses that a shell reads as one plain word, and a command does not read as an option."""


def make(
    replica_set: ReplicaSet,
    kind: Kind,
    severity: Severity,
    member: Member,
    what: str,
    why: str,
    advice: str,
    evidence: Iterable[str],
    *,
    peer: str | None = None,
) -> Finding:
    """Return a finding about a member of a replica set."""
    return Finding(
        kind=kind,
        severity=severity,
        member=member.uuid,
        label=member.label,
        what=what,
        why=why,
        advice=advice,
        evidence=tuple(evidence),
        replicaset=replica_set.uuid,
        peer=peer,
    )


def expel(replica_set: ReplicaSet, member: Member | None) -> str:
    """Return the advice to expel a member, with the command; only a set with a writable member can do it now."""
    when = "" if replica_set.master != "no" else " as soon as a member is writable"
    return f"expel it{when}: {expel_command(replica_set, member)}"


def expel_command(replica_set: ReplicaSet, member: Member | None) -> str:
    """Return the command that expels `member`, addressed to a member that answers."""
    others = [one for one in replica_set.members if one.id and one.report is not None and one is not member]
    at = next((one.address for one in others if one.address is not None), None)
    return f"`flowstone expel {for_command(at)} {member.id if member is not None and member.id else 'ID'}`"


def promote(member: Member) -> str:
    """Return the command that promotes a member."""
    return f"`flowstone promote {for_command(member.address)}`"


def set_option(address: str | None, name: str, value: object) -> str:
    """Return the command that sets an option of the member at `address`."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"`flowstone config {for_command(address)} {shlex.quote(f'{name}={text}')}`"


def set_replication(address: str | None) -> str:
    """Return the command that sets the upstreams of the member at `address`. It replaces the list."""
    return f"`flowstone config {for_command(address)} replication=URI,URI,…` with all upstreams"


def set_replication_again(address: str | None) -> str:
    """Return the command after which the member at `address` retries the upstreams that it has given up."""
    return f"`flowstone config {for_command(address)} --reconnect`"


def call(address: str | None, function: str, *arguments: str) -> str:
    """Return the command that calls a function of the member at `address`. An argument may be any text of a server."""
    words = ["ARGUMENT" if "`" in text else shlex.quote(text) for text in arguments]
    return f"`flowstone call {' '.join((for_command(address), function, *words))}`"


def for_command(address: str | None) -> str:
    """Return the address for use in a command that people copy; `URI` if it is unknown or unsafe in a shell.

    Members report the addresses of each other, and a member may report anything.
    """
    return address if address is not None and _SAFE_ADDRESS.fullmatch(address) else "URI"


def position(vclock: Mapping[int, int]) -> str:
    """Return a vclock as text, such as `{1: 10, 2: 3}`."""
    return format_vclock(vclock)


def rows_text(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def seconds_text(seconds: float) -> str:
    """Return a duration as text: `0.4 s`, `12 s`, `5 min`, `3.1 h`, `4.2 days`."""
    for unit, size in (("days", 86400.0), ("h", 3600.0)):
        if abs(seconds) >= size:
            return f"{seconds / size:.1f} {unit}"
    if abs(seconds) >= 120:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.1f} s" if abs(seconds) < 10 else f"{seconds:.0f} s"


def bytes_text(count: int) -> str:
    """Return a size as text: `512 bytes`, `3.2 MiB`."""
    size = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def capital(text: str) -> str:
    """Return the text with its first letter capitalized."""
    return text[:1].upper() + text[1:]
