"""The shop's log is complete and in order, with one sale kept and one cancelled."""

from __future__ import annotations

from pathlib import Path

from flowstone.history.files import find_logs
from flowstone.history.log_reading import Reading
from flowstone.history.records import records
from flowstone.iproto.constants import type_name
from flowstone.outside import production


def test_shop_sells_one_order_and_cancels_one(shop: Path) -> None:
    outside = production()
    reading = Reading(outside, find_logs(outside.disk, [str(shop)]), settled=True)
    rows = list(records(reading.pieces()))
    assert [row.tuple[0] for row in rows if row.space and row.space.name == "orders" and row.tuple] == [101]
    assert reading.report.rows_rolled_back == 3
    control = [type_name(row.row.type) for row in rows if row.space_id is None]
    assert control == ["RAFT", "PROMOTE", "CONFIRM", "ROLLBACK"]
