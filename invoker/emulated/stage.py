"""A pipeline stage on an emulated accelerator."""

from dataclasses import dataclass, field

from invoker.emulated.device_clock import DeviceClock
from invoker.emulated.engine import next_sampled, step_s
from invoker.emulated.kv import ROWS, kv_shape, row_items, rows_of, slice_of
from invoker.emulated.profiles import Profile
from invoker.emulated.tokens import TokenChain
from invoker.engine.kv.cache import pages_for
from invoker.engine.kv.slices import KvSlice
from invoker.engine.stage_contract import (
    OpenSequence,
    OutOfStep,
    StageChunk,
    StageFacts,
    StageInput,
    StageOutput,
    StageStep,
    StageToken,
)


@dataclass(slots=True)
class _EmulatedSequence:
    """A sequence's tokens so far; `chain` follows them where tokens are sampled."""

    opening: OpenSequence
    tokens: list[int] = field(default_factory=list)
    chain: TokenChain = field(default_factory=TokenChain)


class EmulatedStage:
    """A Stage of the layers `[first, last)` of a profile's model, the head on the last one.

    A hidden state has the size of the model's, at the profile's scale: the token's id, then the number of
    layers it has passed, then zeros. So a stage that is skipped, repeated or out of order is detected.
    """

    def __init__(self, profile: Profile, clock: DeviceClock, kv_bytes: int, first: int, last: int) -> None:
        if not 0 <= first < last <= profile.model.layers:
            raise ValueError(f"{profile.model.name} has no layers [{first}, {last})")
        self.profile = profile
        self.layers = (first, last)
        self.has_head = last == profile.model.layers
        self._shape = kv_shape(profile, last - first)
        self.pages = self._shape.pages_in(kv_bytes)
        self._clock = clock
        self._held: dict[str, _EmulatedSequence] = {}

    def __repr__(self) -> str:
        first, last = self.layers
        return f"<EmulatedStage [{first}, {last}) of {self.profile}, {len(self._held)} sequences>"

    @property
    def facts(self) -> StageFacts:
        """See Stage."""
        return StageFacts(
            row_dtype=ROWS,
            row_items=row_items(self.profile),
            vocabulary=self.profile.model.vocabulary,
            longest=self.profile.model.context,
            shared_prefill_tokens=self.profile.free_tokens,
        )

    def run(self, given: StageInput) -> StageOutput:
        """Wait for the step's duration and check its rows: see Stage."""
        step = given.step
        self._open(step)
        left = ids = self._ids(given)
        for chunk in step.chunks:
            held = self._held.get(chunk.sequence)
            if held is None or len(held.tokens) != chunk.start:
                raise OutOfStep(f"{chunk} does not follow the state of {self!r}: {held}")
            own, left = left[: chunk.count], left[chunk.count :]
            held.tokens += own
            if self.has_head:
                held.chain.follow(own)
        used = sum(pages_for(len(held.tokens)) for held in self._held.values())
        if used > self.pages:
            raise OutOfStep(f"the step needs {used} pages, {self!r} has {self.pages}")
        device_s = 0.0
        if step.chunks:
            chunks = [(chunk.start, chunk.count, chunk.last) for chunk in step.chunks]
            device_s = self._clock.run_stage(step_s(self.profile, *self.layers, chunks))
        if self.has_head:
            drawn = tuple(self._drawn(chunk) for chunk in step.sampled_chunks)
            return StageOutput(step=step, hidden=None, tokens=drawn, device_s=device_s)
        return StageOutput(
            step=step, hidden=rows_of(ids, self.layers[1], self.facts.row_items), device_s=device_s
        )

    def finish(self, given: StageInput) -> StageOutput:
        """Raise OutOfStep: no head of these models is tied."""
        raise OutOfStep(f"{self!r} samples no tokens for other stages")

    def export_kv(self, sequence: str, layers: tuple[int, int] | None = None) -> KvSlice:
        """Return the stand-in for K and V: see Stage."""
        held = self._held.get(sequence)
        first, last = layers or self.layers
        if held is None or not held.tokens or not self.layers[0] <= first < last <= self.layers[1]:
            raise OutOfStep(f"{self!r} has no K and V of sequence {sequence} in layers [{first}, {last})")
        return slice_of(self._shape, first, last, held.tokens)

    def close(self) -> None:
        """Drop all sequences: see Stage."""
        self._held.clear()

    def _open(self, step: StageStep) -> None:
        for sequence in step.closed:
            self._held.pop(sequence, None)
        for opening in step.opened:
            if opening.sequence in self._held:
                raise OutOfStep(f"sequence {opening.sequence} is open already in {self!r}")
            self._held[opening.sequence] = _EmulatedSequence(opening)

    def _ids(self, given: StageInput) -> list[int]:
        """Return the token ids of the rows, one a row, after checking that they passed all layers before."""
        data, first = given.data, self.layers[0]
        if data.shape[0] != given.step.tokens:
            raise OutOfStep(f"{data.shape[0]} rows for the {given.step.tokens} tokens of {given.step}")
        if first and bool((data[:, 1] != first).any()):
            raise OutOfStep(f"rows of step {given.step.number} have not passed {first} layers")
        found: list[int] = (data[:, 0] if first else data).tolist()
        return found

    def _drawn(self, chunk: StageChunk) -> StageToken:
        held = self._held[chunk.sequence]
        sampled = next_sampled(held.chain, held.opening.sampling, self.profile.model.vocabulary)
        return StageToken(sequence=chunk.sequence, sampled=sampled)
