"""The common part of engines of whole models: sequences with KV pages, scheduled step by step."""

import logging
from collections.abc import Callable, Iterator, Sequence

from invoker.engine.contract import NewSequence, TokenOutput
from invoker.engine.kv.cache import PAGE_TOKENS, KvShape
from invoker.engine.kv.entry import EntryFormat, LayerEntry
from invoker.engine.kv.export import KvExport
from invoker.engine.kv.pages import PageAllocator
from invoker.engine.kv.slices import KvSlice, in_host_memory
from invoker.engine.sampling import SampledToken
from invoker.engine.scheduling.scheduler import Chunk, Scheduler, StepLimits, StepPlan
from invoker.engine.scheduling.sequence_table import InvalidSequence, SequenceTable

logger = logging.getLogger(__name__)


class BatchedEngine:
    """A GenerateEngine without `add`, `step`, `entry_format` and `export_kv`, which subclasses define.

    It has `pages` of KV cache and accepts sequences of at most `longest` tokens with ids in
    `[0, vocabulary)`.
    """

    def __init__(self, pages: int, limits: StepLimits, *, vocabulary: int, longest: int) -> None:
        self._allocator = PageAllocator(pages)
        self._scheduler = Scheduler(limits, self._allocator)
        # The last token of a sequence needs no slot: nothing follows it.
        self._sequences = SequenceTable(vocabulary, min(longest, pages * PAGE_TOKENS))
        self._to_export: dict[str, Callable[[KvExport], None]] = {}  # sequences that have not run yet
        self._exports: dict[str, KvExport] = {}
        self._entries: dict[str, LayerEntry] = {}  # of prompts that have not run

    @property
    def max_sequence_tokens(self) -> int:
        return self._sequences.max_tokens

    @property
    def kv_tokens(self) -> tuple[int, int]:
        """The tokens of KV cache in use, and in all."""
        return self._allocator.used * PAGE_TOKENS, self._allocator.total * PAGE_TOKENS

    @property
    def has_work(self) -> bool:
        return len(self._sequences) > 0

    @property
    def sequences(self) -> int:
        return len(self._sequences)

    @property
    def kv_shape(self) -> KvShape:
        """The shape of the K and V that `add` accepts."""
        return self.entry_format.kv

    @property
    def entry_format(self) -> EntryFormat:
        """The format of the entries that `add` accepts."""
        raise NotImplementedError

    def export_kv(self, request_id: str, layers: tuple[int, int] | None = None) -> KvSlice:
        """Return a copy of the K and V of a sequence, between two steps. Raises InvalidSequence."""
        raise NotImplementedError

    def export(self, request_id: str, started: Callable[[KvExport], None]) -> None:
        """Export a queued sequence's K and V while its prompt runs; `started` gets them before that."""
        self._to_export[request_id] = started

    def finish_export(self, request_id: str) -> None:
        """Complete the export of a sequence whose prompt has run, between two steps.

        Raises InvalidSequence if it is not being exported.
        """
        export = self._exports.pop(request_id, None)
        if export is None:
            raise InvalidSequence(f"{self!r} does not export sequence {request_id}")
        try:
            if export.is_under_way:
                copied = in_host_memory(self.export_kv(request_id))
                for layer in range(export.first, export.last):
                    export.write(layer, 0, copied.data[layer])
        finally:
            export.fail("the rest could not be exported")

    def cancel(self, request_id: str) -> None:
        """Drop a sequence and free its pages; do nothing if there is none of that id."""
        if self._sequences.drop(request_id):
            self._scheduler.remove(request_id)
            self._to_export.pop(request_id, None)
            self._entries.pop(request_id, None)
            if (export := self._exports.pop(request_id, None)) is not None:
                export.fail("the sequence has ended")
            self._forget(request_id)

    def close(self) -> None:
        """Drop all sequences. Idempotent."""
        for request_id in list(self._sequences):
            self.cancel(request_id)

    def check_integrity(self) -> None:
        """Assert that pages and queues are consistent, and that an idle engine holds no page."""
        self._scheduler.check_integrity()
        assert len(self._scheduler) == len(self._sequences), "scheduler and engine disagree"
        assert self.has_work or self._allocator.used == 0, "an idle engine holds pages"

    def _forget(self, request_id: str) -> None:
        """Release what the subclass keeps of a dropped sequence."""

    def _queue(self, sequence: NewSequence, kept: int, entry: LayerEntry | None = None) -> None:
        """Queue a sequence of which `kept` tokens have K and V already. Raises as `add`."""
        live = self._sequences.open(sequence)
        request_id, share = sequence.request_id, 1.0
        if entry is not None:
            share = self.entry_format.share(entry)
            self._entries[request_id] = entry
        max_tokens = self._sequences.max_tokens_of(request_id)
        self._scheduler.add(request_id, len(live.tokens), sequence.tenant, max_tokens, kept, share)

    def _cached(self, request_id: str) -> tuple[tuple[int, ...], int]:
        """Return the pages of a sequence and the number of tokens with K and V. Raises InvalidSequence."""
        if request_id not in self._sequences:
            raise InvalidSequence(f"{self!r} has no sequence {request_id}")
        return self._scheduler.cached_pages(request_id)

    def _plan(self) -> StepPlan:
        """Plan the next step of an engine that has work."""
        plan = self._scheduler.plan()
        assert plan.chunks, f"{self!r} has sequences but runs none"
        for request_id in plan.preempted:
            logger.info("sequence %s: preempted, its KV cache will be recomputed", request_id)
            self._entries.pop(request_id, None)
        if self._to_export:
            self._start_exports(plan.chunks)
        return plan

    def _start_exports(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            started = self._to_export.pop(chunk.request_id, None)
            if started is None:
                continue
            tokens = len(self._sequences[chunk.request_id].tokens)
            try:
                export = KvExport.empty(self.kv_shape, tokens)
            except (RuntimeError, MemoryError) as error:  # it is recomputed elsewhere
                logger.info("cannot export K and V of sequence %s: %s", chunk.request_id, error)
                continue
            self._exports[chunk.request_id] = export
            started(export)

    def _exported(self, chunks: Sequence[Chunk]) -> Iterator[tuple[KvExport, Chunk, int]]:
        """Yield the chunks of sequences that are exported, with the export and the chunk's first row."""
        row = 0
        for chunk in chunks:
            if (export := self._exports.get(chunk.request_id)) is not None:
                yield export, chunk, row
            row += chunk.count

    def _work(self, chunk: Chunk) -> int:
        """Return a chunk's share of a step's time: its tokens, fewer if its first layers ran elsewhere."""
        entry = self._entries.get(chunk.request_id)
        if entry is None:
            return chunk.count
        return max(1, int(chunk.count * self.entry_format.share(entry)))

    def _advance(self, chunk: Chunk, sampled: SampledToken | None) -> TokenOutput:
        """Append a sampled token to the sequence of a chunk that ran, and return the output."""
        request_id, work = chunk.request_id, self._work(chunk)
        if chunk.last:
            self._entries.pop(request_id, None)
        output = self._sequences.advance(request_id, sampled, work)
        if output.error or output.finish_reason:
            self.cancel(request_id)
        elif sampled is not None:
            self._scheduler.append_token(request_id)
        return output
