"""Why a member does not follow another: maps error texts in `box.info` to causes (disk full, conflict, …) and advice.

`_RULES` is a table of the texts of Tarantool 2.6 to 3.x and of nodes. `box.info` shows the text of an error without its
code, so rules match the text. Pure. Texts of servers are quoted, never trusted.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, NamedTuple

from flowstone.client import rights
from flowstone.observation.findings.finding import Kind, Severity
from flowstone.observation.findings.wording import call, for_command, set_option, set_replication_again

QUOTED_MAX: Final = 300
"""Limit of a server's text in a sentence, in characters; the evidence contains the whole text."""

_SKIP: Final = "replication_skip_conflict"

END_ONE: Final = (
    "stop one of the two processes that run on copies of one data directory; to make it a separate member, start it "
    "with an empty directory"
)


class Between(NamedTuple):
    """A link that fails, by the labels of its ends, with everything that the advice depends on."""

    follower: str
    master: str
    at: str | None = None
    """Address of the master, for commands."""
    follower_at: str | None = None
    """Address of the follower, for commands."""
    replicaset: str | None = None
    """UUID of the follower's replica set; None if unknown."""
    gets_back: bool = False
    """True if rows of the follower reach the master, or may reach it."""
    conflicting: tuple[str, ...] = ()
    """Labels of all members that a duplicate key has stopped."""

    @property
    def set_again(self) -> str:
        """Advice to restart replication of the follower."""
        return set_again(self.follower, self.follower_at)

    @property
    def rejoin(self) -> str:
        """Advice to rejoin the follower."""
        command = f"`flowstone rebootstrap DIR {for_command(self.at)}`"
        return f"stop {self.follower}, run {command} on its data directory, then start it"


def set_again(label: str | None = None, address: str | None = None) -> str:
    """Return the advice to restart replication that has stopped for good.

    `label` names the member, unless the sentence does; `address` is that of the member, if it is one member.
    """
    place = f" on {label}" if label is not None else ""
    return f"set `replication`{place} again ({set_replication_again(address)})"


class Cause(NamedTuple):
    """The meaning of an error text, and the advice."""

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
    """Return the cause by the first rule that matches the message; an unknown message is a cause of its own."""
    text = message if system_message is None else f"{message}: {system_message}"
    if (found := _REGISTERED_WITH.search(text)) and between.replicaset not in (None, found["theirs"]):
        return Cause(Kind.WRONG_CLUSTER, Severity.STOPPED, *_another_set_there(found["theirs"], between))
    for rule in _RULES:
        if match := rule.text.search(text):
            return Cause(rule.kind, rule.severity, *rule.tell(match, between))
    return Cause(
        Kind.REPLICATION_STOPPED,
        Severity.STOPPED,
        f"{between.follower} reports: {quoted(text)}",
        f"see the log of {between.follower} at that time; after removing the cause, {between.set_again}",
    )


def log_not_written(between: Between) -> Cause:
    """Return the cause of a stopped link without a message: a real server stops so when its own log write fails."""
    why = (
        f"{between.follower} reports no error, as a real server does when it cannot write its own log: its disk is "
        f"full or failing"
    )
    return Cause(Kind.DISK_FULL, Severity.STOPPED, why, _free_space(between))


def quoted(text: str) -> str:
    """Return a server's text on one line, cut to QUOTED_MAX characters."""
    line = " ".join(text.split())
    return line if len(line) <= QUOTED_MAX else f"{line[:QUOTED_MAX]}…"


def conflict_in(message: str) -> tuple[str, str] | None:
    """Return the index and the space of a duplicate key error; None for another error."""
    match = _DUPLICATE.search(message)
    return (match["index"], match["space"]) if match is not None else None


def _duplicate_key(match: re.Match[str], between: Between) -> tuple[str, str]:
    index, space, rows = match["index"], match["space"], match["rows"]
    told = f": {quoted(rows)}" if rows else ""
    why = (
        f"a row from {between.master} has a key that another tuple already has in index {index!r} of space {space!r}"
        f"{told}; both sides have written the same key"
    )
    return why, conflict_advice(between)


