"""Fakes of the engine seam: real queues and life cycle, no model."""

import threading
from collections.abc import Sequence

import numpy as np
import xxhash

from invoker.engine.contract import EngineError, NewSequence, OutOfKvCache, TokenOutput
from registry.messages.node import TokenLogprob


def next_token(context: Sequence[int], vocabulary: int = 1000) -> int:
    """Return the token after `context`: a lost, repeated or changed token changes all that follow."""
    return xxhash.xxh64_intdigest(np.asarray(context, dtype="<i8").tobytes()) % vocabulary


def continuation(context: Sequence[int], count: int, vocabulary: int = 1000) -> list[int]:
    """Return the `count` tokens that FakeEngine generates after `context`."""
    tokens = list(context)
    for _ in range(count):
        tokens.append(next_token(tokens, vocabulary))
    return tokens[len(context) :]


class StepGate:
    """A gate by which a test decides when steps run: each step waits for one release, until it is opened."""

    def __init__(self) -> None:
        self._permits = threading.Semaphore(0)
        self._open = threading.Event()

    def release(self, steps: int = 1) -> None:
        self._permits.release(steps)

    def open(self) -> None:
        self._open.set()
        self._permits.release()

    def wait(self) -> None:
        self._permits.acquire()
        if self._open.is_set():
            self._permits.release()  # for the next one


class FakeEngine:
    """A GenerateEngine that appends one `next_token` to every sequence in each step.

    With a `gate` a step waits for a permit, so open it before closing the runner. After `fail_next(error)`
    the next step raises it.
    """

    def __init__(
        self, *, vocabulary: int = 1000, max_sequence_tokens: int = 4096, gate: StepGate | None = None
    ) -> None:
        self.vocabulary = vocabulary
        self.steps = 0
        self.closed = False
        self._max_sequence_tokens = max_sequence_tokens
        self._gate = gate
        self._sequences: dict[str, tuple[NewSequence, list[int]]] = {}
        self._failure: Exception | None = None

    def __repr__(self) -> str:
        return f"<FakeEngine {sorted(self._sequences)} after {self.steps} steps>"

    @property
    def max_sequence_tokens(self) -> int:
        return self._max_sequence_tokens

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    @property
    def sequences(self) -> int:
        return len(self._sequences)

    def fail_next(self, error: Exception) -> None:
        self._failure = error

    def add(self, sequence: NewSequence) -> None:
        tokens = [*sequence.prompt_ids, *sequence.generated_ids]
        if len(tokens) >= self._max_sequence_tokens:
            raise OutOfKvCache(f"{len(tokens)} tokens leave no room within {self._max_sequence_tokens}")
        if sequence.request_id in self._sequences:
            raise EngineError(f"sequence {sequence.request_id} is running already")
        self._sequences[sequence.request_id] = (sequence, tokens)

    def cancel(self, request_id: str) -> None:
        self._sequences.pop(request_id, None)

    def step(self) -> list[TokenOutput]:
        if not self._sequences:
            return []
        if self._gate is not None:
            self._gate.wait()
        if self._failure is not None:
            raise self._failure
        self.steps += 1
        return [self._advance(request_id) for request_id in list(self._sequences)]

    def close(self) -> None:
        self._sequences.clear()
        self.closed = True

    def _advance(self, request_id: str) -> TokenOutput:
        sequence, tokens = self._sequences[request_id]
        sampling = sequence.sampling
        token = next_token(tokens, self.vocabulary)
        tokens.append(token)
        ends = () if sampling.ignore_eos else sampling.eos_token_ids
        generated = len(tokens) - len(sequence.prompt_ids)
        reason = ""
        if token in ends or token in sampling.stop_token_ids:
            reason = "stop"
        elif generated >= sampling.max_tokens or len(tokens) >= self._max_sequence_tokens:
            reason = "length"
        if reason:
            self.cancel(request_id)
        return TokenOutput(
            request_id=request_id,
            token_id=token,
            logprob=None if sampling.logprobs is None else TokenLogprob(0.0, ((token, 0.0),)),
            finish_reason=reason,
            work=1,
        )


class FakeComputeEngine:
    """A ComputeEngine that returns sums, `[n, 1]` float32, under the name of the kind's result."""

    def __init__(self) -> None:
        self.closed = False

    def compute(
        self,
        kind: str,
        token_ids: Sequence[Sequence[int]],
        pixels: np.ndarray | None,
        pooling: str,
        normalize: bool,
    ) -> dict[str, np.ndarray]:
        name = {"embed": "embeddings", "classify": "logits"}.get(kind, "features")
        rows = (
            [sum(ids) for ids in token_ids] if pixels is None else pixels.reshape(len(pixels), -1).sum(axis=1)
        )
        return {name: np.asarray(rows, dtype=np.float32).reshape(-1, 1)}

    def close(self) -> None:
        self.closed = True
