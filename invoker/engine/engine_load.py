"""What an engine has to do, and what it was seen to do: queued prompts, sequences, rates, step times."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from invoker.engine.contract import TokenOutput

_STEP_DECAY = 0.98  # of the seen prefill rate, a step: it spans about fifty steps with a backlog
_PROMPT_STEP = 2.0  # times a decode step: most of a step that takes as long was a prompt's
_STEP_WEIGHT = 0.1  # of the latest step in the average time of steps of its size
_RATE_S = 1.0  # time constant of the decode rate


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReading:
    """The load and the seen capacity of an engine; 0 for a rate that was not seen.

    `queued_prompt_tokens` were accepted and not run yet; `running` sequences have a token, `waiting` none.
    `prefill_tokens_s` is the rate of steps that left prompts waiting; before there is one, the highest of
    steps which took at least twice as long as a decode step.
    `decode_steps` are (sequences, seconds), in increasing order.
    """

    queued_prompt_tokens: int
    running: int
    waiting: int
    decode_tokens_s: float
    prefill_tokens_s: float
    decode_steps: tuple[tuple[int, float], ...]


class EngineLoad:
    """The load of one engine. The engine's thread calls it between steps; `reading` may be of any thread."""

    def __init__(self) -> None:
        self._left: dict[str, int] = {}  # prompt tokens to run, by sequence
        self._queued = 0
        self._waiting = 0
        self._prefilled = 0.0  # tokens and seconds of recent steps that left prompts waiting
        self._prefill_s = 0.0
        self._fastest = 0, 0.0  # tokens and seconds of the fastest step that left none
        self._steps: dict[int, tuple[float, float]] = {}  # sequences and seconds, by power of two
        self._decode_rate, self._decoded_at = 0.0, 0.0
        self._watchers: tuple[Callable[[], None], ...] = ()

    def __repr__(self) -> str:
        return f"<EngineLoad {len(self._left)} sequences, {self._queued} prompt tokens queued>"

    @property
    def queued_prompt_tokens(self) -> int:
        """The prompt tokens that were accepted and not run yet."""
        return self._queued

    def left(self, request_id: str) -> int | None:
        """Return the prompt tokens of a sequence to run, 0 if it has a token, None if it is not there."""
        return self._left.get(request_id)

    def watch(self, callback: Callable[[], None]) -> None:
        """Call `callback` after each step, on the engine's thread."""
        self._watchers = (*self._watchers, callback)

    def unwatch(self, callback: Callable[[], None]) -> None:
        """End `watch`."""
        self._watchers = tuple(one for one in self._watchers if one != callback)

    def add(self, request_id: str, tokens: int) -> None:
        """Add a sequence of which `tokens` tokens have to be run."""
        self._left[request_id] = tokens
        self._queued += tokens
        self._waiting += 1

    def remove(self, request_id: str) -> None:
        """Drop a sequence, finished or not; an unknown one is ignored."""
        left = self._left.pop(request_id, None)
        if left:
            self._queued -= left
            self._waiting -= 1

    def stepped(self, outputs: Iterable[TokenOutput], seconds: float, now_s: float) -> None:
        """Record a step that ended at `now_s`, before its finished sequences are removed."""
        prompt, decoded = 0, 0
        for output in outputs:
            left = self._left.get(output.request_id)
            if left:
                prompt += output.work
                self._run(output, left)
            elif left == 0:
                decoded += 1
        for watcher in self._watchers:
            watcher()
        if seconds <= 0:
            return
        if prompt and self._queued:  # full of prompts
            self._prefilled = self._prefilled * _STEP_DECAY + prompt
            self._prefill_s = self._prefill_s * _STEP_DECAY + seconds
        elif prompt:
            self._fastest = max(self._fastest, (prompt, seconds), key=_rate)
        if decoded:
            size = (decoded - 1).bit_length()
            count, took_s = self._steps.get(size, (decoded, seconds))
            self._steps[size] = (
                count + _STEP_WEIGHT * (decoded - count),
                took_s + _STEP_WEIGHT * (seconds - took_s),
            )
        self._decode_rate = self._decayed(now_s) + decoded / _RATE_S
        self._decoded_at = now_s

    def reading(self, now_s: float) -> EngineReading:
        steps = sorted((round(count), seconds) for count, seconds in list(self._steps.values()))
        return EngineReading(
            queued_prompt_tokens=self._queued,
            running=len(self._left) - self._waiting,
            waiting=self._waiting,
            decode_tokens_s=self._decayed(now_s),
            prefill_tokens_s=self._prefill_rate(steps),
            decode_steps=tuple(steps),
        )

    def _prefill_rate(self, decode_steps: Sequence[tuple[int, float]]) -> float:
        """Return the rate of full steps, else a lower bound of it, 0 if none is known.

        The last tokens of a prompt whose K and V came from elsewhere, and short prompts, take as long as a
        decode step: they would show a hundredth of the rate.
        """
        if self._prefill_s:
            return self._prefilled / self._prefill_s
        least_s = _PROMPT_STEP * min((seconds for _, seconds in decode_steps), default=math.inf)
        return _rate(self._fastest) if self._fastest[1] >= least_s else 0.0

    def _run(self, output: TokenOutput, left: int) -> None:
        """Record the part of a prompt that a step ran; the last one yields a token."""
        rest = 0 if output.token_id is not None else max(1, left - output.work)
        self._left[output.request_id] = rest
        self._queued -= left - rest
        self._waiting -= not rest

    def _decayed(self, now_s: float) -> float:
        return self._decode_rate * math.exp(-max(0.0, now_s - self._decoded_at) / _RATE_S)


def _rate(step: tuple[int, float]) -> float:
    tokens, seconds = step
    return tokens / seconds if seconds > 0 else 0.0
