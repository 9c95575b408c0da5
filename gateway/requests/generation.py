"""The choices of a generation, each a call whose tokens become text."""

import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from tokenizers import Tokenizer

from gateway.core.contract import Assigned, DispatchError, WaitStage
from gateway.core.errors import BadRequest
from gateway.core.open_call import OpenCall
from gateway.core.prefix import prefix_of_tokens
from gateway.inference.assets import ModelAssets
from gateway.inference.detokenize import Detokenizer, NoText, StopStrings, TextStream
from gateway.inference.tool_calls import ToolCall, ToolForm, ToolReader
from gateway.requests.billed_request import BilledRequest
from gateway.requests.grammar import NO_RULES, TextRules
from gateway.schemas.openai import GenerateFields
from registry.messages.node import Generate, RequestUsage, Tokens
from registry.messages.sampling import Sampling, TokenLogprob
from registry.records.engine import EngineKind

_SEEDS = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationChoice:
    """One completion to generate. `stops` are strings; stop token ids are in `sampling`.

    Its text begins with `echo`; calls of `tools` are read from it, if their form is known.
    """

    index: int
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    stops: tuple[str, ...]
    echo: str = ""
    tools: frozenset[str] = frozenset()
    tool_form: ToolForm | None = None


class ChoiceDelta(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The addition of one message of the node to a choice."""

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[tuple[int, TokenLogprob], ...] = ()
    finish_reason: str = ""
    calls: tuple[ToolCall, ...] = ()
    first_call: int = 0  # the number of calls before them
    stop: str = ""  # the stop string that ended it


@dataclass(slots=True)
class ChoiceResult:
    """A whole choice, collected from its deltas."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, TokenLogprob]] = field(default_factory=list)
    finish_reason: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    stop: str = ""

    def add(self, delta: ChoiceDelta) -> None:
        """Append a delta."""
        self.text.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.calls += delta.calls
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.stop = delta.stop or self.stop


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceCallbacks:
    """The callbacks of a running choice, awaited in order."""

    stage: Callable[[WaitStage], Awaitable[None]]
    assigned: Callable[[Assigned], Awaitable[None]]
    delta: Callable[[ChoiceDelta], Awaitable[None]]


def make_sampling(
    request: GenerateFields,
    assets: ModelAssets,
    *,
    max_tokens: int,
    logprobs: int | None,
    index: int,
    rules: TextRules = NO_RULES,
) -> Sampling:
    """Return the sampling of choice `index`; choices of one seed differ, and are reproducible."""
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
        min_p=request.min_p or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        repetition_penalty=request.repetition_penalty or 1.0,
        min_tokens=_min_tokens(request.min_tokens or 0, max_tokens),
        logit_bias=_logit_bias(request.logit_bias or {}),
        allowed_token_ids=tuple(request.allowed_token_ids or ()),
        bad_words=rules.bad_words,
        grammar="" if rules.grammar is None else rules.grammar.grammar,
        tokenizer="" if rules.grammar is None else rules.grammar.tokenizer,
    )