def conflict_advice(between: Between, remove: str = "") -> str:
    """Return how to make both members have the same tuple; `remove` is the call that deletes the follower's tuple.

    A delete is replicated like any row: if it reaches the master, it deletes the master's tuple, too.
    """
    if not between.gets_back:
        # A key may contain anything: a backquote in it would end the command and start another one.
        how = f"run `{remove}`" if remove and "`" not in remove else "delete the conflicting tuple"
        at, again = between.follower_at, set_replication_again(between.follower_at)
        return (
            f"decide which tuple is right. If that of {between.master}: on {between.follower}, {how}, then "
            f"{set_again(address=at)}. If that of {between.follower}: skip the row from {between.master}: "
            f"{set_option(at, _SKIP, True)}, then {again}; when it follows, {set_option(at, _SKIP, False)}"
        )
    everybody = " and ".join(dict.fromkeys((between.follower, between.master, *between.conflicting)))
    return (
        f"decide which tuple is right, and delete neither yet: {between.master} receives the rows of "
        f"{between.follower}, so a delete would remove both tuples. On {everybody}: "
        f"{set_option(None, _SKIP, True)}, then {set_replication_again(None)}: each drops the conflicting row. "
        f"When all follow again, on each: {set_option(None, _SKIP, False)}. Then, on a member with the wrong tuple, "
        f"`replace` it with the right one (if their primary keys differ, delete the wrong one first): all members "
        f"receive it"
    )


def _log_gap(match: re.Match[str], between: Between) -> tuple[str, str]:
    have, need = match["have"], match["need"]
    why = (
        f"{between.master} has deleted the logs that {between.follower} needs: "
        f"{between.follower} has all rows up to {have}, and the oldest log of {between.master} starts at {need}"
    )
    advice = (
        f"restart {between.follower}: it rejoins by itself, unless it has rows that no other member has. In that case, "
        f"save these rows (`flowstone cat`) and {between.rejoin}"
    )
    return why, advice


def _split_brain(match: re.Match[str], between: Between) -> tuple[str, str]:
    said = match["what"].partition("; decide which data")[0]
    why = (
        f"two members have settled the synchronous queue independently, and each has rows that contradict the other's; "
        f"{between.follower} reports: {quoted(said)}"
    )
    advice = (
        f"decide which side to keep, {between.follower} or {between.master}. Save the rows that only the other side "
        f"has (`flowstone cat` prints its logs), and rejoin that side: stop it, run `flowstone rebootstrap DIR URI` on "
        f"its data directory, then start it. Then, on the side that you kept, {set_again()}: its "
        f"replication has stopped for good, too"
    )
    return why, advice


def _wrong_cluster(match: re.Match[str], between: Between) -> tuple[str, str]:
    found = match.groupdict()
    ours, theirs = found.get("ours"), found.get("theirs")
    told = f": {ours} here, {theirs} there" if ours and theirs else ""
    return (
        f"{between.master} belongs to another replica set{told}",
        f"correct `replication` of {between.follower}; to move it to the other set, start it with an empty directory",
    )


def _another_set_there(theirs: str, between: Between) -> tuple[str, str]:
    """Explain the error of a real server that does not know the follower and names a replica set that is not ours."""
    why = (
        f"the server at the address of {between.master} belongs to another replica set, {theirs}; {between.follower} "
        f"belongs to {between.replicaset}"
    )
    advice = f"start {between.master} at its address again, or correct `replication` of {between.follower}"
    return why, advice


def _not_registered(match: re.Match[str], between: Between) -> tuple[str, str]:
    return (
        (
            f"`_cluster` of {between.master} has no row for {between.follower}: it was expelled, or {between.master} "
            f"has not received the row yet"
        ),
        (
            f"if it was expelled and should come back: {between.rejoin}. "
            f"Otherwise, check why {between.master} lacks rows of the replica set"
        ),
    )


def _expelled(match: re.Match[str], between: Between) -> tuple[str, str]:
    """All versions stop their appliers with this error; real servers of 2.x keep accepting writes."""
    why = f"{between.follower} was expelled from the replica set: its row of `_cluster` was deleted"
    return why, f"if it should come back: {between.rejoin}. Otherwise, stop it"


def _peer_expelled(match: re.Match[str], between: Between) -> tuple[str, str]:
    why = f"{between.master} is not in `_cluster` of {between.follower}: it was expelled"
    advice = (
        f"stop {between.master}, and remove it from `replication` of {between.follower}; to bring it back, run "
        f"`flowstone rebootstrap DIR URI` on its data directory, with the address of a member, then start it"
    )
    return why, advice


def _no_rights(match: re.Match[str], between: Between) -> tuple[str, str]:
    access, kind, name, user = match["access"], match["kind"], match["object"], match["user"]
    what = f"{access.lower()} access to {kind}{f' {name!r}' if name else ''}"
    if rights.is_guest(user):
        return (
            f"no login was given, and user 'guest' lacks {what} on {between.master}",
            (
                f"write user:password@… before that address in `replication` of {between.follower}, for a user with "
                f"the role `replication`"
            ),
        )
    return (
        f"user {user!r} lacks {what} on {between.master}",
        (
            f"grant the role on the master of the replica set: "
            f"{call(None, 'box.schema.user.grant', user, 'replication')}; {between.follower} retries by itself"
        ),
    )


