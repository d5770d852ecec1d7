"""Random replica sets as reported by their servers: any topology, any unreachable servers, and lasting lag.

`answers` draws the answers to a survey. It draws only what servers can report: each restriction says why in a comment.
Rows that a member lacks have been missing for LONG seconds, so that reports must explain them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final, TypeVar

from hypothesis import strategies as st

from flowstone.observation.report import Report, Unreachable
from tests.observation.reports import address, downstream, report, upstream, uuid

T = TypeVar("T")

LONG: Final = 60.0
EXPELLED: Final = 8
ANONYMOUS: Final = 9
"""Numbers of the servers that are not members.

The expelled server reports its old id, the anonymous replica the id 0.
"""

REFUSED: Final = "connection refused"
LOADING: Final = "Instance bootstrap hasn't finished yet"
DENIED: Final = "Execute access to function 'box.info' is denied for user 'guest'"
SILENT: Final = "no answer within 3 s"

ANSWERS: Final = frozenset({"running", "orphan", "loading"})
TROUBLED: Final = ("orphan", "loading", REFUSED, LOADING, DENIED, SILENT)
"""The answer for a stopped server: the status of its report, or the reason why there is none."""

FOLLOWED: Final = frozenset({"running", "orphan", DENIED, SILENT})
"""States in which a server may have followers. A stopped or loading one has had none for long."""

WORKING: Final = ("follow", "sync")
CONNECTING: Final = ("connect", "connected", "auth", "ready")
BROKEN: Final = (
    ("disconnected", "connect, called on fd 9: Connection refused"),
    ("disconnected", None),
    ("loading", LOADING),
    ("stopped", "Duplicate key exists in unique index 'pk' in space 'ledger'"),
    ("stopped", "some unknown error"),
    ("stopped", None),
    ("connect", "timed out"),
    *((status, None) for status in CONNECTING),
)


class Choices:
    """Makes the choices of one set from a seed: drawing each from Hypothesis would take ten times as long."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._random = Random(seed)
        self._fault_in = self.of((2, 4, 8))
        """In some sets nearly everything works: otherwise members whose only problem is that of another member
        would be rare.
        """

    def __repr__(self) -> str:
        return f"Choices({self._seed})"

    def of(self, options: Sequence[T]) -> T:
        return self._random.choice(options)

    def one_in(self, count: int) -> bool:
        return self._random.randrange(count) == 0

    def is_fault(self) -> bool:
        return self.one_in(self._fault_in)


@dataclass(frozen=True)
class Server:
    """The truth about one server."""

    number: int
    state: str
    vclock: dict[int, int]
    shown_at: str | None
    """The address at which others follow it, as they report it: its own, that of a proxy, or none."""
    is_given: bool
    """True if its own address was passed to `explain`."""

    @property
    def is_member(self) -> bool:
        return self.number not in (EXPELLED, ANONYMOUS)

    def lacks_rows_of(self, other: Server) -> bool:
        return any(lsn > self.vclock[component] for component, lsn in other.vclock.items())


@dataclass(frozen=True)
class Way:
    """The follower has the master in its `replication`."""

    status: str
    message: str | None = None
    is_shown: bool = True
    """True if the master shows the end of a connection that has failed."""


Servers = Mapping[int, Server]
Ways = Mapping[tuple[int, int], Way]


def answers() -> st.SearchStrategy[list[Report | Unreachable]]:
    """Draw the answers of the servers of one replica set, in any state."""
    return _choices().map(_answers)


def answers_in_transit(*, is_whole: bool) -> st.SearchStrategy[list[Report]]:
    """Draw the answers of members that all run and get the rows of all others through links that work.

    Unless the set is healthy, rows are missing: they are in transit, as in any set under writes.
    """
    return _choices().map(lambda choices: _in_transit(choices, is_whole))


def _choices() -> st.SearchStrategy[Choices]:
    return st.integers(0, 2**32 - 1).map(Choices)


def _answers(choices: Choices) -> list[Report | Unreachable]:
    count = choices.of((3, 4, 5))
    members = range(1, count + 1)
    others = [number for number in (EXPELLED, ANONYMOUS) if choices.one_in(5)]
    servers = {number: _server(choices, number, members) for number in (*members, *others)}
    for number in members:
        # A member has all rows that it wrote. If it has lost some, the links of its followers report `lost_rows`; if no
        # link does, the member may have written the rows between its answer and that of the follower.
        servers[number].vclock[number] = max(one.vclock[number] for one in servers.values())
    if EXPELLED in servers:
        # The expelled member lacks the row of its expulsion, written by member 1: with this row it would stop.
        servers[1].vclock[1] = max(servers[1].vclock[1], 1)
        servers[EXPELLED].vclock[1] = 0
    ways = {
        (follower.number, master.number): way
        for follower in servers.values()
        for master in servers.values()
        if (way := _way(choices, follower, master)) is not None
    }
    leader = choices.of((None, None, *members))
    reports = [_report(choices, one, servers, ways, leader) for one in servers.values() if one.state in ANSWERS]
    sides = [peer for each in reports for peer in each.replication if peer.upstream is not None and peer.upstream.peer]
    told = {peer.uuid for peer in sides}
    lost = [
        Unreachable(address=place, reason=one.state, is_denied=one.state == DENIED)
        for one in servers.values()
        if one.state not in ANSWERS
        for place in _places(one, is_told=uuid(one.number) in told)
    ]
    return [*lost, *reports] if choices.one_in(2) else [*reports, *lost]