def bad_word_ids(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of words that must not occur, at the start of a text and within it.

    Within a text a word may begin with a token of its own, which includes the space. Raises BadRequest.
    """
    found: list[tuple[int, ...]] = []
    for word in words:
        bare, spaced = (
            tuple(tokenizer.encode(text, add_special_tokens=False).ids)
            for text in (word.lstrip(), " " + word.lstrip())
        )
        if not bare:
            raise BadRequest(f"the bad word {word[:80]!r} has no token", param="bad_words")
        found.append(bare)
        if spaced and spaced[0] != bare[0] and len(spaced) == len(bare):
            found.append(spaced)
    return tuple(found)


def _min_tokens(least: int, most: int) -> int:
    if least > most:
        raise BadRequest(f"min_tokens {least} is over the most tokens, {most}", param="min_tokens")
    return least


def _logit_bias(given: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    try:
        return tuple((int(token), bias) for token, bias in given.items())
    except ValueError:
        raise BadRequest("logit_bias must map token ids to numbers", param="logit_bias") from None


def stop_strings(request: GenerateFields) -> tuple[str, ...]:
    """Return the request's stop strings."""
    if request.stop is None:
        return ()
    return (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)


async def run_choice(
    job: BilledRequest, assets: ModelAssets, choice: GenerationChoice, listener: ChoiceCallbacks
) -> None:
    """Run one choice to its end; its last delta has a `finish_reason`.

    A stop string ends the call at once, which frees the sequence on its node.
    """
    work = Generate(
        request_id=job.next_call_id(),
        instance_id="",
        prompt_ids=choice.prompt_ids,
        sampling=choice.sampling,
        tenant=job.context.caller.tenant,
    )
    text: TextStream = (
        NoText() if assets.tokenizer is None else Detokenizer(assets.tokenizer, choice.prompt_ids)
    )
    deltas = _DeltaMaker(choice, text, StopStrings(choice.stops))
    prefix = 0
    if job.version.engine is not EngineKind.NATIVE:  # the native engine keeps no prefixes
        prefix = prefix_of_tokens(work.tenant, job.version.version, choice.prompt_ids)
    async with job.run(work, prefix) as run:
        await _follow(run, deltas, job, listener)


async def _follow(
    run: OpenCall, deltas: "_DeltaMaker", job: BilledRequest, listener: ChoiceCallbacks
) -> None:
    finished = False
    async for event in run:
        match event:
            case WaitStage():
                await listener.stage(event)
            case Assigned():
                job.note_assigned(event)
                await listener.assigned(event)
            case Tokens():
                delta = deltas.make(event)
                finished = bool(delta.finish_reason)
                await listener.delta(delta)
                run.note_passed(len(event.ids))
                if deltas.stopped:
                    return
            case RequestUsage():
                break
    if not finished:
        raise DispatchError("internal", "the node ended the call without a finish reason", status=500)


class _DeltaMaker:
    """The conversion of a node's messages to deltas."""

    def __init__(self, choice: GenerationChoice, text: TextStream, stops: StopStrings) -> None:
        sampling = choice.sampling
        self._index = choice.index
        self._text = text
        self._stops = stops
        self._hidden = frozenset(sampling.ending_token_ids)
        self._echo = choice.echo
        self._tools = None if choice.tool_form is None else ToolReader(choice.tool_form, choice.tools)
        self._calls = 0
        self._unstoppable = sampling.min_tokens  # stop strings do not count within so many tokens

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stops.hit is not None

    def make(self, tokens: Tokens) -> ChoiceDelta:
        visible = tokens.ids
        if tokens.finish_reason == "stop" and visible and visible[-1] in self._hidden:
            visible = visible[:-1]  # the token that ended the sequence has no text
        text = self._until_stop(visible)
        reason = tokens.finish_reason
        if reason and not self.stopped:
            text += self._stops.push(self._text.finish())
            if not self.stopped:
                text += self._stops.finish()
        text, self._echo = self._echo + text, ""
        calls, before = list[ToolCall](), self._calls
        reason = "stop" if self.stopped else reason
        if self._tools is not None:
            text, calls = self._tools.feed(text)
            if reason:
                rest, more = self._tools.finish()
                text, calls = text + rest, calls + more
            self._calls += len(calls)
            reason = "tool_calls" if reason == "stop" and self._calls else reason
        return ChoiceDelta(
            index=self._index,
            text=text,
            calls=tuple(calls),
            first_call=before,
            token_ids=tokens.ids,
            logprobs=tuple(zip(tokens.ids, tokens.logprobs, strict=False)) if tokens.logprobs else (),
            finish_reason=reason,
            stop=self._stops.hit or "",
        )

    def _until_stop(self, ids: Sequence[int]) -> str:
        """Return the text of tokens up to a stop string."""
        free, self._unstoppable = ids[: self._unstoppable], max(0, self._unstoppable - len(ids))
        text = self._text.push(free) if free else ""
        rest = ids[len(free) :]
        return text + (self._stops.push(self._text.push(rest)) if rest or not free else "")
