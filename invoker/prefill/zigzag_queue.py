"""The ZigZag schedule of BlitzScale: an overloaded and a loading instance share requests (pure).

The target, which has loaded layers `[0, t)`, runs one layer at a time, of the oldest request with a loaded
layer left. The source, when it is free, takes the oldest request with the target's results and runs the
other layers. The target returns to a request as more layers land, until the source takes it; no optimisation
problem is solved. A layer's time is proportional to a request's tokens.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBatch:
    """One or more requests that run together, with their number of tokens."""

    name: str
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """Layers `[first, last)` to run for a batch; those before are done."""

    batch: PromptBatch
    first: int
    last: int


@dataclass(slots=True)
class _QueuedBatch:
    batch: PromptBatch
    done: int = 0  # layers run by the target
    running: bool = False  # on the target
    refused: bool = False  # the target failed


class ZigZagQueue:
    """The requests that the source has not taken and the target has not finished, oldest first."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._loaded = 0
        self._entries: dict[str, _QueuedBatch] = {}

    def __repr__(self) -> str:
        rows = ", ".join(
            f"{name} {entry.done}{'+' if entry.running else ''}" for name, entry in self._entries.items()
        )
        return f"<ZigZagQueue [0,{self._loaded}) of {self._layers} loaded: {rows}>"

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, batch: PromptBatch) -> None:
        """Append a batch. Raises ValueError if its name is queued already."""
        if batch.name in self._entries:
            raise ValueError(f"{batch.name} is queued already")
        self._entries[batch.name] = _QueuedBatch(batch)

    def drop(self, name: str) -> None:
        """Remove a batch that was cancelled or failed, if it is queued."""
        self._entries.pop(name, None)

    def refuse(self, name: str) -> None:
        """Record that a layer of the batch failed: the source runs all of its layers."""
        self._entries[name] = _QueuedBatch(self._entries[name].batch, refused=True)

    def set_loaded_layers(self, layers: int) -> None:
        """Record that the target has loaded layers `[0, layers)`."""
        self._loaded = max(self._loaded, min(layers, self._layers))

    def next_for_target(self) -> LayerWork | None:
        """Return the next layer for the target, which calls `complete` afterwards; None if there is none."""
        for entry in self._entries.values():
            if entry.done < self._loaded and not (entry.running or entry.refused):
                entry.running = True
                return LayerWork(batch=entry.batch, first=entry.done, last=entry.done + 1)
        return None

    def complete(self, work: LayerWork) -> bool:
        """Record that the target ran the layer; return True if it was the last and the batch was removed."""
        entry = self._entries.get(work.batch.name)
        if entry is None or not entry.running:
            return False
        entry.running = False
        entry.done = work.last
        if entry.done == self._layers:
            del self._entries[work.batch.name]
            return True
        return False

    def pop_for_source(self) -> LayerWork | None:
        """Remove the oldest batch and return its other layers; None while the target runs a layer of it.

        Waiting for one layer costs less than letting other batches overtake it.
        """
        for name, entry in self._entries.items():
            if entry.running:
                return None
            del self._entries[name]
            return LayerWork(batch=entry.batch, first=entry.done, last=self._layers)
        return None
