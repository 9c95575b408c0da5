"""Generation: a request's choices, each a call whose tokens become text."""

import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from gateway.assets import ModelAssets
from gateway.callrun import CallRun
from gateway.contract import Assigned, DispatchError, Stage
from gateway.detokenize import Detokenizer, NoText, StopStrings, TextStream
from gateway.job import Job
from gateway.schemas_openai import GenerateFields
from registry.messages import Generate, Sampling, TokenLogprob, Tokens, Usage

_SEEDS = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One completion to make. `stops` are strings; token ids that stop are in `sampling`."""

    index: int
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    stops: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one message of the node added to a choice."""

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[tuple[int, TokenLogprob], ...] = ()
    finish_reason: str = ""


@dataclass(slots=True)
class Outcome:
    """A whole choice, collected from its deltas."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, TokenLogprob]] = field(default_factory=list)
    finish_reason: str = ""

    def add(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason or self.finish_reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """Where a running choice reports to."""

    stage: Callable[[Stage], Awaitable[None]]
    assigned: Callable[[Assigned], Awaitable[None]]
    delta: Callable[[Delta], Awaitable[None]]


def make_sampling(
    request: GenerateFields, assets: ModelAssets, *, max_tokens: int, logprobs: int | None, index: int
) -> Sampling:
    """The request's sampling for one choice; choices of one seed differ, and repeat with it."""
    seed = secrets.randbits(63) if request.seed is None else (request.seed + index) % _SEEDS
    top_k = request.top_k or 0
    return Sampling(
        max_tokens=max_tokens,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else max(request.top_p, 1e-6),
        top_k=max(top_k, 0),
        seed=seed,
        logprobs=logprobs,
        eos_token_ids=assets.eos_token_ids,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
    )


def stop_strings(request: GenerateFields) -> tuple[str, ...]:
    if request.stop is None:
        return ()
    return (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)


async def run_choice(job: Job, assets: ModelAssets, choice: Choice, listener: Listener) -> None:
    """Carry one choice through. Its last delta has a `finish_reason`; a stop string ends the call at
    once, which frees the sequence on its node."""
    work = Generate(
        request_id=job.next_call_id(),
        instance_id="",
        prompt_ids=choice.prompt_ids,
        sampling=choice.sampling,
        flow=job.exchange.caller.tenant,
    )
    text: TextStream = (
        NoText() if assets.tokenizer is None else Detokenizer(assets.tokenizer, choice.prompt_ids)
    )
    cutter = _Cutter(choice, text, StopStrings(choice.stops))
    async with job.run(work) as run:
        await _follow(run, cutter, job, listener)


async def _follow(run: CallRun, cutter: "_Cutter", job: Job, listener: Listener) -> None:
    finished = False
    async for event in run:
        match event:
            case Stage():
                await listener.stage(event)
            case Assigned():
                job.note_assigned(event)
                await listener.assigned(event)
            case Tokens():
                delta = cutter.cut(event)
                finished = bool(delta.finish_reason)
                await listener.delta(delta)
                run.note_passed(len(event.ids))
                if cutter.stopped:
                    return
            case Usage():
                break
    if not finished:
        raise DispatchError("internal", "the node ended the call without a finish reason", status=500)


class _Cutter:
    """Makes deltas out of a node's messages."""

    def __init__(self, choice: Choice, text: TextStream, stops: StopStrings) -> None:
        sampling = choice.sampling
        self._index = choice.index
        self._text = text
        self._stops = stops
        self._silent = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            self._silent |= frozenset(sampling.eos_token_ids)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stops.hit is not None

    def cut(self, tokens: Tokens) -> Delta:
        spoken = tokens.ids
        if tokens.finish_reason == "stop" and spoken and spoken[-1] in self._silent:
            spoken = spoken[:-1]  # the token that says "stop" is no text
        text = self._stops.push(self._text.push(spoken))
        reason = tokens.finish_reason
        if reason and not self.stopped:
            text += self._stops.push(self._text.finish())
            if not self.stopped:
                text += self._stops.finish()
        return Delta(
            index=self._index,
            text=text,
            token_ids=tokens.ids,
            logprobs=tuple(zip(tokens.ids, tokens.logprobs, strict=False)),
            finish_reason="stop" if self.stopped else reason,
        )
