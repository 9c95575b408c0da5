"""The tokenizers that nodes get for sequences with a grammar: once over a channel, again once dropped."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec
import pytest

from gateway.core.contract import FunctionCall
from gateway.dispatch.tokenizers import TOKENIZER_FILE
from registry.errors import ChannelClosed, RemoteError
from registry.messages.node import Generate
from registry.records.function import FunctionVersion, Scaling
from tests.fixtures.control import EXPECTED, FakeCluster, ask, digest, make_call, make_version, open_cluster

TOKENIZER = digest("tokenizer")


@asynccontextmanager
async def _deployed(nodes: int = 1) -> AsyncIterator[tuple[FakeCluster, FunctionVersion]]:
    async with open_cluster(nodes) as cluster:
        draft = make_version()
        assets = {**draft.assets, TOKENIZER_FILE: TOKENIZER}
        version = await cluster.state.create_version(
            replace(draft, assets=assets), Scaling(keep_alive_s=60.0)
        )
        await cluster.until(lambda: cluster.control.state_cache.current("f") == version)
        yield cluster, version


def _call(version: FunctionVersion, request_id: str) -> FunctionCall:
    call = make_call(version, request_id=request_id)
    assert isinstance(call.work, Generate)
    sampling = msgspec.structs.replace(call.work.sampling, grammar="%llguidance {}", tokenizer=TOKENIZER)
    return msgspec.structs.replace(call, work=msgspec.structs.replace(call.work, sampling=sampling))


async def test_calls_at_once_share_one_transfer() -> None:
    async with _deployed() as (cluster, version):
        answers = await asyncio.gather(*(ask(cluster.control, _call(version, f"r{i}")) for i in range(6)))
        assert [answer.ids for answer in answers] == [EXPECTED] * 6
        assert cluster.nodes["n0"].tokenizers == [TOKENIZER]


async def test_a_node_that_dropped_it_gets_it_again() -> None:
    async with _deployed() as (cluster, version):
        await ask(cluster.control, _call(version, "r0"))
        cluster.nodes["n0"].call_errors = [RemoteError("no_tokenizer", "it is not on this node")]
        assert (await ask(cluster.control, _call(version, "r1"))).ids == EXPECTED
        await ask(cluster.control, _call(version, "r2"))
        assert cluster.nodes["n0"].tokenizers == [TOKENIZER] * 2


async def test_all_stages_of_a_pipeline_get_it_again() -> None:
    async with _deployed(nodes=2) as (cluster, version):
        sender = cluster.control.dispatcher.tokenizers
        both = ("n0", "n1")
        await sender.send(version, both)
        await sender.send(version, both)
        sender.forget(both)  # any of them may be the one that dropped it
        await sender.send(version, both)
        assert [node.tokenizers for node in cluster.nodes.values()] == [[TOKENIZER] * 2] * 2


async def test_a_lost_stage_is_a_lost_pipeline() -> None:
    async with _deployed(nodes=2) as (cluster, version):
        sender = cluster.control.dispatcher.tokenizers
        with pytest.raises(RemoteError, match="node n9 of the pipeline is lost") as caught:
            await sender.send(version, ("n0", "n9"))
        assert caught.value.code == "pipeline_lost"
        with pytest.raises(ChannelClosed):
            await sender.send(version, ("n9",))
        sender.forget(("n9",))
