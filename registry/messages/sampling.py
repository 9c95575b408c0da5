"""How the tokens of a sequence are sampled, and how likely they were."""

import msgspec


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters; `temperature=0` is greedy.

    A sample depends on (`seed`, position) and the tokens so far alone, so that the sequence continues
    identically on another node. `logprobs`: None, or the number of alternatives. The other parameters are as
    in vLLM: penalties count the tokens so far (frequency and presence those generated), `logit_bias` are
    pairs of token id and what its logit gets, only `allowed_token_ids` are sampled (empty: all), no token
    that ends the sequence within its first `min_tokens`, and none that completes one of `bad_words` (token
    ids). The text follows `grammar` (llguidance's; empty: any), for which the node needs the tokenizer.json
    of the digest `tokenizer`.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    logprobs: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: str = ""
    tokenizer: str = ""

    @property
    def counts_tokens(self) -> bool:
        """Whether a sample depends on which tokens there are so far."""
        penalties = self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1
        return bool(penalties or self.grammar or self.bad_words)

    @property
    def changes_logits(self) -> bool:
        """Whether anything but temperature and a share of the likeliest tokens applies."""
        return bool(self.counts_tokens or self.min_tokens or self.logit_bias or self.allowed_token_ids)

    @property
    def ending_token_ids(self) -> tuple[int, ...]:
        """The tokens that end the sequence."""
        return self.stop_token_ids + (() if self.ignore_eos else self.eos_token_ids)


class TokenLogprob(msgspec.Struct, frozen=True):
    """The natural-log probability of the sampled token, and the best alternatives, likeliest first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
