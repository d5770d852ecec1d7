"""The feed's values as JSON: exactly the names of the contract."""

from __future__ import annotations

import msgspec

from flowstone.observation.live_transaction import LiveRow, LiveTransaction, TransactionStatus
from flowstone.observation.replica_set import Link, Member
from flowstone.observation.report import Unreachable
from flowstone.web.feed_state import TailState, TransactionBatch, link_state, member_state, to_json


def test_member_has_its_label_and_mode_and_an_error_in_place_of_a_report() -> None:
    silent = Member(uuid="a", id=1, address="db:3301", unreachable=Unreachable(address="db:3301", reason="refused"))
    shown = msgspec.to_builtins(member_state(silent))
    assert (shown["label"], shown["mode"], shown["report"]) == ("db:3301", "unknown", None)
    assert shown["unreachable"]["reason"] == "refused"


def test_link_has_its_rate() -> None:
    shown = msgspec.to_builtins(link_state(Link(follower="a", master="b", status="follow", lag=0.5), 12.0))
    assert (shown["lag"], shown["rows_per_second"]) == (0.5, 12.0)


def test_python_keywords_are_renamed_as_in_the_contract() -> None:
    assert msgspec.to_builtins(TailState(status="following", address="db:3301"))["from"] == "db:3301"
    row = LiveRow(type="INSERT", space="orders", space_id=512, lsn=7, data="{id: 1}")
    one = LiveTransaction(
        replicaset_uuid="s", replica_id=1, lsn=7, tsn=7, at=1.5, status=TransactionStatus.ROLLED_BACK, rows=(row,)
    )
    batch = TransactionBatch(replicaset_uuid="s", transactions=(one,), skipped=3)
    assert msgspec.json.decode(msgspec.json.encode(batch)) == {
        "set": "s",
        "transactions": [
            {
                "set": "s",
                "replica_id": 1,
                "lsn": 7,
                "tsn": 7,
                "at": 1.5,
                "status": "rolled_back",
                "rows": [{"type": "INSERT", "space": "orders", "space_id": 512, "lsn": 7, "data": "{id: 1}"}],
                "more_rows": 0,
            }
        ],
        "skipped": 3,
    }


def test_any_server_report_is_encoded_as_json() -> None:
    strange = Member(uuid="a", id=1, name="x\udcffy", vclock={1: 2})
    text = to_json(member_state(strange))
    assert msgspec.json.decode(text.replace(b"\\udcff", b"?"))["name"] == "x?y"
    assert msgspec.json.decode(text.replace(b"\\udcff", b"?"))["vclock"] == {"1": 2}
    assert to_json({"cfg": {"odd": object}}).startswith(b'{"cfg":{"odd":"<class')
