"""Why a member does not follow another, by what it says: the words of errors in `box.info`, and what to do about each.

A table of the texts of Tarantool 2.6 to 3.x and of nodes. `box.info` shows an error's text without its code, so the
text decides. Pure; everything here was said by a server, and is quoted, never trusted.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, NamedTuple

from flowstone.node import rights
from flowstone.observation.finding import Kind, Severity
from flowstone.observation.wording import for_command

QUOTED_MAX: Final = 300
"""Characters of a server's words that are repeated in a sentence; all of them are evidence."""

_ON_NODE: Final = "CALL `box.cfg` with the value that it shows, which keeps the passwords"
"""Setting an empty list first would lose the passwords: a node shows URIs without them."""

_ON_TARANTOOL: Final = "`box.cfg{replication = {}}`, then the same value, with passwords"
"""A real server ignores an option that is set to the value that it has."""

END_ONE: Final = (
    "end one of the two processes that run with copies of one data directory; if it shall be a member of its own, "
    "start it with an empty directory"
)


class Between(NamedTuple):
    """Who cannot follow whom, as people call them."""

    follower: str
    master: str
    at: str | None = None
    """Where the master, or another member, can be reached: for commands."""
    follower_at: str | None = None
    """The same of the follower."""
    replicaset: str | None = None
    """The UUID of the set that the follower is of, where it is known."""
    gets_back: bool = False
    """What the follower writes comes to the master, or may."""
    conflicting: tuple[str, ...] = ()
    """Everybody whom a row stops whose key another tuple has."""
    is_node: bool | None = None
    """True if the follower is a node, False if it is a real server; None if that is unknown."""

    @property
    def set_again(self) -> str:
        """Advice to restart replication of the follower."""
        return set_again(is_node=self.is_node)

    @property
    def rejoin(self) -> str:
        """How the follower gets the data anew."""
        command = f"`flowstone rebootstrap DIR {for_command(self.at)}`"
        return f"stop {self.follower}, {command} with its data directory, and start it"


def set_again(*, is_node: bool | None) -> str:
    """Return how to restart replication that has stopped for good; `is_node` is None if that is unknown."""
    how = {
        True: _ON_NODE,
        False: _ON_TARANTOOL,
        None: f"a node: {_ON_NODE}; Tarantool: {_ON_TARANTOOL}",
    }
    return f"set `replication` there again ({how[is_node]})"


class Cause(NamedTuple):
    """What an error's text means."""

    kind: Kind
    severity: Severity
    why: str
    advice: str


class _Rule(NamedTuple):
    text: re.Pattern[str]
    kind: Kind
    tell: Callable[[re.Match[str], Between], tuple[str, str]]
    severity: Severity = Severity.STOPPED


def cause_of(message: str, between: Between, system_message: str | None = None) -> Cause:
    """The first rule that knows the message; one that no rule knows is a cause by itself."""
    text = message if system_message is None else f"{message}: {system_message}"
    if (found := _REGISTERED_WITH.search(text)) and between.replicaset not in (None, found["theirs"]):
        return Cause(Kind.WRONG_CLUSTER, Severity.STOPPED, *_another_set_there(found["theirs"], between))
    for rule in _RULES:
        if match := rule.text.search(text):
            return Cause(rule.kind, rule.severity, *rule.tell(match, between))
    return Cause(
        Kind.REPLICATION_STOPPED,
        Severity.STOPPED,
        f"{between.follower} says: {quoted(text)}",
        f"see the log of {between.follower} around that moment; when the cause is gone, {between.set_again}",
    )


def log_not_written(between: Between) -> Cause:
    """For a link that is stopped and has no message: real servers take an applier down so when their log fails."""
    why = (
        f"{between.follower} says nothing, as a real server does whose own log could not be written: its disk is full, "
        f"or failing"
    )
    return Cause(Kind.DISK_FULL, Severity.STOPPED, why, _free_space(between))


