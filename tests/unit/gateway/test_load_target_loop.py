"""The load target in a closed loop: it settles under a constant load, and meets the target."""

import random
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest

from gateway.planning.policy import PolicyState
from gateway.planning.work import InstanceCapacity, StartForecast
from registry.records.function import ScaleDown
from tests.fixtures.load_target import CAPACITY, OUTPUT, PROMPT, decide, load


@dataclass
class Model:
    """Instances with one prompt at a time each, a start time, and calls that decode for four seconds."""

    rate: float
    start_s: float = 0.6
    delay_s: float | None = 2.0  # None: surplus lasts as long as a start
    even: bool = False
    capacity: InstanceCapacity = CAPACITY
    seed: int = 1
    now: float = 0.0
    ready: list[float] = field(default_factory=lambda: [0.0])  # when each has run its prompts
    starting: list[float] = field(default_factory=list)
    queue: deque[float] = field(default_factory=deque)  # arrival times
    ends: list[float] = field(default_factory=list)
    arrived: int = 0
    state: PolicyState = field(default_factory=PolicyState)
    waits: list[float] = field(default_factory=list)
    desired: list[int] = field(default_factory=list)

    def run(self, until: float) -> None:
        rng = random.Random(self.seed)

        def gap() -> float:
            return 1 / self.rate if self.even else rng.expovariate(self.rate)

        arrival = self.now + gap()
        while self.now < until:
            self.now += 0.1
            while arrival <= self.now:
                self.queue.append(arrival)
                self.arrived += 1
                arrival += gap()
            self.ready += [at for at in self.starting if at <= self.now]
            self.starting = [at for at in self.starting if at > self.now]
            self._serve()
            self.ends = [at for at in self.ends if at > self.now]
            self._decide()

    def _serve(self) -> None:
        self.ready.sort()
        while self.queue and self.ready and self.ready[0] <= self.now:
            free_s = max(self.ready[0], self.queue[0])
            self.ready[0] = free_s + PROMPT / self.capacity.prefill_tokens_s
            self.waits.append(self.ready[0] - self.queue.popleft())
            self.ends.append(self.ready[0] + self.service_s)
            self.ready.sort()

    @property
    def service_s(self) -> float:
        """The time of all tokens of a call: longer, the more sequences an instance has."""
        return OUTPUT * self.capacity.step_s(len(self.ends) / len(self.ready))

    def _decide(self) -> None:
        step = load(
            len(self.queue),
            len(self.ends),
            ready=len(self.ready),
            starting=len(self.starting),
            arrived=self.arrived,
            capacity=self.capacity,
            service_s=self.service_s,
            starts=StartForecast(cold_s=self.start_s),
            scale_down=ScaleDown.START if self.delay_s is None else ScaleDown.DELAY,
            scale_down_delay_s=self.delay_s or 2.0,
        )
        step = replace(step, starting_s=tuple(at - self.now for at in self.starting))
        decision = decide(self.now, step, self.state)
        self.state = decision.state
        self.desired.append(decision.desired)
        for _ in range(decision.desired - step.live):
            self.starting.append(self.now + self.start_s)
        for _ in range(step.live - decision.desired):
            (self.starting or self.ready).pop(0)


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("delay_s", [0.5, 2.0, None])
@pytest.mark.parametrize("rate", [5.0, 19.0, 50.0, 78.0])
def test_a_constant_load_of_ten_minutes_settles_and_meets_the_target(
    rate: float, delay_s: float | None, even: bool
) -> None:
    model = Model(rate=rate, delay_s=delay_s, even=even)
    model.run(30.0)  # it settles
    settled = len(model.desired)
    model.run(630.0)
    seen = model.desired[settled:]
    changes = sum(a != b for a, b in pairwise(seen))
    print(even, rate, delay_s, "changes", changes, sum(seen) / len(seen), "max wait", max(model.waits))
    within = sum(wait <= 1.0 for wait in model.waits) / len(model.waits)
    # At random the KV cache of the calls in flight is now and then just too small. What that needs is kept
    # with a delay; without one it stops again, if that saves more than its start costs.
    assert changes <= (0 if even else 20 if delay_s is None else 4)
    assert within > 0.999
    kv_tokens = rate * model.service_s * (PROMPT + OUTPUT)
    least = max(rate * PROMPT / CAPACITY.prefill_tokens_s, kv_tokens / CAPACITY.kv_tokens)
    assert sum(seen) / len(seen) <= least / 0.7 + (1 if even else 1.5)


@pytest.mark.parametrize("rate", [6.0, 7.0, 8.0, 9.0, 12.0])
def test_longer_steps_with_fewer_instances_do_not_make_it_oscillate(rate: float) -> None:
    """Of the KV cache for the sequences of one instance a second one seems not to need its own."""
    slower = replace(CAPACITY, prefill_tokens_s=13_000.0, decode_steps=((1, 0.013), (24, 0.028)))
    model = Model(rate=rate, even=True, capacity=replace(slower, kv_tokens=28_000))
    model.run(30.0)
    settled = len(model.desired)
    model.run(200.0)
    assert len(set(model.desired[settled:])) == 1
