"""The throughput of loading nodes' pipelines by the devices' profile alone, beside the measured one (pure).

The platform's own scheduler plans the steps of each replica; a stage takes the profile's time, transfers and
everything else take none. Calls are spread by the replicas' rates; moved calls recompute their keys and
values. A shortfall against this prediction is overhead; a low rate without one is explained by the profile.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any

from benchmarks.scaleout.client import Burst
from benchmarks.scaleout.profiles import kv_tokens
from benchmarks.scaleout.records import TokenArrival
from benchmarks.scaleout.watch import ServingReplica, ServingSet
from invoker.emulated.engine import limits_of, step_s
from invoker.emulated.profiles import Profile
from invoker.engine.contract import NewSequence
from invoker.engine.kv.cache import PAGE_TOKENS
from invoker.engine.sampling import SampledToken
from invoker.engine.scheduling.pipeline_scheduler import PipelineScheduler, PipelineShape
from invoker.engine.stage_contract import StageOutput, StageStep, StageToken
from registry.messages.sampling import Sampling

MIN_STAIR_S = 0.05  # shorter stairs have too few tokens for a rate
_TOKEN = 5  # any
_SEQUENCES = 64


@dataclass(slots=True)
class _SimulatedCall:
    name: str
    made: int = 0


class _SimulatedReplica:
    """A simulated replica: `calls` are its requests, `ranges` the nodes and their layers."""

    def __init__(self, server: ServingReplica, profile: Profile) -> None:
        self.rate = server.rate
        self.calls: dict[str, _SimulatedCall] = {}
        self.ranges = server.stages or ((server.name, 0, profile.model.layers),)
        stages = len(self.ranges)
        shape = PipelineShape(
            stages=stages,
            pages=kv_tokens(profile) // PAGE_TOKENS,
            context=profile.model.context,
            vocabulary=profile.model.vocabulary,
            steps=stages + 1 if stages > 1 else 1,
        )
        self._scheduler = PipelineScheduler(shape, limits_of(profile, _SEQUENCES))

    def add(self, call: _SimulatedCall, burst: Burst) -> None:
        self.calls[call.name] = call
        self._scheduler.add(
            NewSequence(
                request_id=call.name,
                prompt_ids=[_TOKEN] * burst.prompt_tokens,
                generated_ids=[_TOKEN] * call.made,
                sampling=Sampling(max_tokens=burst.output_tokens, temperature=0.0, ignore_eos=True),
            )
        )

    def take_calls(self, count: int) -> list[_SimulatedCall]:
        """Remove and return `count` calls, those without a first token first."""
        names = sorted(self.calls, key=lambda name: self.calls[name].made)[:count]
        for name in names:
            self._scheduler.cancel(name)
        return [self.calls.pop(name) for name in names]

    def begin(self) -> Iterator[StageStep]:
        """Yield the steps that can start now."""
        while (planned := self._scheduler.next_step()) is not None:
            yield planned.step

    def end(self, step: StageStep) -> tuple[int, int]:
        """Return the tokens of a step, and how many are the first of their calls."""
        sampled = SampledToken(token_id=_TOKEN, logprob=None)
        drawn = tuple(StageToken(sequence=chunk.sequence, sampled=sampled) for chunk in step.sampled_chunks)
        tokens = first = 0
        for output in self._scheduler.complete_step(StageOutput(step=step, hidden=None, tokens=drawn)):
            if output.token_id is not None:
                call = self.calls[output.request_id]
                tokens, first = tokens + 1, first + (not call.made)
                call.made += 1
            if output.finish_reason:
                del self.calls[output.request_id]
        return tokens, first


class _SimulatedPlatform:
    """Replicas in simulated time; a node runs its steps one after another in order of arrival."""

    def __init__(self, profile: Profile, burst: Burst) -> None:
        self.tokens: list[TokenArrival] = []
        self._profile = profile
        self._burst = burst
        self._works: dict[str, _SimulatedReplica] = {}
        self._waiting = [_SimulatedCall(str(number)) for number in range(burst.requests)]
        self._free_s: dict[str, float] = {}
        self._numbers = count()
        self._events: list[
            tuple[float, int, str, _SimulatedReplica, StageStep, int]
        ] = []  # a step arrives at a stage

    def run(self, until_s: float) -> None:
        while self._events and self._events[0][0] < until_s:
            at_s, _, name, work, step, place = heapq.heappop(self._events)
            if self._works.get(name) is not work:
                continue  # it has been removed
            if place < len(work.ranges):
                self._come(at_s + self._stage_s(at_s, work, step, place), name, work, step, place + 1)
                continue
            made, first = work.end(step)
            self.tokens.extend([TokenArrival(at_s, made, first)] if made else [])
            self._begin(name, at_s)

    def change(self, serving: ServingSet) -> None:
        """Change the serving set."""
        servers = {one.name: one for one in serving.pipelines}
        servers.update({node: ServingReplica(name=node, rate=1.0) for node in serving.ready})
        for name in [name for name in self._works if name not in servers]:
            self._waiting += self._works.pop(name).calls.values()
        fresh = [name for name in servers if name not in self._works]
        self._works.update({name: _SimulatedReplica(servers[name], self._profile) for name in fresh})
        if not self._works:
            return
        for name in fresh:
            self._switch(name, serving)
        self._spread()
        for name in self._works:
            self._begin(name, serving.at_s)

    def _switch(self, node: str, serving: ServingSet) -> None:
        """Give a member that serves alone its share of its pipeline's calls."""
        for pipeline in serving.pipelines:
            members = {stage[0] for stage in pipeline.stages}
            if node in members and node not in {one.name for one in serving.pipelines}:
                sharers = 1 + len(members - set(serving.ready))
                work = self._works[pipeline.name]
                for call in work.take_calls(len(work.calls) // sharers):
                    self._works[node].add(call, self._burst)

    def _spread(self) -> None:
        """Assign waiting calls to the replicas with the fewest for their rate.

        Before, replicas with more than their share release calls without a first token.
        """
        works = self._works.values()
        calls = len(self._waiting) + sum(len(work.calls) for work in works)
        for work in works:
            fair = calls * work.rate / sum(one.rate for one in works)
            unbegun = sum(not call.made for call in work.calls.values())
            self._waiting += work.take_calls(min(unbegun, max(0, int(len(work.calls) - fair))))
        for call in sorted(self._waiting, key=lambda call: -call.made):
            least = min(works, key=lambda work: (len(work.calls) + 1) / work.rate)
            least.add(call, self._burst)
        self._waiting = []

    def _begin(self, name: str, now_s: float) -> None:
        work = self._works[name]
        for step in work.begin():
            self._come(now_s, name, work, step, 0)

    def _come(self, at_s: float, name: str, work: _SimulatedReplica, step: StageStep, place: int) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), name, work, step, place))

    def _stage_s(self, now_s: float, work: _SimulatedReplica, step: StageStep, place: int) -> float:
        """Return how long a step that arrives now stays at a stage."""
        node, first, last = work.ranges[place]
        chunks = [(chunk.start, chunk.count, chunk.last) for chunk in step.chunks]
        took_s = step_s(self._profile, first, last, chunks) if chunks else 0.0
        self._free_s[node] = max(now_s, self._free_s.get(node, 0.0)) + took_s
        return self._free_s[node] - now_s


