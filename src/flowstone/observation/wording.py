"""How findings say addresses, positions, counts and spans of time, so that all of them say it alike."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from flowstone.observation.finding import Finding, Kind, Severity
from flowstone.observation.replica_set import Member, ReplicaSet
from flowstone.xlog.meta import format_vclock

_SAFE_ADDRESS: Final = re.compile(r"(?!-)[\w.:\[\]%-]+|unix/:[\w./%-]+")
"""What a shell takes for one word that does nothing, and a command for no option."""


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
    """A finding about a member of a set."""
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
    """What takes a member out of its set: a command, by way of one that answers, as soon as somebody can write it."""
    when = "" if replica_set.master != "no" else " as soon as somebody takes writes"
    return f"expel it{when}: {expel_command(replica_set, member)}"


def expel_command(replica_set: ReplicaSet, member: Member | None) -> str:
    others = [one for one in replica_set.members if one.id and one.report is not None and one is not member]
    at = next((one.address for one in others if one.address is not None), None)
    return f"`flowstone expel {for_command(at)} {member.id if member is not None and member.id else 'ID'}`"


def promote(member: Member) -> str:
    """The command that makes a member the one that may write."""
    return f"`flowstone promote {for_command(member.address)}`"


def for_command(address: str | None) -> str:
    """An address as part of a command that people copy; `URI` for one that is not known, or could do more there.

    Addresses are what members tell of each other, and a member may tell anything.
    """
    return address if address is not None and _SAFE_ADDRESS.fullmatch(address) else "URI"


def position(vclock: Mapping[int, int]) -> str:
    """`{1: 10, 2: 3}`"""
    return format_vclock(vclock)


def rows_text(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def seconds_text(seconds: float) -> str:
    """`0.4 s`, `12 s`, `5 min`, `3.1 h`, `4.2 days`."""
    for unit, size in (("days", 86400.0), ("h", 3600.0)):
        if abs(seconds) >= size:
            return f"{seconds / size:.1f} {unit}"
    if abs(seconds) >= 120:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.1f} s" if abs(seconds) < 10 else f"{seconds:.0f} s"


def bytes_text(count: int) -> str:
    """`512 bytes`, `3.2 MiB`."""
    size = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def capital(text: str) -> str:
    """As the beginning of a sentence."""
    return text[:1].upper() + text[1:]
