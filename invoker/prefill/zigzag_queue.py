"""An overloaded instance and one that is still loading share their requests (pure; BlitzScale's ZigZag).

The target, which holds the layers `[0, t)`, runs one layer at a time: of the earliest request that has a
loaded layer left. The source, whenever it is free, takes the earliest request with what the target has made
of it, and runs all that is left. So the target comes back to a request as more layers land, until the source
takes it; nobody solves anything. A layer's time is proportional to a request's tokens.
"""

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
