"""The same simulation for many concurrent senders: all starts within a short time together (pure).

No block takes less than the fastest port does. So the starts within that time of the first start neither
cause nor delay another of these starts except at the ports of their targets, and all of them are computed
in one pass over arrays.
"""

import numpy as np
from numpy.typing import NDArray

from rdmacast.plan.plan import TransferPlan
from rdmacast.plan.transfers import Ints
from rdmacast.simulate.link_model import LinkModel, Seconds, port_seconds, stretches

_Numbers = NDArray[np.int64]


class WaveSimulation:
    """One simulation in waves, without scale-up domains and pairs with links of their own."""

    def __init__(self, plan: TransferPlan, links: LinkModel, block_bytes: float) -> None:
        shape, moved = plan.shape, plan.transfers
        self._links = links
        self._whole = plan.whole
        self._source, self._target = moved.source, moved.target
        self._wanted = moved.source.astype(np.int64) * shape.blocks + moved.block
        self._brought = moved.target.astype(np.int64) * shape.blocks + moved.block
        self._port_s = port_seconds(links, shape.nodes, block_bytes)
        self._stretch = stretches(links, len(moved))
        self._order, self._next, self._end = _queues(moved.target, shape.nodes)
        self._free_s = np.zeros(shape.nodes)
        self._taken_s = np.zeros(shape.nodes)
        self._come_s = np.full((shape.nodes, shape.blocks), np.inf)  # known once a block is on its way
        self._come_s[list(shape.sources)] = 0.0
        self._lacking = np.full(shape.nodes, shape.blocks)  # blocks that are not on their way yet
        self._lacking[list(shape.sources)] = 0
        # The pulls that are out, several a target, and when they went out.
        self._pull = np.empty(0, dtype=np.int64)
        self._issued_s = np.empty(0)

    def run(self) -> Seconds:
        """Return when each node held each block; infinite where it never arrives."""
        for _ in range(self._links.in_flight):
            begin = self._next < self._end
            self._pull = np.concatenate([self._pull, self._order[self._next[begin]]])
            self._next[begin] += 1
        self._issued_s = np.zeros(len(self._pull))
        least_s = self._port_s.min()
        while len(self._pull):
            at_s = np.maximum(self._ready_s(), self._free_s[self._source[self._pull]])
            first_s = at_s.min()
            if first_s == np.inf:
                break
            near = np.flatnonzero(at_s < first_s + least_s)
            self._start(*self._one_a_source(near, at_s[near]))
        return self._come_s

    def _ready_s(self) -> Seconds:
        """Return when the pulls can be served by free ports."""
        come_s = self._come_s.ravel()[self._wanted[self._pull]]
        if self._whole:
            source = self._source[self._pull]
            come_s = np.where(self._lacking[source], np.inf, np.maximum(come_s, self._taken_s[source]))
        return np.maximum(self._issued_s, come_s)

    def _one_a_source(self, place: _Numbers, at_s: Seconds) -> tuple[_Numbers, Seconds]:
        """Return the earliest pull of each source, of equals the plan's first; in order of time."""
        source = self._source[self._pull[place]]
        order = np.lexsort((self._pull[place], at_s, source))
        order = order[np.unique(source[order], return_index=True)[1]]
        order = order[np.argsort(at_s[order], kind="stable")]
        return place[order], at_s[order]

    def _start(self, place: _Numbers, at_s: Seconds) -> None:
        pull = self._pull[place]
        source, target, stretch = self._source[pull], self._target[pull], self._stretch[pull]
        out_s, in_s = self._port_s[source] * stretch, self._port_s[target] * stretch
        self._free_s[source] = at_s + out_s
        come_s = at_s + self._links.latency_s + np.maximum(out_s, in_s)
        drained = np.zeros(len(self._pull), dtype=np.bool_)
        for turn in _turns(target):  # blocks for one target queue at its port
            node = target[turn]
            self._taken_s[node] = np.maximum(come_s[turn], self._taken_s[node] + in_s[turn])
            self._come_s.ravel()[self._brought[pull[turn]]] = self._taken_s[node]
            self._lacking[node] -= 1
            more = self._next[node] < self._end[node]
            drained[place[turn[~more]]] = True
            self._pull[place[turn[more]]] = self._order[self._next[node[more]]]
            self._issued_s[place[turn]] = self._taken_s[node]
            self._next[node] += 1
        if drained.any():
            self._pull, self._issued_s = self._pull[~drained], self._issued_s[~drained]


def _queues(target: Ints, nodes: int) -> tuple[_Numbers, _Numbers, _Numbers]:
    """Return the pulls of all targets one after the other, and where each target's begin and end."""
    order = np.argsort(target, kind="stable")
    end = np.cumsum(np.bincount(target, minlength=nodes))
    return order, np.concatenate([[0], end[:-1]]), end


def _turns(target: Ints) -> list[_Numbers]:
    """Return index arrays in which no target occurs twice; together all, each target's in order."""
    order = np.argsort(target, kind="stable")
    lined = target[order]
    place = np.arange(len(lined))
    rank = place - np.maximum.accumulate(np.where(np.diff(lined, prepend=-1) != 0, place, 0))
    return [order[rank == turn] for turn in range(int(rank.max(initial=0)) + 1)]
