"""Nodes that load a real model, of which each gets what the test lets through, and pipelines of them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from invoker.engine.contract import DeviceRegion, ModelSpec, NewSequence
from invoker.engine.decoder import DecoderEngine
from invoker.engine.image_ranges import bytes_of_layers
from invoker.engine.stage_contract import Stage
from invoker.engines import Engines, RealEngines
from rdmacast.region import GrowingRegion
from rdmacast.region_server import RegionServer
from registry.live_messages import MOVED, KvAt, OpenPipeline, StageOf, held_of_bytes
from registry.messages import (
    Generate,
    Holder,
    InstanceProgress,
    InstanceStarted,
    Reply,
    Sampling,
    Tokens,
    Usage,
)
from tests.engine_fixture import load_image, run_all
from tests.invoker_fixture import SECRET, FakeCluster, FakeNode
from tests.zygote_fixture import Model, make_model

UNIT = 256 << 10
SERVERS = 6
CUTS = (0, 1, 2, 4)  # of the four layers, for three nodes


class Source:
    """Whom one node gets the model from: what is not released has not arrived there. It has several servers,
    since a node gives one up that does not give for long."""

    def __init__(self, servers: Sequence[RegionServer], model: Model) -> None:
        manifest = model.packed.manifest
        self.region = GrowingRegion(model.data)
        self.holders = [
            Holder(node=f"source{number}", host="source", cast=server.address.url, tier="host")
            for number, server in enumerate(servers)
        ]
        self.missing = set(range(-(-manifest.nbytes // UNIT)))
        self._manifest = manifest
        for server in servers:
            server.publish(manifest.sha256, self.region)

    def release(self, first: int, last: int) -> None:
        """Let the layers `[first, last)` through, in whole units."""
        for start, end in bytes_of_layers(self._manifest, first, last):
            for unit in range(start // UNIT, -(-end // UNIT)):
                self._release(unit)

    def release_all(self) -> None:
        for unit in sorted(self.missing):
            self._release(unit)

    def _release(self, unit: int) -> None:
        self.missing.discard(unit)
        start = unit * UNIT
        self.region.mark(start, min(UNIT, self._manifest.nbytes - start))


class PoisonedEngines(RealEngines):
    """Makes real stages, over an image of which what has not arrived is parts of NaNs."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def make_stage(self, spec: ModelSpec, region: DeviceRegion, kv: DeviceRegion | None) -> Stage:
        assert region.buffer is not None
        for unit in self._source.missing:
            start, end = unit * UNIT, min((unit + 1) * UNIT, spec.manifest.nbytes)
            region.buffer[start:end] = b"\xff" * (end - start)
        return super().make_stage(spec, region, kv)


@dataclass
class LiveNode:
    """A node, its source, and its instance, which starts."""

    node: FakeNode
    source: Source
    instance: str
    held: int = 0
    started: InstanceStarted | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[list[Reply]] | None = None

    def start(self, model: Model) -> None:
        request = msgspec.structs.replace(model.start(self.instance, *self.source.holders), live=True)
        self.task = asyncio.create_task(self.node.ask(request, self._told))

    def _told(self, reply: Reply) -> None:
        if isinstance(reply, InstanceProgress):
            held = held_of_bytes(reply.held)
            assert held & self.held == self.held, "a layer has gone"
            self.held = held
        elif isinstance(reply, InstanceStarted):
            self.started = reply
        self.changed.set()

    async def until_ready(self) -> None:
        """Let all through, and return once the instance is ready."""
        self.source.release_all()
        assert self.task is not None
        await asyncio.shield(self.task)

    async def holds(self, first: int, last: int) -> None:
        """Return once it has told that the layers are there."""
        wanted = (1 << last) - (1 << first)
        while wanted & ~self.held:
            assert self.task is not None
            if self.task.done():
                self.task.result()
            self.changed.clear()
            await self.changed.wait()


@dataclass
class LiveCluster:
    """Nodes of one process, whose stages are connected by real sockets."""

    cluster: FakeCluster
    model: Model
    folder: Path
    nodes: list[LiveNode]

    async def stages(self, cuts: Sequence[int]) -> tuple[StageOf, ...]:
        """One stage a node, in order."""
        stages = []
        for live, first, last in zip(self.nodes, cuts, cuts[1:], strict=False):
            record = await live.node.record()
            stages.append(
                StageOf(
                    node=record.id, address=record.channel, instance=live.instance, first=first, last=last
                )
            )
        return tuple(stages)

    @property
    def head(self) -> LiveNode:
        return self.nodes[0 if self.model.packed.manifest.tied_head else -1]

    async def opening(self, cuts: Sequence[int], epoch: int = 0) -> OpenPipeline:
        return OpenPipeline(pipeline="p", epoch=epoch, stages=await self.stages(cuts))

    def expected(self, requests: Sequence[Generate]) -> dict[str, list[int]]:
        return expected_of(self.folder, requests)


