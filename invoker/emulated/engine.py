"""A decoder engine on an emulated accelerator: real queues and pages, step times of a profile."""

from collections.abc import Sequence
from itertools import pairwise

from invoker.emulated.device_clock import DeviceClock
from invoker.emulated.kv import ROWS, check_rows, check_tokens, kv_shape, row_items, slice_of
from invoker.emulated.profiles import Profile, StepLoad
from invoker.emulated.tokens import TokenChain
from invoker.engine.batched_engine import BatchedEngine
from invoker.engine.contract import NewSequence, TokenOutput
from invoker.engine.kv.entry import EntryFormat, LayerEntry
from invoker.engine.kv.slices import KvSlice, usable_tokens
from invoker.engine.layer_segments import LayerSegment, layer_segments
from invoker.engine.sampling import SampledToken
from invoker.engine.scheduling.scheduler import PREFILL_TOKENS, Chunk, StepLimits
from registry.messages.sampling import Sampling, TokenLogprob

_EXPORT_PARTS = 4  # of a step: each is a sleep


def limits_of(profile: Profile, sequences: int) -> StepLimits:
    """Return the limits of a step; while tenants compete, the prompt tokens that cost next to nothing."""
    turn = min(profile.free_tokens, PREFILL_TOKENS)
    return StepLimits(sequences=sequences, prefill_tokens=PREFILL_TOKENS, shared_prefill_tokens=turn)


def next_sampled(chain: TokenChain, sampling: Sampling, vocabulary: int) -> SampledToken:
    """Return the token that follows, with probability 1."""
    token = chain.next_token(sampling, vocabulary)
    logprob = None if sampling.logprobs is None else TokenLogprob(0.0, ((token, 0.0),))
    return SampledToken(token_id=token, logprob=logprob)


class EmulatedEngine(BatchedEngine):
    """A GenerateEngine. `kv_bytes` is the size of the KV cache, at the profile's scale."""

    def __init__(
        self,
        profile: Profile,
        clock: DeviceClock,
        kv_bytes: int,
        *,
        context_length: int,
        max_sequences: int = 64,
    ) -> None:
        self.profile = profile
        self._shape = kv_shape(profile, profile.model.layers)
        pages = self._shape.pages_in(kv_bytes)
        self._clock = clock
        limits, longest = limits_of(profile, max_sequences), min(context_length, profile.model.context)
        self._format = EntryFormat(
            kv=self._shape, row_dtype=ROWS, row_items=row_items(profile), step_tokens=limits.entering_tokens
        )
        super().__init__(pages, limits, vocabulary=profile.model.vocabulary, longest=longest)
        self._chains: dict[str, TokenChain] = {}

    def __repr__(self) -> str:
        return f"<EmulatedEngine {self.profile}, {self._scheduler!r}>"

    @property
    def entry_format(self) -> EntryFormat:
        """The format of the entries that `add` accepts: stand-ins for K and V and hidden states."""
        return self._format

    def add(self, sequence: NewSequence, kv: Sequence[KvSlice] = (), entry: LayerEntry | None = None) -> None:
        """Queue a sequence, with `kv` and `entry` as in DecoderEngine.add.

        Raises OutOfKvCache, InvalidSequence.
        """
        tokens = [*sequence.prompt_ids, *sequence.generated_ids]
        kept = usable_tokens(self._shape, kv, len(tokens))
        check_tokens(kv, tokens)
        if entry is not None:
            self._format.check(entry, len(tokens))
            check_rows(entry.rows, entry.layers, tokens)
            check_tokens([entry.kv], tokens)
        self._queue(sequence, kept, entry)
        self._chains[sequence.request_id] = TokenChain(tokens)

    def export_kv(self, request_id: str, layers: tuple[int, int] | None = None) -> KvSlice:
        """Return the stand-in for the K and V of a sequence, between two steps. Raises InvalidSequence."""
        _, cached = self._cached(request_id)
        first, last = layers or (0, self.profile.model.layers)
        return slice_of(self._shape, first, last, self._sequences[request_id].tokens[:cached])

    def step(self) -> list[TokenOutput]:
        """Wait for the duration of one batch. The output of a part of a prompt has no token."""
        if not self.has_work:
            return []
        plan = self._plan()
        self._run(plan.chunks)
        self._scheduler.step_done()
        return [self._advanced(chunk) for chunk in plan.chunks]

    def _run(self, chunks: Sequence[Chunk]) -> None:
        """Wait for the duration of a step; K and V that are exported come in parts, by layers."""
        segments = [
            (one, step_s(self.profile, one.first, one.last, [(c.start, c.count, c.last) for c in one.chunks]))
            for one in layer_segments(chunks, self._entries, self.profile.model.layers)
        ]
        if not self._exports:
            self._clock.run(sum(seconds for _, seconds in segments))
            return
        for segment, seconds in segments:
            self._run_exporting(segment, seconds)

    def _run_exporting(self, segment: LayerSegment, seconds: float) -> None:
        layers, exported = segment.last - segment.first, tuple(self._exported(segment.chunks))
        edges = [segment.first + part * layers // _EXPORT_PARTS for part in range(_EXPORT_PARTS + 1)]
        for first, last in pairwise(sorted(set(edges))):
            self._clock.run(seconds * (last - first) / layers)
            for export, chunk, _ in exported:
                tokens = self._sequences[chunk.request_id].tokens
                made = slice_of(self._shape, first, last, tokens[chunk.start : chunk.start + chunk.count])
                for layer in range(first, last):
                    export.write(layer, chunk.start, made.data[layer - first])

    def check_integrity(self) -> None:
        super().check_integrity()
        assert len(self._sequences) == len(self._chains)

    def _forget(self, request_id: str) -> None:
        del self._chains[request_id]

    def _advanced(self, chunk: Chunk) -> TokenOutput:
        chain, sampled = self._chains[chunk.request_id], None
        if chunk.last:
            sampling = self._sequences[chunk.request_id].request.sampling
            sampled = next_sampled(chain, sampling, self.profile.model.vocabulary)
        output = self._advance(chunk, sampled)
        if output.token_id is not None:
            chain.follow((output.token_id,))
        return output


def step_s(profile: Profile, first: int, last: int, chunks: Sequence[tuple[int, int, bool]]) -> float:
    """Return the seconds of the layers `[first, last)` for chunks of (first position, tokens, samples)."""
    batch = StepLoad(
        tokens=sum(count for _, count, _ in chunks),
        sequences=len(chunks),
        context=sum(start for start, _, _ in chunks),
    )
    return profile.stage_s(first, last, batch, sampled=sum(samples for _, _, samples in chunks))
