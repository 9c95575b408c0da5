"""Pipelines of real processes: a node that is killed at any token loses, repeats and changes none."""

import asyncio
import os
import random
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from registry.channel.client import Channel
from registry.errors import ChannelClosed, RemoteError
from registry.messages.live import KvLocation, OpenPipeline, PipelineOpened, StageSpec
from registry.messages.node import Generate, Reply, Tokens
from registry.messages.sampling import Sampling
from registry.records.node import NodeRecord
from registry.redis.state import RedisState
from tests.fixtures.checkpoints import LAYERS
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.stages import expected_of, rest_of
from tests.fixtures.zygote import Machine, ask, channel_to, joined, machine_of, make_model, put

CLUSTER = f"stages-{os.getpid()}"
SHM = Path("/dev/shm") / f"hypercast-{CLUSTER}"
TOKENS = 60


@pytest.fixture(scope="module")
def machine(tmp_path_factory) -> Iterator[Machine]:
    with machine_of(CLUSTER, tmp_path_factory.mktemp("machine")) as machine:
        yield machine
    shutil.rmtree(SHM, ignore_errors=True)


Answers = Callable[[Channel, Generate, "asyncio.Queue[int]"], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class LoadingNodes:
    """Three nodes, on each of which an instance loads: `i0`, `i1`, `i2`; one is the head of a pipeline."""

    names: list[str]
    pids: list[int]
    channels: list[Channel]
    opening: OpenPipeline
    head: int
    requests: list[Generate]
    expected: list[list[int]]

    def kill(self, place: int) -> None:
        os.kill(self.pids[place], signal.SIGKILL)
        self.pids[place] = 0

    @asynccontextmanager
    async def serving(
        self, answer: Answers, tokens: int
    ) -> AsyncIterator[tuple[AsyncIterator[Reply], list["asyncio.Task[Any]"]]]:
        """Yield the pipeline and its calls, which have so many tokens."""
        seen: asyncio.Queue[int] = asyncio.Queue()
        async with self.channels[self.head].call(self.opening) as opened:
            assert isinstance(await anext(opened), PipelineOpened)
            calls = [answer(self.channels[self.head], one, seen) for one in self.requests]
            running = [asyncio.create_task(call) for call in calls]
            for _ in range(tokens):
                await seen.get()
            yield opened, running


@asynccontextmanager
async def three_loading(
    machine: Machine, kind: str, hosts: int, name: str, *flags: str
) -> AsyncIterator[LoadingNodes]:
    """Yield nodes of that name, with `flags`; in the end all have ended."""
    model = make_model(machine.folder / name, kind)
    names = [f"{name}-{place}" for place in range(3)]
    pids = [machine.zygote.spawn(one, f"{name}-h{at % hosts}", *flags) for at, one in enumerate(names)]
    head = 0 if model.packed.manifest.tied_head else 2
    requests = some_requests(head)
    expected = list(expected_of(machine.folder / name, requests).values())
    async with (
        asyncio.timeout(3 * PATIENCE_S),
        RedisState.connect(machine.redis.url) as state,
        AsyncExitStack() as stack,
    ):
        await put(machine.store, model.data)
        records = [await joined(state, name) for name in names]
        channels = [await stack.enter_async_context(channel_to(record)) for record in records]
        for place, channel in enumerate(channels):
            await ask(channel, msgspec.structs.replace(model.start(f"i{place}"), live=True))
        yield LoadingNodes(names, pids, channels, opening_of(names, records), head, requests, expected)
    for pid in filter(None, pids):
        os.kill(pid, signal.SIGKILL)
    assert {machine.zygote.event().get("exited") for _ in pids} == set(names)


def some_requests(head: int) -> list[Generate]:
    """Greedy and drawn ones, by the pipeline whose head is on the node of that place."""
    found = []
    for number in range(4):
        drawn = {"temperature": 0.8, "seed": number} if number % 2 else {"temperature": 0.0}
        sampling = Sampling(max_tokens=TOKENS, ignore_eos=True, **drawn)  # type: ignore[arg-type]
        found.append(
            Generate(
                request_id=f"r{number}",
                instance_id=f"i{head}",
                prompt_ids=(3, 4, 5 + number),
                sampling=sampling,
                pipeline="p.0",
            )
        )
    return found


def opening_of(names: Sequence[str], records: Sequence[NodeRecord]) -> OpenPipeline:
    """Open a pipeline of three nodes."""
    edges = (0, 1, 3, LAYERS)
    stages = tuple(
        StageSpec(
            node=names[place],
            address=records[place].channel,
            instance=f"i{place}",
            first=edges[place],
            last=edges[place + 1],
        )
        for place in range(3)
    )
    return OpenPipeline(pipeline="p", epoch=0, stages=stages)


async def until_moved(channel: Channel, request: Generate, seen: asyncio.Queue[int]) -> list[Tokens]:
    """Return a call's replies until it ends or moves."""
    found = []
    async with channel.call(request) as replies:
        async for reply in replies:
            if isinstance(reply, Tokens):
                found.append(reply)
                for token in reply.ids:
                    seen.put_nowait(token)
    return found


async def until_lost(channel: Channel, request: Generate, seen: asyncio.Queue[int]) -> list[int]:
    """Return the tokens received before the pipeline was lost, or all."""
    ids: list[int] = []
    try:
        async with channel.call(request) as replies:
            async for reply in replies:
                if isinstance(reply, Tokens):
                    ids += reply.ids
                    for token in reply.ids:
                        seen.put_nowait(token)
    except RemoteError as error:
        assert error.code == "pipeline_lost"
    except ChannelClosed:
        pass  # it was the head that was killed
    return ids


@pytest.mark.parametrize(("kind", "hosts"), [("llama", 1), ("gpt2", 3), ("qwen2-tied", 3)])
async def test_a_stage_that_is_killed_costs_no_token(machine: Machine, kind: str, hosts: int) -> None:
    random_ = random.Random(kind)
    victim = random_.randrange(3)
    async with three_loading(machine, kind, hosts, kind) as nodes:
        async with nodes.serving(until_lost, random_.randrange(1, 3 * TOKENS)) as (opened, running):
            nodes.kill(victim)
            so_far = await asyncio.gather(*running)
            with pytest.raises((RemoteError, ChannelClosed)) as lost:
                await anext(opened)
        if victim != nodes.head:
            assert isinstance(lost.value, RemoteError)
            assert lost.value.message.startswith(f"{nodes.names[victim]}: "), lost.value.message
        left = next(place for place in range(3) if place != victim)
        whole = [
            ids + await _goes_on(nodes.channels[left], one, ids, f"i{left}")
            for one, ids in zip(nodes.requests, so_far, strict=True)
        ]
        assert whole == nodes.expected


@pytest.mark.parametrize(("kind", "hosts"), [("llama", 1), ("qwen2-tied", 3)])
async def test_kv_goes_from_process_to_process(machine: Machine, kind: str, hosts: int) -> None:
    async with three_loading(machine, kind, hosts, f"{kind}-kv", "--kv-moves", "always") as nodes:
        async with nodes.serving(until_moved, TOKENS) as (_, running):
            pass
        moved = await asyncio.gather(*running)  # since the pipeline has ended
        assert any(replies[-1].kv is not None for replies in moved)

        async def whole(one: Generate, replies: list[Tokens]) -> list[int]:
            ids = [token for reply in replies for token in reply.ids]
            return ids + await _goes_on(nodes.channels[1], one, ids, "i1", replies[-1].kv)

        # At once: the stages keep what calls have left for some seconds only.
        assert await asyncio.gather(*map(whole, nodes.requests, moved)) == nodes.expected
        assert " loaded K and V" in machine.zygote.log(nodes.names[1]).read_text()


async def _goes_on(
    channel: Channel, request: Generate, ids: list[int], instance: str, kv: KvLocation | None = None
) -> list[int]:
    if len(ids) == TOKENS:
        return []
    rest = rest_of(request, ids, instance, kv)
    return [token for reply in await ask(channel, rest) if isinstance(reply, Tokens) for token in reply.ids]