def _places(one: Server, *, is_told: bool) -> list[str]:
    """Return the addresses at which a server is queried: the given one and, as in a survey, every reported one."""
    given = [address(one.number)] if one.is_given else []
    return list(dict.fromkeys(given + ([one.shown_at] if is_told and one.shown_at is not None else [])))


def _server(choices: Choices, number: int, members: Sequence[int]) -> Server:
    return Server(
        number,
        choices.of(TROUBLED) if choices.is_fault() else "running",
        {component: choices.of((7, 3, 0)) if choices.is_fault() else 10 for component in members},
        choices.of((address(number), address(number), f"proxy{number}:1", None)),
        choices.one_in(2),
    )


def _way(choices: Choices, follower: Server, master: Server) -> Way | None:
    # An anonymous replica rejects followers, and a loading server has no upstreams yet.
    if follower is master or master.number == ANONYMOUS or follower.state in (LOADING, "loading"):
        return None
    if choices.one_in(3):
        return None
    if master.state in FOLLOWED and not choices.is_fault():
        return Way(choices.of(WORKING))
    return Way(*choices.of(BROKEN), is_shown=choices.one_in(2))


def _report(choices: Choices, one: Server, servers: Servers, ways: Ways, leader: int | None) -> Report:
    peers: dict[int, dict[str, Any]] = {}
    for other in servers.values():
        sides = {}
        if (way := ways.get((one.number, other.number))) is not None:
            sides["upstream"] = _upstream(way, one, other)
        back = ways.get((other.number, one.number))
        if back is not None and one.state != "loading" and (shown := _downstream(back, other, one)) is not None:
            sides["downstream"] = shown
        # `box.info.replication` lists members only, even if the server follows another one.
        if other is not one and other.is_member:
            peers[other.number] = sides
    configured = sum("upstream" in sides for sides in peers.values())
    more: dict[str, Any] = {"status": one.state, "ro": choices.one_in(2), "cfg": {}}
    if leader is not None:
        state = "leader" if one.number == leader else "follower"
        more |= {"election": {"state": state, "term": 3, "leader": leader, "vote": leader}}
        # With elections, only the leader is writable.
        more |= {"cfg": {"election_mode": "candidate"}, "ro": state != "leader"}
    if one.number == ANONYMOUS:
        more |= {"id": 0, "cfg": {"replication_anon": True}}
    more["upstreams_configured"] = choices.of((None, configured, configured + 1))
    return report(one.number, one.vclock, peers, **more)


def _upstream(way: Way, one: Server, master: Server) -> dict[str, Any]:
    # A master sends heartbeats even if it has no row to send. If rows are missing for long, or the link does not work,
    # the lag or the time since the last message is as long.
    is_late = way.status not in WORKING or one.lacks_rows_of(master)
    told: dict[str, Any] = {"peer": master.shown_at, "idle": LONG if is_late else 0.1}
    return upstream(master.number, way.status, **told, **({"message": way.message} if way.message is not None else {}))


def _downstream(way: Way, follower: Server, master: Server) -> dict[str, Any] | None:
    if way.status in WORKING:
        # After LONG seconds the follower has acknowledged all rows that it has.
        return downstream(dict(follower.vclock), lag=LONG if follower.lacks_rows_of(master) else 0.001)
    if way.status in CONNECTING or not way.is_shown:
        return None
    return {"status": "stopped", "message": "unexpected EOF when reading from socket"}


def _in_transit(choices: Choices, is_whole: bool) -> list[Report]:
    count = choices.of((3, 4, 5))
    numbers = range(1, count + 1)
    # A ring reaches all members, whatever other links there are.
    links = {(number, number % count + 1) for number in numbers}
    links |= {(f, m) for f in numbers for m in numbers if f != m and choices.one_in(2)}
    vclocks = {
        one: {each: 10 if is_whole or each == one else choices.of((10, 9, 8)) for each in numbers} for one in numbers
    }
    found = []
    for number in numbers:
        peers: dict[int, dict[str, Any]] = {other: {} for other in numbers if other != number}
        for follower, master in sorted(links):
            if follower == number:
                peers[master]["upstream"] = upstream(master)
            if master == number:
                peers[follower]["downstream"] = downstream(vclocks[follower], lag=0.001)
        found.append(report(number, vclocks[number], peers, ro=number != 1))
    return found
