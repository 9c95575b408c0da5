"""The choice of planner and block count from measured links, with the reason (pure).

With several pulls in flight a block costs its time at the port, and latency is paid once a hop. So both the
binomial pipeline and the chain cost blocks + hops such times: ceil(log2 L) hops, or L - 1. They differ also
in that the pipeline changes partner with every block. Over TCP an idle connection restarts with a small
window, which costs `restart_s`; on RDMA and shared memory it costs nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rdmacast.link_rate import LinkRate
from rdmacast.plan.plan import CastShape, TransferPlan
from rdmacast.plan.planners.catalog import BINOMIAL, CHAIN, MULTI_CHAIN, PLANNERS, TransferPlanner
from rdmacast.plan.planners.edge import with_edge
from rdmacast.plan.planners.multi_chain import Chains, chains_of
from rdmacast.plan.topology import NodeTopology, is_flat, leaves_of, without_rates
from rdmacast.protocol.pull_report import MAX_SLOW

# Two units of checksums. A block costs the processors of its nodes as much as 0.4 MB do.
MIN_BLOCK_BYTES = 512 << 10
# Over links so slow that one unit takes `_SPARE_S` processors have time for each.
MIN_SLOW_BLOCK_BYTES = MIN_BLOCK_BYTES // 2
_SPARE_S = 0.02
MAX_CHOSEN_BLOCKS = 512
# The pipeline completes its targets together, so it is taken unless the chain is faster by more.
_MAX_SLOWDOWN = 1.01
_AS_FAST = 1.003
# Above this spread of rates a slow node must not pass on what fast ones wait for: it is left at the edge, or,
# where slow ones are many, put last in a chain.
_MIXED_SPREAD = 1.5
_MIN_NODES_PER_SLOW = 4  # at most one in so many nodes is at the edge
# A block that takes longer is worth requesting the next only after it arrived: the pipeline then
# keeps to its steps, where otherwise two blocks meet at one port and all that follow are late.
_MIN_SLOT_S = 0.02
_SCATTER_ALLGATHER = "scatter-allgather"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFacts:
    """Measurements of the links: the slowest port's rate, and what a block costs besides its bytes."""

    bytes_per_s: float
    latency_s: float = 0.0
    overhead_s: float = 0.0
    restart_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0:
            raise ValueError(f"a link's rate must be above 0, not {self.bytes_per_s}")
        if not min(self.latency_s, self.overhead_s, self.restart_s) >= 0:
            raise ValueError("a link's latency, overhead and restart must be 0 or more")


# To request a block, check and publish it costs about the same
# over any transport.
_USUAL = LinkFacts(bytes_per_s=LinkRate().bytes_per_s, latency_s=2e-4, overhead_s=2e-4)
_TCP_RESTART_S = 1e-3


