"""Link rates for transfer plans: measured, capped, or assumed from ports, with the transport. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median_low

from gateway.cluster.link_rates import LinkRateCache, MeasuredLinkRate
from rdmacast.link_rate import LinkRate
from rdmacast.plan.planners.automatic import LinkFacts, default_link_facts
from registry.records.node import NodeRecord

_GBIT = 1.25e8  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEstimates:
    """Estimated link `rates` by node in bytes per second, with a short `summary` of their origin.

    `is_known`: at least one of them is measured or configured, not assumed.
    """

    rates: Mapping[str, float]
    transport: str
    summary: str
    is_known: bool

    @property
    def facts(self) -> LinkFacts:
        """Link facts of the slowest link."""
        return replace(default_link_facts(self.transport), bytes_per_s=min(self.rates.values()))

    def min_rate(self, nodes: Iterable[str]) -> int:
        """Return the rate of the slowest link of `nodes`; 0 where all rates are assumed."""
        return int(min(self.rates[node] for node in nodes)) if self.is_known else 0


def estimate_links(nodes: Iterable[NodeRecord], links: LinkRateCache) -> LinkEstimates:
    """Estimate the link rates of `nodes`, at least one.

    Links without a measurement are assumed to be like the measured ones, but not faster than their ports.
    """
    nodes = list(nodes)
    caps = {node.id: float(node.link_rate_bytes_s) for node in nodes if node.link_rate_bytes_s}
    measured = {node.id: rate for node in nodes if (rate := links.get(node.id)) is not None}
    # A cap holds over TCP; a link of which only a lower rate was measured may still reach it.
    used = {id_: rate for id_, rate in measured.items() if _limits(rate, caps.get(id_))}
    transport = _transport(measured.values()) if measured and not caps else "tcp"
    usual = links.configured_bytes_per_s
    if used:
        usual = median_low(rate.bytes_per_s for rate in used.values())
    ports = {
        node.id: float(port)
        for node in nodes
        if (port := node.port_rate_bytes_s) and node.id not in caps and (usual is None or port < usual)
    }
    usual = usual or LinkRate().bytes_per_s
    rates = {node.id: caps.get(node.id) or ports.get(node.id) or usual for node in nodes}
    for id_, rate in used.items():
        # A link that was limited by its peers is not assumed to be slower than usual.
        rates[id_] = rate.bytes_per_s if rate.exact else max(rate.bytes_per_s, rates[id_])
    casts = len({cast for rate in used.values() for cast in rate.casts})
    others = rates.keys() - used.keys()
    summary = _summary(
        {
            f"as measured over {transport} in {casts} cast{'s' * (casts > 1)}": len(used),
            "as capped": len(caps.keys() & others),
            "as fast as their ports": len(ports.keys() & others),
            f"of {usual / _GBIT:.3g} Gbit/s assumed": len(others - caps.keys() - ports.keys()),
        }
    )
    is_known = bool(used or caps or links.configured_bytes_per_s)
    return LinkEstimates(rates=rates, transport=transport, summary=summary, is_known=is_known)


def _summary(groups: Mapping[str, int]) -> str:
    present = {how: count for how, count in groups.items() if count}
    if len(present) == 1:
        return f"links {next(iter(present))}"
    return ", ".join(f"{count} links {how}" for how, count in present.items())


def _limits(rate: MeasuredLinkRate, cap: float | None) -> bool:
    return cap is None or (rate.exact and rate.bytes_per_s < cap)


def _transport(measured: Iterable[MeasuredLinkRate]) -> str:
    """Return the most common transport, but TCP if any link uses it: a plan must suit the slowest kind."""
    counts = Counter(rate.transport for rate in measured)
    return "tcp" if "tcp" in counts else counts.most_common(1)[0][0]