def _wrong_password(match: re.Match[str], between: Between) -> tuple[str, str]:
    return (
        f"{between.master} rejects the login in `replication` of {between.follower}: {quoted(match[0])}",
        (
            f"correct user and password of that URI on {between.follower}, or set the password on the master of the "
            f"replica set: `box.schema.user.passwd(user, password)`"
        ),
    )


def _no_such_user(match: re.Match[str], between: Between) -> tuple[str, str]:
    user = match["user"]
    return (
        f"{between.master} has no user {user!r}, which `replication` of {between.follower} names",
        (
            f"correct the URI, or, on the master of the replica set, run `box.schema.user.create({user!r}, "
            f"{{password = …}})` and `box.schema.user.grant({user!r}, 'replication')`"
        ),
    )


def _lost_rows(match: re.Match[str], between: Between) -> tuple[str, str]:
    return (
        (
            f"{between.master} {quoted(match[0])}. It restarted without rows that it had sent (a lost disk, an old "
            f"backup). If it has written rows since, these reuse the LSNs of lost rows, and more rows are lost than "
            f"named here"
        ),
        (
            f"send no writes to {between.master} from now on. If it has accepted none since its restart, add "
            f"{between.follower} to its `replication` and restart it to get the lost rows back (a running server does "
            f"not accept its own rows). Otherwise its new rows reuse the LSNs of lost ones: save the new rows "
            f"(`flowstone cat`), stop {between.master}, run `flowstone rebootstrap DIR "
            f"{for_command(between.follower_at)}` on its data directory (it lists these rows and asks for --force), "
            f"then start it"
        ),
    )


def _version(match: re.Match[str], between: Between) -> tuple[str, str]:
    return (
        (
            f"{between.follower} does not understand the rows or requests of {between.master}: {quoted(match[0])}. "
            f"It runs an older release, or another dialect"
        ),
        (
            "compare both releases: replication works between neighbouring release series, and 2.6 supports neither "
            "elections nor PROMOTE. Upgrade the older one"
        ),
    )


def _schema(match: re.Match[str], between: Between) -> tuple[str, str]:
    return (
        (
            f"a row of {between.master} does not fit the schema of {between.follower}: {quoted(match[0])}; spaces or "
            f"indexes were changed on one of them only"
        ),
        (
            f"make the schema of {between.follower} the same as that of {between.master} and {between.set_again}, or "
            f"{between.rejoin}"
        ),
    )


def _foreign_queue(match: re.Match[str], between: Between) -> tuple[str, str]:
    return (
        (
            f"{between.follower} received a synchronous row of an instance that does not own the synchronous queue: "
            f"{quoted(match[0])}"
        ),
        (
            f"promote only one instance (`flowstone promote URI`), then {between.set_again}; if the data of the two "
            f"contradict each other, rejoin one side"
        ),
    )


def _disk(match: re.Match[str], between: Between) -> tuple[str, str]:
    why = (
        f"{between.follower} cannot write its log: {quoted(match[0])}. Its disk is full or failing; rows that could "
        f"not be written were rolled back"
    )
    return why, _free_space(between)


def _free_space(between: Between) -> str:
    return (
        f"free space on the disk with the logs of {between.follower} (`flowstone explain DIR` shows how much is left), "
        f"then {between.set_again}"
    )


def _starting(match: re.Match[str], between: Between) -> tuple[str, str]:
    why = f"{between.master} is starting and does not accept followers yet"
    return why, f"wait; {between.follower} retries by itself"


def _twice(match: re.Match[str], between: Between) -> tuple[str, str]:
    return (
        f"{between.master} already has a connection from an instance with the UUID of {between.follower}",
        f"wait 4 × replication_timeout, until a lost connection is closed; if the error persists, {END_ONE}",
    )


def _unreachable(match: re.Match[str], between: Between) -> tuple[str, str]:
    return (
        f"{between.follower} cannot reach {between.master}: {quoted(match.string)}",
        (
            f"check whether {between.master} runs and listens, and whether its port is open from {between.follower}; "
            f"{between.follower} retries by itself"
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
            r"|is lost[^;]*|sent nothing for [^;]*|timed? ?-?out|unexpected EOF[^;,]*|getaddrinfo[^;]*|no answer[^;]*"
            r"|did not answer[^;]*|cannot connect[^;]*|closed the connection[^;]*|closed by[^;]*)"
        ),
        Kind.UNREACHABLE,
        _unreachable,
    ),
)
