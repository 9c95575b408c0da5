"""How an engine's outputs go out: in batches, and as arrays."""

import asyncio
from collections.abc import AsyncIterator

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from invoker.engine.contract import TokenOutput
from invoker.serving import batches, decode_array, encode_array


def token(number: int) -> TokenOutput:
    return TokenOutput(request_id="r", token_id=number, logprob=None, finish_reason="", work=1)


@given(st.lists(st.integers(1, 100), max_size=8))
@settings(max_examples=50)
async def test_batches_lose_nothing_and_wait_for_nothing(runs: list[int]) -> None:
    moved_on = asyncio.Event()

    async def outputs() -> AsyncIterator[TokenOutput]:
        number = 0
        for run in runs:
            await moved_on.wait()  # set only once what came before has been delivered
            moved_on.clear()
            for _ in range(run):
                yield token(number)
                number += 1

    got: list[int] = []
    moved_on.set()
    total = 0
    ends = {sum(runs[: index + 1]) for index in range(len(runs))}
    async for batch in batches(outputs()):
        total += len(batch)
        got += [output.token_id for output in batch]
        if total in ends:
            moved_on.set()
    assert got == list(range(sum(runs)))


def test_arrays_cross_the_channel() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert (decode_array(encode_array(array)) == array).all()
    assert (decode_array(encode_array(array.T)) == array.T).all()
