"""How many instances a function version should have: a pure decision behind the ScalerPolicy seam."""

import math
from dataclasses import dataclass, field, replace
from typing import Protocol

from registry.function import Scaling


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionLoad:
    """One function version now. `in_flight` and `held` are calls on instances and calls waiting, of all
    gateways; `ready` and `starting` count instances; `nodes` could take one."""

    in_flight: int
    held: int
    ready: int
    starting: int
    nodes: int
    scaling: Scaling

    @property
    def live(self) -> int:
        return self.ready + self.starting

    @property
    def cap(self) -> int:
        most = self.scaling.max_instances
        # Without a maximum of its own a function may take all nodes; instances that are there stay
        # allowed while a node of theirs is out of sight.
        return max(self.nodes, self.live) if most is None else most


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What a policy keeps of one function version between decisions.

    `surplus_since` is when there began to be more instances than needed, `peak` the most that was
    needed by load since then. `floor` holds an operator's (or a redeploy's) number until
    `floor_until`, which is unset until that number is ready. `asleep`: scaled to zero by hand, until
    the next call. `cut`: let go of the surplus now.
    """

    surplus_since: float | None = None
    peak: int = 0
    floor: int = 0
    floor_until: float | None = None
    asleep: bool = False
    cut: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """`next_at` is when to decide again if nothing changes, None if that would change nothing."""

    desired: int
    reason: str
    memory: Memory = field(default_factory=Memory)
    next_at: float | None = None


class ScalerPolicy(Protocol):
    """Pure: the same load, memory and time give the same decision. Never decides more than `load.cap`."""

    def decide(self, load: FunctionLoad, memory: Memory, now: float) -> Decision: ...


def asked(memory: Memory, instances: int) -> Memory:
    """Set the number once; the policy goes on from there."""
    if instances == 0:
        return Memory(asleep=True, cut=True)
    return Memory(floor=instances, cut=True)


class ConcurrencyTarget:
    """As many instances as keep `target_concurrency` calls on each.

    Up at once, several in one step. Down once there was a surplus for as long as: `keep_alive_s`
    while nothing was called, else the shorter of that and `stable_s`, to as many as the load needed
    at its peak in that time. The time runs only while nothing is starting, so that an instance is
    kept from when it became ready, however long its start took.
    """

    def __init__(self, stable_s: float = 30.0) -> None:
        self._stable_s = stable_s

    def decide(self, load: FunctionLoad, memory: Memory, now: float) -> Decision:
        scaling = load.scaling
        asleep = memory.asleep and load.held == 0
        calls = 0 if asleep else load.in_flight + load.held
        wanted = math.ceil(calls / scaling.target_concurrency)
        need = _clamp(wanted, 0 if asleep else scaling.min_instances, load.cap)

        floor, floor_until = self._floor(load, memory, now)
        since: float | None = None
        peak, next_at = 0, floor_until
        desired, reason = need, f"{calls} calls at {scaling.target_concurrency} each"
        if asleep:
            reason = "asleep until the next call"
        elif load.live > need and load.starting and not memory.cut:
            desired, reason = load.live, "starting"
        elif load.live > need and not memory.cut:
            since = now if memory.surplus_since is None else memory.surplus_since
            peak = max(memory.peak, wanted)
            kept = max(_clamp(peak, scaling.min_instances, load.live), floor)
            ends_at: float | None = since + self._window_s(peak, scaling)
            if ends_at is not None and now < ends_at:
                desired, reason = load.live, "kept alive"
            else:
                desired, reason, ends_at = kept, f"at most {peak} were needed of late", None
                if need < kept and floor < kept:  # the surplus that is left counts anew
                    since, peak = now, wanted
                    ends_at = now + self._window_s(peak, scaling)
            if ends_at is not None:
                next_at = ends_at if next_at is None else min(next_at, ends_at)
        if floor > desired:
            desired, reason = floor, f"set to {floor}"
        return Decision(
            desired=min(desired, load.cap),
            reason=reason,
            memory=Memory(
                surplus_since=since, peak=peak, floor=floor, floor_until=floor_until, asleep=asleep
            ),
            next_at=next_at,
        )

    def _window_s(self, peak: int, scaling: Scaling) -> float:
        return scaling.keep_alive_s if peak == 0 else min(scaling.keep_alive_s, self._stable_s)

    @staticmethod
    def _floor(load: FunctionLoad, memory: Memory, now: float) -> tuple[int, float | None]:
        if not memory.floor:
            return 0, None
        until = memory.floor_until
        if until is None and load.ready >= memory.floor:
            until = now + load.scaling.keep_alive_s
        if until is not None and now >= until:
            return 0, None
        return memory.floor, until


def give_up_floor(memory: Memory) -> Memory:
    """Forget a number that cannot be reached."""
    return replace(memory, floor=0, floor_until=None)


def _clamp(value: int, low: int, high: int) -> int:
    return max(min(low, high), min(value, high))
