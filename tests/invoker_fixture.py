"""Nodes for tests: real servers, host tiers and stores in one process, over a state in memory."""

import asyncio
import hashlib
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from invoker.assembly import run_node
from invoker.engine.contract import DeviceRegion, GenerateEngine, ModelSpec
from invoker.engine.fake import FakeEngine, StepGate
from invoker.engine.fake_stage import FakeStage
from invoker.engines import Engines
from invoker.settings import Settings, parse_settings
from registry.change import InstanceChanged
from registry.channel import Channel
from registry.clock import Clock
from registry.images.codec import encode_manifest
from registry.images.manifest import MANIFEST_FORMAT, LayerSpan, Manifest
from registry.images.store import LocalStore
from registry.images.verify import unit_checksums
from registry.instance import InstanceState
from registry.memory_state import MemoryState
from registry.messages import (
    Generate,
    GetStatus,
    Holder,
    ImageRef,
    InstanceProgress,
    InstanceStarted,
    NodeStatus,
    Reply,
    Request,
    Sampling,
    StartInstance,
)
from registry.node import NodeRecord
from registry.state import ClusterConfig

SECRET = "a secret of the tests, long enough"
PROMPT = (5, 6, 7)
KIB = 1024


@dataclass(frozen=True)
class FakeImage:
    """Bytes with a manifest; no model."""

    data: bytes
    manifest: Manifest
    encoded: bytes

    @property
    def digest(self) -> str:
        return self.manifest.sha256

    def ref(self, *holders: Holder) -> ImageRef:
        return ImageRef(
            image=self.digest,
            manifest=hashlib.sha256(self.encoded).hexdigest(),
            nbytes=len(self.data),
            holders=holders,
            manifest_bytes=self.encoded,
        )


def make_image(name: str, nbytes: int) -> FakeImage:
    """An image whose bytes depend on its name."""
    data = hashlib.shake_128(name.encode()).digest(nbytes)
    manifest = Manifest(
        format=MANIFEST_FORMAT,
        architecture="Fake",
        model_type="fake",
        tied_head=False,
        num_layers=0,
        nbytes=nbytes,
        sha256=hashlib.sha256(data).hexdigest(),
        tensors=(),
        layers=(LayerSpan(kind="embed", index=0, tower="", start=0, end=nbytes),),
        units=unit_checksums(memoryview(data)),
    )
    return FakeImage(data, manifest, encode_manifest(manifest))


@dataclass
class FakeEngines:
    """Makes FakeEngines, and checks that the region holds the image by then, unless that is `early`."""

    kv: tuple[int, int] = (64 * KIB, 256 * KIB)
    gate: StepGate | None = None
    early: bool = False
    made: list[FakeEngine] = field(default_factory=list)

    def kv_bytes(self, spec: ModelSpec, max_concurrency: int) -> tuple[int, int]:
        return self.kv

    def make(
        self, spec: ModelSpec, region: DeviceRegion, kv: DeviceRegion | None, max_concurrency: int
    ) -> GenerateEngine:
        assert region.buffer is not None
        assert self.early or hashlib.sha256(region.buffer).hexdigest() == spec.manifest.sha256
        self.made.append(FakeEngine(gate=self.gate))
        return self.made[-1]

    def binds_early(self, spec: ModelSpec) -> bool:
        return self.early

    def make_stage(self, spec: ModelSpec, region: DeviceRegion, kv: DeviceRegion | None) -> FakeStage:
        first, last = spec.layers or (0, spec.manifest.num_layers)
        return FakeStage(first, last, spec.manifest.num_layers)


@dataclass
class FakeNode:
    """A running node and a channel to it."""

    state: MemoryState
    settings: Settings
    channel: Channel
    engines: Engines
    stop: asyncio.Event
    task: asyncio.Task[None]

    async def ask(self, request: Request, on_reply: Callable[[Reply], None] = lambda _: None) -> list[Reply]:
        """All replies to a request."""
        replies = []
        async with self.channel.call(request) as call:
            async for reply in call:
                on_reply(reply)
                replies.append(reply)
        return replies

    async def record(self) -> NodeRecord:
        (status,) = await self.ask(GetStatus())
        assert isinstance(status, NodeStatus)
        return status.record

    async def draining(self, instance: str) -> None:
        """Return once the instance takes no more work and lets what is under way finish."""
        snapshot = await self.state.snapshot()
        told = {one.instance_id: one.state for one in snapshot.instances}
        if told[instance] is InstanceState.DRAINING:
            return
        async for _, change in self.state.watch(snapshot.cursor):
            record = change.record if isinstance(change, InstanceChanged) else None
            if record and (record.instance_id, record.state) == (instance, InstanceState.DRAINING):
                return

    async def holder(self, tier: str = "host") -> Holder:
        record = await self.record()
        return Holder(node=record.id, host=record.host, cast=record.cast, tier=tier)


