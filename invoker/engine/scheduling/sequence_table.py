"""The unfinished sequences of an engine: admission checks, appended tokens, finish reasons."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from invoker.engine.contract import EngineError, NewSequence, OutOfKvCache, TokenOutput
from invoker.engine.sampling import SampledToken


class InvalidSequence(EngineError):
    """The sequence breaks a rule of the engine, at any load."""

    code = "bad_request"


@dataclass(slots=True)
class LiveSequence:
    """An unfinished sequence. `tokens` are the prompt and all generated tokens."""

    request: NewSequence
    tokens: list[int]
    generated: int
    stops: frozenset[int]


class SequenceTable:
    """Unfinished sequences by request, each of at most `max_tokens` token ids below `vocabulary`."""

    def __init__(self, vocabulary: int, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._vocabulary = vocabulary
        self._live: dict[str, LiveSequence] = {}

    def __repr__(self) -> str:
        return f"<SequenceTable {len(self)} sequences>"

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[str]:
        return iter(self._live)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    def __getitem__(self, request_id: str) -> LiveSequence:
        return self._live[request_id]

    def open(self, sequence: NewSequence) -> LiveSequence:
        """Add a sequence. Raises OutOfKvCache if it can never fit, InvalidSequence if it breaks a rule."""
        tokens = [*sequence.prompt_ids, *sequence.generated_ids]
        self._check(sequence, tokens)
        sampling = sequence.sampling
        stops = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stops.update(sampling.eos_token_ids)
        live = LiveSequence(sequence, tokens, len(sequence.generated_ids), frozenset(stops))
        self._live[sequence.request_id] = live
        return live

    def max_tokens_of(self, request_id: str) -> int:
        """Return the maximum length that the sequence may reach, in tokens."""
        live = self._live[request_id]
        return min(len(live.tokens) + live.request.sampling.max_tokens - live.generated, self.max_tokens)

    def drop(self, request_id: str) -> bool:
        """Remove a sequence; return whether it was there."""
        return self._live.pop(request_id, None) is not None

    def advance(self, request_id: str, sampled: SampledToken | None, work: int) -> TokenOutput:
        """Append a sampled token (None after a part of a prompt) and return the output.

        The caller drops a sequence with a `finish_reason` or an `error`.
        """
        if sampled is None:
            return TokenOutput(
                request_id=request_id, token_id=None, logprob=None, finish_reason="", work=work
            )
        if sampled.token_id is None:
            return failed_output(request_id, sampled.error, work)
        live = self._live[request_id]
        live.tokens.append(sampled.token_id)
        live.generated += 1
        return TokenOutput(
            request_id=request_id,
            token_id=sampled.token_id,
            logprob=sampled.logprob,
            finish_reason=self._finish_reason(live),
            work=work,
        )

    def _check(self, sequence: NewSequence, tokens: Sequence[int]) -> None:
        request_id, sampling = sequence.request_id, sequence.sampling
        if request_id in self._live:
            raise InvalidSequence(f"sequence {request_id} is running already")
        if not sequence.prompt_ids:
            raise InvalidSequence("the prompt is empty")
        if len(sequence.generated_ids) >= sampling.max_tokens:
            raise InvalidSequence(
                f"{len(sequence.generated_ids)} tokens of at most {sampling.max_tokens} are generated already"
            )
        if min(tokens) < 0 or max(tokens) >= self._vocabulary:
            raise InvalidSequence(f"a token id is outside [0, {self._vocabulary})")
        if sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
            raise InvalidSequence("temperature and top_k must be at least 0, top_p above 0 and at most 1")
        if sampling.repetition_penalty <= 0 or not 0 <= sampling.min_p <= 1:
            raise InvalidSequence("repetition_penalty must be above 0, min_p from 0 to 1")
        named = (*sampling.allowed_token_ids, *(token for token, _ in sampling.logit_bias))
        if named and not 0 <= min(named) <= max(named) < self._vocabulary:
            raise InvalidSequence(
                f"logit_bias and allowed_token_ids must name token ids within [0, {self._vocabulary})"
            )
        if len(tokens) >= self.max_tokens:
            raise OutOfKvCache(
                f"{len(tokens)} tokens leave no room for another within {self.max_tokens} tokens"
            )

    def _finish_reason(self, live: LiveSequence) -> str:
        if live.tokens[-1] in live.stops:
            return "stop"
        full = len(live.tokens) >= self.max_tokens
        return "length" if full or live.generated >= live.request.sampling.max_tokens else ""


def failed_output(request_id: str, message: str, work: int) -> TokenOutput:
    """Return the last output of a sequence that an error ended."""
    return TokenOutput(
        request_id=request_id, token_id=None, logprob=None, finish_reason="", work=work, error=message
    )
