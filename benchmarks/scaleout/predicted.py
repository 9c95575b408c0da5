"""What pipelines of loading nodes would serve by the devices' profile alone, beside what they did (pure).

The platform's own scheduler plans the steps of each server; a stage takes what the profile says, hand-overs
and everything else take nothing. Calls are spread by the servers' rates; those that go elsewhere have their
keys and values computed anew there. So a rate that stays behind is overhead, one that does not is
explained by the profile.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any

from benchmarks.scaleout_client import Burst
from benchmarks.scaleout_records import Arrival
from benchmarks.scaleout_watch import Server, Serving
from invoker.emulated.engine import limits_of, step_s
from invoker.emulated.profiles import Profile
from invoker.engine.conductor import Conductor, PipelineShape
from invoker.engine.contract import NewSequence
from invoker.engine.kv_cache import PAGE_TOKENS
from invoker.engine.sampling import Choice
from invoker.engine.stage_contract import StageOutput, StageStep, StageToken
from registry.messages import Sampling

SHORTEST_S = 0.05  # of a stair: in less there are too few tokens to tell a rate
_TOKEN = 5  # any
_SEQUENCES = 64


@dataclass(slots=True)
class _Call:
    name: str
    made: int = 0


class _Works:
    """A server at work: `calls` are what it has, `ranges` which nodes run which layers."""

    def __init__(self, server: Server, profile: Profile) -> None:
        self.rate = server.rate
        self.calls: dict[str, _Call] = {}
        self.ranges = server.stages or ((server.name, 0, profile.model.layers),)
        stages = len(self.ranges)
        shape = PipelineShape(
            stages=stages,
            pages=profile.kv_tokens // PAGE_TOKENS,
            context=profile.model.context,
            vocabulary=profile.model.vocabulary,
            steps=stages + 1 if stages > 1 else 1,
        )
        self._conductor = Conductor(shape, limits_of(profile, _SEQUENCES))

    def add(self, call: _Call, burst: Burst) -> None:
        self.calls[call.name] = call
        self._conductor.add(
            NewSequence(
                request_id=call.name,
                prompt_ids=[_TOKEN] * burst.prompt_tokens,
                generated_ids=[_TOKEN] * call.made,
                sampling=Sampling(max_tokens=burst.output_tokens, temperature=0.0, ignore_eos=True),
            )
        )

    def give(self, count: int) -> list[_Call]:
        """So many calls, those that wait for their first token before others."""
        names = sorted(self.calls, key=lambda name: self.calls[name].made)[:count]
        for name in names:
            self._conductor.cancel(name)
        return [self.calls.pop(name) for name in names]

    def begin(self) -> Iterator[StageStep]:
        """The steps that can begin now."""
        while (given := self._conductor.next_step()) is not None:
            yield given.step

    def end(self, step: StageStep) -> tuple[int, int]:
        """How many tokens a step gave, and how many of them are the first ones of their calls."""
        choice = Choice(token_id=_TOKEN, logprob=None)
        drawn = tuple(StageToken(sequence=chunk.sequence, choice=choice) for chunk in step.wanting)
        tokens = first = 0
        for told in self._conductor.take(StageOutput(step=step, hidden=None, tokens=drawn)):
            if told.token_id is not None:
                call = self.calls[told.request_id]
                tokens, first = tokens + 1, first + (not call.made)
                call.made += 1
            if told.finish_reason:
                del self.calls[told.request_id]
        return tokens, first


class _Platform:
    """Servers at work in simulated time. A node does one thing after the other, as they come."""

    def __init__(self, profile: Profile, burst: Burst) -> None:
        self.tokens: list[Arrival] = []
        self._profile = profile
        self._burst = burst
        self._works: dict[str, _Works] = {}
        self._waiting = [_Call(str(number)) for number in range(burst.requests)]
        self._free_s: dict[str, float] = {}
        self._numbers = count()
        self._events: list[tuple[float, int, str, _Works, StageStep, int]] = []  # a step comes to a stage

    def run(self, until_s: float) -> None:
        while self._events and self._events[0][0] < until_s:
            at_s, _, name, work, step, place = heapq.heappop(self._events)
            if self._works.get(name) is not work:
                continue  # it has ended meanwhile
            if place < len(work.ranges):
                self._come(at_s + self._stage_s(at_s, work, step, place), name, work, step, place + 1)
                continue
            made, first = work.end(step)
            self.tokens.extend([Arrival(at_s, made, first)] if made else [])
            self._begin(name, at_s)

    def change(self, serving: Serving) -> None:
        """From now on these serve."""
        servers = {one.name: one for one in serving.pipelines}
        servers.update({node: Server(name=node, rate=1.0) for node in serving.ready})
        for name in [name for name in self._works if name not in servers]:
            self._waiting += self._works.pop(name).calls.values()
        fresh = [name for name in servers if name not in self._works]
        self._works.update({name: _Works(servers[name], self._profile) for name in fresh})
        if not self._works:
            return
        for name in fresh:
            self._switch(name, serving)
        self._spread()
        for name in self._works:
            self._begin(name, serving.at_s)

    def _switch(self, node: str, serving: Serving) -> None:
        """A member that serves alone takes its share of its pipeline's calls."""
        for pipeline in serving.pipelines:
            members = {stage[0] for stage in pipeline.stages}
            if node in members and node not in {one.name for one in serving.pipelines}:
                sharers = 1 + len(members - set(serving.ready))
                work = self._works[pipeline.name]
                for call in work.give(len(work.calls) // sharers):
                    self._works[node].add(call, self._burst)

    def _spread(self) -> None:
        """Calls that nobody has go where there are fewest for its rate; before, servers that have more than
        by their rates give away such as wait for their first token."""
        works = self._works.values()
        calls = len(self._waiting) + sum(len(work.calls) for work in works)
        for work in works:
            fair = calls * work.rate / sum(one.rate for one in works)
            unbegun = sum(not call.made for call in work.calls.values())
            self._waiting += work.give(min(unbegun, max(0, int(len(work.calls) - fair))))
        for call in sorted(self._waiting, key=lambda call: -call.made):
            least = min(works, key=lambda work: (len(work.calls) + 1) / work.rate)
            least.add(call, self._burst)
        self._waiting = []

    def _begin(self, name: str, now_s: float) -> None:
        work = self._works[name]
        for step in work.begin():
            self._come(now_s, name, work, step, 0)

    def _come(self, at_s: float, name: str, work: _Works, step: StageStep, place: int) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), name, work, step, place))

    def _stage_s(self, now_s: float, work: _Works, step: StageStep, place: int) -> float:
        """How long a step that comes now is at a stage."""
        node, first, last = work.ranges[place]
        chunks = [(chunk.start, chunk.count, chunk.last) for chunk in step.chunks]
        took_s = step_s(self._profile, first, last, chunks) if chunks else 0.0
        self._free_s[node] = max(now_s, self._free_s.get(node, 0.0)) + took_s
        return self._free_s[node] - now_s


