"""The simulated platform: arrivals, admission, scaling decisions, starts and stops in simulated time (pure).

The scaling policy is the platform's own. Its planner takes some 15 ms a step for 200 functions on a thousand
nodes: six hours for the 1.4 million decisions of a day. So placement is that of `cluster`. A decision follows
a change of the load after `Overheads.react_s`, as reports are batched; all changes until then share it.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from time import perf_counter

from benchmarks.trace_sim.cluster import SimulatedCluster, StartTier
from benchmarks.trace_sim.figures import RunFigures
from benchmarks.trace_sim.function import SimulatedFunction
from benchmarks.trace_sim.instance import EngineModel, SimulatedCall, SimulatedInstance
from benchmarks.trace_sim.starts import Overheads, StartTimes
from gateway.planning.plan import PlannerSettings
from gateway.planning.policy import ScalerPolicy
from gateway.planning.work import StartForecast

_Event = tuple[float, int, Callable[..., None], tuple[object, ...]]


@dataclass(slots=True, kw_only=True)
class SimulatedPlatform:
    """A simulation of `functions` on the nodes of `cluster`; `figures` receives what happens.

    With `moves` calls that decode leave an instance which is to stop, one after the other.
    """

    functions: Sequence[SimulatedFunction]
    cluster: SimulatedCluster
    policy: ScalerPolicy
    engine: EngineModel
    start_times: StartTimes
    overheads: Overheads
    figures: RunFigures
    moves: bool = False
    _events: list[_Event] = field(default_factory=list)
    _numbers: int = 0
    _instances: int = 0
    _now_s: float = 0.0
    _short: dict[int, SimulatedFunction] = field(default_factory=dict)  # with fewer nodes than wanted

    def run(self, until_s: float) -> None:
        """Run all requests; GPU time and host copies count until `until_s`, also if calls end later."""
        for function in self.functions:
            self._scale(function, function.scaling.min_instances, loaded=True)
            self._arrive_next(function)
        self.figures.until_s = self.cluster.until_s = until_s
        events, pop = self._events, heapq.heappop
        while events:
            if events[0][0] > until_s and not self.figures.open_calls:
                break
            at_s, _, handle, arguments = pop(events)
            self._now_s = at_s
            handle(*arguments)
        self._now_s = max(until_s, self._now_s)
        for function in self.functions:
            for instance in [*function.ready, *function.starting.values(), *function.draining]:
                self.figures.stopped(instance, self._now_s)
        self.cluster.finish(self._now_s)

    def check_integrity(self) -> None:
        """Assert that functions, instances and nodes agree."""
        running = []
        for function in self.functions:
            function.check_integrity()
            instances = [*function.ready, *function.starting.values(), *function.draining]
            running += [(function.number, instance.node) for instance in instances]
        assert len(running) == len({node for _, node in running})
        self.cluster.check_integrity(running)

    def _at(self, at_s: float, handle: Callable[..., None], *arguments: object) -> None:
        self._numbers += 1
        heapq.heappush(self._events, (at_s, self._numbers, handle, arguments))

    # --- calls

    def _arrive_next(self, function: SimulatedFunction) -> None:
        request = next(function.arrivals, None)
        if request is not None:
            call = SimulatedCall(request.offset_s, request.prompt_tokens, request.output_tokens)
            self._at(request.offset_s, self._on_arrival, function, call)

    def _on_arrival(self, function: SimulatedFunction, call: SimulatedCall) -> None:
        self.figures.arrived()
        function.arrive(call)
        instance = None if function.held else function.choose(call)
        if instance is None:
            function.hold(call)
        else:
            self._assign(function, call, instance)
        self._changed(function)
        self._arrive_next(function)

    def _assign(self, function: SimulatedFunction, call: SimulatedCall, instance: SimulatedInstance) -> None:
        before_s = instance.phase_ends_s
        function.assign(call, instance, self._now_s)
        self._follow(function, instance, before_s)

    def _follow(self, function: SimulatedFunction, instance: SimulatedInstance, before_s: float) -> None:
        """Wait for the end of the phase unless it ends as before."""
        if instance.phase_ends_s not in (before_s, inf):
            self._at(instance.phase_ends_s, self._on_phase_end, function, instance, instance.phase_ends_s)

    def _on_phase_end(self, function: SimulatedFunction, instance: SimulatedInstance, at_s: float) -> None:
        if instance.phase_ends_s != at_s:
            return  # a call has changed the phase
        end = instance.finish_phase()
        if instance.phase_ends_s < inf:
            self._at(instance.phase_ends_s, self._on_phase_end, function, instance, instance.phase_ends_s)
        for call in end.first:
            function.got_first(call)
        for call in end.ended:
            function.ended(call)
            self.figures.ended(call)
        if not (end.first or end.ended):
            return
        if instance.stopping:
            if not instance.calls:
                self._stop(function, instance)
        else:
            self._fill(function, instance)
        for one in sorted(function.draining, key=lambda one: one.id):
            self._empty(function, one)
        self._changed(function)

    def _fill(self, function: SimulatedFunction, instance: SimulatedInstance) -> None:
        """Assign held calls to an instance that may have room for them."""
        slots = function.slots
        while function.held and function.admits(instance, function.held[0], slots):
            self._assign(function, function.pop_held(), instance)

    # --- scaling

    def _changed(self, function: SimulatedFunction) -> None:
        if not function.deciding:
            function.deciding = True
            self._at(self._now_s + self.overheads.react_s, self._decide, function)

    def _on_timer(self, function: SimulatedFunction, at_s: float) -> None:
        if function.timer_s == at_s and not function.deciding:
            self._decide(function)

    def _decide(self, function: SimulatedFunction) -> None:
        """Decide on a function's number of instances, and act on that."""
        now_s, number = self._now_s, function.number
        function.deciding = False
        hot, warm = self.cluster.near(number, now_s)
        times = self.start_times
        starts = StartForecast(
            hot=hot,
            hot_s=times.hot_s,
            warm=warm,
            warm_s=times.warm_s,
            cold_s=times.next_cold_s(self.cluster.sources(number, now_s)),
        )
        load = function.load(self.cluster.nodes, starts, now_s)
        began_s = perf_counter()
        decision = self.policy.decide(load, function.state, now_s)
        self.figures.decided(perf_counter() - began_s)
        function.state = decision.state
        patience_s = max(PlannerSettings().share_after_s, starts.next_s)
        self._scale(function, decision.desired, patience_s=patience_s)
        if decision.next_at is not None and decision.next_at != function.timer_s:
            function.timer_s = max(now_s, decision.next_at)
            self._at(function.timer_s, self._on_timer, function, function.timer_s)

    def _scale(
        self, function: SimulatedFunction, desired: int, *, loaded: bool = False, patience_s: float = 0.0
    ) -> None:
        missing = desired - function.live
        if missing > 0:
            if missing > self.cluster.free and function.held:
                self._stop_victims(function, missing - self.cluster.free)
                self._take_turn(function, patience_s)
            self._start(function, missing, loaded=loaded)
        for instance in self._surplus(function, -missing):
            self._retire(function, instance)
        if function.live or not function.held:
            function.alone_since_s = None
        if desired > function.live:
            self._short[function.number] = function
        else:
            self._short.pop(function.number, None)

    def _start(self, function: SimulatedFunction, count: int, *, loaded: bool) -> None:
        """Start up to `count` instances; `loaded` ones are ready at once."""
        number, now_s, times = function.number, self._now_s, self.start_times
        sources = self.cluster.sources(number, now_s)
        chosen = self.cluster.choose(number, count, now_s)
        cold = sum(tier is StartTier.COLD for _, tier in chosen)
        taken_s = iter(times.cold_s(sources, cold) if cold else ())
        self.figures.cast_images += times.cast_images(sources, cold) if not loaded else 0
        by_tier = {StartTier.HOT: times.hot_s, StartTier.WARM: times.warm_s}
        for node, tier in chosen:
            self._instances += 1
            instance = SimulatedInstance(self._instances, node, self.engine, function.observed)
            instance.started_s = now_s
            lasts_s = next(taken_s) if tier is StartTier.COLD else by_tier[tier]
            instance.ready_s = now_s if loaded else now_s + lasts_s
            self.cluster.occupy(number, node, now_s)
            self.figures.started(tier, now_s, counts=not loaded)
            function.starting[instance.id] = instance
            if loaded:
                self._on_ready(function, instance)
            else:
                self._at(instance.ready_s, self._on_ready, function, instance)

    def _on_ready(self, function: SimulatedFunction, instance: SimulatedInstance) -> None:
        if function.starting.pop(instance.id, None) is None:
            return  # it was stopped
        function.ready.append(instance)
        self._fill(function, instance)
        self._changed(function)

    def _surplus(self, function: SimulatedFunction, count: int) -> list[SimulatedInstance]:
        """Choose instances to stop: idle before busy, starting before ready, the youngest first."""
        if count <= 0:
            return []
        rows = [(0, 0, -one.started_s, -one.id, one) for one in function.starting.values()]
        rows += [(one.calls, 1, -one.started_s, -one.id, one) for one in function.ready]
        return [row[-1] for row in heapq.nsmallest(count, rows)]

    def _retire(self, function: SimulatedFunction, instance: SimulatedInstance) -> None:
        """Stop an instance once it has no calls."""
        instance.stopping = True
        if instance.id in function.starting:
            del function.starting[instance.id]
            self._stop(function, instance, loaded=False)
            return
        function.ready.remove(instance)
        function.draining.add(instance)
        if instance.calls:
            self._empty(function, instance)
        else:
            self._stop(function, instance)

    def _empty(self, function: SimulatedFunction, instance: SimulatedInstance) -> None:
        """Have the next call leave an instance that is to stop."""
        if self.moves and not instance.moving:
            instance.moving = True
            self._at(self._now_s + self.overheads.move_s, self._move_call, function, instance)

    def _move_call(self, function: SimulatedFunction, instance: SimulatedInstance) -> None:
        """Move a call to another instance if that has room and none waits; else try again as calls end."""
        instance.moving = False
        call = instance.oldest
        if instance not in function.draining or call is None or function.held:
            return
        target, before_s = function.place(call), instance.phase_ends_s
        taken = None if target is None else instance.leave(self._now_s)
        if target is None or taken is None:
            return
        self._follow(function, instance, before_s)
        before_s = target.phase_ends_s
        target.adopt(*taken, self._now_s)
        self._follow(function, target, before_s)
        if instance.calls:
            self._empty(function, instance)
        else:
            self._stop(function, instance)
            self._changed(function)

    def _stop(self, function: SimulatedFunction, instance: SimulatedInstance, *, loaded: bool = True) -> None:
        function.draining.discard(instance)
        self.cluster.release(function.number, instance.node, self._now_s, loaded=loaded)
        self.figures.stopped(instance, self._now_s)
        # The platform plans all in one step, those first that have nothing.
        for other in sorted(self._short.values(), key=lambda one: one.live > 0):
            self._changed(other)

    def _stop_victims(self, function: SimulatedFunction, count: int) -> None:
        """Stop idle instances of other functions, the oldest first, for calls that wait for a node."""
        idle = [
            (one.started_s, one.id, other, one)
            for other in self.functions
            if other is not function and other.live > other.scaling.min_instances
            for one in other.ready
            if not one.calls and not other.held
        ]
        for _, _, other, one in sorted(idle, key=lambda row: row[:2])[:count]:
            if other.live > other.scaling.min_instances:
                self._retire(other, one)
                self._changed(other)

    def _take_turn(self, function: SimulatedFunction, patience_s: float) -> None:
        """Stop an instance of the function with the most once one without any has waited for `patience_s`."""
        if function.live or self.cluster.free or any(other.draining for other in self.functions):
            return
        if function.alone_since_s is None:
            function.alone_since_s = self._now_s
            self._at(self._now_s + patience_s, self._changed, function)
        largest = max(self.functions, key=lambda other: len(other.ready))
        if self._now_s >= function.alone_since_s + patience_s and len(largest.ready) > 1:
            self._retire(largest, min(largest.ready, key=lambda one: one.calls))
            self._changed(largest)
