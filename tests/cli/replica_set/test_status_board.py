"""The tables of `flowstone status`: complete, not truncated, and safe from control codes sent by a server."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from flowstone.cli.replica_set.status_board import RateWindow, board
from flowstone.observation.replica_set import replica_sets
from flowstone.observation.report import Report, Unreachable
from tests.observation.reports import downstream, report, upstream, uuid


def lines(*answers: Report | Unreachable, width: int = 80) -> list[str]:
    screen = io.StringIO()
    console = Console(file=screen, width=width, highlight=False, markup=False)
    console.print(board(replica_sets(answers), explained="db1:3301"))
    return [line.rstrip() for line in screen.getvalue().splitlines()]


def elected(number: int, peers: dict[int, dict[str, Any]], **more: Any) -> Report:
    election = {"state": "leader" if number == 2 else "follower", "term": 5, "leader": 2, "vote": 2}
    queue = {"len": 3, "owner": 2, "term": 5, "busy": False, "age": 1.25}
    shown = {"election": election, "synchro": {"quorum": 2, "queue": queue}, "cfg": {"election_mode": "candidate"}}
    if number != 2:
        shown |= {"ro": True, "ro_reason": "election"}
    return report(number, {1: 204, 2: 70 if number == 2 else 66}, peers, **(shown | more))


def three() -> list[Report | Unreachable]:
    gc = {
        "vclock": {1: 200},
        "signature": 200,
        "checkpoints": ({"vclock": {1: 204, 2: 60}, "signature": 264},),
        "consumers": (
            {"name": f"replica {uuid(1)}", "vclock": {1: 204, 2: 66}, "signature": 270},
            {"name": f"replica {uuid(3)}", "vclock": {1: 200}, "signature": 200},
        ),
    }
    return [
        elected(1, {2: {"upstream": upstream(2, lag=0.5)}, 3: {"upstream": upstream(3, "disconnected", idle=4000.0)}}),
        elected(
            2,
            {
                1: {"upstream": upstream(1), "downstream": downstream({1: 204, 2: 66})},
                3: {"downstream": {"status": "stopped"}},
            },
            gc=gc,
        ),
        Unreachable(address="db3:3301", reason="cannot connect to db3:3301: connection refused"),
    ]


EXPECTED = """\
• 5e700000-0000-4000-8000-000000000000
  Failover: election, term 5, led by db2:3301
  Master:   single
  Queue:    3 pending, the oldest for 1.2 s; owned by db2:3301, term 5
  ! db3:3301 is unreachable: connection refused

     id  instance  mode     role      why       vclock
  •   1  db1:3301  read     follower  election  {1: 204, 2: 66}
  ★   2  db2:3301  rw       leader              {1: 204, 2: 70}
  •   3  db3:3301  unknown  unknown             {1: 200}

  follower  follows   state           lag  rows   idle
  db1:3301  db2:3301  follow        0.5 s     4  0.1 s
  db1:3301  db3:3301  disconnected      –     –  1.1 h
  db2:3301  db1:3301  follow        0.0 s     0  0.1 s
  db3:3301  db2:3301  stopped           –     –      –

  logs of   rows  snapshots  held by   slowest   lag
  db2:3301    74          1  db3:3301  db3:3301   74

Run flowstone explain db1:3301 for causes and advice.
"""


def test_set_is_shown_in_the_layout_of_tt() -> None:
    assert lines(*three()) == EXPECTED.splitlines()


def test_long_names_wrap_at_80_columns() -> None:
    name = "storage-with-a-name-that-somebody-thought-about-001-a"
    text = lines(report(1, {number: 10**9 + number for number in range(1, 9)}, name=name))
    assert max(map(len, text)) <= 80
    packed = "".join("".join(text).split())
    assert "8:1000000008}" in packed
    assert "db1:3301" in packed
    assert not any("…" in line for line in text)


def test_two_sets_are_shown_one_below_the_other() -> None:
    text = lines(report(1, {1: 5}), report(2, {2: 5}, cluster={"uuid": "other"}))
    assert [line for line in text if line.startswith("•")] == ["• 5e700000-0000-4000-8000-000000000000", "• other"]
    assert not any("explain" in line for line in text)


def test_single_master_without_elections_is_marked_with_a_star() -> None:
    text = lines(report(1, {1: 5}, {2: {"downstream": downstream({1: 5})}}))
    assert next(line.split()[:2] for line in text if "db1:3301" in line) == ["★", "1"]
    assert "  Queue:    unknown (reported since 2.8)" in text


def test_differing_report_of_the_master_follows_a_slash() -> None:
    text = lines(
        report(1, {1: 9}, {2: {"downstream": {"status": "stopped"}}}),
        report(2, {1: 5}, {1: {"upstream": upstream(1)}}),
    )
    assert any("follow/stopped" in line for line in text)


def test_markup_and_control_codes_of_a_server_are_shown_as_text() -> None:
    text = "\n".join(lines(report(1, {1: 5}, name="[red]x[/red]", status="\x1b[2Jgone")))
    assert "[red]x[/red]" in text
    assert "\x1b" not in text


def test_low_terminal_shows_the_number_of_hidden_lines() -> None:
    whole = lines(*three())

    def shown(height: int) -> list[str]:
        console = Console(file=io.StringIO(), width=80, height=height, highlight=False, markup=False)
        window = RateWindow(board(replica_sets(three()), explained="db1:3301"))
        return ["".join(each.text for each in line).rstrip() for line in console.render_lines(window, pad=False)]

    assert shown(len(whole)) == whole
    assert shown(len(whole) - 1) == [
        *whole[:-2],
        "… 2 more lines; enlarge the terminal, or omit --watch",
    ]
