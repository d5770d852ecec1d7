"""The plan of one run, derived from its seed alone: size and settings of the replica set, followers, load and faults.

Each plan enables some faults and workloads and leaves others out: a run with all of them would drown rare combinations.
Knows only names and requirements of faults; `faults.py` implements them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Final

SIZES: Final = {3: 60, 5: 30, 7: 10}
"""Number of members, and its share of runs in percent."""

REPLICATION_TIMEOUTS: Final = {3: (0.5, 1.0, 1.5), 5: (1.0, 1.5, 1.5), 7: (2.0, 2.0, 2.0)}
"""By size: the heartbeats of seven members twice a second would be a third of all traffic."""

NOTICE_TIMEOUTS: Final = 5
"""A leader that has lost its quorum notices within this many replication timeouts and stops deciding.

If it rolled back by `replication_synchro_timeout` earlier, and its successor confirmed the same transaction, that would
be a split brain, as with real servers.
"""

UNFENCED_SECONDS: Final = 60.0
"""The timeout for leaders without fencing: they accept transactions that are never confirmed, beside their successor.
"""

VOTER_SHARE: Final = 0.25
"""Share of runs with candidates in which one member only votes."""

SYNCHRONOUS: Final = ("register", "append", "set", "bank")
WITH_TRANSACTIONS: Final = ("bank",)
"""Workloads that 2.6 does not support over the network."""
ASYNCHRONOUS: Final = ("notes",)

FAULTS_MIN, FAULTS_MAX = 4, 9
"""Minimum and maximum number of fault kinds in a run."""

ANY: Final = "any"
POWER: Final = "fsync"
"""For plans that sync before they acknowledge: others promise nothing about power losses."""
TERMS: Final = "2.11"
"""For plans whose dialect has promotion, and whose queue may change its owner."""
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
"""The sampled kinds of faults, with the plans to which each applies."""

ADDED: Final = {
    "power_loss_in_recovery": POWER,
    "full_for_long": ANY,
    "overtake": TERMS,
}
"""Additional kinds: each is drawn separately, so that a new kind leaves the runs of most seeds unchanged."""

ADDED_SHARES: Final = {"power_loss_in_recovery": 0.2, "full_for_long": 0.2, "overtake": 0.4}
"""The share of applicable plans that have each additional kind."""

FAULTS: Final = SAMPLED | ADDED
"""All kinds of faults."""

LOSES_A_MEMBER: Final = ("expel", "bit_rot", "read_errors")
"""Not if every member writes: the only copy of rows may leave with a member, and the set never converges."""


@dataclass(frozen=True)
class Plan:
    """The parameters of one run. Times are in virtual seconds."""

    seed: int
    size: int
    dialect: str
    election_mode: str
    has_voter: bool
    """True if one of the electing members never leads."""
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
        """True if the synchronous queue may change its owner; otherwise the first member owns it permanently."""
        return self.election_mode != "off"

    @property
    def has_masters(self) -> bool:
        """True if all members write rows of their own, without a quorum."""
        return self.dialect == "2.6" and self.workloads == ASYNCHRONOUS

    @property
    def is_durable(self) -> bool:
        """True if acknowledged writes survive a power loss, not only the death of a process."""
        return self.wal_mode == "fsync"


def plan(seed: int) -> Plan:
    """Return the plan of a seed; the same in every process."""
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
    """Return a timeout long enough for a leader to notice its isolation; longer than any fault if fencing is off."""
    if not planned.has_elections:
        return planned.synchro_timeout
    least = NOTICE_TIMEOUTS * planned.replication_timeout if planned.fencing_mode != "off" else UNFENCED_SECONDS
    return max(planned.synchro_timeout, least)


def _workloads(rng: Random, dialect: str, election_mode: str) -> tuple[str, ...]:
    """Choose one to three workloads that need a quorum, and sometimes one that does not.

    The latter is left out if leaders change: asynchronous rows of a leader that does not know its successor are a split
    brain, which stops replication for good, as designed. In 2.6 all members may write such rows if there are no others.
    """
    if dialect == "2.6" and rng.random() < 0.2:
        return ASYNCHRONOUS
    possible = [name for name in SYNCHRONOUS if dialect != "2.6" or name not in WITH_TRANSACTIONS]
    chosen = rng.sample(possible, rng.randint(1, 3))
    if election_mode == "off" and rng.random() < 0.6:
        chosen += ASYNCHRONOUS
    return tuple(chosen)


def _met(dialect: str, election_mode: str, wal_mode: str) -> tuple[str, ...]:
    """Return the requirements of faults that hold."""
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