def predicted(
    profile: Profile, burst: Burst, seen: Sequence[ServingSet], until_s: float
) -> list[TokenArrival]:
    """Return the predicted arrivals before `until_s`, for a burst at 0."""
    platform = _SimulatedPlatform(profile, burst)
    for serving in seen:
        if serving.at_s >= until_s:
            break
        platform.run(serving.at_s)
        platform.change(serving)
    platform.run(until_s)
    return platform.tokens


def stairs(
    profile: Profile, burst: Burst, seen: Sequence[ServingSet], arrived: Sequence[TokenArrival]
) -> list[dict[str, Any]]:
    """Compare measured and predicted throughput between changes of the serving set with pipelines.

    Each stair counts the replicas at its end. A prompt counts where its first token is; it takes as long as
    many tokens, so fewer tokens with more prompts are another order, not overhead.
    """
    span = _span(seen)
    if span is None:
        return []
    first_s, until_s = span
    expected = predicted(profile, burst, seen, until_s)
    edges = [first_s]
    for serving in seen:
        if edges[-1] + MIN_STAIR_S <= serving.at_s <= until_s - MIN_STAIR_S:
            edges.append(serving.at_s)
    edges.append(until_s)
    return [_stair(seen, arrived, expected, begin_s, end_s) for begin_s, end_s in pairwise(edges)]


def _span(seen: Sequence[ServingSet]) -> tuple[float, float] | None:
    """Return the time from the first pipeline to the end of the last one."""
    served = [serving.at_s for serving in seen if serving.pipelines]
    ends = [serving.at_s for serving in seen if served and serving.at_s > served[-1]]
    return (served[0], ends[0]) if ends else None


def _stair(
    seen: Sequence[ServingSet],
    arrived: Sequence[TokenArrival],
    expected_arrivals: Sequence[TokenArrival],
    begin_s: float,
    end_s: float,
) -> dict[str, Any]:
    def inside(arrivals: Sequence[TokenArrival]) -> tuple[int, int]:
        there = [one for one in arrivals if begin_s <= one.at_s < end_s]
        return sum(one.tokens for one in there), sum(one.first for one in there)

    last = [serving for serving in seen if serving.at_s < end_s][-1]
    (tokens, prompts), (expected, expected_prompts) = inside(arrived), inside(expected_arrivals)
    return {
        "from_s": round(begin_s, 4),
        "to_s": round(end_s, 4),
        "pipelines": len(last.pipelines),
        "instances": len(last.ready),
        "tokens_per_s": round(tokens / (end_s - begin_s), 1),
        "predicted_tokens_per_s": round(expected / (end_s - begin_s), 1),
        "of_predicted": round(tokens / expected, 3) if expected else None,
        "prompts": prompts,
        "predicted_prompts": expected_prompts,
    }