def predicted(profile: Profile, burst: Burst, seen: Sequence[Serving], until_s: float) -> list[Arrival]:
    """What comes before `until_s`; the burst is at 0."""
    platform = _Platform(profile, burst)
    for serving in seen:
        if serving.at_s >= until_s:
            break
        platform.run(serving.at_s)
        platform.change(serving)
    platform.run(until_s)
    return platform.tokens


def stairs(
    profile: Profile,
    burst: Burst,
    seen: Sequence[Serving],
    came: Sequence[Arrival],
) -> list[dict[str, Any]]:
    """While there are pipelines: what was served between changes of who serves, by `came`, and what is
    predicted. Each counts who is there at its end. Prompts count where their first tokens are: one takes as
    long as many tokens, so that fewer tokens and more prompts are another order, no overhead."""
    span = _span(seen)
    if span is None:
        return []
    first_s, until_s = span
    told = predicted(profile, burst, seen, until_s)
    edges = [first_s]
    for serving in seen:
        if edges[-1] + SHORTEST_S <= serving.at_s <= until_s - SHORTEST_S:
            edges.append(serving.at_s)
    edges.append(until_s)
    return [_stair(seen, came, told, begin_s, end_s) for begin_s, end_s in pairwise(edges)]


def _span(seen: Sequence[Serving]) -> tuple[float, float] | None:
    """From the first pipeline to the end of the last one."""
    served = [serving.at_s for serving in seen if serving.pipelines]
    ends = [serving.at_s for serving in seen if served and serving.at_s > served[-1]]
    return (served[0], ends[0]) if ends else None


def _stair(
    seen: Sequence[Serving],
    came: Sequence[Arrival],
    told: Sequence[Arrival],
    begin_s: float,
    end_s: float,
) -> dict[str, Any]:
    def inside(arrivals: Sequence[Arrival]) -> tuple[int, int]:
        there = [one for one in arrivals if begin_s <= one.at_s < end_s]
        return sum(one.tokens for one in there), sum(one.first for one in there)

    last = [serving for serving in seen if serving.at_s < end_s][-1]
    (tokens, prompts), (expected, expected_prompts) = inside(came), inside(told)
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
