"""Grammars that the text of a sequence follows, by llguidance.

A matcher of each sequence says which tokens may be next, as a mask over the vocabulary. It needs the model's
tokenizer, which gateways send to a node before the first such sequence.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer

from invoker.engine.contract import EngineError
from registry.messages.sampling import Sampling

_KEPT = 8  # tokenizers: each takes some ten bytes for each byte of its file
_Key = tuple[str, int, tuple[int, ...]]  # digest, vocabulary size, end-of-sequence ids


class NoTokenizer(EngineError):
    """The node does not have the tokenizer of a sequence with a grammar: the gateway sends it."""

    code = "no_tokenizer"


class GrammarError(EngineError):
    """The grammar is not one, or too complex."""

    code = "bad_request"


class TokenMatcher:
    """The state of one sequence in its grammar.

    Nothing raises, as steps have other sequences, too: after a failure `error` says why, and no token may be
    next.
    """

    def __init__(self, matcher: LLMatcher | None, error: str = "") -> None:
        self._matcher = matcher
        self.error = error

    def forbid(self, logits: torch.Tensor) -> None:
        """Set the logits of tokens that may not be next to minus infinity, in place: `[vocabulary]`."""
        allowed = np.zeros(len(logits), dtype=np.bool_)
        if self._matcher is not None and not self.error:
            mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            self.error = self._matcher.get_error()
            bits = np.unpackbits(mask, count=min(len(logits), 8 * len(mask)), bitorder="little")
            allowed[: len(bits)] = bits
        logits.masked_fill_(torch.from_numpy(~allowed).to(logits.device), float("-inf"))

    def accept(self, token: int) -> None:
        """Add a token."""
        if self._matcher is not None and not self._matcher.consume_token(token):
            self.error = self._matcher.get_error()


class Grammars:
    """The tokenizers of a node, the last used ones, and matchers of grammars over them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: OrderedDict[str, str] = OrderedDict()  # tokenizer.json by digest
        self._tokenizers: OrderedDict[_Key, LLTokenizer] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Grammars {len(self._files)} tokenizers>"

    def add_tokenizer(self, digest: str, content: bytes) -> None:
        """Keep a tokenizer.json. Raises GrammarError if it is none."""
        try:
            text = content.decode()
            LLTokenizer(text)
        except (ValueError, RuntimeError) as error:
            raise GrammarError(f"the tokenizer cannot be used for grammars: {error}") from error
        with self._lock:
            self._files[digest] = text
            self._files.move_to_end(digest)
            while len(self._files) > _KEPT:
                dropped, _ = self._files.popitem(last=False)
                for key in [key for key in self._tokenizers if key[0] == dropped]:
                    del self._tokenizers[key]

    def matcher(self, sampling: Sampling, vocabulary: int, generated: Sequence[int]) -> TokenMatcher | None:
        """Return the matcher of a sequence after the `generated` tokens, None without a grammar.

        Raises NoTokenizer, GrammarError.
        """
        if not sampling.grammar:
            return None
        matcher = LLMatcher(self._tokenizer(sampling, vocabulary), sampling.grammar)
        if matcher.is_error() or not matcher.consume_tokens(list(generated)):
            raise GrammarError(matcher.get_error())
        return TokenMatcher(matcher)

    def _tokenizer(self, sampling: Sampling, vocabulary: int) -> LLTokenizer:
        key = sampling.tokenizer, vocabulary, sampling.eos_token_ids
        with self._lock:
            text = self._files.get(sampling.tokenizer)
            if text is None:
                raise NoTokenizer(f"the tokenizer {sampling.tokenizer[:12]} is not on this node")
            self._files.move_to_end(sampling.tokenizer)
            found = self._tokenizers.get(key)
            if found is not None:
                self._tokenizers.move_to_end(key)
        if found is None:
            try:
                found = LLTokenizer(text, n_vocab=vocabulary, eos_token=list(sampling.eos_token_ids))
            except (ValueError, RuntimeError) as error:
                raise GrammarError(f"the tokenizer cannot be used for grammars: {error}") from error
            with self._lock:
                self._tokenizers[key] = found
                while len(self._tokenizers) > _KEPT:
                    self._tokenizers.popitem(last=False)
        return found
