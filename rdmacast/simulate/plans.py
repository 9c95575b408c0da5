"""Simulates a plan on model links, without steps or barriers (pure, discrete events).

A target pulls its blocks in the order of the plan, some at once. A pull waits until its source has the
block, then for the source's port, which serves the pending pulls in the order of the plan. A port is busy
with a block as long as its own rate takes: a slow target delays only its successors.
"""

from heapq import heappop, heappush

import numpy as np

from rdmacast.plan.plan import TransferPlan
from rdmacast.simulate.link_model import LinkModel, Seconds, Simulation, port_seconds, stretches
from rdmacast.simulate.waves import WaveSimulation

# From so many transfers a step on, passes over arrays are faster than single events.
_WAVES_FROM = 48


def simulate(
    plan: TransferPlan, links: LinkModel, block_bytes: float = 1.0, *, waves: bool | None = None
) -> Simulation:
    """Simulate a plan. Raises ValueError for one that cannot end: `validate` it first.

    `waves` selects one of two computations with the same result; None: the faster one.
    """
    can = not links.pairs and not plan.is_local().any()
    if waves is None:
        waves = can and len(plan.transfers) >= _WAVES_FROM * plan.steps
    if waves and not can:
        raise ValueError("pairs of nodes and transfers inside scale-up domains cannot be simulated in waves")
    arrived_s = (WaveSimulation if waves else _EventSimulation)(plan, links, block_bytes).run()
    missing = np.argwhere(~np.isfinite(arrived_s))
    if len(missing):
        node, block = map(int, missing[0])
        raise ValueError(f"the plan does not end: node {node} waits for block {block}")
    return Simulation(arrived_s=arrived_s, sources=plan.shape.sources)


class _EventSimulation:
    """One simulation by events; transfers are numbered in the plan's order, their precedence at a port."""

    def __init__(self, plan: TransferPlan, links: LinkModel, block_bytes: float) -> None:
        self._links = links
        self._bytes = block_bytes
        nodes, blocks, moved = plan.shape.nodes, plan.shape.blocks, plan.transfers
        self._source: list[int] = moved.source.tolist()
        self._target: list[int] = moved.target.tolist()
        self._wanted: list[int] = (moved.source.astype(np.int64) * blocks + moved.block).tolist()
        self._brought: list[int] = (moved.target.astype(np.int64) * blocks + moved.block).tolist()
        self._local: list[bool] = plan.is_local().tolist()
        self._stretch: list[float] = stretches(links, len(moved)).tolist()
        self._port_s: list[float] = port_seconds(links, nodes, block_bytes).tolist()
        self._queues = self._pulls_by_target(plan)
        self._lacking = [0] * nodes  # with `whole`: the blocks without which a node sends nothing
        if plan.whole:
            self._lacking = [0 if node in plan.shape.sources else blocks for node in range(nodes)]
        self._arrived_s = np.full((nodes, blocks), np.inf)
        self._arrived_s[list(plan.shape.sources)] = 0.0
        self._held: list[bool] = (self._arrived_s == 0).ravel().tolist()
        self._waiting: dict[int, list[int]] = {}  # by node and block: pulls whose source lacks it
        self._held_back: dict[int, list[int]] = {}  # by node: pulls of a source that is not complete
        self._ready: list[list[int]] = [[] for _ in range(nodes)]  # by source: a heap of pulls
        self._free_s = [0.0] * nodes  # when a port can send again
        self._taken_s = [0.0] * nodes  # until when a port receives
        self._events: list[tuple[float, int]] = []  # an arrival as its number, a free port as -1 - node
        self._changed: set[int] = set()

    def run(self) -> Seconds:
        """Return when each node held each block; infinite where it never arrives."""
        for target, queue in enumerate(self._queues):
            for _ in range(min(self._links.in_flight, len(queue))):
                self._pull(target)
        self._serve(0.0)
        arrived_s = self._arrived_s.ravel()
        while self._events:
            now_s = self._events[0][0]
            while self._events and self._events[0][0] == now_s:
                event = heappop(self._events)[1]
                if event >= 0:
                    arrived_s[self._brought[event]] = now_s
                    self._arrive(event)
                else:
                    self._changed.add(-1 - event)
            self._serve(now_s)
        return self._arrived_s

    @staticmethod
    def _pulls_by_target(plan: TransferPlan) -> list[list[int]]:
        """Return the numbers of each target's pulls, the first last."""
        order = np.argsort(plan.transfers.target, kind="stable")
        ends = np.cumsum(np.bincount(plan.transfers.target, minlength=plan.shape.nodes))
        return [part[::-1].tolist() for part in np.split(order, ends[:-1])]

    def _pull(self, target: int) -> None:
        """Send the target's next pull."""
        pull = self._queues[target].pop()
        if not self._held[self._wanted[pull]]:
            self._waiting.setdefault(self._wanted[pull], []).append(pull)
        elif self._lacking[self._source[pull]]:
            self._held_back.setdefault(self._source[pull], []).append(pull)
        else:
            self._offer(pull)

    def _offer(self, pull: int) -> None:
        heappush(self._ready[self._source[pull]], pull)
        self._changed.add(self._source[pull])

    def _arrive(self, pull: int) -> None:
        target, brought = self._target[pull], self._brought[pull]
        self._held[brought] = True
        woken = self._waiting.pop(brought, ())
        if self._lacking[target]:
            self._lacking[target] -= 1
            self._held_back.setdefault(target, []).extend(woken)
            woken = () if self._lacking[target] else self._held_back.pop(target)
        for waiting in woken:
            self._offer(waiting)
        if self._queues[target]:
            self._pull(target)

    def _serve(self, now_s: float) -> None:
        for source in sorted(self._changed):
            ready = self._ready[source]
            while ready and (self._local[ready[0]] or self._free_s[source] <= now_s):
                self._start(heappop(ready), now_s)
        self._changed.clear()

    def _start(self, pull: int, now_s: float) -> None:
        if self._local[pull]:
            heappush(self._events, (now_s, pull))
            return
        source, target, links = self._source[pull], self._target[pull], self._links
        latency_s, pair_s = links.latency_s, 0.0
        if links.pairs and (source, target) in links.pairs:
            latency_s, rate = links.pairs[source, target]
            pair_s = links.overhead_s + self._bytes / rate
        stretch = self._stretch[pull]
        out_s, in_s = self._port_s[source] * stretch, self._port_s[target] * stretch
        self._free_s[source] = now_s + out_s
        heappush(self._events, (now_s + out_s, -1 - source))
        came_s = max(now_s + latency_s + max(out_s, in_s, pair_s * stretch), self._taken_s[target] + in_s)
        self._taken_s[target] = came_s
        heappush(self._events, (came_s, pull))
