"""An overloaded instance and one that is still loading share their requests (pure; BlitzScale's ZigZag).

The target, which holds the layers `[0, t)`, runs one layer at a time: of the earliest request that has a
loaded layer left. The source, whenever it is free, takes the earliest request with what the target has made
of it, and runs all that is left. So the target comes back to a request as more layers land, until the source
takes it; nobody solves anything. A layer's time is proportional to a request's tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A request, or several that run together, of so many tokens."""

    name: str
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Run the layers `[first, last)` of a batch. What comes before is done."""

    batch: Batch
    first: int
    last: int


@dataclass(slots=True)
class _Entry:
    batch: Batch
    done: int = 0  # layers that the target has run
    running: bool = False  # on the target


class ZigZagQueue:
    """The requests that neither instance has taken for good, the earliest first."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._loaded = 0
        self._entries: dict[str, _Entry] = {}

    def __repr__(self) -> str:
        rows = ", ".join(
            f"{name} {entry.done}{'+' if entry.running else ''}" for name, entry in self._entries.items()
        )
        return f"<ZigZagQueue [0,{self._loaded}) of {self._layers} loaded: {rows}>"

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, batch: Batch) -> None:
        """Behind all others. Raises ValueError for one that is there."""
        if batch.name in self._entries:
            raise ValueError(f"{batch.name} is in the queue already")
        self._entries[batch.name] = _Entry(batch)

    def drop(self, name: str) -> None:
        """Nobody wants it any more, or its work was lost."""
        self._entries.pop(name, None)

    def loaded(self, layers: int) -> None:
        """The target can run the layers `[0, layers)` now."""
        self._loaded = max(self._loaded, min(layers, self._layers))

    def for_target(self) -> Work | None:
        """The next layer for the target, which then tells `ran`."""
        for entry in self._entries.values():
            if entry.done < self._loaded and not entry.running:
                entry.running = True
                return Work(batch=entry.batch, first=entry.done, last=entry.done + 1)
        return None

    def ran(self, work: Work) -> bool:
        """The target ran the layer. True if it was the last: the batch is done then, and gone from here."""
        entry = self._entries.get(work.batch.name)
        if entry is None or not entry.running:
            return False
        entry.running = False
        entry.done = work.last
        if entry.done == self._layers:
            del self._entries[work.batch.name]
            return True
        return False

    def for_source(self) -> Work | None:
        """All that is left of the earliest batch, which is the source's then. None while the target runs a
        layer of it: to wait for one layer costs less than to let others overtake it by all of theirs."""
        for name, entry in self._entries.items():
            if entry.running:
                return None
            del self._entries[name]
            return Work(batch=entry.batch, first=entry.done, last=self._layers)
        return None


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
