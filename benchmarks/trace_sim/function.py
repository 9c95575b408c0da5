"""A function in the simulation: calls, instances, and the load as the scaling policy sees it (pure)."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

from benchmarks.harness.traces import TraceRequest
from benchmarks.trace_sim.instance import SimulatedCall, SimulatedInstance
from benchmarks.trace_sim.observed import ObservedCapacity
from gateway.dispatch.call_averages import CallAverages
from gateway.planning.plan import PlannerSettings
from gateway.planning.policy import FunctionLoad, PolicyState
from gateway.planning.work import StartForecast, TokenLoad
from registry.records.function import FunctionTask, Scaling, ScalingMode

MAX_FRESH, MAX_FRESH_TOKENS = (
    2,
    1024,
)  # calls without a first token on an instance: gateway/dispatch/router.py


@dataclass(slots=True, eq=False)
class SimulatedFunction:
    """One function. `ready` and `starting` are its instances; `draining` ones stop once they have no calls.

    `deciding` while a decision is due, `timer_s` is the next one without a change. `alone_since_s` is when
    its calls began to wait without any instance and free node.
    """

    number: int
    scaling: Scaling
    arrivals: Iterator[TraceRequest]
    observed: ObservedCapacity
    state: PolicyState = field(default_factory=PolicyState)
    averages: CallAverages = field(default_factory=CallAverages)
    held: deque[SimulatedCall] = field(default_factory=deque)
    ready: list[SimulatedInstance] = field(default_factory=list)
    starting: dict[int, SimulatedInstance] = field(default_factory=dict)
    draining: set[SimulatedInstance] = field(default_factory=set)
    in_flight: int = 0
    held_tokens: int = 0
    prefilling_tokens: int = 0
    kv_tokens: int = 0
    deciding: bool = False
    timer_s: float = 0.0
    alone_since_s: float | None = None

    @property
    def live(self) -> int:
        return len(self.ready) + len(self.starting)

    @property
    def paced(self) -> bool:
        return self.scaling.policy is ScalingMode.LOAD

    @property
    def slots(self) -> int:
        """The calls of one instance."""
        if self.paced:
            return self.observed.slots
        return PlannerSettings().max_concurrency(FunctionTask.GENERATE, self.scaling)

    def arrive(self, call: SimulatedCall) -> None:
        """Count a new call."""
        averages = self.averages
        averages.arrived_calls += 1
        averages.arrived_tokens += call.prompt_tokens
        call.kv_tokens = call.prompt_tokens + averages.expected_output(call.output_tokens)
        self.kv_tokens += call.kv_tokens

    def hold(self, call: SimulatedCall) -> None:
        self.held.append(call)
        self.held_tokens += call.prompt_tokens

    def assign(self, call: SimulatedCall, instance: SimulatedInstance, now_s: float) -> None:
        """Send a call to an instance."""
        self.in_flight += 1
        self.prefilling_tokens += call.prompt_tokens
        call.assigned_s = now_s
        instance.add(call, now_s)

    def pop_held(self) -> SimulatedCall:
        call = self.held.popleft()
        self.held_tokens -= call.prompt_tokens
        return call

    def got_first(self, call: SimulatedCall) -> None:
        self.prefilling_tokens -= call.prompt_tokens

    def ended(self, call: SimulatedCall) -> None:
        self.in_flight -= 1
        self.kv_tokens -= call.kv_tokens
        self.averages.record(call.end_s - call.assigned_s, call.output_tokens)

    def admits(self, instance: SimulatedInstance, call: SimulatedCall, slots: int) -> bool:
        """Return whether an instance takes the call now, as the gateway's router does."""
        if instance.calls >= slots:
            return False
        if not self.paced or not instance.calls:
            return True
        fits = instance.kv_tokens + call.kv_tokens <= self.observed.kv_tokens
        fresh = instance.fresh < MAX_FRESH or instance.fresh_tokens + call.prompt_tokens <= MAX_FRESH_TOKENS
        return fits and fresh

    def choose(self, call: SimulatedCall) -> SimulatedInstance | None:
        """Return the least loaded instance for a call, None if it has to wait."""
        best, least, slots = None, inf, self.slots
        fresh_weight = 1 / MAX_FRESH_TOKENS if self.paced else 0.0
        for instance in self.ready:
            load = instance.calls / slots + instance.fresh_tokens * fresh_weight
            if load < least and self.admits(instance, call, slots):
                best, least = instance, load
        return best

    def place(self, call: SimulatedCall) -> SimulatedInstance | None:
        """Return the least loaded instance with room for a call that decodes elsewhere, None without one."""
        slots, kv_tokens = self.slots, self.observed.kv_tokens
        able = [
            one
            for one in self.ready
            if one.calls < slots
            and (not self.paced or not one.calls or one.kv_tokens + call.kv_tokens <= kv_tokens)
        ]
        return min(able, key=lambda one: (one.calls, one.id), default=None)

    def load(self, nodes: int, starts: StartForecast, now_s: float) -> FunctionLoad:
        """Return the load for the scaling policy."""
        averages = self.averages
        return FunctionLoad(
            in_flight=self.in_flight,
            held=len(self.held),
            ready=len(self.ready),
            starting=len(self.starting),
            nodes=nodes,
            scaling=self.scaling,
            tokens=TokenLoad(
                held_tokens=self.held_tokens,
                prefilling_tokens=self.prefilling_tokens,
                kv_tokens=self.kv_tokens,
                arrived_tokens=averages.arrived_tokens,
                arrived_calls=averages.arrived_calls,
                service_s=averages.service_s,
            ),
            capacity=self.observed.capacity,
            starting_s=tuple(max(0.0, one.ready_s - now_s) for one in self.starting.values()),
            starts=starts,
        )

    def check_integrity(self) -> None:
        """Assert that counts and calls agree."""
        instances = [*self.ready, *self.starting.values(), *self.draining]
        for instance in instances:
            instance.check_integrity()
        assert self.in_flight == sum(one.calls for one in instances)
        assert self.prefilling_tokens == sum(one.fresh_tokens for one in instances)
        assert self.held_tokens == sum(call.prompt_tokens for call in self.held)
        held_kv = sum(call.kv_tokens for call in self.held)
        assert self.kv_tokens == held_kv + sum(one.kv_tokens for one in instances)
