"""Token ids to text as they come: UTF-8 safe, and cut at the first stop string."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_PRIME = 6  # prompt tokens that give the first output its context (a leading space, say)
_BROKEN = "\N{REPLACEMENT CHARACTER}"


class TextStream(Protocol):
    """Turns ids into text deltas."""

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids make final; "" while a character is incomplete."""
        ...

    def finish(self) -> str:
        """What was held back for an incomplete character."""
        ...


class Detokenizer:
    """Incremental decoding of one sequence. The work a token costs does not grow with the sequence."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        prime = list(prompt_ids[-_PRIME:])
        # A prompt cut inside a character would come out twice: such a tail is no context.
        if prime and _BROKEN in tokenizer.decode(prime, skip_special_tokens=True):
            prime = []
        self._stream = DecodeStream(ids=prime, skip_special_tokens=True)
        self._settled = prime  # the ids of the last emission: context of the pending ones
        self._pending: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        parts: list[str] = []
        for token in ids:
            delta = self._stream.step(self._tokenizer, token)
            self._pending.append(token)
            if delta is not None:
                parts.append(delta)
                self._settled, self._pending = self._pending, []
        return "".join(parts)

    def finish(self) -> str:
        if not self._pending:
            return ""
        decode = self._tokenizer.decode
        before = decode(self._settled, skip_special_tokens=True)
        whole = decode(self._settled + self._pending, skip_special_tokens=True)
        self._pending = []
        return whole[len(before) :] if whole.startswith(before) else ""


class NoText:
    """For functions without a tokenizer: ids only, no text."""

    def push(self, ids: Iterable[int]) -> str:
        return ""

    def finish(self) -> str:
        return ""


class StopStrings:
    """Finds the first stop string to be complete, wherever the deltas are cut.

    Text is held back only while it may be the beginning of a stop string. The outcome depends on the
    text alone: the stop string that ends first wins, and of those that end together the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in stops), default=0)
        self._held = ""
        self.hit: str | None = None

    def push(self, delta: str) -> str:
        """The text that may go out now; once `hit` is set, "" for ever."""
        if self.hit is not None:
            return ""
        if not self._stops:
            return delta
        text = self._held + delta
        if found := self._first(text):
            start, self.hit = found
            self._held = ""
            return text[:start]
        keep = self._beginning(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The text still held, at the end of the sequence."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[1], best[2])

    def _beginning(self, text: str) -> int:
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[len(text) - length :]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
