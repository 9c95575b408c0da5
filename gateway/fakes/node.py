"""Nodes without weights: the fake of NodeClient.

A FakeNode publishes itself and its instances to the shared state and serves every message. Its tokens
are a function of the context only, so that a lost or repeated token shows. It takes no time but for the
latches that a test closes.
"""

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

from gateway.cluster.condition import ChangeCondition
from gateway.fakes.channel import FakeChannel, FakeNet, Latch, Send
from gateway.fakes.instances import FakeInstances
from gateway.fakes.pipelines import FakeLayers, FakePipelines
from gateway.fakes.tiers import with_image, with_mark, without_image
from registry.errors import RemoteError
from registry.messages.images import (
    AddTokenizer,
    CheckModel,
    CloseFolders,
    DropImage,
    ImageRef,
    ModelChecked,
    ModelFolder,
    PrepareLinks,
    PullModel,
    UnpinImage,
    WarmImage,
)
from registry.messages.live import (
    MOVED,
    HandOffCalls,
    KvLocation,
    KvStage,
    LeaveInstance,
    OpenPipeline,
    PrefetchKv,
)
from registry.messages.node import (
    Acknowledged,
    Array,
    Arrays,
    CallsUsed,
    Compute,
    CordonNode,
    EndCalls,
    Generate,
    GetStatus,
    HandlerChunk,
    InstanceProgress,
    InvokeHandler,
    LogChunk,
    NodeStatus,
    Request,
    RequestUsage,
    SettleCalls,
    StartInstance,
    StopInstance,
    TailLogs,
    Tokens,
)
from registry.messages.sampling import TokenLogprob
from registry.records.instance import InstanceRecord, InstanceState
from registry.records.node import NodeRecord, NodeState, Tier
from registry.state import ClusterState

OUTPUT_US = 10


def next_token(context: tuple[int, ...], vocabulary: int = 50_000) -> int:
    """Return the token after `context`, different for nearly all contexts."""
    return (sum((i + 1) * token for i, token in enumerate(context[-16:])) * 31 + len(context)) % vocabulary


def tokens_after(prompt: tuple[int, ...], count: int) -> list[int]:
    """Return the tokens that a FakeNode generates after `prompt`."""
    context = prompt
    for _ in range(count):
        context += (next_token(context),)
    return list(context[len(prompt) :])


def kv_of(work: Generate) -> KvLocation:
    """Return where an instance has exported the K and V of a call."""
    stage = KvStage(link=work.instance_id, host="h", first=0, last=1)
    return KvLocation(pipeline=work.instance_id, epoch=0, sequence=work.request_id, stages=(stage,))


def _record(id_: str, *, gpu_bytes: int = 1 << 30, **facts: Any) -> NodeRecord:
    fields: dict[str, Any] = {
        "host": f"host-{id_}",
        "device": "cpu",
        "gpu_count": 1,
        "channel": f"tcp://{id_}:1",
        "cast": f"tcp://{id_}:2",
        "gpu_bytes": gpu_bytes,
        "gpu_free_bytes": gpu_bytes,
        "reads_store": True,
        "allows_handlers": True,
        "link_rate_bytes_s": None,
    }
    return NodeRecord(
        id=id_,
        pid=1,
        epoch=0,
        state=NodeState.READY,
        gpu_type="fake",
        host_bytes=1 << 34,
        host_free_bytes=1 << 34,
        started_at=0.0,
        **(fields | facts),
    )


