"""Choosing tokens from logits: vectorised over the sequences of a step.

A draw is a function of (seed, position) and the logits alone: no generator state is carried from one
token to the next, so a sequence continues identically wherever it goes on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from registry.messages import Sampling, TokenLogprob

_MASK = np.uint64(0xFFFFFFFFFFFFFFFF)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One row of logits: how to sample from it, and the position that the token will take."""

    sampling: Sampling
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The chosen token. `token_id` is None if the logits were not numbers."""

    token_id: int | None
    logprob: TokenLogprob | None


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser: a bijection of 64-bit words in which every input bit moves every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """One float64 in [0, 1) for each (seed, position), 53 bits of it random."""
    # Seeds may be any Python int; reduced here because numpy refuses what does not fit.
    seed = np.array([s & int(_MASK) for s in seeds], dtype=np.uint64)
    position = np.array(positions, dtype=np.uint64)
    with np.errstate(over="ignore"):
        word = _mix(_mix(seed + np.uint64(0x9E3779B97F4A7C15)) + position * np.uint64(0xD1342543DE82EF95))
    return (word >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[Choice]:
    """Choose one token for each row of `logits` [rows, vocabulary]."""
    logits = logits.float()
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
    logprobs = _logprobs(logits, chosen, draws)
    return [
        Choice(token_id=token if ok else None, logprob=logprob if ok else None)
        for token, ok, logprob in zip(tokens, valid, logprobs, strict=True)
    ]


def _best(logits: torch.Tensor) -> torch.Tensor:
    if logits.device.type == "cpu":  # numpy's takes a tenth of the time of torch's
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def _draw(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Inverse-CDF sampling over the sorted probabilities, after top-k and then top-p."""
    device, vocabulary = logits.device, logits.shape[1]
    samplings = [draw.sampling for draw in draws]

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device).unsqueeze(1)

    ordered, tokens = logits.sort(dim=-1, descending=True, stable=True)
    scaled = (ordered - ordered[:, :1]).double() / column([s.temperature for s in samplings])
    mass = torch.softmax(scaled, dim=-1)
    if any(s.top_k > 0 for s in samplings):
        rank = torch.arange(vocabulary, device=device)
        mass = mass.masked_fill(rank >= column([s.top_k or vocabulary for s in samplings]), 0.0)
    total = mass.sum(dim=-1, keepdim=True)
    below = mass.cumsum(dim=-1)
    # A token stays while the mass ahead of it is short of top_p; the first always stays.
    kept = (below - mass < column([s.top_p for s in samplings]) * total) & (mass > 0)
    kept[:, 0] = True
    last = kept.sum(dim=-1, keepdim=True) - 1

    drawn = column(uniforms([s.seed for s in samplings], [d.position for d in draws]).tolist())
    target = drawn * below.gather(1, last)
    index = torch.searchsorted(below, target, right=True).minimum(last)
    return tokens.gather(1, index).squeeze(1)


def _logprobs(
    logits: torch.Tensor, chosen: torch.Tensor, draws: Sequence[Draw]
) -> Sequence[TokenLogprob | None]:
    """Natural-log probabilities under the unscaled, unfiltered logits, for the rows that asked."""
    asked = [draw.sampling.logprobs for draw in draws]
    if all(n is None for n in asked):
        return [None] * len(draws)
    table = torch.log_softmax(logits, dim=-1)
    own = table.gather(1, chosen.unsqueeze(1)).squeeze(1).tolist()
    most = min(max(n or 0 for n in asked), logits.shape[1])
    values, ids = table.topk(most, dim=-1)
    rows = zip(asked, own, ids.tolist(), values.tolist(), strict=True)
    return [
        None if n is None else TokenLogprob(logprob, tuple(zip(top[:n], best[:n], strict=True)))
        for n, logprob, top, best in rows
    ]
