"""Metrics in Prometheus' text format, built from the reports of servers.

`tnt_…` metrics have the names, labels and help texts of `tarantool/metrics`, so that its Grafana dashboards and alerts
work; `flowstone_…` metrics are ours. Everything here needs only a report, so that a node exports the same about itself
as a dashboard that watches it. A value that a server does not report is omitted, never exported as 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from prometheus_client import core
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from flowstone.node.statistics import Durations
from flowstone.observation.replica_set import replica_sets
from flowstone.observation.report import Report, ReportedPeer, Unreachable

ELECTION_STATES: Final = {"follower": 0, "candidate": 1, "leader": 2}
STATUSES: Final = ("loading", "hot_standby", "orphan", "running")
FOLLOW: Final = "follow"
OPEN_METRICS: Final = "application/openmetrics-text; version=1.0.0"


class Families(Collector):
    """Collects metric families: each has one help text, one type, and samples that differ in their labels."""

    def __init__(self) -> None:
        self._found: dict[str, core.Metric] = {}

    def gauge(self, name: str, text: str, value: float | None, /, **labels: str | int) -> None:
        """Add a sample of a gauge; None is omitted."""
        if value is not None:
            self._family(name, text, "gauge").add_sample(name, _texts(labels), value)

    def counter(self, name: str, text: str, value: float | None, /, **labels: str | int) -> None:
        """Add a sample of a counter, whose name ends in _total; None is omitted."""
        if value is not None:
            assert name.endswith("_total"), name
            self._family(name.removesuffix("_total"), text, "counter").add_sample(name, _texts(labels), value)

    def histogram(self, name: str, text: str, values: Durations, /, **labels: str | int) -> None:
        """Add the buckets, count and sum of a histogram."""
        family, given = self._family(name, text, "histogram"), _texts(labels)
        below = 0
        for bound, count in zip((*values.bounds, float("inf")), values.counts, strict=True):
            below += count
            family.add_sample(f"{name}_bucket", given | {"le": _bound(bound)}, below)
        family.add_sample(f"{name}_count", given, values.count)
        family.add_sample(f"{name}_sum", given, values.sum)

    def info(self, name: str, text: str, /, **labels: str | int) -> None:
        """Add facts as labels of a metric that is always 1 and whose name ends in _info."""
        self._family(name.removesuffix("_info"), text, "info").add_sample(name, _texts(labels), 1)

    def _family(self, name: str, text: str, kind: str) -> core.Metric:
        family = self._found.get(name)
        if family is None:
            family = self._found[name] = core.Metric(name, text, kind)
        assert family.type == kind, name
        return family

    def collect(self) -> Iterable[core.Metric]:
        return self._found.values()


def accepted(accept: str) -> str:
    """Return OPEN_METRICS if an Accept header names that format in any version, else "": Prometheus' own.

    Versions and escaping make no difference here, and the library fails on versions that are not numbers.
    """
    kinds = [part.partition(";")[0].strip() for part in accept.split(",")]
    return OPEN_METRICS if OPEN_METRICS.partition(";")[0] in kinds else ""


def encode(families: Families, accept: str) -> tuple[bytes, str]:
    """Return the text and its content type: OpenMetrics if the Accept header names it, else Prometheus' format."""
    encoder, content_type = choose_encoder(accepted(accept))
    return encoder(families), content_type


def _bound(value: float) -> str:
    """Format a bucket bound as both formats require it."""
    return "+Inf" if value == float("inf") else repr(float(value))


def _texts(labels: Mapping[str, str | int]) -> dict[str, str]:
    return {name: str(value) for name, value in labels.items()}


# --- reports ---


def add_token_failures(families: Families, count: int | None) -> None:
    """Add the number of wrong tokens that the HTTP server has received; None if it requires no token."""
    families.counter("flowstone_http_token_failures_total", "HTTP requests with a wrong token", count)


def add_reports(families: Families, answers: Sequence[Report | Unreachable]) -> None:
    """Add all metrics of the servers' answers; the label `alias` identifies the server."""
    for alias, answer in _by_alias(answers):
        is_up = isinstance(answer, Report)
        families.gauge("flowstone_server_up", "Whether the server answers", int(is_up), alias=alias)
        if isinstance(answer, Report):
            _add_info(families, alias, answer)
            _add_replication(families, alias, answer)
            _add_replication_lsn(families, alias, answer)
            _add_synchro(families, alias, answer)
            _add_election(families, alias, answer)
            _add_retention(families, alias, answer)
    _add_links(families, answers)


def _by_alias(answers: Sequence[Report | Unreachable]) -> Iterator[tuple[str, Report | Unreachable]]:
    """Yield each answer once, with the server's name, or its address if the name is missing or taken."""
    taken: dict[str, None] = {}
    for answer in answers:
        names = [answer.name, answer.address] if isinstance(answer, Report) else [answer.address]
        alias = next((name for name in names if name and name not in taken), None)
        if alias is not None:
            taken[alias] = None
            yield alias, answer


