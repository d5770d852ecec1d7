"""What one run is made of, from its seed alone: size and settings of the replica set, its company, load and faults.

Each plan switches on some faults and workloads and leaves others out, so that rare combinations come about that a run
with everything would drown. It knows of faults no more than their names and what they need; `faults.py` has them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Final

SIZES: Final = {3: 60, 5: 30, 7: 10}
"""Members, and in how many of a hundred runs there are so many."""

REPLICATION_TIMEOUTS: Final = {3: (0.5, 1.0, 1.5), 5: (1.0, 1.5, 1.5), 7: (2.0, 2.0, 2.0)}
"""By size: heartbeats of seven members twice a second would be a third of all that a run sends."""

NOTICE_TIMEOUTS: Final = 5
"""So many of these after its quorum is out of reach, a leader has noticed and decides nothing more. One that takes back
by `replication_synchro_timeout` before, what its successor confirms, begins a split brain, as real ones do."""

UNFENCED_SECONDS: Final = 60.0
"""For leaders that do not notice: they go on taking transactions, which nobody confirms, beside their successor."""

VOTER_SHARE: Final = 0.25
"""In how many of the runs with candidates one of the members only votes."""

SYNCHRONOUS: Final = ("register", "append", "set", "bank")
WITH_TRANSACTIONS: Final = ("bank",)
"""For which 2.6 has nothing to offer over the network."""
ASYNCHRONOUS: Final = ("notes",)

FAULTS_MIN, FAULTS_MAX = 4, 9
"""Kinds of faults that one run has."""

ANY: Final = "any"
POWER: Final = "fsync"
"""For plans that sync what they acknowledge: others promise nothing when the power goes."""
TERMS: Final = "2.11"
"""For plans whose dialect knows promotion, and whose queue may change hands."""
SUCCESSION: Final = "2.11, fsync"
"""For plans with both."""

SAMPLED: Final = {
    "kill": ANY,
    "stop": ANY,
    "power_loss": POWER,
    "power_loss_of_all": POWER,
    "power_loss_in_election": SUCCESSION,
    "power_loss_at_confirm": SUCCESSION,
    "crash_in_disk_operation": ANY,
    "cut": ANY,
    "black_hole": ANY,
    "one_way": ANY,
    "partition": ANY,
    "bridge": ANY,
    "depose": TERMS,
    "flapping": ANY,
    "packet_loss": ANY,
    "duplication": ANY,
    "delay": ANY,
    "clog": ANY,
    "slow_disk": ANY,
    "full_disk": ANY,
    "failing_write": ANY,
    "failing_sync": POWER,
    "read_errors": ANY,
    "bit_rot": POWER,
    "clock_jump": ANY,
    "pause": ANY,
    "quorum": ANY,
    "promote": TERMS,
    "join": ANY,
    "expel": ANY,
    "checkpoint": ANY,
    "schema": ANY,
}
"""The kinds of faults of which each plan has some, and for which plans each is."""

ADDED: Final = {
    "power_loss_in_recovery": POWER,
    "full_for_long": ANY,
    "overtake": TERMS,
}
"""Kinds that a plan may have besides: each is drawn by itself, so that one more leaves the runs of most seeds alone."""

ADDED_SHARES: Final = {"power_loss_in_recovery": 0.2, "full_for_long": 0.2, "overtake": 0.4}
"""In how many plans each is, where it may be."""

FAULTS: Final = SAMPLED | ADDED
"""All kinds."""

LOSES_A_MEMBER: Final = ("expel", "bit_rot", "read_errors")
"""Not where every member writes: rows of one that goes for good may be with nobody else, and the set is never one."""


@dataclass(frozen=True)
class Plan:
    """One run, as it is meant to be. Times are virtual seconds."""

    seed: int
    size: int
    dialect: str
    election_mode: str
    has_voter: bool
    """Whether one of those who elect never leads."""
    wal_mode: str
    wal_max_size: int
    checkpoint_interval: float
    replication_timeout: float
    election_timeout: float
    fencing_mode: str
    synchro_timeout: float
    anonymous: int
    listeners: int
    has_archive: bool
    has_limestone: bool
    workloads: tuple[str, ...]
    faults: tuple[str, ...]
    seconds: float

    @property
    def has_elections(self) -> bool:
        """Whether the queue of synchronous transactions may change hands; else the first member has it for ever."""
        return self.election_mode != "off"

    @property
    def has_masters(self) -> bool:
        """Whether all members write, each rows of its own, and nobody waits for a quorum."""
        return self.dialect == "2.6" and self.workloads == ASYNCHRONOUS

    @property
    def is_durable(self) -> bool:
        """Whether what is acknowledged survives a loss of power, and not only the end of a process."""
        return self.wal_mode == "fsync"


def plan(seed: int) -> Plan:
    """The same plan for the same seed, in any process."""
    rng = Random(f"{seed}/plan")
    dialect = rng.choices(["2.11", "2.6"], [75, 25])[0]
    election_mode = rng.choices(["candidate", "manual", "off"], [70, 15, 15])[0] if dialect == "2.11" else "off"
    wal_mode = rng.choices(["fsync", "write"], [80, 20])[0]
    workloads = _workloads(rng, dialect, election_mode)
    size = rng.choices(list(SIZES), list(SIZES.values()))[0]
    planned = Plan(
        seed=seed,
        size=size,
        dialect=dialect,
        election_mode=election_mode,
        has_voter=False,
        wal_mode=wal_mode,
        wal_max_size=rng.choice([4_000, 20_000, 1_000_000]),
        checkpoint_interval=rng.choice([0.0, 0.0, 15.0, 40.0]),
        replication_timeout=rng.choice(REPLICATION_TIMEOUTS[size]),
        election_timeout=rng.choice([1.0, 2.0, 5.0]),
        fencing_mode=rng.choices(["soft", "strict", "off"], [40, 20, 40])[0],
        synchro_timeout=rng.choice([2.0, 5.0, 5.0, 30.0]),
        anonymous=rng.choices([0, 1, 2], [60, 30, 10])[0],
        listeners=rng.choice([0, 1]),
        has_archive=rng.random() < 0.3,
        has_limestone=rng.random() < 0.1,
        workloads=workloads,
        faults=_faults(rng, seed, _met(dialect, election_mode, wal_mode), workloads),
        seconds=60.0,
    )
    has_voter = election_mode == "candidate" and rng.random() < VOTER_SHARE
    return replace(planned, has_voter=has_voter, synchro_timeout=_synchro_timeout(planned))


def _synchro_timeout(planned: Plan) -> float:
    """Where leaders change, long enough for one to notice; longer than any fault where it is told not to resign."""
    if not planned.has_elections:
        return planned.synchro_timeout
    least = NOTICE_TIMEOUTS * planned.replication_timeout if planned.fencing_mode != "off" else UNFENCED_SECONDS
    return max(planned.synchro_timeout, least)


def _workloads(rng: Random, dialect: str, election_mode: str) -> tuple[str, ...]:
    """One to three of those that wait for a quorum, and sometimes one that does not.

    Not where leaders change: asynchronous rows of one that does not know yet that another leads are a split brain,
    which stops replication for good, as it is meant to. In 2.6 those alone may come from all members.
    """
    if dialect == "2.6" and rng.random() < 0.2:
        return ASYNCHRONOUS
    possible = [name for name in SYNCHRONOUS if dialect != "2.6" or name not in WITH_TRANSACTIONS]
    chosen = rng.sample(possible, rng.randint(1, 3))
    if election_mode == "off" and rng.random() < 0.6:
        chosen += ASYNCHRONOUS
    return tuple(chosen)


def _met(dialect: str, election_mode: str, wal_mode: str) -> tuple[str, ...]:
    """What of faults' needs is given."""
    has_terms = dialect == TERMS and election_mode != "off"
    given = {POWER: wal_mode == POWER, TERMS: has_terms, SUCCESSION: has_terms and wal_mode == POWER}
    return (ANY, *(need for need, is_given in given.items() if is_given))


def _faults(rng: Random, seed: int, met: tuple[str, ...], workloads: tuple[str, ...]) -> tuple[str, ...]:
    possible = [name for name, need in SAMPLED.items() if need in met]
    if workloads == ASYNCHRONOUS:
        possible = [name for name in possible if name not in LOSES_A_MEMBER]
    chosen = rng.sample(possible, rng.randint(FAULTS_MIN, FAULTS_MAX))
    added = [name for name in ADDED if Random(f"{seed}/plan/{name}").random() < ADDED_SHARES[name]]
    return (*chosen, *(name for name in added if ADDED[name] in met))
