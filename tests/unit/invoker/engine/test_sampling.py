"""Sampling: a draw depends on seed and position alone, and follows the filtered distribution."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from invoker.engine.sampling import SamplingRow, sample, uniforms
from registry.messages.sampling import Sampling

SEEDS = st.integers(0, 2**64 - 1)
CPU = torch.device("cpu")


def _draw(position: int = 0, **values: object) -> SamplingRow:
    return SamplingRow(sampling=Sampling(max_tokens=1, **values), position=position)  # type: ignore[arg-type]


@given(st.lists(st.tuples(SEEDS, st.integers(0, 1 << 40)), min_size=1, max_size=8))
def test_uniforms_depend_on_their_own_pair_only(pairs: list[tuple[int, int]]) -> None:
    together = uniforms([s for s, _ in pairs], [p for _, p in pairs], 5, CPU)
    alone = [uniforms([s], [p], 9, CPU)[0, :5] for s, p in pairs]
    assert together.equal(torch.stack(alone))
    assert torch.all((together > 0) & (together < 1))


@pytest.mark.parametrize("vary", ["seed", "position", "token"])
def test_uniforms_are_uniform_and_uncorrelated(vary: str) -> None:
    count = 50_000
    fixed, moving = [7] * count, list(range(count))
    match vary:
        case "seed":
            drawn = uniforms(moving, fixed, 1, CPU).flatten().numpy()
        case "position":
            drawn = uniforms(fixed, moving, 1, CPU).flatten().numpy()
        case _:
            drawn = uniforms([7], [7], count, CPU).flatten().numpy()
    assert abs(drawn.mean() - 0.5) < 0.01
    assert abs(drawn.var() - 1 / 12) < 0.005
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.02


def test_uniforms_take_any_seed() -> None:
    assert uniforms([-1], [0], 3, CPU).equal(uniforms([2**64 - 1], [0], 3, CPU))


def test_last_bits_of_the_logits_hardly_ever_change_a_draw() -> None:
    # A flat distribution, as a random model's: of its 2048 tokens many change places when sorted.
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(1, 2048, generator=generator)
    draws = [_draw(i, seed=9, temperature=0.7) for i in range(4000)]
    moved = logits + torch.randn(1, 2048, generator=generator) * 1e-6
    before, after = (sample(x.expand(len(draws), 2048), draws) for x in (logits, moved))
    assert sum(a.token_id != b.token_id for a, b in zip(before, after, strict=True)) <= 1


@given(SEEDS, st.integers(0, 1000), st.floats(0.01, 5), st.floats(0.05, 1), st.integers(0, 20))
def test_a_row_is_drawn_alike_alone_and_in_a_batch(
    seed: int, position: int, temperature: float, top_p: float, top_k: int
) -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    draw = _draw(position, seed=seed, temperature=temperature, top_p=top_p, top_k=top_k)
    other = _draw(position + 1, seed=seed ^ 1, temperature=1.0, logprobs=2)
    greedy = _draw(temperature=0.0)
    batch = sample(logits, [other, draw, greedy, draw])
    assert batch[1].token_id == sample(logits[1:2], [draw])[0].token_id
    assert batch[3].token_id == sample(logits[3:4], [draw])[0].token_id
    assert batch[2].token_id == int(logits[2].argmax())


@pytest.mark.parametrize(
    ("settings_", "kept"),
    [
        ({"temperature": 1.0}, 6),
        ({"temperature": 2.0, "top_k": 3}, 3),
        ({"temperature": 1.0, "top_p": 0.6}, 2),
        ({"temperature": 1.0, "top_k": 4, "top_p": 0.7}, 2),
    ],
)
def test_draws_follow_the_filtered_distribution(settings_: dict[str, float], kept: int) -> None:
    probabilities = torch.tensor([0.05, 0.4, 0.1, 0.25, 0.15, 0.05])
    scaled = torch.softmax(probabilities.log() / settings_["temperature"], 0)
    order = scaled.argsort(descending=True, stable=True)[:kept]
    expected = torch.zeros(6)
    expected[order] = scaled[order] / scaled[order].sum()
    count = 20_000
    draws = [_draw(i, seed=3, **settings_) for i in range(count)]
    choices = sample(probabilities.log().expand(count, 6), draws)
    found = np.bincount([c.token_id for c in choices if c.token_id is not None], minlength=6) / count
    assert np.abs(found - expected.numpy()).max() < 0.015
    assert np.all(found[expected.numpy() == 0] == 0)


def test_a_tiny_temperature_or_top_p_is_greedy() -> None:
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(2)) * 5
    best = logits.argmax(-1).tolist()
    for values in ({"temperature": 1e-6}, {"temperature": 1.0, "top_p": 1e-9}, {"top_k": 1}):
        drawn = sample(logits, [_draw(i, seed=i, **values) for i in range(3)])
        assert [c.token_id for c in drawn] == best


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]]).repeat(3, 1)
    table = torch.log_softmax(logits[0], 0).tolist()
    none, zero, two = sample(
        logits,
        [
            _draw(temperature=0.0),
            _draw(temperature=0.0, logprobs=0),
            _draw(temperature=0.01, top_k=1, logprobs=2),
        ],
    )
    assert none.logprob is None
    assert zero.logprob is not None and zero.logprob.top == ()
    assert two.logprob is not None and math.isclose(two.logprob.logprob, table[1], rel_tol=1e-5)
    assert [token for token, _ in two.logprob.top] == [1, 2]
    assert two.logprob.top[0][1] == two.logprob.logprob


def test_a_row_that_is_not_a_number_gives_no_token() -> None:
    logits = torch.zeros(3, 5)
    logits[1, 2] = math.nan
    logits[2] = math.nan
    draws = [_draw(temperature=0.0), _draw(temperature=0.0, logprobs=1), _draw(temperature=1.0)]
    assert [c.token_id for c in sample(logits, draws)] == [0, None, None]


def test_half_precision_logits_are_compared_in_single() -> None:
    choice = sample(torch.tensor([[0.5, 1.5, 1.0]], dtype=torch.bfloat16), [_draw(temperature=0.0)])
    assert choice[0].token_id == 1


# --- what changes logits --------------------------------------------------------------------------

VOCABULARY = 30


def _greedy(logits: torch.Tensor, tokens: list[int], generated: int, **values: object) -> int:
    sampling = Sampling(max_tokens=99, temperature=0.0, **values)  # type: ignore[arg-type]
    row = SamplingRow(sampling=sampling, position=len(tokens), generated=generated, tokens=tokens)
    before = logits.clone()
    (sampled,) = sample(logits[None], [row])
    assert torch.equal(logits, before) and sampled.token_id is not None
    return sampled.token_id


@given(
    st.integers(0, 1000),
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=40),
    st.floats(0.2, 3),
)
def test_the_repetition_penalty_is_that_of_transformers(seed: int, tokens: list[int], penalty: float) -> None:
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed))
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    expected = processor(torch.tensor([tokens]), logits[None].clone())[0]
    assert _greedy(logits, tokens, 1, repetition_penalty=penalty) == expected.argmax()


@given(
    st.integers(0, 1000),
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=40),
    st.integers(0, 40),
    st.floats(-2, 2),
    st.floats(-2, 2),
)
def test_frequency_and_presence_count_generated_tokens(
    seed: int, tokens: list[int], generated: int, frequency: float, presence: float
) -> None:
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed))
    generated = min(generated, len(tokens))
    made = Counter(tokens[len(tokens) - generated :])
    expected = logits.clone()
    for token, count in made.items():
        expected[token] -= count * frequency + presence
    found = _greedy(logits, tokens, generated, frequency_penalty=frequency, presence_penalty=presence)
    assert expected[found] == pytest.approx(float(expected.max()), abs=1e-5)


def test_biases_allowed_tokens_and_a_least_number() -> None:
    logits = torch.arange(VOCABULARY, dtype=torch.float32)
    assert _greedy(logits, [1], 0, logit_bias=((3, 100.0), (29, -100.0))) == 3
    assert _greedy(logits, [1], 0, allowed_token_ids=(4, 9, 7)) == 9
    ends = {"eos_token_ids": (29,), "stop_token_ids": (28,), "min_tokens": 2}
    assert [_greedy(logits, [1, 2, 3], made, **ends) for made in (0, 1, 2)] == [27, 27, 29]
    assert _greedy(logits, [1], 0, **ends, ignore_eos=True) == 29  # an end that is no end


def test_words_that_must_not_occur() -> None:
    logits = torch.arange(VOCABULARY, dtype=torch.float32)
    assert _greedy(logits, [1], 0, bad_words=((29,), (28,))) == 27
    words = {"bad_words": ((5, 6, 29), (7, 28), (VOCABULARY + 5,))}
    assert _greedy(logits, [1, 5, 6], 2, **words) == 28
    assert _greedy(logits, [1, 5, 6], 1, **words) == 29  # of the word a part is of the prompt
    assert _greedy(logits, [1, 7], 1, **words) == 29
    assert _greedy(logits, [7, 29, 7], 1, bad_words=((7, 29),)) == 28


def test_logprobs_are_those_of_the_model() -> None:
    logits = torch.arange(VOCABULARY, dtype=torch.float32)
    sampling = Sampling(max_tokens=1, temperature=0.0, logprobs=1, logit_bias=((3, 100.0),))
    (sampled,) = sample(logits[None], [SamplingRow(sampling=sampling, position=0)])
    assert sampled.token_id == 3 and sampled.logprob is not None
    assert sampled.logprob.logprob == pytest.approx(float(logits.log_softmax(0)[3]))
    assert sampled.logprob.top[0][0] == VOCABULARY - 1


@given(SEEDS, st.floats(0.001, 0.9))
def test_min_p_keeps_what_is_likely_enough(seed: int, least: float) -> None:
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed % 1000)) * 3
    chances = logits.softmax(0)
    draws = [_draw(i, seed=seed, min_p=least, temperature=1.0) for i in range(30)]
    for sampled in sample(logits.expand(len(draws), VOCABULARY), draws):
        assert sampled.token_id is not None
        assert chances[sampled.token_id] >= least * chances.max() - 1e-6
