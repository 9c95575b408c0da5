"""Incremental detokenization: UTF-8 safe, and cut at the first stop string."""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_CONTEXT_TOKENS = 6  # of the prompt, on which the first output's text depends (as a leading space)
_BROKEN = "\N{REPLACEMENT CHARACTER}"
_CACHED_TEXTS = 1 << 15


def token_texts(tokenizer: Tokenizer | None) -> Callable[[int], str]:
    """Return a function, with a cache, from a token to its text; without a tokenizer to its number."""

    def text_of(token: int) -> str:
        if tokenizer is None:
            return f"token_id:{token}"
        text = tokenizer.decode([token], skip_special_tokens=False)
        # A token that is a part of a character has no text: it is shown by its name in the vocabulary.
        return text if text and _BROKEN not in text else (tokenizer.id_to_token(token) or text)

    return lru_cache(_CACHED_TEXTS)(text_of)


class TextStream(Protocol):
    """A converter of ids to text deltas."""

    def push(self, ids: Iterable[int]) -> str:
        """Return the text that these ids complete; "" while a character is incomplete."""
        ...

    def finish(self) -> str:
        """Return the text held back for an incomplete character."""
        ...


class Detokenizer:
    """The incremental decoder of one sequence, with constant work a token."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        context = list(prompt_ids[-_CONTEXT_TOKENS:])
        # A prompt that ends inside a character would repeat it: it is not used as context.
        if context and _BROKEN in tokenizer.decode(context, skip_special_tokens=True):
            context = []
        self._stream = DecodeStream(ids=context, skip_special_tokens=True)
        self._emitted = context  # the ids of the last text: context of the pending ones
        self._pending: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        parts: list[str] = []
        for token in ids:
            delta = self._stream.step(self._tokenizer, token)
            self._pending.append(token)
            if delta is not None:
                parts.append(delta)
                self._emitted, self._pending = self._pending, []
        return "".join(parts)

    def finish(self) -> str:
        if not self._pending:
            return ""
        decode = self._tokenizer.decode
        before = decode(self._emitted, skip_special_tokens=True)
        whole = decode(self._emitted + self._pending, skip_special_tokens=True)
        self._pending = []
        return whole[len(before) :] if whole.startswith(before) else ""


class NoText:
    """The text stream of a function without a tokenizer: always empty."""

    def push(self, ids: Iterable[int]) -> str:
        return ""

    def finish(self) -> str:
        return ""


class StopStrings:
    """A matcher of stop strings across deltas.

    Text is held back only while it may be a prefix of a stop string. The result depends on the text only:
    the stop string that ends first matches, and of those that end together the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in stops), default=0)
        self._held = ""
        self.hit: str | None = None

    def push(self, delta: str) -> str:
        """Return the text that may be sent now; always "" once `hit` is set."""
        if self.hit is not None:
            return ""
        if not self._stops:
            return delta
        text = self._held + delta
        if found := self._first(text):
            start, self.hit = found
            self._held = ""
            return text[:start]
        keep = self._prefix_length(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Return the text held back, at the end of the sequence."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[1], best[2])

    def _prefix_length(self, text: str) -> int:
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[len(text) - length :]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