def quoted(text: str) -> str:
    """As much of a server's words as a sentence bears, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= QUOTED_MAX else f"{line[:QUOTED_MAX]}…"


def conflict_in(message: str) -> tuple[str, str] | None:
    """The names of the index and of the space of a duplicate key."""
    match = _DUPLICATE.search(message)
    return (match["index"], match["space"]) if match is not None else None


def _duplicate_key(match: re.Match[str], between: Between) -> tuple[str, str]:
    index, space, rows = match["index"], match["space"], match["rows"]
    told = f": {quoted(rows)}" if rows else ""
    why = (
        f"a row that came from {between.master} has a key that another tuple already has "
        f"in index {index!r} of space {space!r}{told}; both sides have written the same key"
    )
    return why, conflict_advice(between)


def conflict_advice(between: Between, remove: str = "") -> str:
    """How the two get the same tuple; `remove` is the call that takes away the follower's.

    A delete is a row like any other: where the master gets it, its tuple goes, too.
    """
    if not between.gets_back:
        # A key may hold anything: one with a backquote would end the command, and begin another.
        how = f"`{remove}`" if remove and "`" not in remove else "delete the tuple that is in the way"
        return (
            f"decide which of the two is right. If {between.master}'s: on {between.follower}, {how}, then "
            f"{between.set_again}. If {between.follower}'s: set `replication_skip_conflict` there, then `replication` "
            f"again, until the row is passed, which drops it"
        )
    everybody = " and ".join(dict.fromkeys((between.follower, between.master, *between.conflicting)))
    return (
        f"decide which of the two is right, and delete neither yet: {between.master} gets what {between.follower} "
        f"writes, so a delete would take the tuple of both. On {everybody}: "
        f"`box.cfg{{replication_skip_conflict = true}}`, then {set_again(is_node=None)}: each drops the row that it "
        f"does not take. When all follow again, set `replication_skip_conflict` back to false. Then, on a member that "
        f"has the wrong tuple, `replace` the right one (where their primary keys differ, delete the wrong one there "
        f"first): all get it"
    )


def _log_gap(match: re.Match[str], between: Between) -> tuple[str, str]:
    have, need = match["have"], match["need"]
    why = (
        f"{between.master} has deleted the logs that {between.follower} needs: "
        f"{between.follower} has everything up to {have}, and the oldest log left there begins at {need}"
    )
    advice = (
        f"restart {between.follower}: it joins anew by itself, if it has no rows that nobody else has. Else save what "
        f"only it has (`flowstone cat`) and {between.rejoin}"
    )
    return why, advice


def _split_brain(match: re.Match[str], between: Between) -> tuple[str, str]:
    said = match["what"].partition("; decide which data")[0]
    why = (
        f"two members have decided about the synchronous queue on their own, and each has rows that contradict the "
        f"other's; {between.follower} says: {quoted(said)}"
    )
    advice = (
        f"decide which side to keep, {between.follower}'s or {between.master}'s. Save what only the other side has "
        f"(`flowstone cat` prints its logs), and let it join anew: stop it, `flowstone rebootstrap DIR URI` with its "
        f"data directory, start it. Then, on the side that was kept, {set_again(is_node=None)}: it has "
        f"stopped for good, too"
    )
    return why, advice


def _wrong_cluster(match: re.Match[str], between: Between) -> tuple[str, str]:
    found = match.groupdict()
    ours, theirs = found.get("ours"), found.get("theirs")
    told = f": {ours} here, {theirs} there" if ours and theirs else ""
    return (
        f"{between.master} is of another replica set{told}",
        f"correct `replication` of {between.follower}; if it shall move over, start it with an empty directory",
    )


def _another_set_there(theirs: str, between: Between) -> tuple[str, str]:
    """Real servers say no more than that they do not know the follower."""
    why = (
        f"who answers at the address of {between.master} is of another replica set, {theirs}; {between.follower} is of "
        f"{between.replicaset}"
    )
    advice = f"start {between.master} again where it was, or correct `replication` of {between.follower}"
    return why, advice


def _not_registered(match: re.Match[str], between: Between) -> tuple[str, str]:
    return (
        (
            f"{between.master} does not have {between.follower} in its `_cluster`: it was expelled, or the row that "
            f"registers it has not come there yet"
        ),
        (
            f"if it was expelled and shall come back: {between.rejoin}. "
            f"Else see why {between.master} lacks rows of the set"
        ),
    )


def _expelled(match: re.Match[str], between: Between) -> tuple[str, str]:
    """All versions stop their appliers with this error; real servers of 2.x keep accepting writes."""
    why = f"{between.follower} was expelled from the replica set: its row of `_cluster` was deleted"
    return why, f"if it shall come back: {between.rejoin}. Else stop it"


def _peer_expelled(match: re.Match[str], between: Between) -> tuple[str, str]:
    why = f"{between.master} is not in `_cluster` of {between.follower}: it was expelled"
    advice = f"stop {between.master}, and take it out of `replication` of {between.follower}; if it shall come back, "
    return (
        why,
        advice + "`flowstone rebootstrap DIR URI` with its data directory and the address of a member, and start it",
    )


def _no_rights(match: re.Match[str], between: Between) -> tuple[str, str]:
    access, kind, name, user = match["access"], match["kind"], match["object"], match["user"]
    what = f"{access.lower()} on {kind}{f' {name!r}' if name else ''}"
    if rights.is_guest(user):
        return (
            f"nobody has logged in, and guests lack the right {what} on {between.master}",
            (
                f"write user:password@… before that address in `replication` of {between.follower}, of a user with the "
                f"role `replication`"
            ),
        )
    return (
        f"user {user!r} lacks the right {what} on {between.master}",
        f"on the master of the set: `box.schema.user.grant({user!r}, 'replication')`; it is tried again by itself",
    )


def _wrong_password(match: re.Match[str], between: Between) -> tuple[str, str]:
    return (
        f"{between.master} refuses the login in `replication` of {between.follower}: {quoted(match[0])}",
        (
            f"correct user and password of that URI on {between.follower}, or set the password on the master of the "
            f"set: `box.schema.user.passwd(user, password)`"
        ),
    )


def _no_such_user(match: re.Match[str], between: Between) -> tuple[str, str]:
    user = match["user"]
    return (
        f"{between.master} has no user {user!r}, which `replication` of {between.follower} names",
        (
            f"correct the URI, or on the master of the set: `box.schema.user.create({user!r}, {{password = …}})` and "
            f"`box.schema.user.grant({user!r}, 'replication')`"
        ),
    )


def _lost_rows(match: re.Match[str], between: Between) -> tuple[str, str]:
    return (
        (
            f"{quoted(match[0])}. It restarted without rows that it had sent (a lost disk, an old backup); what it has "
            f"written since has numbers of lost rows, which are more than are named here then"
        ),
        (
            f"send no writes to {between.master} from now on. If none have come since it is back: put "
            f"{between.follower} into its `replication` and restart it (a server that runs does not take its own "
            f"rows), and it gets them back. Else its new rows have the numbers of lost ones: save them (`flowstone "
            f"cat`), stop it, `flowstone rebootstrap DIR {for_command(between.follower_at)}` with its data directory, "
            f"which names them and asks for --force, and start it"
        ),
    )


def _version(match: re.Match[str], between: Between) -> tuple[str, str]:
    return (
        (
            f"{between.follower} does not understand what {between.master} sends: {quoted(match[0])}. "
            f"It is of an older release, or of another dialect"
        ),
        (
            "compare both releases: replication works between neighbouring release series, and a server of 2.6 takes "
            "neither elections nor PROMOTE. Upgrade the older one"
        ),
    )


def _schema(match: re.Match[str], between: Between) -> tuple[str, str]:
    return (
        f"a row of {between.master} does not fit the schema of {between.follower}: {quoted(match[0])}",
        (
            f"one of them has changed spaces or indexes on its own: make {between.follower}'s schema as it is on "
            f"{between.master} and {between.set_again}, or {between.rejoin}"
        ),
    )


def _foreign_queue(match: re.Match[str], between: Between) -> tuple[str, str]:
    return (
        f"a synchronous row came whose instance does not own the queue: {quoted(match[0])}",
        (
            f"promote one instance only (`flowstone promote URI`), then {between.set_again}; if data contradict each "
            f"other, rejoin one side"
        ),
    )


def _disk(match: re.Match[str], between: Between) -> tuple[str, str]:
    why = (
        f"{between.follower} cannot write its log: {quoted(match[0])}. Its disk is full, or failing; whatever was not "
        f"written has been taken back"
    )
    return why, _free_space(between)


def _free_space(between: Between) -> str:
    return (
        f"free space where {between.follower} has its logs (`flowstone explain DIR` says how much there is), "
        f"then {between.set_again}"
    )


def _starting(match: re.Match[str], between: Between) -> tuple[str, str]:
    return f"{between.master} is starting and answers: not now", "wait; it is tried again by itself"


def _twice(match: re.Match[str], between: Between) -> tuple[str, str]:
    return (
        f"{between.master} has a connection of an instance with the UUID of {between.follower} already",
        f"a connection that was lost goes away within 4 × replication_timeout; if it stays, {END_ONE}",
    )


def _unreachable(match: re.Match[str], between: Between) -> tuple[str, str]:
    return (
        f"{between.follower} cannot reach {between.master}: {quoted(match.string)}",
        (
            f"see whether {between.master} runs and listens, and whether its port is open from {between.follower}; it "
            f"is tried again by itself"
        ),
    )


_UUID: Final = r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
_VCLOCK: Final = r"-?\d+ (?P<{}>\{{[^}}]*\}})"


def _says(text: str) -> re.Pattern[str]:
    return re.compile(text, re.DOTALL)


_DUPLICATE: Final = _says(
    r"Duplicate key exists in unique index ['\"](?P<index>.*?)['\"] in space ['\"](?P<space>.*?)['\"]"
    r"(?: with (?P<rows>old tuple - .*))?"
)

_REGISTERED_WITH: Final = _says(rf"is not registered with replica set (?P<theirs>{_UUID})")

_RULES: Final = (
    _Rule(_says(r"Split-Brain discovered: (?P<what>.*)"), Kind.SPLIT_BRAIN, _split_brain),
    _Rule(_DUPLICATE, Kind.DUPLICATE_KEY, _duplicate_key),
    _Rule(
        _says(rf"Missing \.xlog file between LSN {_VCLOCK.format('have')} and {_VCLOCK.format('need')}"),
        Kind.LOG_GAP,
        _log_gap,
    ),
    _Rule(_says(r"(?:has|had) lost its rows [^;]*"), Kind.LOST_ROWS, _lost_rows),
    _Rule(
        _says(rf"that is another replica set \((?P<theirs>{_UUID}), ours is (?P<ours>{_UUID})\)"),
        Kind.WRONG_CLUSTER,
        _wrong_cluster,
    ),
    _Rule(
        _says(rf"Replica set UUID mismatch: expected (?P<ours>{_UUID}), got (?P<theirs>{_UUID})"),
        Kind.WRONG_CLUSTER,
        _wrong_cluster,
    ),
    _Rule(_says(r"(?:Cluster|Replicaset|Replica set) (?:UUID|name) mismatch[^;]*"), Kind.WRONG_CLUSTER, _wrong_cluster),
    _Rule(
        _says(r"The local instance id \d+ is read-only"),
        Kind.NOT_REGISTERED,
        _expelled,
    ),
    _Rule(
        _says(
            r"_cluster does not have|does not support non-anonymous followers|expelled from its replica set does not"
        ),
        Kind.NOT_REGISTERED,
        _peer_expelled,
    ),
    _Rule(
        _says(r"is not registered with|until join is done|does not know us|Unknown replica"),
        Kind.NOT_REGISTERED,
        _not_registered,
    ),
    _Rule(
        _says(
            r"(?P<access>\w+) access to (?P<kind>[\w ]+?) ['\"](?P<object>[^'\"]*)['\"] "
            r"is denied for user ['\"](?P<user>[^'\"]*)['\"]"
        ),
        Kind.NO_RIGHTS,
        _no_rights,
    ),
    _Rule(_says(r"User ['\"](?P<user>[^'\"]*)['\"] is not found"), Kind.WRONG_PASSWORD, _no_such_user),
    _Rule(
        _says(r"Incorrect password supplied[^;]*|User not found or supplied[^;]*"), Kind.WRONG_PASSWORD, _wrong_password
    ),
    _Rule(
        _says(
            r"Unknown request type \d+|Invalid MsgPack[^;]*|[Dd]ialect 2\.6 does not support \w+"
            r"|unknown space for system view"
        ),
        Kind.VERSION_MISMATCH,
        _version,
    ),
    _Rule(
        _says(
            r"The synchronous transaction queue[^;]*|arrived for an unknown master id[^;]*"
            r"|Found uncommitted sync transactions[^;]*"
        ),
        Kind.FOREIGN_QUEUE,
        _foreign_queue,
    ),
    _Rule(
        _says(r"No space left on device|Failed to write to disk|Disk quota exceeded|File too large"),
        Kind.DISK_FULL,
        _disk,
    ),
    _Rule(
        _says(
            r"Space '[^']*' does not exist|No index [^;]* is defined|Tuple field[^;]*|Tuple doesn't match[^;]*"
            r"|Can't modify (?:space|index)[^;]*|Space '[^']*' already exists"
        ),
        Kind.SCHEMA_MISMATCH,
        _schema,
    ),
    _Rule(_says(r"bootstrap hasn't finished|Please call box\.cfg"), Kind.STARTING, _starting, Severity.WARNING),
    _Rule(_says(r"duplicate connection with the same replica UUID"), Kind.COPIED_INSTANCE, _twice),
    _Rule(
        _says(
            r"(?i:connection refused|connection reset[^;]*|broken pipe|no route to host|network is unreachable"
            r"|is lost[^;]*|said nothing for [^;]*|timed? ?-?out|unexpected EOF[^;,]*|getaddrinfo[^;]*|no answer[^;]*"
            r"|did not answer[^;]*|cannot connect[^;]*|closed the connection[^;]*|closed by[^;]*)"
        ),
        Kind.UNREACHABLE,
        _unreachable,
    ),
)
