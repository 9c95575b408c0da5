"""Prometheus metrics of jobs, batches and webhooks."""

from collections import Counter as Tally
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.http.collectors import Tallied
from registry.records.batch import BatchStatus
from registry.records.job import JobStatus
from registry.records.job_counts import JobCounts

_OUTCOMES = ("delivered", "retried", "failed")


class JobMetrics(Collector):
    """The jobs of the cluster as of the last `counts`, none of which are shown while there are none.

    `deliveries` are the tries of webhooks of this gateway by outcome: delivered, retried, or failed for good.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.counts: JobCounts | None = None
        self.deliveries: Tally[tuple[str, ...]] = Tally({(outcome,): 0 for outcome in _OUTCOMES})
        registry.register(self)
        registry.register(
            Tallied(
                "hypercast_webhook_deliveries",
                "Tries to deliver webhooks: delivered, to be retried, or failed for good.",
                ("outcome",),
                self.deliveries,
            )
        )

    def collect(self) -> Iterator[Metric]:
        jobs = GaugeMetricFamily(
            "hypercast_jobs",
            "Predictions and lines of batches, those that have ended while they are kept.",
            labels=("kind", "state"),
        )
        batches = GaugeMetricFamily(
            "hypercast_batches",
            "Batches, those that have ended while they are kept.",
            labels=("state",),
        )
        oldest = GaugeMetricFamily(
            "hypercast_oldest_queued_job_seconds", "Time since the oldest job that waits was submitted."
        )
        if (counts := self.counts) is not None:
            for kind, by_status in (("prediction", counts.predictions), ("line", counts.lines)):
                for status in JobStatus:
                    if kind == "prediction" or not status.is_final:  # of a line only its result is kept
                        jobs.add_metric((kind, status), by_status.get(status, 0))
            for state in BatchStatus:
                batches.add_metric((state,), counts.batches.get(state, 0))
            oldest.add_metric((), counts.oldest_queued_s or 0.0)
        yield jobs
        yield batches
        yield oldest
