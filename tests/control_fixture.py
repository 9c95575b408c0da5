"""A cluster in one process for tests of the control side: MemoryState, FakeNodes and gateways."""

import hashlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

from gateway.callrun import CallRun
from gateway.contract import Assigned, Call, Deadlines, Event, Stage
from gateway.control import Control, ControlSettings, make_control
from gateway.fake_channel import FakeNet
from gateway.fake_node import FakeNode
from gateway.policy import ScalerPolicy
from registry.function import FunctionVersion, Scaling, Task
from registry.images.codec import encode_manifest
from registry.images.manifest import UNIT_BYTES, LayerSpan, Manifest
from registry.images.verify import CHECKSUM_BYTES
from registry.instance import InstanceRecord, InstanceState, StartKind
from registry.memory_state import MemoryState
from registry.messages import Generate, Sampling, Tokens, Usage
from registry.node import Holding, NodeRecord, NodeState, Tier

MIB = 1 << 20


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def make_version(
    name: str = "f",
    version: int = 1,
    *,
    image: str | None = "image-1",
    task: Task = Task.GENERATE,
    nbytes: int = MIB,
) -> FunctionVersion:
    return FunctionVersion(
        function=name,
        version=version,
        task=task,
        architecture="llama",
        image=digest(image) if image else None,
        manifest=digest(f"manifest of {image}") if image else None,
        image_bytes=nbytes if image else 0,
        blocks=16,
        dtype="float32",
        context_length=1024,
        assets={"config.json": digest("config")},
        created_at=0.0,
    )


def make_node(id_: str, **changes: object) -> NodeRecord:
    record = NodeRecord(
        id=id_,
        host=f"host-{id_}",
        pid=1,
        epoch=1,
        state=NodeState.READY,
        device="cpu",
        gpu_type="fake",
        gpu_count=1,
        channel=f"tcp://{id_}:1",
        cast=f"tcp://{id_}:2",
        gpu_bytes=64 * MIB,
        gpu_free_bytes=64 * MIB,
        host_bytes=256 * MIB,
        host_free_bytes=256 * MIB,
        reads_store=True,
        allows_handlers=True,
        link_rate_bytes_s=None,
        started_at=0.0,
    )
    return replace(record, **changes)  # type: ignore[arg-type]


def make_holding(image: str, *tiers: Tier, nbytes: int = MIB, last_used_at: float = 0.0) -> Holding:
    return Holding(image=digest(image), tiers=tiers, bytes=nbytes, last_used_at=last_used_at)


def make_instance(
    id_: str,
    node: str,
    *,
    name: str = "f",
    version: int = 1,
    state: InstanceState = InstanceState.READY,
    **changes: object,
) -> InstanceRecord:
    record = InstanceRecord(
        instance_id=id_,
        function=name,
        version=version,
        node=node,
        state=state,
        start_kind=StartKind.COLD,
        since=1.0,
        max_concurrency=4,
    )
    return replace(record, **changes)  # type: ignore[arg-type]


LAYERS = 6
ALL_LAYERS = (1 << LAYERS) - 1