@asynccontextmanager
async def live_cluster(
    folder: Path,
    kind: str,
    count: int,
    hosts: Sequence[str] = (),
    make_engines: Callable[[Source], Engines] = PoisonedEngines,
    flags: Sequence[str] = (),
) -> AsyncIterator[LiveCluster]:
    """Nodes that have begun to load, and have nothing yet. By default each is on a host of its own."""
    model = make_model(folder / kind, kind)
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(FakeCluster(folder))
        nodes = []
        for number in range(count):
            servers = [
                await stack.enter_async_context(RegionServer(SECRET.encode(), host="source"))
                for _ in range(SERVERS)
            ]
            source = Source(servers, model)
            host = hosts[number] if hosts else f"h{number}"
            node = await stack.enter_async_context(
                cluster.node(f"n{number}", host, *flags, engines=make_engines(source))
            )
            nodes.append(LiveNode(node, source, f"i{number}"))
        for live in nodes:
            live.start(model)
        try:
            yield LiveCluster(cluster, model, folder / kind, nodes)
        finally:
            tasks = [live.task for live in nodes if live.task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


def let_serve(live: LiveCluster, cuts: Sequence[int] = CUTS) -> None:
    """Let each node have the layers of its stage."""
    for one, first, last in zip(live.nodes, cuts[:-1], cuts[1:], strict=True):
        one.source.release(first, last)


@asynccontextmanager
async def open_pipeline(live: LiveCluster, cuts: Sequence[int], epoch: int = 0) -> AsyncIterator[Reply]:
    """The pipeline serves inside; it is left at the end."""
    async with live.head.node.channel.call(await live.opening(cuts, epoch)) as replies:
        yield await anext(replies)


@dataclass
class Answer:
    """What came of a request."""

    ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    kv: KvAt | None = None
    usage: Usage | None = None


async def answer(node: FakeNode, request: Generate, seen: asyncio.Queue[int] | None = None) -> Answer:
    """Generate to the end; `seen` hears of each token."""
    got = Answer()
    async with node.channel.call(request) as replies:
        async for reply in replies:
            if isinstance(reply, Tokens):
                assert not got.finish_reason
                got.ids += reply.ids
                got.finish_reason, got.kv = reply.finish_reason, reply.kv
                if seen is not None:
                    for token in reply.ids:
                        seen.put_nowait(token)
            else:
                assert isinstance(reply, Usage)
                got.usage = reply
    return got


def rest_of(request: Generate, ids: Sequence[int], instance: str, kv: KvAt | None = None) -> Generate:
    """What a whole instance is asked for, of a call that has left a pipeline with these tokens."""
    return msgspec.structs.replace(
        request,
        request_id=f"{request.request_id}+1",
        instance_id=instance,
        pipeline="",
        generated_ids=tuple(ids),
        kv=kv,
    )


async def goes_on(one: LiveNode, request: Generate, got: Answer, kv: KvAt | None = None) -> list[int]:
    """All tokens of a call, of which a whole instance gives the rest if it moved."""
    if got.finish_reason != MOVED:
        return got.ids
    return got.ids + (await answer(one.node, rest_of(request, got.ids, one.instance, kv))).ids


def requests_for(live: LiveCluster, count: int, tokens: int = 12) -> list[Generate]:
    return requests_at(live.head, range(1, 1 + 5 * count, 5), tokens)


def requests_at(head: LiveNode, lengths: Sequence[int], tokens: int) -> list[Generate]:
    """Greedy and drawn ones by the pipeline of that head, with prompts of these lengths."""
    found = []
    for number, length in enumerate(lengths):
        drawn = {"temperature": 0.9, "top_p": 0.9, "seed": number} if number % 2 else {"temperature": 0.0}
        sampling = Sampling(max_tokens=tokens, ignore_eos=True, **drawn)  # type: ignore[arg-type]
        prompt = tuple(3 + (number * 7 + place) % 500 for place in range(length))
        found.append(
            Generate(
                request_id=f"r{number}",
                instance_id=head.instance,
                prompt_ids=prompt,
                sampling=sampling,
                pipeline="p.0",
            )
        )
    return found


def sequence_of(request: Generate) -> NewSequence:
    return NewSequence(
        request_id=request.request_id,
        prompt_ids=request.prompt_ids,
        generated_ids=request.generated_ids,
        sampling=request.sampling,
    )


def expected_of(folder: Path, requests: Sequence[Generate]) -> dict[str, list[int]]:
    """What a whole engine gives."""
    spec, region = load_image(folder)
    engine = DecoderEngine(replace(spec, context_length=128), region, 2 << 20)
    return run_all(engine, [sequence_of(request) for request in requests])
