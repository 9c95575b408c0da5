"""Token sampling from logits, vectorised over the sequences of a step.

A draw is a function of (seed, position) and the logits alone: no generator state is carried from one token to
the next, so a sequence continues identically on any node.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from invoker.engine.grammars import TokenMatcher
from registry.messages.sampling import Sampling, TokenLogprob

_MASK = 0xFFFFFFFFFFFFFFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRow:
    """One row of logits: its sampling parameters, and the position of the token to sample.

    `tokens` are those before it, of which the last `generated` were sampled; empty where the parameters do
    not count tokens. `matcher` is its state in its grammar.
    """

    sampling: Sampling
    position: int
    generated: int = 0
    tokens: Sequence[int] = ()
    matcher: TokenMatcher | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """A sampled token. `token_id` is None if there is none, with the reason as `error`."""

    token_id: int | None
    logprob: TokenLogprob | None
    error: str = ""


def _signed(word: int) -> int:
    """Return the 64-bit word as a signed int64."""
    return (word & _MASK) - ((word & (1 << 63)) << 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Return SplitMix64's finaliser, a bijection of 64-bit words with full avalanche."""

    def folded(x: torch.Tensor, bits: int) -> torch.Tensor:
        return x ^ ((x >> bits) & ((1 << (64 - bits)) - 1))  # int64's own shift repeats the sign

    x = folded(x, 30) * _signed(0xBF58476D1CE4E5B9)
    x = folded(x, 27) * _signed(0x94D049BB133111EB)
    return folded(x, 31)


def uniforms(
    seeds: Sequence[int], positions: Sequence[int], count: int, device: torch.device
) -> torch.Tensor:
    """Return `[rows, count]` float64 in (0, 1), 53 random bits each, a row for each (seed, position)."""
    seed = torch.tensor([[_signed(seed)] for seed in seeds], device=device)
    position = torch.tensor([[_signed(position)] for position in positions], device=device)
    row = _mix(_mix(seed + _signed(0x9E3779B97F4A7C15)) + position * _signed(0xD1342543DE82EF95))
    word = _mix(row + torch.arange(1, count + 1, device=device) * _signed(0x9E3779B97F4A7C15))
    return (((word >> 11) & ((1 << 53) - 1)).double() + 0.5) * 2.0**-53


def sample(logits: torch.Tensor, draws: Sequence[SamplingRow]) -> list[SampledToken]:
    """Sample one token for each row of `logits`, `[rows, vocabulary]`; matchers accept theirs."""
    raw = logits.float()
    logits = _changed(raw, draws)
    random_rows = [i for i, draw in enumerate(draws) if draw.sampling.temperature > 0]
    if len(random_rows) == len(draws):
        chosen = _draw(logits, draws)
    else:
        chosen = _best(logits)
        if random_rows:
            rows = torch.tensor(random_rows, device=logits.device)
            chosen[rows] = _draw(logits[rows], [draws[i] for i in random_rows])

    picked = logits.gather(1, chosen.unsqueeze(1)).squeeze(1)
    tokens = chosen.tolist()
    valid = torch.isfinite(picked).tolist()
    for token, ok, draw in zip(tokens, valid, draws, strict=True):
        if ok and draw.matcher is not None:
            draw.matcher.accept(token)
    logprobs = _logprobs(raw, chosen, draws)
    return [
        SampledToken(token_id=token, logprob=logprob)
        if ok
        else SampledToken(token_id=None, logprob=None, error=_error(draw))
        for token, ok, logprob, draw in zip(tokens, valid, logprobs, draws, strict=True)
    ]


def _error(draw: SamplingRow) -> str:
    failed = "" if draw.matcher is None else draw.matcher.error
    return f"the grammar failed: {failed}" if failed else "the model's output is not a number"


def _changed(raw: torch.Tensor, draws: Sequence[SamplingRow]) -> torch.Tensor:
    """Return logits with biases, penalties and forbidden tokens; `raw` itself where there are none."""
    rows = [i for i, draw in enumerate(draws) if draw.sampling.changes_logits]
    if not rows:
        return raw
    logits = raw.clone()
    for i in rows:
        _change(logits[i], draws[i])
    return logits


