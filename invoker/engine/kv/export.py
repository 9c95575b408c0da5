"""K and V of a sequence that an engine exports while it runs the sequence's prompt."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from invoker.engine.kv.cache import KvShape
from invoker.engine.kv.slices import KvSlice, empty_slice

ExportKv = Callable[[str, "KvExport"], None]  # receives a sequence's K and V; called by any thread


class KvRange(NamedTuple):
    """Tokens `[start, end)` of the layers `[first, last)`."""

    first: int
    last: int
    start: int
    end: int


class KvExport:
    """A slice in host memory that one thread fills in the order of tokens, layer by layer.

    Another may read what is there meanwhile. It ends complete, or by `fail`. Thread-safe.
    """

    def __init__(self, kv: KvSlice) -> None:
        self._kv = kv
        self._filled = [0] * (kv.last - kv.first)  # tokens of each layer, from the first on
        self._failure = ""
        self._changed = threading.Condition()

    def __repr__(self) -> str:
        state = self._failure or f"{sum(self._filled)} of {len(self._filled) * self.tokens} layer-tokens"
        return f"<KvExport layers [{self.first}, {self.last}), {state}>"

    @classmethod
    def empty(cls, shape: KvShape, tokens: int) -> "KvExport":
        """Return one of all layers of a model of `shape`, to be filled."""
        return cls(empty_slice(shape, 0, shape.layers, tokens))

    @classmethod
    def whole(cls, kv: KvSlice) -> "KvExport":
        """Return a slice that is complete already, as an export."""
        one = cls(kv)
        one._filled = [kv.tokens] * len(one._filled)
        return one

    @property
    def first(self) -> int:
        return self._kv.first

    @property
    def last(self) -> int:
        return self._kv.last

    @property
    def tokens(self) -> int:
        return self._kv.tokens

    @property
    def nbytes(self) -> int:
        return self._kv.nbytes

    @property
    def is_under_way(self) -> bool:
        """Whether more of it may come."""
        with self._changed:
            return not self._failure and min(self._filled) < self.tokens

    def write(self, layer: int, start: int, entries: torch.Tensor) -> None:
        """Copy a layer's tokens from `start` on, `[2 * heads, tokens, head_dim]`.

        Those before them must be there; without effect on those that are there already.
        """
        index = layer - self.first
        filled = self._filled[index]  # written by this thread alone
        end = start + entries.shape[1]
        if not start <= filled < end <= self.tokens:
            return
        self._kv.data[index, :, filled:end].copy_(entries[:, filled - start :])
        with self._changed:
            self._filled[index] = end
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """End an export that is not complete; readers get no more of it."""
        with self._changed:
            if min(self._filled) < self.tokens:
                self._failure = self._failure or reason
                self._changed.notify_all()

    def arriving(self, timeout_s: float) -> Iterator[KvRange]:
        """Yield ranges of one or more layers as they are filled, until complete; blocks between them.

        Raises TimeoutError at the latest after `timeout_s`, BrokenPipeError if the export fails.
        """
        deadline = time.monotonic() + timeout_s
        sent = [0] * len(self._filled)
        while min(sent) < self.tokens:
            yield from self._since(sent, deadline)

    def wait(self, timeout_s: float) -> KvSlice:
        """Return the slice once complete. Raises as `arriving`."""
        for _ in self.arriving(timeout_s):
            pass
        return self._kv

    def view(self, part: KvRange) -> torch.Tensor:
        """Return a range, `[layers, 2 * heads, tokens, head_dim]`, without a copy."""
        return self._kv.data[part.first - self.first : part.last - self.first, :, part.start : part.end]

    def _since(self, sent: list[int], deadline: float) -> list[KvRange]:
        """Wait until there is more than `sent`; return that, and count it as sent."""
        with self._changed:
            while not self._failure and self._filled == sent:
                if not self._changed.wait(deadline - time.monotonic()):
                    raise TimeoutError("the export takes too long")
            if self._failure:
                raise BrokenPipeError(self._failure)
            filled = list(self._filled)
        parts: list[KvRange] = []
        for index, (before, now) in enumerate(zip(sent, filled, strict=True)):
            if before == now:
                continue
            layer, previous = index + self.first, parts[-1] if parts else None
            if previous is not None and previous.last == layer and previous[2:] == (before, now):
                parts[-1] = previous._replace(last=layer + 1)
            else:
                parts.append(KvRange(layer, layer + 1, before, now))
        sent[:] = filled
        return parts
