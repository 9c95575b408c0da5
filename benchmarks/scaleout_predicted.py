"""What pipelines of loading nodes would serve by the devices' profile alone, beside what they did (pure).

The platform's own scheduler plans the steps of each server; a stage takes what the profile says, hand-overs
and everything else take nothing. Calls are spread by the servers' rates; those of a server that ends begin
anew elsewhere with the tokens that they have. So a rate that stays behind is overhead, one that does not is
explained by the profile.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """So many calls at once at 0 s."""

    requests: int
    prompt_tokens: int
    output_tokens: int


@dataclass(slots=True)
class _Call:
    name: str
    made: int = 0


class _Works:
    """A server at work: `calls` are what it has, `steps` goes around its stages."""

    def __init__(self, server: Server, profile: Profile) -> None:
        layers = profile.model.layers
        self.rate = server.rate
        self.calls: dict[str, _Call] = {}
        self._profile = profile
        self._ranges = [stage[1:] for stage in server.stages] or [(0, layers)]
        self._free_s = [0.0] * len(self._ranges)
        stages = len(self._ranges)
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

    def give_up(self, name: str) -> _Call:
        self._conductor.cancel(name)
        return self.calls.pop(name)

    def begin(self, now_s: float) -> Iterator[tuple[float, StageStep]]:
        """The steps that can begin now, and when each is over."""
        while (given := self._conductor.next_step()) is not None:
            chunks = [(chunk.start, chunk.count, chunk.last) for chunk in given.step.chunks]
            at_s = now_s
            for place, (first, last) in enumerate(self._ranges):
                took_s = step_s(self._profile, first, last, chunks) if chunks else 0.0
                at_s = self._free_s[place] = max(at_s, self._free_s[place]) + took_s
            yield at_s, given.step

    def end(self, step: StageStep) -> int:
        """How many tokens a step gave."""
        choice = Choice(token_id=_TOKEN, logprob=None)
        drawn = tuple(StageToken(sequence=chunk.sequence, choice=choice) for chunk in step.wanting)
        tokens = 0
        for told in self._conductor.take(StageOutput(step=step, hidden=None, tokens=drawn)):
            if told.token_id is not None:
                tokens += 1
                self.calls[told.request_id].made += 1
            if told.finish_reason:
                del self.calls[told.request_id]
        return tokens


def predicted(
    profile: Profile, burst: Burst, seen: Sequence[Serving], until_s: float
) -> list[tuple[float, int]]:
    """Moments before `until_s`, and how many tokens came at each."""
    works: dict[str, _Works] = {}
    waiting = [_Call(str(number)) for number in range(burst.requests)]
    steps: list[tuple[float, int, str, _Works, StageStep]] = []
    numbers, tokens = count(), list[tuple[float, int]]()

    def begin(name: str, now_s: float) -> None:
        for at_s, step in works[name].begin(now_s):
            heapq.heappush(steps, (at_s, next(numbers), name, works[name], step))

    def run(until_s: float) -> None:
        while steps and steps[0][0] < until_s:
            at_s, _, name, work, step = heapq.heappop(steps)
            if works.get(name) is not work:
                continue  # it has ended meanwhile
            made = work.end(step)
            tokens.extend([(at_s, made)] if made else [])
            begin(name, at_s)

    for serving in seen:
        if serving.at_s >= until_s:
            break
        run(serving.at_s)
        servers = {one.name: one for one in serving.pipelines}
        servers.update({node: Server(name=node, rate=1.0) for node in serving.ready})
        for name in [name for name in works if name not in servers]:
            waiting += works.pop(name).calls.values()
        works.update({name: _Works(one, profile) for name, one in servers.items() if name not in works})
        waiting = _spread(works, waiting, burst)
        for name in works:
            begin(name, serving.at_s)
    run(until_s)
    return tokens


def _spread(works: dict[str, _Works], waiting: list[_Call], burst: Burst) -> list[_Call]:
    """All calls by the servers' rates; of those that a server has, only such as wait for their first token
    go elsewhere. What is left over waits: all, where nobody serves."""
    if not works:
        return waiting
    rate = sum(work.rate for work in works.values())
    calls = len(waiting) + sum(len(work.calls) for work in works.values())
    fair = {name: calls * work.rate / rate for name, work in works.items()}
    for name, work in works.items():
        movable = [call.name for call in work.calls.values() if not call.made]
        more = max(0, int(len(work.calls) - fair[name]))
        waiting = waiting + [work.give_up(one) for one in movable[len(movable) - more :]]
    for call in sorted(waiting, key=lambda call: -call.made):
        least = min(works, key=lambda name: (len(works[name].calls) + 1) / works[name].rate)
        works[least].add(call, burst)
    return []


def stairs(
    profile: Profile,
    burst: Burst,
    seen: Sequence[Serving],
    came: Sequence[tuple[float, int]],
) -> list[dict[str, Any]]:
    """From the first pipeline until one of the members is whole: what was served between changes of who
    serves, by `came` (moments, tokens), and what is predicted."""
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
    first = next((serving for serving in seen if serving.pipelines), None)
    if first is None:
        return None
    members = set[str]()
    until_s = first.at_s
    for serving in seen[seen.index(first) :]:
        until_s = serving.at_s
        members |= {stage[0] for one in serving.pipelines for stage in one.stages}
        if members & set(serving.ready):
            break
    return (first.at_s, until_s) if until_s > first.at_s else None


def _stair(
    seen: Sequence[Serving],
    came: Sequence[tuple[float, int]],
    told: Sequence[tuple[float, int]],
    begin_s: float,
    end_s: float,
) -> dict[str, Any]:
    inside: Callable[[Sequence[tuple[float, int]]], int] = lambda moments: sum(  # noqa: E731
        tokens for at_s, tokens in moments if begin_s <= at_s < end_s
    )
    now = [serving for serving in seen if serving.at_s <= begin_s][-1]
    tokens, expected = inside(came), inside(told)
    return {
        "from_s": round(begin_s, 4),
        "to_s": round(end_s, 4),
        "pipelines": len(now.pipelines),
        "instances": len(now.ready),
        "tokens_per_s": round(tokens / (end_s - begin_s), 1),
        "predicted_tokens_per_s": round(expected / (end_s - begin_s), 1),
        "of_predicted": round(tokens / expected, 3) if expected else None,
    }
