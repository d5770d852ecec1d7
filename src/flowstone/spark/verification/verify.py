"""`flowstone.spark.verify`: compare two sides, given as texts. The job of `flowstone verify`.

Opens the sides and starts Spark if needed; the comparison is `comparison.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from os import PathLike, fspath
from typing import TYPE_CHECKING, Literal

from flowstone.archive.events import ArchiveEvent, Progress
from flowstone.iproto.uri import Uri, parse_uri, with_login
from flowstone.spark.sources.options import AsOf, When, WrongOption, as_of
from flowstone.spark.spark_session import MASTER, session_for
from flowstone.spark.verification.common_position import COMMON
from flowstone.spark.verification.comparison import LIMIT, VerifyOptions, compare, find_position
from flowstone.spark.verification.open_side import open_side
from flowstone.spark.verification.report import VerifyReport
from flowstone.spark.verification.sides import Side

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def verify(
    a: str | PathLike[str],
    b: str | PathLike[str],
    *,
    spark: SparkSession | None = None,
    space: int | str | Collection[int | str] = (),
    system: bool = False,
    at: When | None = None,
    wait: float = 10.0,
    limit: int = LIMIT,
    username: str | None = None,
    password: str | None = None,
    storage_options: Mapping[str, str] | None = None,
    mask_salt: str | None = None,
    raw: bool = False,
    master: str = MASTER,
    conf: Mapping[str, str] | None = None,
    on_step: Callable[[str], object] | None = None,
) -> VerifyReport:
    """Compare two of live node, archive, log directory and lake, byte by byte, at one settled position.

    Definitions are compared as well. First come the counts and digests of each space, then the keys that differ, with
    both values. In a lake, the columns of each row are also checked against its tuple.

    Args:
        a: A live node (`[user[:password]@]host:port`, `unix/:/path`, or a port), a lake (path or URL), or the directory
            of an archive, of logs or of Limestone data.
        b: The other side, in the same forms.
        spark: Session to use. By default, the running session of this process is used, or one is started.
        space: Compare only these spaces and their definitions, by name or id. By default, all user spaces.
        system: Also compare users, privileges, functions and collations.
        at: Compare two logs at this position: a vclock (`"{1: 500}"`), an LSN or epoch, a time with its zone, or
            `"common"`, the newest position that both have. By default, the newest position of either side; a side that
            lacks rows up to it differs.
        wait: Seconds to wait for a side that lags.
        limit: Number of differing keys in the report; all are counted.
        username: User of live nodes whose URI names none.
        password: Password of that user.
        storage_options: Options for a lake in object storage, as in deltalake.
        mask_salt: Salt of the masks of a lake. Without it, fields masked by sha256 with a salt are not compared.
        raw: Compare Tsurugi's tables as storages, with raw keys and values, as in a lake that was mirrored so.
        master: Spark master of a session that is started here.
        conf: Spark settings of a session that is started here.
        on_step: Called with a line of text at each step.

    Returns:
        The report. `is_equal` is the result; `to_json` gives all of it.

    Raises:
        SideError: A side does not exist, or cannot show the position.
        NotSettled: The position is not settled, or lies inside a transaction.
        UnknownSpace: Neither side has a chosen space.
        WrongOption: `at` is not a position.
        SparkUnavailable: Spark cannot be started here.
        FlowstoneError: A side is unreachable or damaged.

    Example:
        report = flowstone.spark.verify("replicator:secret@db1:3301", "/lake/shop", space=["orders"])
        if not report.is_equal:
            for difference in report.differences:
                print(difference.space, difference.key, difference.kind)
    """
    tell = on_step if on_step is not None else lambda text: None
    options = VerifyOptions(
        (space,) if isinstance(space, int | str) else tuple(space), system, _position(at), wait, limit
    )

    def login(text: str) -> Uri:
        return with_login(parse_uri(text), username, password)

    def hear(event: ArchiveEvent) -> None:
        if isinstance(event, Progress):
            tell(f"receiving: {event}")

    with ExitStack() as stack:

        def opened(name: str) -> Side:
            side = open_side(
                name, login=login, storage_options=storage_options, salt=mask_salt, is_raw=raw, on_event=hear
            )
            stack.callback(side.close)
            return side

        sides = opened(fspath(a)), opened(fspath(b))
        # An unreachable side fails here, before Spark starts.
        meeting = find_position(*sides, options, tell)
        tell("starting Spark")
        with session_for(spark, "flowstone verify", master=master, conf=conf) as session:
            return compare(session, *sides, meeting, options, tell=tell)


def _position(at: When | None) -> AsOf | Literal["common"] | None:
    if at is None or at == COMMON:
        return COMMON if at is not None else None
    try:
        return as_of(at)
    except ValueError as error:
        raise WrongOption(f"invalid position: {at!r}", hint=f"{error}, or {COMMON}") from None
