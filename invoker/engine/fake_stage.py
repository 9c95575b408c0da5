"""A fake of the seam between stages: real sequence tables, no model."""

import torch

from invoker.engine.fake import next_token
from invoker.engine.kv.cache import pages_for
from invoker.engine.kv.slices import KvSlice
from invoker.engine.sampling import SampledToken
from invoker.engine.stage_contract import (
    OutOfStep,
    StageFacts,
    StageFailed,
    StageInput,
    StageOutput,
    StageToken,
)


class FakeStage:
    """A Stage of `[first, last)` of `layers` layers, with hidden states `[rows, 1]` float64.

    A row is its token's id, and each layer adds one. The last stage replaces it with `next_token` of the
    sequence, which thus depends on every token before, and on every layer of the last. After `fail_next()`
    the next `run` raises StageFailed.
    """

    def __init__(
        self,
        first: int,
        last: int,
        layers: int,
        *,
        tied: bool = False,
        pages: int = 64,
        vocabulary: int = 1000,
    ) -> None:
        self.layers = (first, last)
        self.pages = pages
        self.has_head = first == 0 if tied else last == layers
        self.facts = StageFacts(row_dtype=torch.float64, row_items=1, vocabulary=vocabulary, longest=1 << 20)
        self.closed = False
        self.max_used_pages = 0
        self._ends = last == layers
        self._vocabulary = vocabulary
        self._contexts: dict[str, list[int]] = {}
        self._fails = False

    def __repr__(self) -> str:
        return f"<FakeStage [{self.layers[0]}, {self.layers[1]}), {sorted(self._contexts)}>"

    @property
    def sequences(self) -> int:
        return len(self._contexts)

    def fail_next(self) -> None:
        self._fails = True

    def run(self, given: StageInput) -> StageOutput:
        step, first = given.step, self.layers[0]
        for name in step.closed:
            self._contexts.pop(name, None)
        for opening in step.opened:
            if opening.sequence in self._contexts:
                raise OutOfStep(f"{opening.sequence} is open already")
            self._contexts[opening.sequence] = []
        if self._fails:
            self._fails = False
            raise StageFailed("failure requested by the test")
        ids = (given.data.flatten() - first).long().tolist()
        if len(ids) != step.tokens:
            raise OutOfStep(f"{len(ids)} rows for {step.tokens} tokens")
        wanted = []
        for chunk in step.chunks:
            context = self._contexts.get(chunk.sequence)
            if context is None or len(context) != chunk.start:
                raise OutOfStep(f"{chunk} does not follow {context}")
            context += ids[: chunk.count]
            del ids[: chunk.count]
            if chunk.last:
                wanted.append(next_token(context, self._vocabulary))
        used = sum(pages_for(len(context)) for context in self._contexts.values())
        if used > self.pages:
            raise OutOfStep(f"{used} pages of {self.pages}")
        self.max_used_pages = max(self.max_used_pages, used)
        if not self._ends:
            return StageOutput(step=step, hidden=given.data.double().view(-1, 1) + self.layers[1] - first)
        rows = torch.tensor(wanted, dtype=torch.float64).view(-1, 1)
        if self.has_head:
            return self.finish(StageInput(step=step, data=rows))
        return StageOutput(step=step, hidden=rows)

    def finish(self, given: StageInput) -> StageOutput:
        rows = zip(given.step.sampled_chunks, given.data.flatten().tolist(), strict=True)
        tokens = tuple(
            StageToken(sequence=chunk.sequence, sampled=SampledToken(token_id=int(row), logprob=None))
            for chunk, row in rows
            if chunk.sequence in self._contexts
        )
        return StageOutput(step=given.step, hidden=None, tokens=tokens)

    def export_kv(self, sequence: str, layers: tuple[int, int] | None = None) -> KvSlice:
        """Return the sequence's tokens as one head of size one, keys and values alike."""
        if sequence not in self._contexts:
            raise OutOfStep(f"{self!r} has no sequence {sequence}")
        first, last = layers or self.layers
        tokens = torch.tensor(self._contexts[sequence], dtype=torch.float32)
        return KvSlice(first=first, last=last, data=tokens.repeat(last - first, 2, 1)[..., None].contiguous())

    def close(self) -> None:
        self._contexts.clear()
        self.closed = True
