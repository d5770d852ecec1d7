"""Replica sets under chaos: how their members start again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.seats import LSN_TWICE, Seats26
from tests.interop.member import RealMember
from tests.interop.versions import Binary, parameters


@pytest.mark.parametrize("binary", parameters("2.6"))
def test_real_replica_that_wrote_an_lsn_twice_rejoins_with_its_id(binary: Binary, tmp_path: Path) -> None:
    seats = Seats26(tmp_path, binary, "ours")
    try:
        replica = next(member for member in seats.members if isinstance(member, RealMember))
        number, before = replica.id, replica.vclock()
        replica.kill()
        with (replica.directory / "member.log").open("a") as log:
            log.write(f"{LSN_TWICE}: replica id: 1, confirmed lsn: 12, new lsn 6\n")
        seats.start(replica)
        assert seats.rejoined == 1
        assert replica.id == number
        replica.wait_vclock(before)
        replica.kill()
        seats.start(replica)
        assert seats.rejoined == 1
    finally:
        seats.close()