class FakeNode:
    """A fake node.

    `counts` has `store_reads`, `peer_reads`, `starts`, `joins`, `stops`, `warms`, `drops`, `calls`, `served`
    and `cancelled`, and `most_running` concurrent calls.
    """

    def __init__(
        self,
        state: ClusterState,
        net: FakeNet,
        id_: str,
        *,
        ttl_s: float = 60.0,
        vocabulary: int = 50_000,
        **facts: Any,
    ) -> None:
        """Create a node that is not up; `facts` are fields of its record."""
        self.id = id_
        self._vocabulary = vocabulary
        self.alive = False
        self.counts: Counter[str] = Counter()
        self.channels: set[FakeChannel] = set()
        self.instances = FakeInstances(self)
        self.loading = Latch()  # before the bytes of an image arrive
        self.layers = FakeLayers()
        self.token = Latch()  # before each token
        self.start_error: RemoteError | None = None
        self.call_errors: list[RemoteError] = []  # one for each of the next calls
        self.dies_after: int | None = None  # the number of tokens after which it is killed
        self.asked: list[Generate] = []
        self.prefetches = True
        self.prefetched: list[PrefetchKv] = []
        self.leaving: set[str] = set()  # calls that end before their next token
        self.used_us: dict[str, int] = {}  # by call, until it is settled
        self.lost_us: dict[str, int] = {}  # by call, where a channel broke before it was settled
        self.settled: list[tuple[str, ...]] = []
        self._state = state
        self._net = net
        self._ended = ChangeCondition()
        self._ttl_s = ttl_s
        self.pipelines = FakePipelines(self, self._fellows, lambda context: next_token(context, vocabulary))
        self.loaded: dict[str, asyncio.Event] = {}
        self.tokenizers: list[str] = []  # digests, as they arrived
        self.foreign: set[str] = set()  # images that only another engine runs
        self.folders: dict[str, PullModel] = {}  # by name of the folder
        self.linked: set[str] = set()  # hosts to which links were prepared
        self.refusals: dict[str, str] = {}  # of images that no engine here can run
        self._record = _record(id_, **facts)

    @property
    def record(self) -> NodeRecord:
        return self._record

    # --- life cycle

    async def up(self) -> None:
        """Start, also after `kill`."""
        epoch = await self._state.next_node_epoch(self.id)
        self._record = replace(self._record, epoch=epoch, state=NodeState.READY)
        self.alive = True
        self._net.nodes[self._record.channel] = self
        await self.beat()

    def listening(self, channel: str) -> None:
        """Publish this address instead of the network's."""
        self._record = replace(self._record, channel=channel)

    async def beat(self) -> None:
        await self._state.put_node(self._record, self._ttl_s)

    async def kill(self) -> None:
        """Die: channels break, the records stay until their lease expires."""
        self.alive = False
        for fellow in self._fellows().values():
            fellow.pipelines.lose(self.id)
            await fellow.instances.lose(self.id)
        self.instances.clear()
        self.loaded.clear()
        self._record = replace(self._record, holdings=(), gpu_free_bytes=self._record.gpu_bytes)
        await self.cut()

    async def leave(self) -> None:
        """Shut down: the record is removed."""
        await self._state.remove_node(self.id, self._record.epoch)
        await self.kill()

    async def cut(self) -> None:
        """Break all channels."""
        self.lost_us |= self.used_us
        self.used_us.clear()
        for channel in list(self.channels):
            await channel.aclose()

    def open_channel(self) -> FakeChannel:
        channel = FakeChannel(self)
        self.channels.add(channel)
        return channel

    async def served(self, calls: int) -> None:
        """Return once so many more calls have come to their end here."""
        until = self.counts["served"] + calls
        await self._ended.wait_for(lambda: self.counts["served"] >= until)

    async def settles(self) -> None:
        """Return once no call here waits to be settled."""
        await self._ended.wait_for(lambda: not self.used_us)

    def holds(self, image: str, tier: Tier) -> bool:
        return any(h.image == image and tier in h.tiers for h in self._record.holdings)

    # --- its answers

    async def answer(self, request: Request, send: Send) -> None:
        match request:
            case StartInstance():
                await self.instances.start(request, send)
            case StopInstance():
                await self.instances.stop(request, send)
            case WarmImage(image=image):
                self.counts["warms"] += not self.holds(image.image, Tier.HOST)
                await self.fetch(image, send)
                await self.hold(image.image, Tier.HOST, image.nbytes)
                if request.pin:
                    await self._mark(image.image, pinned=True)
                await send(Acknowledged())
            case CheckModel(image=image):
                if refusal := self.refusals.get(image.image):
                    raise RemoteError("unsupported_model", refusal)
                await send(ModelChecked(natively=image.image not in self.foreign))
            case AddTokenizer(digest=digest):
                self.tokenizers.append(digest)
                await send(Acknowledged())
            case PullModel(name=name, image=digest):
                if not self.holds(digest, Tier.HOST):
                    raise RemoteError("start_failed", f"{digest} is not in the host tier")
                self.folders[name] = request
                await send(ModelFolder(path=f"/models/{self.id}/{name}"))
            case UnpinImage(image=digest):
                await self._mark(digest, pinned=False)
                await send(Acknowledged())
            case PrefetchKv():
                if not self.prefetches:
                    raise RemoteError("bad_request", "unknown message")
                self.prefetched.append(request)
                await send(Acknowledged())
            case PrepareLinks(peers=peers):
                self.linked |= {peer.host for peer in peers}
                await send(Acknowledged())
            case CordonNode(cordoned=cordoned):
                self._record = replace(self._record, cordoned=cordoned)
                await self.beat()
                await send(Acknowledged())
            case CloseFolders(image=image):
                self.folders = {name: one for name, one in self.folders.items() if one.image != image}
                await send(Acknowledged())
            case DropImage(image=image, tier=tier):
                await self.drop(image, Tier(tier))
                await send(Acknowledged())
            case OpenPipeline():
                await self.pipelines.hold_open(request, send)
            case HandOffCalls():
                self.pipelines.leave(request)
                await send(Acknowledged())
            case LeaveInstance(request_ids=ids):
                self.leaving.update(ids)
                await send(Acknowledged())
            case Generate(pipeline=pipeline) if pipeline:
                self.asked.append(request)
                await self.pipelines.serve(request, send)
            case Generate() | Compute() | InvokeHandler():
                await self._serve(request, send)
            case TailLogs(function=function):
                await send(LogChunk(lines=(f"a line of {function}",)))
            case GetStatus():
                await send(NodeStatus(record=self._record))
            case EndCalls(request_ids=ids):
                await send(CallsUsed(gpu_us={id_: self.used_us[id_] for id_ in ids if id_ in self.used_us}))
            case SettleCalls(request_ids=ids):
                self.settled.append(ids)
                self.used_us = {id_: us for id_, us in self.used_us.items() if id_ not in ids}
                await send(Acknowledged())
                self._ended.notify()

    async def fetch(self, image: ImageRef, send: Send) -> None:
        if self.holds(image.image, Tier.HOST):
            return
        if image.image in self.loaded:  # another load on this node
            await self.loaded[image.image].wait()
            return
        names = {holder.node for holder in image.holders}
        # A peer that has not started to load has no such image.
        peers = [n for n in self._net.nodes.values() if n.alive and n.id in names and image.image in n.loaded]
        loaded = self.loaded[image.image] = asyncio.Event()
        await send(InstanceProgress(stage="fetch", fraction=0.5))
        if peers:
            self.counts["peer_reads"] += 1
        else:
            self.counts["store_reads"] += 1
        await self.loading.through()
        if peers and not peers[0].holds(image.image, Tier.HOST):
            await peers[0].loaded[image.image].wait()
        loaded.set()

    async def hold(self, image: str, tier: Tier, nbytes: int) -> None:
        record = with_image(self._record, image, tier, nbytes)
        if record is not self._record:
            self._record = record
            await self.beat()

    async def _mark(self, image: str, *, pinned: bool) -> None:
        self._record = with_mark(self._record, image, pinned=pinned)
        await self.beat()

    async def drop(self, image: str, tier: Tier) -> None:
        if tier is Tier.HOST and any(folder.image == image for folder in self.folders.values()):
            return
        self.counts["drops"] += 1
        if tier is Tier.HOST:
            self.loaded.pop(image, None)
        self._record = without_image(self._record, image, tier)
        await self.beat()

    async def _serve(self, work: Generate | Compute | InvokeHandler, send: Send) -> None:
        self.counts["calls"] += 1
        if self.call_errors:
            raise self.call_errors.pop(0)
        instance = self.instances.get(work.instance_id)
        if instance is None:
            raise RemoteError("no_such_instance", work.instance_id)
        if instance.record.state is not InstanceState.READY:
            raise RemoteError("draining", work.instance_id)
        instance.running += 1
        instance.idle.clear()
        self.counts["most_running"] = max(self.counts["most_running"], instance.running)
        try:
            await self._work(work, send)
            self.counts["served"] += 1
            self._ended.notify()
        except asyncio.CancelledError:
            self.counts["cancelled"] += 1
            raise
        finally:
            instance.running -= 1
            if not instance.running:
                instance.idle.set()

    async def _work(self, work: Generate | Compute | InvokeHandler, send: Send) -> None:
        prompt = made = 0
        self.used_us[work.request_id] = 0
        match work:
            case Generate(prompt_ids=ids, generated_ids=generated, sampling=sampling):
                self.asked.append(work)
                context = ids + generated
                if work.hand_off and sampling.max_tokens - len(generated) > 1:
                    await send(Tokens(ids=(), kv=kv_of(work)))
                helpers = self._helpers(work.instance_id)
                for i in range(len(generated), sampling.max_tokens):
                    await self.token.through()
                    if work.request_id in self.leaving:
                        await send(Tokens(ids=(), finish_reason=MOVED, kv=kv_of(work)))
                        break
                    self._check_group(work.instance_id)
                    context += (next_token(context, self._vocabulary),)
                    reason = "length" if i + 1 == sampling.max_tokens else ""
                    if work.hand_off and not reason:
                        reason = MOVED
                    used_us = self.use(work.request_id)
                    for helper in helpers:
                        helper.use(work.request_id)
                    logprobs = () if sampling.logprobs is None else (TokenLogprob(-context[-1] / 1000),)
                    await send(
                        Tokens(
                            ids=context[-1:],
                            logprobs=logprobs,
                            finish_reason=reason,
                            gpu_us=used_us,
                            kv=kv_of(work) if reason == MOVED else None,
                        )
                    )
                    made += 1
                    await self._die_in_time()
                    if reason:
                        break
                prompt = len(ids)
            case Compute():
                await self.token.through()
                self.use(work.request_id)
                await send(Arrays(arrays={"embeddings": Array(dtype="float32", shape=(0,), data=b"")}))
            case InvokeHandler(body=body):
                await self.token.through()
                self.use(work.request_id)
                used_us = self.used_us.get(work.request_id, 0)
                usage = RequestUsage(prompt_tokens=0, completion_tokens=0, gpu_us=used_us, exec_us=used_us)
                await send(HandlerChunk(data=body, usage=usage))
                return
        used_us = self.used_us.get(work.request_id, 0)
        await send(
            RequestUsage(prompt_tokens=prompt, completion_tokens=made, gpu_us=used_us, exec_us=used_us)
        )

    def _helpers(self, instance_id: str) -> "list[FakeNode]":
        """Return the other nodes of the instance's group."""
        instance, fellows = self.instances.get(instance_id), self._fellows()
        return [] if instance is None else [fellows[one.node] for one in instance.record.helpers]

    def _check_group(self, instance_id: str) -> None:
        """Raise RemoteError if a member of the instance's group is lost."""
        instance, fellows = self.instances.get(instance_id), self._fellows()
        if instance is None:
            raise RemoteError("pipeline_lost", f"{self.id}: instance {instance_id} has ended")
        for one in instance.record.helpers:
            if not fellows[one.node].runs(one.instance_id):
                raise RemoteError("pipeline_lost", f"{one.node} is lost")

    async def _die_in_time(self) -> None:
        if self.dies_after is None:
            return
        self.dies_after -= 1
        if not self.dies_after:
            await self.kill()
        if not self.alive:
            await asyncio.Event().wait()  # a dead node sends nothing

    # --- for its instances and pipelines

    async def publish(self, record: InstanceRecord) -> None:
        await self._state.put_instance(record, self._record.epoch)

    def runs(self, instance_id: str) -> bool:
        """Whether the instance can be a stage."""
        return self.instances.get(instance_id) is not None

    def is_ready(self, instance_id: str) -> bool:
        instance = self.instances.get(instance_id)
        return instance is not None and instance.record.state is InstanceState.READY

    async def until_settled(self, instance_id: str) -> None:
        """Return once the instance is ready, or removed."""
        instance = self.instances.get(instance_id)
        if instance is not None:
            await instance.settled.wait()

    def use(self, call_id: str) -> int:
        """Count an output of the call; return its usage so far."""
        book = self.lost_us if call_id in self.lost_us else self.used_us
        book[call_id] = used_us = book.get(call_id, 0) + OUTPUT_US
        return used_us

    def _fellows(self) -> "dict[str, FakeNode]":
        return {node.id: node for node in self._net.nodes.values()}
