"""Metrics and health of a dashboard: all servers that it watches, the tails of their logs, findings, and lakes.

A server exports the same server metrics about itself. Findings are exported as counts, so that an alert needs only one
number.
"""

from __future__ import annotations

from flowstone.observation.findings.finding import Severity
from flowstone.observation.tail import TailStatus
from flowstone.web.feed import Feed
from flowstone.web.feed_state import FeedState, PipelineTable, SetState
from flowstone.web.health import Health
from flowstone.web.metrics import Families, add_reports


class FeedMonitored:
    """`monitoring.Monitored` for a dashboard."""

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
        families.gauge("flowstone_dashboard_listeners", "Listeners of the event stream", self._feed.events.listeners)
        return families

    async def health(self) -> Health:
        """Return the health of the dashboard itself: it must not be restarted because a watched server is unhealthy."""
        return Health(state="watching", is_ready=True)


def _add_findings(families: Families, state: FeedState) -> None:
    for severity in Severity:
        count = sum(finding.severity is severity for finding in state.findings)
        families.gauge("flowstone_findings", "Findings about the watched servers", count, severity=severity.value)


def _add_tail(families: Families, one: SetState) -> None:
    of = {"replicaset": one.uuid or ""}
    is_following = one.tail.status == TailStatus.FOLLOWING.value
    families.gauge("flowstone_tail_following", "Whether the log of the set is followed", int(is_following), **of)
    families.counter("flowstone_tail_transactions_total", "Transactions seen in the log", one.tail.seen, **of)
    families.gauge("flowstone_tail_rows_per_second", "Rows per second in the log", one.tail.rows_per_second, **of)
    families.gauge("flowstone_tail_waiting", "Pending synchronous transactions in the log", len(one.waiting), **of)


def _add_table(families: Families, table: PipelineTable) -> None:
    of = {"lake": table.lake, "table": table.table}
    age = "Age of the newest settled change in the table; 0 if no changes are missing"
    families.gauge("flowstone_lake_table_age_seconds", age, table.age_seconds, **of)
    families.gauge("flowstone_lake_table_rows", "Rows in the table", table.rows, **of)
    families.gauge("flowstone_lake_table_version", "Version of the table", table.version, **of)
    families.gauge("flowstone_lake_table_sound", "Whether the table is readable", int(table.status != "damaged"), **of)
