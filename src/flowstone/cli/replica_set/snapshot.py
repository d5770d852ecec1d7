"""`flowstone snapshot`: make live servers write a snapshot."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from flowstone.cli.console import FAILED, INTERRUPTED, OK, say
from flowstone.cli.replica_set.members import Json, Password, Uris, Username, Yes, addresses, consent

if TYPE_CHECKING:
    from flowstone.errors import FlowstoneError
    from flowstone.iproto.uri import Uri
    from flowstone.observation.query import Asking
    from flowstone.observation.report import VClock

EXAMPLE = "Example: `TT_CLI_USERNAME=admin TT_CLI_PASSWORD=secret flowstone snapshot --yes 127.0.0.1:3301`"

TIMEOUT_SECONDS: Final = 3600.0
"""Default for one snapshot: a server with much data writes for minutes."""


def snapshot(
    uris: Uris,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=0.1, help="Timeout for each snapshot.")
    ] = TIMEOUT_SECONDS,
    yes: Yes = False,
    username: Username = None,
    password: Password = None,
    as_json: Json = False,
) -> int:
    """Make servers write a snapshot of all their data, one after the other, as `box.snapshot()` does.

    A new snapshot lets a server delete logs that only older snapshots need, and speeds up its next start. If one server
    fails, the others still write theirs.
    """
    from flowstone.cli import event_loop

    wanted = addresses(uris, username, password)
    if not consent(f"write a snapshot at {', '.join(uri.address for uri in wanted)}?", yes=yes):
        return INTERRUPTED
    results = event_loop.run(_all(wanted, timeout))
    if as_json:
        print(json.dumps({"snapshots": results}))
    else:
        for result in results:
            _tell(result)
    return FAILED if any(result["error"] for result in results) else OK


async def _all(uris: Sequence[Uri], timeout: float) -> list[dict[str, Any]]:
    return [await _one(uri, timeout) for uri in uris]


async def _one(uri: Uri, timeout: float) -> dict[str, Any]:
    from flowstone.errors import FlowstoneError
    from flowstone.observation.query import Asking
    from flowstone.outside import production

    asking = Asking(production(), uri)
    begun = time.monotonic()
    vclock, error = None, None
    try:
        await asking.call("box.snapshot", timeout=timeout)
        vclock = await _newest(asking)
    except FlowstoneError as refusal:
        error = _reason(refusal)
    finally:
        await asking.close()
    return {"address": uri.address, "vclock": vclock, "seconds": round(time.monotonic() - begun, 3), "error": error}


def _reason(refusal: FlowstoneError) -> str:
    """Return the server's error, with a hint for system errors, which have no error code and no hint."""
    from flowstone.iproto.errors import TarantoolError

    if not isinstance(refusal, TarantoolError) or refusal.code:
        return str(refusal)
    is_full = os.strerror(errno.ENOSPC) in refusal.message or os.strerror(errno.EDQUOT) in refusal.message
    hint = "free space in its snapshot directory (memtx_dir)" if is_full else "see its log"
    return f"{refusal.message}; {hint}"


async def _newest(asking: Asking) -> VClock | None:
    """Return the vclock of the server's newest snapshot; None if the server does not report it.

    The user may lack the privilege to call `box.info.gc`, or a function of the application may replace it.
    """
    from flowstone.errors import FlowstoneError
    from flowstone.observation.report import vclock_of

    try:
        gc = await asking.call("box.info.gc")
    except FlowstoneError:
        return None
    match gc:
        case {"checkpoints": [*_, {"vclock": vclock}]}:
            return vclock_of(vclock)
    return None


def _tell(result: dict[str, Any]) -> None:
    from flowstone.observation.findings.wording import position

    if result["error"]:
        say(f"flowstone: snapshot failed at {result['address']}: {result['error']}")
    else:
        where = f" at {position(result['vclock'])}" if result["vclock"] is not None else ""
        print(f"{result['address']} wrote a snapshot{where} in {result['seconds']:.1f} s")
