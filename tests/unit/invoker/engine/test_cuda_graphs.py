"""Graphed decode steps without a GPU: buckets, padding, and the tokens that come out."""

import logging
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from invoker.engine.cuda_graphs import GraphBucket, Replay, bucket_for, static_inputs
from invoker.engine.decoder import DecoderEngine
from invoker.engine.kv.cache import PAGE_TOKENS, pages_for
from invoker.engine.scheduling.scheduler import Chunk
from tests.fixtures.engine import KV_BYTES, cached_image, make_decoder, run_all, sequence


class Recorder:
    """A capture that only calls, into the same tensor each time, as a graph does."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.captures = 0
        self.replays = 0
        self._fail_at = fail_at

    def __call__(self, run: Callable[[], torch.Tensor]) -> Replay:
        if self.captures == self._fail_at:
            raise RuntimeError("this cannot be captured")
        self.captures += 1
        output = run()

        def replay() -> torch.Tensor:
            self.replays += 1
            return output.copy_(run())

        return replay


def _engine(kind: str, capture: Recorder, **limits: int) -> DecoderEngine:
    spec, region, _ = cached_image(kind)
    limits = {"max_sequences": 8, "prefill_budget": 24, **limits}
    return DecoderEngine(spec, region, KV_BYTES, capture=capture, **limits)


def _requests() -> list:
    prompts = [[7 * i % 500 + 3, 5, *range(3, 3 + 5 * i)] for i in range(7)]
    return [
        sequence(str(i), p, max_tokens=20 + 3 * i, ignore_eos=True, temperature=0.9 * (i % 2), seed=i)
        for i, p in enumerate(prompts)
    ]


# Windows on some layers, norms of q and k, partly turned heads.
@pytest.mark.parametrize("kind", ["llama", "qwen3", "phi3"])
def test_graphed_steps_give_the_tokens_of_the_others(kind: str) -> None:
    capture = Recorder()
    found = run_all(_engine(kind, capture), _requests())
    assert found == run_all(make_decoder(kind), _requests())
    # 1, 2, 4 and 8 sequences, all of up to 256 tokens.
    assert capture.captures == 4 and capture.replays > 20


def test_long_sequences_have_a_bucket_of_their_own() -> None:
    capture = Recorder()
    requests = [sequence("a", [5] * 250, max_tokens=20, ignore_eos=True)]
    assert run_all(_engine("llama", capture), requests) == run_all(make_decoder("llama"), requests)
    assert capture.captures == 2


def test_what_cannot_be_captured_runs_without(caplog: pytest.LogCaptureFixture) -> None:
    capture = Recorder(fail_at=1)
    with caplog.at_level(logging.ERROR, "invoker.engine"):
        found = run_all(_engine("llama", capture), _requests())
    assert found == run_all(make_decoder("llama"), _requests())
    assert caplog.text.count("CUDA graphs are disabled") == 1


def _chunk(start: int, first_page: int, count: int = 1, last: bool = True) -> Chunk:
    pages = tuple(range(first_page, first_page + pages_for(start + count)))
    return Chunk(request_id=str(first_page), start=start, count=count, pages=pages, last=last)


def test_buckets() -> None:
    assert bucket_for([_chunk(0, 0)]) == GraphBucket(sequences=1, pages=16)
    assert bucket_for([_chunk(255, 0)] * 3) == GraphBucket(sequences=4, pages=16)
    assert bucket_for([_chunk(0, 0), _chunk(256, 9)]) == GraphBucket(sequences=2, pages=32)
    assert bucket_for([_chunk(0, 0)] * 64) == GraphBucket(sequences=64, pages=16)
    assert bucket_for([_chunk(0, 0)] * 65) is None
    assert bucket_for([_chunk(16 * 512, 0)] * 16) is None  # too much to copy
    assert bucket_for([]) is None
    assert bucket_for([_chunk(0, 0), _chunk(0, 9, count=5)]) is None
    assert bucket_for([_chunk(0, 0), _chunk(0, 9, last=False)]) is None


@given(st.lists(st.integers(0, 400), min_size=1, max_size=20))
def test_padding_repeats_what_is_there(starts: list[int]) -> None:
    chunks = [_chunk(start, 100 * i) for i, start in enumerate(starts)]
    ids = list(range(1, len(chunks) + 1))
    bucket = bucket_for(chunks)
    assert bucket is not None and bucket.sequences < 2 * len(chunks)
    n = bucket.sequences
    found_ids, positions, slots, table = np.split(static_inputs(bucket, chunks, ids), [n, 2 * n, 3 * n])
    table = table.reshape(n, bucket.pages)
    for row in range(n):
        of = row if row < len(chunks) else 0
        assert (found_ids[row], positions[row]) == (ids[of], starts[of])
        assert slots[row] == (100 * of + starts[of] // PAGE_TOKENS) * PAGE_TOKENS + starts[of] % PAGE_TOKENS
        used = pages_for(starts[of] + 1)
        assert table[row, :used].tolist() == list(chunks[of].pages)
        assert set(table[row, used:].tolist()) <= {100 * of}
