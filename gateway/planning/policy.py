"""The scaling policy: the desired number of instances of a version, as a pure decision."""

import math
from dataclasses import dataclass, field, replace
from typing import Protocol

from gateway.planning.roles import RoleNeed
from gateway.planning.work import (
    NO_TOKENS,
    UNSEEN,
    USUAL_STARTS,
    InstanceCapacity,
    StartForecast,
    TokenLoad,
    Trend,
)
from registry.records.function import Scaling, ScalingMode


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionLoad:
    """The load of one function version.

    `in_flight` and `held` are calls on instances and queued calls, of all gateways; `ready` and `starting`
    count instances; `nodes` is the number of usable nodes. `starting_s` are the predicted seconds until the
    starting instances are ready. `tokens`, `capacity` and `starts` are for the load target; `last_need` is
    what its last decision found that the calls need (None: there is none yet). Of a disaggregated function
    `prefilling` are the ready instances that run prompts.
    """

    in_flight: int
    held: int
    ready: int
    starting: int
    nodes: int
    scaling: Scaling
    tokens: TokenLoad = NO_TOKENS
    capacity: InstanceCapacity = UNSEEN
    starting_s: tuple[float, ...] = ()
    starts: StartForecast = USUAL_STARTS
    last_need: int | None = None
    prefilling: int = 0

    @property
    def live(self) -> int:
        return self.ready + self.starting

    @property
    def prompt_runners(self) -> int:
        """The number of ready instances that run prompts: all, as long as none has a role."""
        return self.prefilling or self.ready

    @property
    def needed(self) -> int:
        """The number of instances for its calls."""
        calls = self.in_flight + self.held
        if self.scaling.policy is ScalingMode.LOAD and self.last_need is not None:
            return max(1, self.last_need) if calls else 0
        return -(-calls // self.scaling.target_concurrency)

    @property
    def cap(self) -> int:
        most = self.scaling.max_instances
        # Without a maximum a function may use all nodes; existing instances stay allowed while their
        # node is not usable.
        return max(self.nodes, self.live) if most is None else most


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyState:
    """The policy's state of one function version between decisions.

    `surplus_since` is when a surplus of instances began, `peak` the largest number needed by load since then.
    `floor` is the number set by an operator (or a redeploy) until `floor_until`, which is unset until that
    number is ready. `completing`: that number is of starts which another controller made, and falls to those
    that succeed. `asleep`: scaled to zero by hand, until the next call. `cut`: release the surplus now.
    `trend` is the load target's view of the recent load.
    """

    surplus_since: float | None = None
    peak: int = 0
    floor: int = 0
    floor_until: float | None = None
    completing: bool = False
    asleep: bool = False
    cut: bool = False
    trend: Trend | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingDecision:
    """A desired number of instances; `next_at` is when to decide again if nothing changes, None if never.

    `roles` are the numbers for each role, None where instances have none.
    """

    desired: int
    reason: str
    state: PolicyState = field(default_factory=PolicyState)
    next_at: float | None = None
    roles: RoleNeed | None = None


class ScalerPolicy(Protocol):
    """A pure policy: the same arguments give the same decision, which never exceeds `load.cap`."""

    def decide(self, load: FunctionLoad, state: PolicyState, now: float) -> ScalingDecision: ...


def with_target(state: PolicyState, instances: int) -> PolicyState:
    """Return the state after an operator set the number once; the policy continues from there."""
    if instances == 0:
        return PolicyState(asleep=True, cut=True)
    return PolicyState(floor=instances, cut=True)


class ConcurrencyTarget:
    """A policy that keeps `target_concurrency` calls on each instance.

    It scales up at once, by several instances in one step. It scales down after a surplus of `keep_alive_s`
    without calls, else of the shorter of that and `stable_s`, to the peak of the load in that time. The time
    runs only while no instance is starting, so that an instance is kept from when it became ready.
    """

    def __init__(self, stable_s: float = 30.0) -> None:
        self._stable_s = stable_s

    def decide(self, load: FunctionLoad, state: PolicyState, now: float) -> ScalingDecision:
        scaling = load.scaling
        asleep = state.asleep and load.held == 0
        calls = 0 if asleep else load.in_flight + load.held
        wanted = math.ceil(calls / scaling.target_concurrency)
        need = clamp(wanted, 0 if asleep else scaling.min_instances, load.cap)

        floor, floor_until = floor_of(load, state, now)
        since: float | None = None
        peak, next_at = 0, floor_until
        desired, reason = need, calls_reason(calls, scaling.target_concurrency)
        if asleep:
            reason = "asleep until the next call"
        elif load.live > need and load.starting and not state.cut:
            desired, reason = load.live, "starting"
        elif load.live > need and not state.cut:
            since = now if state.surplus_since is None else state.surplus_since
            peak = max(state.peak, wanted)
            kept = max(clamp(peak, scaling.min_instances, load.live), floor)
            ends_at: float | None = since + self._window_s(peak, scaling)
            if ends_at is not None and now < ends_at:
                desired, reason = load.live, "kept alive"
            else:
                desired, reason, ends_at = kept, f"recent load needed at most {peak}", None
                if need < kept and floor < kept:  # the remaining surplus starts a new period
                    since, peak = now, wanted
                    ends_at = now + self._window_s(peak, scaling)
            if ends_at is not None:
                next_at = ends_at if next_at is None else min(next_at, ends_at)
        if floor > desired:
            desired, reason = floor, f"set to {floor}"
        return ScalingDecision(
            desired=min(desired, load.cap),
            reason=reason,
            state=PolicyState(
                surplus_since=since, peak=peak, floor=floor, floor_until=floor_until, asleep=asleep
            ),
            next_at=next_at,
        )

    def _window_s(self, peak: int, scaling: Scaling) -> float:
        return scaling.keep_alive_s if peak == 0 else min(scaling.keep_alive_s, self._stable_s)


def floor_of(load: FunctionLoad, state: PolicyState, now: float) -> tuple[int, float | None]:
    """Return the number that an operator set (0: none), and until when it holds if that is known."""
    if not state.floor:
        return 0, None
    floor, until = state.floor, state.floor_until
    ended = state.completing and not load.starting
    if until is None and (ended or 0 < min(floor, load.cap) <= load.ready):
        until = now + load.scaling.keep_alive_s
        floor = min(floor, load.ready) if ended else floor
    if not floor or (until is not None and now >= until):
        return 0, None
    return floor, until


def without_floor(state: PolicyState) -> PolicyState:
    """Return the state without a floor that cannot be reached."""
    return replace(state, floor=0, floor_until=None, completing=False)


def calls_reason(calls: int, per_instance: int) -> str:
    """Return the reason of a decision by the number of calls, for `describe`."""
    return f"{calls} {'call' if calls == 1 else 'calls'} at {per_instance} each"


def clamp(value: int, low: int, high: int) -> int:
    """Return the number in [low, high] that is nearest to `value`; `high` if there is none."""
    return max(min(low, high), min(value, high))