def layered_manifest(nbytes: int = MIB) -> bytes:
    """Of an image of six layers of like size, the first with the embedding and the last with the head."""
    edges = [nbytes * place // (LAYERS + 2) for place in range(LAYERS + 3)]
    kinds = [("embed", 0), *(("layer", index) for index in range(LAYERS)), ("head", 0)]
    spans = (
        LayerSpan(kind=kind, index=index, tower="", start=edges[place], end=edges[place + 1])
        for place, (kind, index) in enumerate(kinds)
    )
    return encode_manifest(
        Manifest(
            format=1,
            architecture="LlamaForCausalLM",
            model_type="llama",
            tied_head=False,
            num_layers=LAYERS,
            nbytes=nbytes,
            sha256="0" * 64,
            tensors=(),
            layers=tuple(spans),
            units=bytes(CHECKSUM_BYTES * -(-nbytes // UNIT_BYTES)),
        )
    )


class AnyBlobs:
    """The part of `Blobs` that starts use: every digest is there, and is a manifest."""

    url = "memory://"

    def __init__(self) -> None:
        self.reads: list[str] = []
        self._manifest = layered_manifest()

    async def read(self, digest: str, *, limit: int) -> bytes:
        self.reads.append(digest)
        return self._manifest


@dataclass(slots=True)
class FakeCluster:
    """`nodes` by id; `gateways` in the order of their opening."""

    state: MemoryState
    net: FakeNet
    nodes: dict[str, FakeNode] = field(default_factory=dict)
    gateways: list[Control] = field(default_factory=list)

    @property
    def control(self) -> Control:
        return self.gateways[0]

    async def add_node(self, id_: str, **options: object) -> FakeNode:
        node = FakeNode(self.state, self.net, id_, **options)  # type: ignore[arg-type]
        self.nodes[id_] = node
        await node.up()
        return node

    async def deploy(
        self, scaling: Scaling | None = None, name: str = "f", **options: object
    ) -> FunctionVersion:
        """A new current version, once the first gateway knows it."""
        draft = make_version(name, **options)  # type: ignore[arg-type]
        version = await self.state.create_version(draft, scaling)
        for control in self.gateways:
            await control.changes.wait_for(lambda c=control: c.directory.current(name) == version)
        return version

    def counts(self, what: str) -> int:
        return sum(node.counts[what] for node in self.nodes.values())

    def ready(self, name: str = "f") -> list[InstanceRecord]:
        instances = self.control.directory.instances()
        return [i for i in instances if i.function == name and i.state is InstanceState.READY]

    async def until_ready(self, count: int, name: str = "f") -> None:
        await self.control.changes.wait_for(lambda: len(self.ready(name)) == count)

    async def until_gone(self, name: str = "f") -> None:
        await self.control.changes.wait_for(
            lambda: all(i.function != name for i in self.control.directory.instances())
        )


@asynccontextmanager
async def open_cluster(
    nodes: int = 2,
    *,
    gateways: int = 1,
    settings: ControlSettings | None = None,
    policy: ScalerPolicy | None = None,
    state: MemoryState | None = None,
    **options: object,
) -> AsyncIterator[FakeCluster]:
    cluster = FakeCluster(state=state or MemoryState(), net=FakeNet())
    for number in range(nodes):
        await cluster.add_node(f"n{number}", **options)
    async with AsyncExitStack() as stack:
        for number in range(gateways):
            cluster.gateways.append(
                await stack.enter_async_context(open_gateway(cluster, f"g{number}", settings, policy))
            )
        yield cluster


@asynccontextmanager
async def open_gateway(
    cluster: FakeCluster,
    id_: str,
    settings: ControlSettings | None = None,
    policy: ScalerPolicy | None = None,
) -> AsyncIterator[Control]:
    """A gateway whose channels to all nodes are up."""
    async with make_control(
        state=cluster.state,
        blobs=AnyBlobs(),  # type: ignore[arg-type]
        dial=cluster.net.dial,
        gateway_id=id_,
        settings=settings,
        policy=policy,
    ) as control:
        await control.ready.wait()
        alive = {node.id for node in cluster.nodes.values() if node.alive}
        await control.changes.wait_for(lambda: {n.id for n in control.directory.usable_nodes()} >= alive)
        yield control


def make_call(
    version: FunctionVersion,
    *,
    request_id: str = "r",
    prompt: tuple[int, ...] = (1, 2, 3),
    tokens: int = 4,
    tenant: str = "t",
    deadlines: Deadlines | None = None,
) -> Call:
    work = Generate(
        request_id=request_id,
        instance_id="",
        prompt_ids=prompt,
        sampling=Sampling(max_tokens=tokens, temperature=0),
    )
    return Call(
        request_id=request_id, tenant=tenant, version=version, work=work, deadlines=deadlines or Deadlines()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A call's events, sorted."""

    stages: tuple[Stage, ...]
    assigned: Assigned
    ids: list[int]
    usage: Usage
    events: tuple[Event, ...]


async def ask(control: Control, call: Call) -> Answer:
    """Run a call to its end."""
    events: list[Event] = []
    async with CallRun(control.dispatcher, call) as replies:
        async for event in replies:
            events.append(event)  # noqa: PERF401
    return Answer(
        stages=tuple(e for e in events if isinstance(e, Stage)),
        assigned=[e for e in events if isinstance(e, Assigned)][-1],
        ids=[token for e in events if isinstance(e, Tokens) for token in e.ids],
        usage=next(e for e in events if isinstance(e, Usage)),
        events=tuple(events),
    )
