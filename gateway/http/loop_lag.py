"""The metric of the event loop's lag."""

from prometheus_client import CollectorRegistry, Histogram

_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


def loop_lag_metric(registry: CollectorRegistry) -> Histogram:
    """Return the histogram of the lags that `watch_loop_lag` measures."""
    return Histogram(
        "hypercast_event_loop_lag_seconds",
        "How much later than due the event loop ran a timer, measured every 50 ms.",
        buckets=_BOUNDS_S,
        registry=registry,
    )
