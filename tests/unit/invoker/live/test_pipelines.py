"""Nodes that load a model serve it together, over real sockets: the tokens are those of a whole engine."""

import asyncio
from pathlib import Path

import pytest

from registry.messages.live import PipelineOpened
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.stages import answer, let_serve, live_cluster, open_pipeline, requests_for

CUTS = {2: (0, 2, 4), 3: (0, 1, 3, 4), 4: (0, 1, 2, 3, 4)}


@pytest.mark.parametrize(
    ("kind", "count"), [("llama", 3), ("llama", 4), ("qwen2-tied", 3), ("gpt2", 2), ("llama-tied", 4)]
)
async def test_tokens_equal_a_whole_engines(tmp_path: Path, kind: str, count: int) -> None:
    async with asyncio.timeout(2 * PATIENCE_S), live_cluster(tmp_path, kind, count) as live:
        cuts = CUTS[count]
        let_serve(live, cuts)
        requests = requests_for(live, 6)
        async with open_pipeline(live, cuts) as opened:
            assert isinstance(opened, PipelineOpened)
            answers = await asyncio.gather(*(answer(live.head.node, one) for one in requests))
        expected = live.expected(requests)
        for request, got in zip(requests, answers, strict=True):
            assert got.ids == expected[request.request_id] and got.finish_reason == "length"
            assert got.usage is not None and got.usage.completion_tokens == 12
        for one in live.nodes:
            assert not one.source.missing or one.started is None
