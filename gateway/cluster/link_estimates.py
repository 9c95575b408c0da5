"""What a plan goes by: each node's rate as measured, capped or assumed, and what transport it is of. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median_low

from gateway.measured_links import LinkRate, MeasuredLinks
from rdmacast.planners.automatic import LinkFacts, usual_links
from registry.node import NodeRecord

_GBIT = 1.25e8  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownLinks:
    """`rates` by node in bytes per second; `said`: in a few words, how they are known. `is_told`: not all are
    guesses, but measured or told by somebody."""

    rates: Mapping[str, float]
    transport: str
    said: str
    is_told: bool

    @property
    def facts(self) -> LinkFacts:
        """Of the slowest of the links."""
        return replace(usual_links(self.transport), bytes_per_s=min(self.rates.values()))

    def least_of(self, nodes: Iterable[str]) -> int:
        """The rate of the slowest of these links; 0 where all rates are assumed."""
        return int(min(self.rates[node] for node in nodes)) if self.is_told else 0


def known_links(nodes: Iterable[NodeRecord], links: MeasuredLinks) -> KnownLinks:
    """The rates of `nodes`, of which there is at least one. Those of which nothing is known are taken to be
    like those that were measured."""
    nodes = list(nodes)
    caps = {node.id: float(node.link_rate_bytes_s) for node in nodes if node.link_rate_bytes_s}
    measured = {node.id: rate for node in nodes if (rate := links.of(node.id)) is not None}
    # A cap holds over TCP, and may be reached by one of which only a lower rate was seen.
    used = {id_: rate for id_, rate in measured.items() if _tells(rate, caps.get(id_))}
    transport = _transport(measured.values()) if measured and not caps else "tcp"
    usual = median_low([rate.bytes_per_s for rate in used.values()]) if used else links.usual_bytes_per_s
    rates = {node.id: caps.get(node.id, usual) for node in nodes}
    for id_, rate in used.items():
        # One that was held back by others is not taken to be slower than usual for that.
        rates[id_] = rate.bytes_per_s if rate.exact else max(rate.bytes_per_s, usual)
    casts = len({cast for rate in used.values() for cast in rate.casts})
    groups = {
        f"as measured over {transport} in {casts} cast{'s' * (casts > 1)}": len(used),
        "as capped": len(caps.keys() - used.keys()),
        f"of {usual / _GBIT:.3g} Gbit/s assumed": len(rates.keys() - used.keys() - caps.keys()),
    }
    present = {how: count for how, count in groups.items() if count}
    said = ", ".join(f"{count} links {how}" for how, count in present.items())
    if len(present) == 1:
        said = f"links {next(iter(present))}"
    return KnownLinks(
        rates=rates, transport=transport, said=said, is_told=bool(used or caps or links.is_told)
    )


def _tells(rate: LinkRate, cap: float | None) -> bool:
    return cap is None or (rate.exact and rate.bytes_per_s < cap)


def _transport(measured: Iterable[LinkRate]) -> str:
    """What most of them go by; TCP if any does, since a plan must suit the one that it is hardest for."""
    counts = Counter(rate.transport for rate in measured)
    return "tcp" if "tcp" in counts else counts.most_common(1)[0][0]
