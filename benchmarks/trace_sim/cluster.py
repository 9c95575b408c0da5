"""The simulated nodes: what their accelerators and hosts hold, and the choice of nodes for starts (pure).

A node runs one instance. The choice follows `gateway.planning.placement.choose_starts` for equal nodes: the
nearest tier, then the lowest number. A started image leaves the accelerator with its instance (with
`keeps_gpu` when another one takes its place), and in host memory until `host_ttl_s` have passed
since its last use or more recent images need the room. Each image has a copy that is kept, unless
`keeps_copies` is false: then it leaves the host with its instance too.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from heapq import heappop, heappush, nsmallest
from math import inf


class StartTier(IntEnum):
    """Where the image of a start is."""

    HOT = 0  # on the accelerator
    WARM = 1  # in host memory
    COLD = 2


@dataclass(slots=True)
class _HostCopy:
    since_s: float
    used_s: float  # infinite while an instance runs


class SimulatedCluster:
    """The nodes of a simulation; `copy_s` counts the seconds of all host copies until `until_s`."""

    def __init__(
        self,
        nodes: int,
        functions: int,
        *,
        host_images: int,
        host_ttl_s: float,
        keeps_gpu: bool = False,
        keeps_copies: bool = True,
    ) -> None:
        self.nodes = nodes
        self._keeps_copies = keeps_copies
        self.copy_s = 0.0
        self.until_s = inf
        self._ttl_s, self._host_images, self._keeps_gpu = host_ttl_s, host_images, keeps_gpu
        self._free = set(range(nodes))
        self._on_gpu: list[int | None] = [None] * nodes
        self._gpus_of: list[set[int]] = [set() for _ in range(functions)]
        self._hosts_of: list[dict[int, _HostCopy]] = [{} for _ in range(functions)]
        self._images: list[set[int]] = [set() for _ in range(nodes)]  # in host memory
        # The free nodes where a start of the function would be hot or warm.
        self._hot: list[set[int]] = [set() for _ in range(functions)]
        self._warm: list[set[int]] = [set() for _ in range(functions)]
        self._expiries: list[tuple[float, int, int]] = []  # when a copy of a function on a node may expire
        for function in range(functions if keeps_copies else 0):
            node = self.keeper(function)
            self._hosts_of[function][node] = _HostCopy(0.0, 0.0)
            self._images[node].add(function)
            self._warm[function].add(node)

    def __repr__(self) -> str:
        return f"<SimulatedCluster {len(self._free)} of {self.nodes} nodes free>"

    @property
    def free(self) -> int:
        return len(self._free)

    def keeper(self, function: int) -> int:
        """Return the node with the copy that is kept."""
        return function % self.nodes

    def near(self, function: int, now_s: float) -> tuple[int, int]:
        """Return how many starts could be hot, and how many warm."""
        self._expire(now_s)
        return len(self._hot[function]), len(self._warm[function])

    def sources(self, function: int, now_s: float) -> int:
        """Return how many nodes hold the image."""
        self._expire(now_s)
        hosts = self._hosts_of[function]
        return len(hosts) + sum(node not in hosts for node in self._gpus_of[function])

    def choose(self, function: int, count: int, now_s: float) -> list[tuple[int, StartTier]]:
        """Return up to `count` free nodes for starts, the best first."""
        self._expire(now_s)
        hot, warm = self._hot[function], self._warm[function]
        chosen = [(node, StartTier.HOT) for node in nsmallest(count, hot)]
        chosen += [(node, StartTier.WARM) for node in nsmallest(count - len(chosen), warm)]
        if len(chosen) < count:
            cold = (node for node in self._free if node not in hot and node not in warm)
            chosen += [(node, StartTier.COLD) for node in nsmallest(count - len(chosen), cold)]
        return chosen

    def occupy(self, function: int, node: int, now_s: float) -> None:
        """Begin an instance on a free node."""
        for other in self._images[node]:
            self._warm[other].discard(node)
        self._free.remove(node)
        before = self._on_gpu[node]
        if before is not None:
            self._gpus_of[before].discard(node)
            self._hot[before].discard(node)
        self._on_gpu[node] = function
        self._gpus_of[function].add(node)
        copies = self._hosts_of[function]
        if node in copies:
            copies[node].used_s = inf
        else:
            self._make_room(node, now_s)
            copies[node] = _HostCopy(now_s, inf)
            self._images[node].add(function)

    def release(self, function: int, node: int, now_s: float, *, loaded: bool) -> None:
        """End an instance; an image that was not loaded is not kept."""
        copy = self._hosts_of[function][node]
        copy.used_s = now_s
        stays = loaded and self._keeps_gpu
        if not stays:
            self._on_gpu[node] = None
            self._gpus_of[function].discard(node)
        if not self._keeps_copies:
            self._drop(function, node, now_s)
        elif loaded:
            heappush(self._expiries, (now_s + self._ttl_s, function, node))
        elif node != self.keeper(function):
            self._drop(function, node, now_s)
        self._free.add(node)
        for other in self._images[node]:
            if self._on_gpu[node] != other:
                self._warm[other].add(node)
        if stays:
            self._hot[function].add(node)

    def finish(self, now_s: float) -> None:
        """Count the copies that are left at the end."""
        self._expire(now_s)
        for copies in self._hosts_of:
            self.copy_s += sum(self._lasted_s(copy, now_s) for copy in copies.values())

    def check_integrity(self, running: Iterable[tuple[int, int]]) -> None:
        """Assert that (function, node) of the instances are all that is not free, and that sets agree."""
        taken = {node: function for function, node in running}
        assert set(taken) == set(range(self.nodes)) - self._free
        assert all(self._on_gpu[node] == function for node, function in taken.items())
        for node, images in enumerate(self._images):
            kept = sum(self.keeper(function) == node for function in images)
            assert len(images) <= max(self._host_images, kept + 1), f"{len(images)} images on node {node}"
        for function, (gpus, hosts) in enumerate(zip(self._gpus_of, self._hosts_of, strict=True)):
            assert all(self._on_gpu[node] == function for node in gpus)
            assert all(function in self._images[node] for node in hosts)
            assert self._hot[function] == gpus & self._free
            assert self._warm[function] == (hosts.keys() & self._free) - gpus

    # --- host memory

    def _expire(self, now_s: float) -> None:
        """Drop the copies that were not used for long enough."""
        while self._expiries and self._expiries[0][0] <= now_s:
            at_s, function, node = heappop(self._expiries)
            copy = self._hosts_of[function].get(node)
            if copy is not None and copy.used_s + self._ttl_s == at_s and node != self.keeper(function):
                self._drop(function, node, at_s)

    def _make_room(self, node: int, now_s: float) -> None:
        """Drop the copy that was used longest ago if there are as many as fit."""
        images = self._images[node]
        if len(images) < self._host_images:
            return
        idle = [f for f in images if self.keeper(f) != node and self._hosts_of[f][node].used_s < inf]
        if idle:
            self._drop(min(idle, key=lambda f: (self._hosts_of[f][node].used_s, f)), node, now_s)

    def _drop(self, function: int, node: int, at_s: float) -> None:
        copy = self._hosts_of[function].pop(node)
        self._images[node].discard(function)
        self._warm[function].discard(node)
        self.copy_s += self._lasted_s(copy, at_s)

    def _lasted_s(self, copy: _HostCopy, end_s: float) -> float:
        return max(0.0, min(end_s, self.until_s) - copy.since_s)