class FakeCluster:
    """A state, a store and a folder for host tiers."""

    def __init__(self, folder: Path) -> None:
        self.state = MemoryState()
        self.id = f"test-{os.getpid()}-{secrets.token_hex(4)}"
        self.store_folder = folder / "store"
        self.store = LocalStore(self.store_folder)
        # Not where `up` looks for what killed platforms left: it may be run at the same time.
        self.shm_dir = Path("/dev/shm") / f"fake-{self.id}"
        self.shm = self.shm_dir / f"hypercast-{self.id}"

    async def __aenter__(self) -> "FakeCluster":
        self.shm_dir.mkdir()
        await self.store.claim(self.id)
        await self.state.cluster_config(ClusterConfig(cluster_id=self.id, store_url=str(self.store_folder)))
        return self

    async def __aexit__(self, *_: object) -> None:
        shutil.rmtree(self.shm_dir, ignore_errors=True)

    async def put(self, image: FakeImage) -> Path:
        """Store the image; returns the blob's file."""

        async def chunks() -> AsyncIterator[bytes]:
            yield image.data

        await self.store.append(image.digest, 0, chunks(), total=len(image.data))
        return self.blob(image)

    def blob(self, image: FakeImage) -> Path:
        return self.store_folder / "blobs" / image.digest

    @asynccontextmanager
    async def node(
        self,
        name: str,
        host: str,
        *flags: str,
        engines: Engines | None = None,
        clock: Clock | None = None,
    ) -> AsyncIterator[FakeNode]:
        """Run a node until the block ends."""
        argv = ["--redis-url", "unix:///none", "--node-id", name, "--host-id", host, "--device", "cpu"]
        sizes = ["--gpu-memory", "16MiB", "--host-memory", "16MiB", "--shm-dir", str(self.shm_dir)]
        sizes += ["--threads", "1"]  # of this very process, for all tests that follow
        settings = parse_settings([*argv, *sizes, *flags], {"HYPERCAST_CLUSTER_SECRET": SECRET})
        stop, engines = asyncio.Event(), engines or FakeEngines()
        watching = self.state.watch((await self.state.snapshot()).cursor)
        task = asyncio.create_task(run_node(settings, self.state, engines, stop, clock))
        try:
            record = await _joined(watching, name, task)
            channel = await Channel.connect(record.channel, SECRET.encode())
            try:
                yield FakeNode(self.state, settings, channel, engines, stop, task)
                stop.set()
                await task
            finally:
                await channel.aclose()
        finally:
            stop.set()
            await asyncio.wait([task])


async def _joined(watching: AsyncIterator, name: str, task: asyncio.Task[None]) -> NodeRecord:
    """The first heartbeat of a node; its failure if it fails before."""

    async def first() -> NodeRecord:
        async for _, change in watching:
            record = getattr(change, "record", None)
            if isinstance(record, NodeRecord) and record.id == name:
                return record
        raise AssertionError("the feed ended")

    wanted = asyncio.create_task(first())
    await asyncio.wait([wanted, task], return_when=asyncio.FIRST_COMPLETED)
    if not wanted.done():
        wanted.cancel()
        await asyncio.wait([wanted])
        task.result()
    return await wanted


def start_request(name: str, image: FakeImage | None, *holders: Holder, **changes: object) -> StartInstance:
    """A request to start instance `name` of function `f`."""
    values: dict[str, object] = {
        "instance_id": name,
        "function": "f",
        "version": 1,
        "task": "generate",
        "architecture": "Fake",
        "dtype": "float32",
        "context_length": 128,
        "max_concurrency": 4,
        "assets": {"config.json": b"{}"},
        "image": None if image is None else image.ref(*holders),
    }
    return StartInstance(**{**values, **changes})  # type: ignore[arg-type]


def generate(instance: str, request: str = "r1", tokens: int = 6) -> Generate:
    sampling = Sampling(max_tokens=tokens, temperature=0.0)
    return Generate(request_id=request, instance_id=instance, prompt_ids=PROMPT, sampling=sampling)


def started(replies) -> InstanceStarted:
    assert all(isinstance(reply, InstanceProgress) for reply in replies[:-1])
    assert isinstance(replies[-1], InstanceStarted)
    return replies[-1]


@asynccontextmanager
async def one_node(
    folder: Path, image: FakeImage, *, engines: FakeEngines | None = None
) -> AsyncIterator[tuple[FakeCluster, FakeNode]]:
    """A node of a cluster whose store has the image."""
    async with FakeCluster(folder) as cluster, cluster.node("n0", "h0", engines=engines) as node:
        await cluster.put(image)
        yield cluster, node


@asynccontextmanager
async def two_nodes(
    folder: Path, image: FakeImage, *flags: str, host: str = "h1"
) -> AsyncIterator[tuple[FakeCluster, FakeNode, FakeNode]]:
    """Two nodes of a cluster whose store has the image; `flags` and `host` are the second one's."""
    async with one_node(folder, image) as (cluster, first), cluster.node("n1", host, *flags) as second:
        yield cluster, first, second


@asynccontextmanager
async def serving(tmp_path: Path, nbytes: int, gate: StepGate | None = None) -> AsyncIterator[FakeNode]:
    """A node on which instance `i1` of an image of that size is ready; its steps wait at the gate."""
    image, engines = make_image("a", nbytes), FakeEngines(gate=gate)
    async with one_node(tmp_path, image, engines=engines) as (_, node):
        await node.ask(start_request("i1", image))
        yield node
