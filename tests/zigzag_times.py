"""What the queue of a pair (registry/zigzag.py) comes to in time, where a layer's time is proportional to a
request's tokens: what is held against the optimum.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from registry.zigzag import Batch, Work, ZigZagQueue


@dataclass(frozen=True, slots=True, kw_only=True)
class Relief:
    """How source and target are off: `load_s` for each further layer from when the first one is there, at 0;
    `token_layer_s` for a layer of one token; the source ends what it runs now at `source_free_s`."""

    layers: int
    load_s: float
    token_layer_s: float
    source_free_s: float = 0.0


def finish_times(batches: Sequence[Batch], relief: Relief, until_s: float | None = None) -> dict[str, float]:
    """When each batch would be done, all being there at 0; up to `until_s`, if that is given."""
    return _Run(batches, relief).run(until_s)


class _Run:
    def __init__(self, batches: Iterable[Batch], relief: Relief) -> None:
        self._relief = relief
        self._queue = ZigZagQueue(relief.layers)
        for batch in batches:
            self._queue.add(batch)
        self._target: tuple[float, Work] | None = None  # until when it runs what
        self._source: tuple[float, Work | None] | None = (relief.source_free_s, None)
        self._landed = 1
        self._ended: dict[str, float] = {}

    def run(self, until_s: float | None) -> dict[str, float]:
        now = 0.0
        while self._queue or self._source is not None or self._target is not None:
            if until_s is not None and now > until_s:
                break
            self._finish(now)
            self._begin(now)
            now = self._next(now)
        return self._ended

    def _finish(self, now: float) -> None:
        if self._target is not None and self._target[0] <= now:
            if self._queue.ran(self._target[1]):
                self._ended[self._target[1].batch.name] = now
            self._target = None
        if self._source is not None and self._source[0] <= now:
            if self._source[1] is not None:
                self._ended[self._source[1].batch.name] = now
            self._source = None

    def _begin(self, now: float) -> None:
        while self._landed < self._relief.layers and self._landed * self._relief.load_s <= now:
            self._landed += 1
        self._queue.loaded(self._landed)
        # The source first: what it takes now, the target need not look at.
        if self._source is None and (work := self._queue.for_source()) is not None:
            self._source = now + self._takes_s(work), work
        if self._target is None and (work := self._queue.for_target()) is not None:
            self._target = now + self._takes_s(work), work

    def _next(self, now: float) -> float:
        times = [end for end, _ in filter(None, (self._target, self._source))]
        if self._landed < self._relief.layers and self._queue:
            times.append(self._landed * self._relief.load_s)
        return min(times, default=now)

    def _takes_s(self, work: Work) -> float:
        return (work.last - work.first) * work.batch.tokens * self._relief.token_layer_s
