"""A dashboard for Prometheus and for probes: all servers that it watches, how their logs are followed, and lakes.

What it tells of servers is what each of them would tell of itself; the findings are counted, so that an alert needs no
more than one number.
"""

from __future__ import annotations

from flowstone.observation.finding import Severity
from flowstone.observation.tail import TailStatus
from flowstone.web.feed import Feed
from flowstone.web.feed_state import PipelineTable, SetState, State
from flowstone.web.health import Health
from flowstone.web.metrics import Families, add_reports


class FeedMonitored:
    """`monitoring.Monitored` of a dashboard."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    async def metrics(self) -> Families:
        families, state = Families(), self._feed.state()
        members = [member for one in self._feed.sets for member in one.members]
        answers = [member.report or member.unreachable for member in members]
        add_reports(families, [answer for answer in answers if answer is not None])
        _add_findings(families, state)
        for one in state.sets:
            _add_tail(families, one)
        for table in state.pipeline:
            _add_table(families, table)
        families.gauge("flowstone_dashboard_listeners", "Pages that are told of changes", self._feed.events.listeners)
        return families

    async def health(self) -> Health:
        """That of the dashboard itself: what it sees of others is no reason to start it anew."""
        return Health(state="watching", is_ready=True)


def _add_findings(families: Families, state: State) -> None:
    for severity in Severity:
        count = sum(finding.severity is severity for finding in state.findings)
        families.gauge("flowstone_findings", "What is wrong with the servers watched", count, severity=severity.value)


def _add_tail(families: Families, one: SetState) -> None:
    of = {"replicaset": one.uuid or ""}
    is_following = one.tail.status == TailStatus.FOLLOWING.value
    families.gauge("flowstone_tail_following", "Whether the log of the set is followed", int(is_following), **of)
    families.counter("flowstone_tail_transactions_total", "Transactions seen in the log", one.tail.seen, **of)
    families.gauge("flowstone_tail_rows_per_second", "Rows written in the set", one.tail.rows_per_second, **of)
    families.gauge("flowstone_tail_waiting", "Transactions seen that wait for a quorum", len(one.waiting), **of)


def _add_table(families: Families, table: PipelineTable) -> None:
    of = {"lake": table.lake, "table": table.table}
    age = "How old the newest settled change is that a table has, 0 where it has all there are"
    families.gauge("flowstone_lake_table_age_seconds", age, table.age_seconds, **of)
    families.gauge("flowstone_lake_table_rows", "Rows of a table", table.rows, **of)
    families.gauge("flowstone_lake_table_version", "Version of a table", table.version, **of)
    families.gauge("flowstone_lake_table_sound", "Whether a table can be read", int(table.status != "damaged"), **of)
