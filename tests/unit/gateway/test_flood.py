"""A flood is a small wait for others: the queue of a gateway before the scheduler of an engine, simulated.

No processes: time passes by what a step costs.
"""

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from gateway.cluster.state_cache import VersionKey
from gateway.dispatch.admission import Admission, AdmissionLimits, QueuedRequest
from gateway.dispatch.router import ReplicaSlots, concurrency_of
from invoker.engine.kv.pages import PageAllocator
from invoker.engine.scheduling.scheduler import Scheduler, StepLimits, StepPlan
from tests.fixtures.control import make_call, make_instance, make_version

KEY = VersionKey("f", 1)
Cost = Callable[[StepPlan], float]


def cost(*, step_ms: float, token_ms: float, prompt_ms: float = 0.0) -> Cost:
    """Return a step's cost: a constant, and parts for its tokens and for prompts beside others."""

    def of(plan: StepPlan) -> float:
        prompts = sum(chunk.count > 1 for chunk in plan.chunks)
        beside = prompts if len(plan.chunks) > 1 else 0
        return step_ms + token_ms * sum(chunk.count for chunk in plan.chunks) + prompt_ms * beside

    return of


COSTS = {  # a processor's small model, its larger one, and an accelerator that a few hundred tokens fill
    "small": (
        cost(step_ms=3.0, token_ms=0.1, prompt_ms=2.0),
        StepLimits(sequences=64, prefill_tokens=512, shared_prefill_tokens=48),
    ),
    "large": (
        cost(step_ms=15.0, token_ms=1.2),
        StepLimits(sequences=64, prefill_tokens=512, shared_prefill_tokens=48),
    ),
    "accelerator": (
        cost(step_ms=6.0, token_ms=0.02),
        StepLimits(sequences=64, prefill_tokens=512, shared_prefill_tokens=128),
    ),
}


@dataclass(slots=True, eq=False)
class Request:
    """A call of the simulation: when it came, and what is left of it."""

    queued: QueuedRequest
    prompt: int
    output: int
    quiet: bool
    came_ms: float
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.output


class Simulation:
    """One instance of eight slots under a flood of calls.

    `flood` connections send one call after the other; a quiet client does so with pauses.
    `first_ms` are its times to first token.
    """

    def __init__(self, kind: str, *, flood: int, quiet_prompt: int, quiet_tenant: str = "quiet") -> None:
        self._cost, limits = COSTS[kind]
        self._scheduler = Scheduler(limits, PageAllocator(8 * 64))
        self._admission = Admission(AdmissionLimits())
        self._slots = ReplicaSlots()
        self._instance = make_instance("i", "a", max_concurrency=8)
        self._rng = random.Random(5)
        self._requests: dict[QueuedRequest, Request] = {}
        self._running: dict[str, Request] = {}
        self._now_ms = 0.0
        self._next_quiet_ms = 100.0
        self._quiet = quiet_tenant, quiet_prompt
        self.first_ms: list[float] = []
        self.flooded_tokens = 0
        for _ in range(flood):
            self._flood()

    def run(self, requests: int) -> None:
        while len(self.first_ms) < requests:
            if self._next_quiet_ms <= self._now_ms:
                self._arrive(*self._quiet, 16, self._next_quiet_ms, quiet=True)
                self._next_quiet_ms = float("inf")
            self._assign()
            plan = self._scheduler.plan()
            if not plan.chunks:
                self._now_ms = self._next_quiet_ms
                continue
            self._now_ms += self._cost(plan)
            self._scheduler.step_done()
            self._scheduler.check_integrity()
            for chunk in plan.chunks:
                if chunk.last:
                    self._token(chunk.request_id)

    def _flood(self) -> None:
        self._arrive("flood", self._rng.randint(300, 600), 128, self._now_ms, quiet=False)

    def _arrive(self, tenant: str, prompt: int, output: int, now_ms: float, *, quiet: bool) -> None:
        call = make_call(make_version(), tenant=tenant, prompt=(1,) * prompt, tokens=output)
        request = Request(
            QueuedRequest(call, VersionKey(call.version.function, 1), now_ms / 1000, 0, hot=True),
            prompt,
            output,
            quiet,
            now_ms,
        )
        self._requests[request.queued] = request
        self._admission.enqueue(request.queued)

    def _assign(self) -> None:
        line = self._admission.queue(KEY).to_prefill
        while (queued := line.first()) is not None:
            over_commit = line.is_below_share(queued.tenant, concurrency_of(self._instance))
            chosen = self._slots.choose(
                [self._instance], self._rng, self._now_ms, over_commit=over_commit
            ).instance
            if chosen is None:
                return
            self._slots.acquire(chosen.instance_id)
            self._admission.assign(queued, chosen)
            self._running[str(queued.arrival)] = request = self._requests.pop(queued)
            self._scheduler.add(str(queued.arrival), request.prompt, queued.tenant)

    def _token(self, name: str) -> None:
        request = self._running[name]
        if request.quiet and request.left == request.output:
            self.first_ms.append(self._now_ms - request.came_ms)
        self.flooded_tokens += not request.quiet
        request.left -= 1
        if request.left:
            self._scheduler.append_token(name)
            return
        self._scheduler.remove(name)
        del self._running[name]
        self._slots.release("i")
        self._admission.leave(request.queued)
        if request.quiet:
            self._next_quiet_ms = self._now_ms + self._rng.uniform(0, 50)
        else:
            self._flood()


def p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20, method="inclusive")[-1]


@pytest.mark.parametrize("prompt", [64, 128, 512])
@pytest.mark.parametrize("kind", COSTS)
def test_a_flood_at_most_doubles_the_p95_time_to_first_token_of_others(kind: str, prompt: int) -> None:
    alone = Simulation(kind, flood=0, quiet_prompt=prompt)
    alone.run(50)
    flooded = Simulation(kind, flood=64, quiet_prompt=prompt)
    flooded.run(50)
    assert p95(flooded.first_ms) <= 2 * p95(alone.first_ms)
    assert flooded.flooded_tokens > 0


def test_without_tenants_the_same_flood_is_felt() -> None:
    """What the simulation shows if all calls belong to one: the wait is for whole answers."""
    alone = Simulation("large", flood=0, quiet_prompt=128)
    alone.run(10)
    flooded = Simulation("large", flood=64, quiet_prompt=128, quiet_tenant="flood")
    flooded.run(10)
    assert statistics.median(flooded.first_ms) > 50 * statistics.median(alone.first_ms)
