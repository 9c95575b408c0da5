"""A node whose meter's journal has no room: it serves on, bills exactly, and writes again when it can."""

import asyncio
import os
from pathlib import Path

import pytest

from registry.messages.node import Generate, RequestUsage
from registry.messages.sampling import Sampling
from tests.fixtures.invoker import FakeCluster, FakeNode, make_image, start_request
from tests.fixtures.patience import PATIENCE_S


async def test_a_node_serves_and_bills_while_the_disk_of_its_journal_is_full(
    small_disk: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    used_us = 0

    async def serve(node: FakeNode, until: str) -> None:
        """Call the node until it says this."""
        nonlocal used_us
        number = 0
        async with asyncio.timeout(PATIENCE_S):
            while until not in caplog.text:
                number += 1
                call = Generate(
                    instance_id="i",
                    request_id=f"{until} {number}",
                    prompt_ids=(5, 6, 7),
                    sampling=Sampling(max_tokens=4),
                )
                last = (await node.ask(call))[-1]
                assert isinstance(last, RequestUsage)
                used_us += last.gpu_us

    with caplog.at_level("WARNING"):
        image = make_image("a", 1 << 20)
        async with FakeCluster(tmp_path) as cluster:
            await cluster.put(image)
            async with cluster.node("n0", "h0", "--journal-dir", str(small_disk)) as node:
                await node.ask(start_request("i", image))
                with (small_disk / "filler").open("wb", buffering=0) as file, pytest.raises(OSError):
                    while True:
                        file.write(bytes(4096))
                await serve(node, "cannot write, continuing without")
                (small_disk / "filler").unlink()
                await serve(node, "writable again")
            intervals, lost = await cluster.state.intervals(), await cluster.state.lost_calls()
        assert sum(one.busy_us for one in intervals) == used_us == sum(one.used_us for one in lost)
    assert not any(name.endswith(".journal") for _, _, names in os.walk(small_disk) for name in names)
