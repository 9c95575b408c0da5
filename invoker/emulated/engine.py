"""A decoder engine on an accelerator that is not there: real queues and pages, and times of a profile."""

import logging
from collections.abc import Sequence

from invoker.emulated.device_clock import DeviceClock
from invoker.emulated.kv import check_tokens, kv_shape, slice_of
from invoker.emulated.profiles import Batch, Profile
from invoker.emulated.tokens import TokenChain
from invoker.engine.contract import NewSequence, OutOfKvCache, TokenOutput
from invoker.engine.kv_cache import PAGE_TOKENS, KvShape
from invoker.engine.kv_slices import KvSlice, usable_tokens
from invoker.engine.pages import PageAllocator
from invoker.engine.sampling import Choice
from invoker.engine.scheduler import Limits, Scheduler
from invoker.engine.sequences import BadSequence, SequenceBook
from registry.messages import Sampling, TokenLogprob

logger = logging.getLogger(__name__)

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


class EmulatedEngine:
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
        self._allocator = PageAllocator(pages)
        self._scheduler = Scheduler(limits_of(profile, max_sequences), self._allocator)
        max_tokens = min(context_length, profile.model.context, pages * PAGE_TOKENS)
        self._sequences = SequenceBook(profile.model.vocabulary, max_tokens)
        self._chains: dict[str, TokenChain] = {}

    def __repr__(self) -> str:
        return f"<EmulatedEngine {self.profile}, {self._scheduler!r}>"

    @property
    def max_sequence_tokens(self) -> int:
        return self._sequences.max_tokens

    @property
    def kv_shape(self) -> KvShape:
        """Of what stands for K and V in `add`."""
        return self._shape

    @property
    def has_work(self) -> bool:
        return len(self._sequences) > 0

    @property
    def sequences(self) -> int:
        return len(self._sequences)

    def add(self, sequence: NewSequence, kv: Sequence[KvSlice] = ()) -> None:
        """Queue a sequence, `kv` as DecoderEngine takes it. Raises OutOfKvCache, BadSequence."""
        request_id, tokens = sequence.request_id, [*sequence.prompt_ids, *sequence.generated_ids]
        kept = usable_tokens(self._shape, kv, len(tokens))
        check_tokens(kv, tokens)
        self._sequences.open(sequence)
        most = self._sequences.most_tokens(request_id)
        self._scheduler.add(request_id, len(tokens), sequence.flow, most, kept)
        self._chains[request_id] = TokenChain(tokens)

    def cancel(self, request_id: str) -> None:
        """Drop a sequence and free its pages; one that is not there (any more) is no error."""
        if self._sequences.drop(request_id):
            self._scheduler.remove(request_id)
            del self._chains[request_id]

    def export_kv(self, request_id: str, layers: tuple[int, int] | None = None) -> KvSlice:
        """What stands for the keys and values of a sequence, between two steps. Raises BadSequence."""
        if request_id not in self._sequences:
            raise BadSequence(f"{self!r} has no sequence {request_id}")
        _, cached = self._scheduler.held(request_id)
        first, last = layers or (0, self.profile.model.layers)
        return slice_of(self._shape, first, last, self._sequences[request_id].tokens[:cached])

    def step(self) -> list[TokenOutput]:
        """Wait for as long as one batch takes. A part of a prompt comes with no token yet."""
        if not self.has_work:
            return []
        plan = self._scheduler.plan()
        assert plan.chunks, f"{self!r} has sequences but runs none"
        for request_id in plan.preempted:
            logger.info("sequence %s gave up its KV pages and will be computed again", request_id)
        layers = self.profile.model.layers
        self._clock.run(step_s(self.profile, 0, layers, [(c.start, c.count, c.last) for c in plan.chunks]))
        self._scheduler.ran()
        return [self._advance(chunk.request_id, chunk.count, chunk.last) for chunk in plan.chunks]

    def close(self) -> None:
        """Drop all sequences. Idempotent."""
        for request_id in list(self._sequences):
            self.cancel(request_id)

    def check_integrity(self) -> None:
        """Assert that pages and queues are consistent, and that an idle engine holds no page."""
        self._scheduler.check_integrity()
        assert len(self._scheduler) == len(self._sequences) == len(self._chains)
        assert self.has_work or self._allocator.used == 0, "an idle engine holds pages"

    def _advance(self, request_id: str, work: int, wants: bool) -> TokenOutput:
        chain, choice = self._chains[request_id], None
        if wants:
            sampling = self._sequences[request_id].request.sampling
            choice = chosen(chain, sampling, self.profile.model.vocabulary)
        output = self._sequences.advance(request_id, choice, work)
        if output.finish_reason:
            self.cancel(request_id)
        elif output.token_id is not None:
            chain.follow((output.token_id,))
            self._scheduler.append_token(request_id)
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