def _add_info(families: Families, alias: str, report: Report) -> None:
    families.gauge("tnt_info_lsn", "Tarantool lsn", report.lsn, alias=alias)
    families.gauge("tnt_info_uptime", "Tarantool uptime", report.uptime, alias=alias)
    for replica_id, lsn in report.vclock.items():
        families.gauge("tnt_info_vclock", "VClock", lsn, alias=alias, id=replica_id)
    families.gauge("tnt_read_only", "Is instance read only", int(report.ro), alias=alias)
    families.info(
        "flowstone_instance_info",
        "Version and identity of the server",
        alias=alias,
        package=report.package,
        version=report.version,
        id=report.id,
        uuid=report.uuid,
        replicaset=report.replicaset_uuid or "",
    )
    for status in STATUSES:
        text = "Whether the server has this status"
        families.gauge("flowstone_status", text, int(report.status == status), alias=alias, status=status)


def _add_replication(families: Families, alias: str, report: Report) -> None:
    for peer in _others(report):
        for stream, side in (("upstream", peer.upstream), ("downstream", peer.downstream)):
            if side is not None:
                of: dict[str, str | int] = {"alias": alias, "id": peer.id, "stream": stream}
                families.gauge("tnt_replication_lag", "Replication lag", side.lag, **of)
                families.gauge("tnt_replication_status", "Replication status", int(side.status == FOLLOW), **of)


def _add_replication_lsn(families: Families, alias: str, report: Report) -> None:
    """Add `tnt_replication_lsn` as Tarantool's module does: rows that a replica lacks on a master, 0 on a replica."""
    name, text = "tnt_replication_lsn", "lsn for instance"
    for peer in report.replication:
        if report.ro:
            lsn = report.vclock.get(peer.id)
            missing = None if lsn is None else peer.lsn - lsn
            families.gauge(name, text, missing, alias=alias, id=peer.id, type="replica")
        elif peer.downstream is not None and report.id in peer.downstream.vclock:
            missing = report.lsn - peer.downstream.vclock[report.id]
            families.gauge(name, text, missing, alias=alias, id=peer.id, type="master")


def _others(report: Report) -> Iterator[ReportedPeer]:
    return (peer for peer in report.replication if peer.id != report.id)


def _add_synchro(families: Families, alias: str, report: Report) -> None:
    queue = report.queue
    if queue is None:
        return
    families.gauge("tnt_synchro_queue_owner", "Synchro queue owner", queue.owner, alias=alias)
    families.gauge("tnt_synchro_queue_term", "Synchro queue term", queue.term, alias=alias)
    text = "Amount of transactions are collecting confirmations now"
    families.gauge("tnt_synchro_queue_len", text, queue.len, alias=alias)
    families.gauge("tnt_synchro_queue_busy", "Is synchro queue busy", int(queue.busy), alias=alias)
    text = "Bytes of pending transactions in the synchro queue"
    families.gauge("tnt_synchro_queue_size", text, queue.size, alias=alias)
    text = "Seconds for which the oldest pending transaction has waited"
    families.gauge("tnt_synchro_queue_age", text, queue.age, alias=alias)
    text = "Seconds that the last confirmed transaction waited for its quorum"
    families.gauge("tnt_synchro_queue_confirm_lag", text, queue.confirm_lag, alias=alias)
    text = "Members that must acknowledge a synchronous transaction before it is committed"
    families.gauge("flowstone_synchro_quorum", text, queue.quorum, alias=alias)
    text = "Transactions rolled back from the synchro queue"
    families.counter("flowstone_synchro_rollbacks_total", text, queue.rollback_count, alias=alias)


def _add_election(families: Families, alias: str, report: Report) -> None:
    election = report.election
    if election is None:
        return
    state = ELECTION_STATES.get(election.state)
    families.gauge("tnt_election_state", "Election state of the node", state, alias=alias)
    families.gauge("tnt_election_vote", "ID of a node the current node votes for", election.vote, alias=alias)
    families.gauge("tnt_election_leader", "Leader node ID in the current term", election.leader, alias=alias)
    families.gauge("tnt_election_term", "Current election term", election.term, alias=alias)
    idle = election.leader_idle
    families.gauge("tnt_election_leader_idle", "Current idle for elected leader", idle, alias=alias)


def _add_retention(families: Families, alias: str, report: Report) -> None:
    gc = report.gc
    if gc is None:
        return
    families.gauge("flowstone_gc_checkpoints", "Snapshots retained", len(gc.checkpoints), alias=alias)
    text = "Whether file deletion is paused until all members have reconnected"
    families.gauge("flowstone_gc_paused", text, int(gc.is_paused), alias=alias)
    lags: dict[str, int] = {}
    for consumer in gc.consumers:
        rows = max(0, report.signature - sum(consumer.vclock.values()))
        lags[consumer.name] = max(rows, lags.get(consumer.name, 0))
    for name, rows in lags.items():
        text = "Log rows retained for this consumer"
        families.gauge("flowstone_gc_consumer_lag_rows", text, rows, alias=alias, consumer=name)


def _add_links(families: Families, answers: Sequence[Report | Unreachable]) -> None:
    for replica_set in replica_sets(answers):
        ids = {member.uuid: member.id for member in replica_set.members}
        for link in replica_set.links:
            of: dict[str, str | int] = {
                "replicaset": replica_set.uuid or "",
                "id": ids.get(link.follower, 0),
                "uuid": link.follower,
                "master": ids.get(link.master, 0),
            }
            text = "Rows that the master has and the follower lacks"
            families.gauge("flowstone_replication_lag_rows", text, link.lag_lsn, **of)
            text = "Replication lag in seconds; 0 if the follower has all rows, however old the last one is"
            families.gauge("flowstone_replication_lag_seconds", text, link.lag, **of)
