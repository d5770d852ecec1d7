"""A finding: a data directory belongs to an expelled instance, so no server can start from it."""

from __future__ import annotations

from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from flowstone.node.wal.membership_check import check_files
from flowstone.observation.findings.finding import Finding, Kind, Severity
from flowstone.observation.log_directory import Directory
from flowstone.outside import Outside


async def expulsion_findings(outside: Outside, directory: Directory) -> list[Finding]:
    """Return one finding if the logs show that the instance was a member and was expelled.

    Archives and spools contain the files of another instance. Other reasons that prevent a start are not checked.
    """
    if directory.is_archive or directory.has_definitions or directory.unreadable or not directory.listing.snapshots:
        return []
    try:
        # An instance that was never a member may be an anonymous replica, so only former members are reported.
        await check_files(outside, directory.listing, is_anonymous=True, force=True)
    except errors.Cfg as error:
        return [
            Finding(
                kind=Kind.NOT_REGISTERED,
                severity=Severity.STOPPED,
                member=directory.path,
                label=directory.path,
                what=f"no server can start from {directory.path}: its instance was expelled",
                why=f"the row of {directory.instance_uuid} was deleted from `_cluster`",
                advice=f"to rejoin it, run `flowstone rebootstrap {directory.path} URI`, then start it",
                evidence=(error.message,),
                replicaset=directory.replicaset_uuid,
            )
        ]
    except (FlowstoneError, OSError):
        return []  # the garbage collector of a running server may delete a listed log
    return []
