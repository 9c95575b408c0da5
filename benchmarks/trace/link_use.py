"""The use of links during a run, from the switch's counters (pure)."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from benchmarks.testbed.link_meter import LinkBytes
from benchmarks.trace.measures import ModelScale

_STEPS = 120


def network_use(
    samples: Sequence[LinkBytes], started_s: float, length_s: float, how: ModelScale
) -> dict[str, Any]:
    """Return the use of links in the `length_s` from `started_s` on, as mean rates of equal steps.

    Host 0 is the gateway's. `link_share` is the share of a node's link that it used to receive. Bytes between
    nodes are those of the model; those of the gateway's link, both ways, are prompts, tokens and commands,
    which have their own size. Nodes and gateway reach Redis, and nodes the store, without a link.
    """
    if len(samples) < 2:
        return {}
    step_s = length_s / _STEPS
    steps = [_at(samples, started_s + step * step_s) for step in range(_STEPS + 1)]
    rows = [_difference(first, then) for first, then in pairwise(steps)]
    model_step_s = step_s / how.slower
    between = [_between_nodes(row) * how.scale for row in rows]
    control = [row.received[0] + row.sent[0] for row in rows]
    return {
        "step_s": round(model_step_s, 5),
        "between_nodes_bytes_s": [round(nbytes / model_step_s) for nbytes in between],
        "gateway_bytes_s": [round(nbytes / model_step_s) for nbytes in control],
        "link_share": {
            f"n{host - 1}": [round(row.received[host] / step_s / how.link_bytes_s, 4) for row in rows]
            for host in range(1, len(samples[0].received))
        },
        "between_nodes_bytes": round(sum(between)),
        "gateway_bytes": round(sum(control)),
    }


def _between_nodes(row: LinkBytes) -> float:
    """Return what nodes received, but for what the gateway sent."""
    return max(0.0, sum(row.received[1:]) - row.sent[0])


def _difference(first: LinkBytes, then: LinkBytes) -> LinkBytes:
    return LinkBytes(
        at_s=then.at_s,
        received=tuple(after - before for before, after in zip(first.received, then.received, strict=True)),
        sent=tuple(after - before for before, after in zip(first.sent, then.sent, strict=True)),
    )


def _at(samples: Sequence[LinkBytes], at_s: float) -> LinkBytes:
    """Return the counters at a moment, between two readings in proportion."""
    place = bisect_right(samples, at_s, key=lambda one: one.at_s)
    first, then = samples[max(0, place - 1)], samples[min(place, len(samples) - 1)]
    span_s = then.at_s - first.at_s
    part = (at_s - first.at_s) / span_s if span_s > 0 else 0.0

    def mixed(before: tuple[int, ...], after: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(round(one + part * (two - one)) for one, two in zip(before, after, strict=True))

    return LinkBytes(
        at_s=at_s, received=mixed(first.received, then.received), sent=mixed(first.sent, then.sent)
    )
