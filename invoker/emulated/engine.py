"""A decoder engine on an accelerator that is not there: real queues and pages, and times of a profile."""

from collections.abc import Sequence

from invoker.emulated.device_clock import DeviceClock
from invoker.emulated.kv import check_tokens, kv_shape, slice_of
from invoker.emulated.profiles import Batch, Profile
from invoker.emulated.tokens import TokenChain
from invoker.engine.batched_engine import BatchedEngine
from invoker.engine.contract import NewSequence, OutOfKvCache, TokenOutput
from invoker.engine.kv_cache import KvShape
from invoker.engine.kv_slices import KvSlice, usable_tokens
from invoker.engine.sampling import Choice
from invoker.engine.scheduler import Chunk, Limits
from registry.messages import Sampling, TokenLogprob

PREFILL_TOKENS = 512


def limits_of(profile: Profile, sequences: int) -> Limits:
    """The limits of a step: while sequences compete, what prompts cost it next to nothing."""
    turn = min(profile.free_tokens, PREFILL_TOKENS)
    return Limits(sequences=sequences, prefill_tokens=PREFILL_TOKENS, turn_tokens=turn)


def chosen(chain: TokenChain, sampling: Sampling, vocabulary: int) -> Choice:
    """The token that follows, which is certain of itself."""
    token = chain.next_token(sampling, vocabulary)
    logprob = None if sampling.logprobs is None else TokenLogprob(0.0, ((token, 0.0),))
    return Choice(token_id=token, logprob=logprob)


class EmulatedEngine(BatchedEngine):
    """A GenerateEngine. `kv_bytes` is the room for keys and values, at the profile's scale."""

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
        pages = kv_bytes // self._shape.page_bytes
        if pages < 1:
            raise OutOfKvCache(f"{kv_bytes} bytes are no page of {self._shape.page_bytes} bytes")
        self._clock = clock
        limits, longest = limits_of(profile, max_sequences), min(context_length, profile.model.context)
        super().__init__(pages, limits, vocabulary=profile.model.vocabulary, longest=longest)
        self._chains: dict[str, TokenChain] = {}

    def __repr__(self) -> str:
        return f"<EmulatedEngine {self.profile}, {self._scheduler!r}>"

    @property
    def kv_shape(self) -> KvShape:
        """Of what stands for K and V in `add`."""
        return self._shape

    def add(self, sequence: NewSequence, kv: Sequence[KvSlice] = ()) -> None:
        """Queue a sequence, `kv` as DecoderEngine takes it. Raises OutOfKvCache, BadSequence."""
        tokens = [*sequence.prompt_ids, *sequence.generated_ids]
        kept = usable_tokens(self._shape, kv, len(tokens))
        check_tokens(kv, tokens)
        self._queue(sequence, kept)
        self._chains[sequence.request_id] = TokenChain(tokens)

    def export_kv(self, request_id: str, layers: tuple[int, int] | None = None) -> KvSlice:
        """What stands for the keys and values of a sequence, between two steps. Raises BadSequence."""
        _, cached = self._cached(request_id)
        first, last = layers or (0, self.profile.model.layers)
        return slice_of(self._shape, first, last, self._sequences[request_id].tokens[:cached])

    def step(self) -> list[TokenOutput]:
        """Wait for as long as one batch takes. A part of a prompt comes with no token yet."""
        if not self.has_work:
            return []
        plan = self._plan()
        layers = self.profile.model.layers
        self._clock.run(step_s(self.profile, 0, layers, [(c.start, c.count, c.last) for c in plan.chunks]))
        self._scheduler.ran()
        return [self._advanced(chunk) for chunk in plan.chunks]

    def check_integrity(self) -> None:
        super().check_integrity()
        assert len(self._sequences) == len(self._chains)

    def _forget(self, request_id: str) -> None:
        del self._chains[request_id]

    def _advanced(self, chunk: Chunk) -> TokenOutput:
        chain, choice = self._chains[chunk.request_id], None
        if chunk.last:
            sampling = self._sequences[chunk.request_id].request.sampling
            choice = chosen(chain, sampling, self.profile.model.vocabulary)
        output = self._advance(chunk.request_id, choice, chunk.count)
        if output.token_id is not None:
            chain.follow((output.token_id,))
        return output


def step_s(profile: Profile, first: int, last: int, chunks: Sequence[tuple[int, int, bool]]) -> float:
    """What the layers `[first, last)` take for chunks by first position, tokens, and whether they want a
    token."""
    batch = Batch(
        tokens=sum(count for _, count, _ in chunks),
        sequences=len(chunks),
        context=sum(start for start, _, _ in chunks),
    )
    wanting = sum(wants for _, _, wants in chunks)
    head_s = profile.head_s(wanting) if wanting and last == profile.model.layers else 0.0
    return (last - first) * profile.layer_s(batch) + head_s