def _change(logits: torch.Tensor, draw: SamplingRow) -> None:
    """Change one row of logits in place, in vLLM's order."""
    sampling = draw.sampling

    def ids(tokens: Sequence[int]) -> torch.Tensor:
        return torch.tensor(tokens, dtype=torch.long, device=logits.device)

    if draw.matcher is not None:
        draw.matcher.forbid(logits)
    if sampling.allowed_token_ids:
        allowed = ids(sampling.allowed_token_ids)
        kept = logits[allowed]
        logits.fill_(float("-inf"))
        logits[allowed] = kept
    if sampling.bad_words:
        made = tuple(draw.tokens[len(draw.tokens) - draw.generated :])
        for *before, last in sampling.bad_words:
            if last < len(logits) and made[len(made) - len(before) :] == tuple(before):
                logits[last] = float("-inf")
    if sampling.logit_bias:
        biased, values = zip(*sampling.logit_bias, strict=True)
        logits.index_add_(0, ids(biased), torch.tensor(values, dtype=logits.dtype, device=logits.device))
    if draw.generated < sampling.min_tokens:
        logits[ids(sampling.ending_token_ids)] = float("-inf")
    if sampling.repetition_penalty != 1:
        seen = ids(draw.tokens).unique()
        penalty, values_seen = sampling.repetition_penalty, logits[seen]
        logits[seen] = torch.where(values_seen > 0, values_seen / penalty, values_seen * penalty)
    if draw.generated and (sampling.frequency_penalty or sampling.presence_penalty):
        made, counts = ids(draw.tokens[-draw.generated :]).unique(return_counts=True)
        logits[made] -= counts * sampling.frequency_penalty + sampling.presence_penalty


def _best(logits: torch.Tensor) -> torch.Tensor:
    if logits.device.type == "cpu":  # numpy's takes a tenth of the time of torch's
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def _draw(logits: torch.Tensor, draws: Sequence[SamplingRow]) -> torch.Tensor:
    """Sample by the Gumbel-max trick over the tokens that min-p, top-k, top-p keep; return ids, `[rows]`.

    Each token has its own noise. Logits computed in another batch or on another node differ in their last
    bits. That changes this draw only where two tokens are nearly tied; inverting the CDF over sorted tokens,
    which change places, would change far more often.
    """
    device, vocabulary = logits.device, logits.shape[1]
    samplings = [draw.sampling for draw in draws]
    temperatures = torch.tensor([[s.temperature] for s in samplings], dtype=torch.float64, device=device)
    scaled = (logits - logits.max(dim=-1, keepdim=True).values).double() / temperatures
    noise = uniforms([s.seed for s in samplings], [d.position for d in draws], vocabulary, device)
    scores = scaled - noise.log_().neg_().log_()
    if any(s.top_k > 0 or s.top_p < 1 or s.min_p > 0 for s in samplings):
        scores.masked_fill_(~_kept(scaled, samplings), float("-inf"))
    return scores.argmax(dim=-1)


def _kept(scaled: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Return which tokens min-p, then top-k and top-p keep in each row, bool `[rows, vocabulary]`."""
    device, vocabulary = scaled.device, scaled.shape[1]
    ordered, tokens = scaled.sort(dim=-1, descending=True, stable=True)
    mass = torch.softmax(ordered, dim=-1)
    least = torch.tensor([[s.min_p] for s in samplings], dtype=torch.float64, device=device)
    mass = mass.masked_fill(mass < least * mass[:, :1], 0.0)
    rank = torch.arange(vocabulary, device=device)
    limit = torch.tensor([[s.top_k or vocabulary] for s in samplings], device=device)
    mass = mass.masked_fill(rank >= limit, 0.0)
    shares = torch.tensor([[s.top_p] for s in samplings], dtype=torch.float64, device=device)
    # A token stays while the mass ahead of it is short of top_p; the first always stays.
    ahead = mass.cumsum(dim=-1) - mass
    kept = (ahead < shares * mass.sum(dim=-1, keepdim=True)) & (rank < limit) & (mass > 0)
    kept[:, 0] = True
    return torch.zeros_like(kept).scatter_(1, tokens, kept)


def _logprobs(
    logits: torch.Tensor, chosen: torch.Tensor, draws: Sequence[SamplingRow]
) -> Sequence[TokenLogprob | None]:
    """Return log-probabilities under the unscaled, unfiltered logits, for the rows that request them."""
    requested = [draw.sampling.logprobs for draw in draws]
    if all(n is None for n in requested):
        return [None] * len(draws)
    table = torch.log_softmax(logits, dim=-1)
    own = table.gather(1, chosen.unsqueeze(1)).squeeze(1).tolist()
    columns = min(max(n or 0 for n in requested), logits.shape[1])
    values, ids = table.topk(columns, dim=-1)
    rows = zip(requested, own, ids.tolist(), values.tolist(), strict=True)
    return [
        None if n is None else TokenLogprob(logprob, tuple(zip(top[:n], best[:n], strict=True)))
        for n, logprob, top, best in rows
    ]