def default_link_facts(transport: str = "tcp") -> LinkFacts:
    """Return the assumed facts of links by `transport` where nothing was measured."""
    if transport != "tcp":
        return _USUAL
    return replace(_USUAL, restart_s=_TCP_RESTART_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerChoice:
    """The planner and block count to use, the predicted duration, and the reason in one line.

    With `in_slots` blocks should arrive one at a time, in the order of the plan's steps. `sites` describe
    the nodes to the planner, empty where they are alike. The plan is for the nodes that are not at the
    `edge`: those are slow, and take what the others have.
    """

    planner: str
    blocks: int
    predicted_s: float
    reason: str
    sites: tuple[NodeTopology, ...] = ()
    edge: tuple[int, ...] = ()
    in_slots: bool = False

    def plan(self, nodes: int, sources: tuple[int, ...]) -> TransferPlan:
        shape = CastShape(nodes=nodes, sources=sources, blocks=self.blocks, sites=self.sites)
        planner = PLANNERS[self.planner]
        if not self.edge:
            return planner.plan(shape)
        fast = [node for node in range(nodes) if node not in self.edge]
        held = tuple(index for index, node in enumerate(fast) if node in sources)
        sites = tuple(self.sites[node] for node in fast) if self.sites else ()
        inner = replace(shape, nodes=len(fast), sources=held, sites=sites)
        return with_edge(planner.plan(inner), shape, self.edge)


def choose_planner(
    *,
    nodes: int,
    sources: int,
    nbytes: int,
    facts: LinkFacts,
    blocks: int | None = None,
    sites: Sequence[NodeTopology] = (),
) -> PlannerChoice:
    """Choose for `nodes` nodes of which `sources` hold the image; `blocks` fixes the count."""
    if not 1 <= sources <= nodes or nbytes <= 0:
        raise ValueError("a cast has 1 to all nodes as sources, and more than 0 bytes")
    if blocks is not None and blocks < 1:
        raise ValueError(f"a cast has at least 1 block, not {blocks}")
    edge = _edge(sites, sources)
    if edge:
        fast = [site for node, site in enumerate(sites) if node not in edge]
        fast_facts = replace(facts, bytes_per_s=min(site.bytes_per_s for site in fast))
        fast_sources = sources - sum(node < sources for node in edge)
        inner = _choose(len(fast), fast_sources, nbytes, fast_facts, blocks, fast)
        reason = f"{inner.reason}; {len(edge)} of {nodes} nodes are slow and take what the others have"
        whole = without_rates(sites) if inner.sites else ()
        return replace(inner, sites=whole, edge=edge, reason=reason, in_slots=False)
    return _choose(nodes, sources, nbytes, facts, blocks, sites)


def _choose(
    nodes: int,
    sources: int,
    nbytes: int,
    facts: LinkFacts,
    blocks: int | None,
    sites: Sequence[NodeTopology],
) -> PlannerChoice:
    """Choose for nodes of which none is left at the edge."""
    if not is_flat(sites):
        return _by_topology(sources, nbytes, facts, blocks, sites)
    members = -(-nodes // sources)
    counts = [blocks] if blocks else _block_counts(_most_blocks(nbytes, facts))
    tried = [_best(planner, members, nbytes, facts, counts) for planner in (BINOMIAL, CHAIN)]
    pipeline, chain = tried
    spread = _spread(sites)
    if spread > _MIXED_SPREAD:
        return PlannerChoice(
            planner=MULTI_CHAIN.name,
            blocks=chain[1],
            predicted_s=chain[0],
            reason=f"ordered chains, {chain[1]} blocks: the nodes' rates differ {spread:.1f}-fold, "
            "and in a pipeline fast nodes would wait for slow ones",
            sites=tuple(sites),
        )
    if members > 2 and pipeline[0] <= chain[0] * _MAX_SLOWDOWN:
        in_slots = uses_slots(BINOMIAL.name, nbytes / pipeline[1], facts.bytes_per_s)
        return replace(_decided(BINOMIAL, pipeline, CHAIN, chain, members, facts), in_slots=in_slots)
    return _decided(CHAIN, chain, BINOMIAL, pipeline, members, facts)


def _by_topology(
    sources: int, nbytes: int, facts: LinkFacts, blocks: int | None, sites: Sequence[NodeTopology]
) -> PlannerChoice:
    """Choose chains along leaf switches and scale-up domains.

    The pipeline would send most blocks over the spine, as the partners of its steps are anywhere. Nodes are
    in the order of their rates, which the chains keep under each leaf switch.
    """
    alike = without_rates(sites)
    shape = CastShape(nodes=len(sites), sources=tuple(range(sources)), blocks=1, sites=alike)
    chains = chains_of(shape)
    width = min((edge.width for edge in chains.edges), default=1)
    counts = [blocks] if blocks else _block_counts(_most_blocks(nbytes, facts))
    wide = replace(facts, bytes_per_s=facts.bytes_per_s * width, overhead_s=facts.overhead_s / width)
    seconds, chosen = _best(CHAIN, chains.hops + 1, nbytes, wide, counts)
    return PlannerChoice(
        planner=MULTI_CHAIN.name,
        blocks=chosen,
        predicted_s=seconds,
        reason=f"chains along the topology, {chosen} blocks: {_crossings(chains, sites)}",
        sites=alike,
    )


def _crossings(chains: Chains, sites: Sequence[NodeTopology]) -> str:
    """Describe what chains send between leaf switches, or else inside scale-up domains."""
    leaves = leaves_of(sites)
    if leaves <= 1:
        return "the ports of each scale-up domain receive different blocks, which spread inside it"
    copies = sum(edge.unit.leaf != sites[edge.senders[0]].leaf for edge in chains.edges)
    return f"{copies} {'copy' if copies == 1 else 'copies'} between {leaves} leaf switches"


def uses_slots(planner: str, block_bytes: float, bytes_per_s: float) -> bool:
    """Return whether blocks of this size should arrive one at a time, in the order of the plan's steps.

    Those of scatter and allgather always: else the source sends all parts at once, and none is passed on
    before the last of them is sent.
    """
    if planner == _SCATTER_ALLGATHER:
        return True
    return planner == BINOMIAL.name and block_bytes >= _MIN_SLOT_S * bytes_per_s


def predict_s(planner: TransferPlanner, members: int, nbytes: int, facts: LinkFacts, blocks: int) -> float:
    """Return the seconds that `members` nodes take with the binomial pipeline or the chain."""
    if members == 1:
        return 0.0
    hops = (members - 1).bit_length() if planner is BINOMIAL else members - 1
    # Two nodes never change partner; with three or more the pipeline always does.
    change_s = facts.restart_s if planner is BINOMIAL and members > 2 else 0.0
    block_s = nbytes / blocks / facts.bytes_per_s + facts.overhead_s + change_s
    return (blocks - 1 + hops) * block_s + hops * facts.latency_s


def _best(
    planner: TransferPlanner, members: int, nbytes: int, facts: LinkFacts, counts: Sequence[int]
) -> tuple[float, int]:
    """Return (seconds, blocks) of the finest count that is as fast as any: fine blocks execute early."""
    times_s = {count: predict_s(planner, members, nbytes, facts, count) for count in counts}
    least_s = min(times_s.values())
    finest = max(count for count, seconds in times_s.items() if seconds <= least_s * _AS_FAST)
    return times_s[finest], finest


def _most_blocks(nbytes: int, facts: LinkFacts) -> int:
    most = max(1, nbytes // MIN_BLOCK_BYTES)
    if _SPARE_S * facts.bytes_per_s <= MIN_SLOW_BLOCK_BYTES:
        most = -(-nbytes // MIN_SLOW_BLOCK_BYTES)
    return min(MAX_CHOSEN_BLOCKS, most)


def _block_counts(most: int) -> list[int]:
    """Return the counts to try: powers of two and the values half-way between, up to `most`."""
    powers = [1 << power for power in range(most.bit_length())]
    return sorted({count for power in powers for count in (power, power * 3 // 2, most) if count <= most})


def _edge(sites: Sequence[NodeTopology], sources: int) -> tuple[int, ...]:
    """Return the slow nodes if they are few and the others alike.

    The first `sources` nodes hold the image.
    """
    rates = [site.bytes_per_s for site in sites]
    typical = sorted(rates)[len(rates) // 2] if rates else 0.0
    slow = tuple(node for node, rate in enumerate(rates) if rate * _MIXED_SPREAD < typical)
    fast = [node for node in range(len(rates)) if node not in slow]
    if (
        not 0 < len(slow) * _MIN_NODES_PER_SLOW <= len(rates)
        or len(slow) > MAX_SLOW
        or not fast[0] < sources <= fast[-1]
    ):
        return ()
    return slow if _spread([sites[node] for node in fast]) <= _MIXED_SPREAD else ()


def _spread(sites: Sequence[NodeTopology]) -> float:
    rates = [site.bytes_per_s for site in sites]
    return max(rates) / min(rates) if rates else 1.0


def _decided(
    planner: TransferPlanner,
    chosen: tuple[float, int],
    other: TransferPlanner,
    rival: tuple[float, int],
    members: int,
    facts: LinkFacts,
) -> PlannerChoice:
    seconds, blocks = chosen
    times = f"{_duration(seconds)} where the {other.name} takes {_duration(rival[0])}"
    if members <= 2:
        why = "each source has one target at most, so all planners are alike"
    elif planner is CHAIN:
        why = (
            f"{times}: its change of partners costs "
            f"{_duration(facts.restart_s)} a block, more than the chain's {members - 1} hops"
        )
    else:
        hops = (members - 1).bit_length()
        why = f"{times} with {rival[1]} blocks: {hops} hops, not {members - 1}"
    reason = f"{planner.name}, {blocks} blocks: {why}"
    return PlannerChoice(planner=planner.name, blocks=blocks, predicted_s=seconds, reason=reason)


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
