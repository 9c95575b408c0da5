"""Fakes of the contract: a scripted dispatcher, a cluster that records its calls, a blob store in memory."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from gateway.cluster.condition import ChangeCondition
from gateway.core.contract import (
    Assigned,
    CallUsage,
    Event,
    FunctionCall,
    PulledModel,
    RolloutHealth,
    WaitStage,
    Work,
)
from gateway.core.open_call import DeadlineTimer, OpenCall
from registry.errors import Conflict, CorruptImage, NotFound, RegistryError, StoreError
from registry.messages.arrivals import Arrivals
from registry.messages.node import Generate, RequestUsage, Tokens
from registry.records.cast import CastState
from registry.records.change import CallTraffic, Snapshot
from registry.records.function import FunctionVersion
from registry.records.instance import InstanceRecord
from registry.records.usage import GpuSlice
from registry.state import ClusterState

Script = Callable[[FunctionCall], AsyncIterator[Event]]

HOT = Assigned(
    instance_id="i-1", node="n0", gpu_type="cpu", gpu_count=1, start_kind="hot", queue_ms=0.2, load_ms=0.0
)


_EMPTY = Snapshot(cursor="", functions=(), versions=(), nodes=(), instances=(), load_reports=())


async def repeat_prompt(call: FunctionCall) -> AsyncIterator[Event]:
    """Yield a hot instance's events: the prompt's ids repeated, one a message, until max_tokens."""
    work = call.work
    assert isinstance(work, Generate)
    yield HOT
    count = work.sampling.max_tokens
    for index in range(count):
        await asyncio.sleep(0)
        token = work.prompt_ids[index % len(work.prompt_ids)]
        reason = "length" if index == count - 1 else ""
        yield Tokens(ids=(token,), finish_reason=reason, gpu_us=100 * (index + 1))
    yield RequestUsage(
        prompt_tokens=len(work.prompt_ids),
        completion_tokens=count,
        gpu_us=100 * count,
        exec_us=200 * count,
    )


class ScriptedCall(OpenCall):
    """A call that plays a script; its usage is that of the script's outputs."""

    def __init__(self, dispatcher: "FakeDispatcher", call: FunctionCall) -> None:
        super().__init__(call, dispatcher.deadlines)
        self._dispatcher = dispatcher
        self._source = dispatcher.script(call)
        self._gpu_us = 0

    def _enter(self) -> None:
        self._dispatcher.entered(self.call)

    async def _next(self) -> Event:
        event = await anext(self._source)
        if isinstance(event, Tokens | RequestUsage):
            self._gpu_us = max(self._gpu_us, event.gpu_us)
        return event

    async def _leave(self) -> None:
        await self._source.aclose()  # type: ignore[attr-defined]
        self._dispatcher.left(self.call, early=self.usage is None)

    @property
    def used(self) -> tuple[CallUsage, ...]:
        if self.assigned is None:
            return ()
        gpu = GpuSlice(
            call_id=self.call.request_id,
            instance_id=self.assigned.instance_id,
            node=self.assigned.node,
            gpu_us=self._gpu_us,
        )
        return (CallUsage(gpu=gpu, exact=self.usage is not None),)


@dataclass
class FakeDispatcher:
    """A dispatcher that plays `script` for each call, and records open calls and those left early."""

    script: Script = repeat_prompt
    calls: list[FunctionCall] = field(default_factory=list)
    open: set[str] = field(default_factory=set)
    left_early: list[str] = field(default_factory=list)
    changes: ChangeCondition = field(default_factory=ChangeCondition)
    deadlines: DeadlineTimer = field(default_factory=DeadlineTimer)

    def run(self, call: FunctionCall) -> ScriptedCall:
        return ScriptedCall(self, call)

    def entered(self, call: FunctionCall) -> None:
        self.calls.append(call)
        self.open.add(call.request_id)
        self.changes.notify()

    def left(self, call: FunctionCall, *, early: bool) -> None:
        self.open.discard(call.request_id)
        if early:
            self.left_early.append(call.request_id)
        self.changes.notify()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until a condition on the calls holds."""
        await self.changes.wait_for(holds)

    def works(self) -> list[Work]:
        return [call.work for call in self.calls]


@dataclass
class FakeCluster:
    """A cluster with a snapshot of `state` as of the last `refresh`, which records operations."""

    state: ClusterState
    asked: list[tuple[object, ...]] = field(default_factory=list)
    stages: Sequence[WaitStage] = (
        WaitStage(stage="fetch", fraction=0.5),
        WaitStage(stage="fetch", fraction=1.0),
    )
    lines: Sequence[str] = ("n0 started",)
    failure: Exception | None = None
    snapshot: Snapshot = _EMPTY
    served: Callable[[], dict[tuple[str, int], CallTraffic]] = dict
    health: RolloutHealth = field(default_factory=RolloutHealth)
    ended: dict[str, dict[str, CastState]] = field(default_factory=dict)  # parts of casts
    arriving: dict[str, Arrivals] = field(default_factory=dict)  # by node; others report nothing
    silent: RegistryError | None = None  # why no node reports what arrives on it
    changes: ChangeCondition = field(default_factory=ChangeCondition)

    async def refresh(self) -> None:
        self.snapshot = await self.state.snapshot()
        self.changes.notify()

    def view(self) -> Snapshot:
        return self.snapshot

    def subscribe(self, callback: Callable[[], None]) -> None:
        self.changes.subscribe(callback)

    def ended_parts(self, cast_id: str) -> dict[str, CastState]:
        return self.ended.get(cast_id, {})

    def traffic(self) -> dict[tuple[str, int], CallTraffic]:
        return self.served()

    def rollout_health(self, function: str) -> RolloutHealth:
        return self.health

    async def rollout_started(self, function: str, rollout_id: str) -> None:
        self._ask("rollout_started", function)

    async def arrivals(self, node: str) -> AsyncIterator[Arrivals]:
        """Yield what is set to arrive on the node, now and when it is another at one of `changes`."""
        self.asked.append(("arrivals", node))
        if self.silent is not None:
            raise self.silent
        shown = None
        while True:
            found = self.arriving.get(node)
            if found is not None and found is not shown:
                shown = found
                yield found
            await self.changes.wait()

    async def scale(self, function: str, instances: int, on: Sequence[str], *, wait: bool) -> None:
        self._ask("scale", function, instances, tuple(on), wait)

    async def cordon(self, node: str, *, cordoned: bool) -> None:
        self._ask("cordon", node, cordoned)

    async def drain(self, node: str, *, wait: bool) -> Sequence[InstanceRecord]:
        self._ask("drain", node, wait)
        return ()

    async def pull(self, function: str, on: str | None) -> AsyncIterator[WaitStage | PulledModel]:
        self._ask("pull", function, on)
        for stage in self.stages:
            yield stage
        yield PulledModel(node="n0", host="h0", version=1, folder=f"/models/{function}-1")

    async def warm(self, function: str, nodes: int | None, on: Sequence[str]) -> AsyncIterator[WaitStage]:
        self._ask("warm", function, nodes, tuple(on))
        for stage in self.stages:
            yield stage

    async def check_model(self, version: FunctionVersion) -> bool:
        self._ask("check_model", version.function, version.version)
        return True

    async def ensure_host_copy(self, version: FunctionVersion) -> None:
        self._ask("ensure_host_copy", version.function, version.version)
        await self.refresh()

    async def drop(self, function: str, tier: str, on: Sequence[str]) -> None:
        self._ask("drop", function, tier, tuple(on))

    async def logs(self, function: str, since_version: int, lines: int, follow: bool) -> AsyncIterator[str]:
        self._ask("logs", function, lines, follow)
        for line in self.lines:
            yield line

    def _ask(self, *what: object) -> None:
        self.asked.append(what)
        if self.failure is not None:
            raise self.failure


class MemoryBlobs:
    """A content-addressed store in memory, as strict as the real one."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.used_at: dict[str, float | None] = {}
        self.appended = asyncio.Event()
        self._partial: dict[str, bytes] = {}

    def put(self, data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        self.blobs[digest] = data
        return digest

    async def size(self, digest: str) -> int | None:
        blob = self.blobs.get(digest)
        return None if blob is None else len(blob)

    async def read(self, digest: str, *, limit: int) -> bytes:
        if digest not in self.blobs:
            raise NotFound(f"no blob {digest}")
        if len(self.blobs[digest]) > limit:
            raise StoreError(f"blob {digest} is over {limit} bytes")
        return self.blobs[digest]

    async def partial_size(self, digest: str) -> int:
        return len(self._partial.get(digest, b""))

    async def append(self, digest: str, offset: int, chunks: AsyncIterator[bytes], *, total: int) -> int:
        if digest in self.blobs:
            return total
        if offset != await self.partial_size(digest):
            raise Conflict(f"the upload stands at {await self.partial_size(digest)}, not {offset}")
        async for chunk in chunks:
            self._partial[digest] = self._partial.get(digest, b"") + chunk
        self.appended.set()
        data = self._partial.get(digest, b"")
        if len(data) >= total:
            del self._partial[digest]
            if hashlib.sha256(data).hexdigest() != digest:
                raise CorruptImage(f"the bytes of {digest} do not have that digest")
            self.blobs[digest] = data
        return len(data)

    async def delete(self, digest: str) -> None:
        self.blobs.pop(digest, None)
        self._partial.pop(digest, None)

    async def digests(self) -> list[str]:
        return sorted(self.blobs)

    async def last_used(self) -> dict[str, float | None]:
        return {digest: self.used_at.get(digest) for digest in self.blobs}

    async def touch(self, digest: str) -> None:
        self.used_at.pop(digest, None)

    async def partials(self) -> dict[str, float | None]:
        return {digest: self.used_at.get(digest) for digest in self._partial}

    async def drop_partial(self, digest: str) -> bool:
        return self._partial.pop(digest, None) is not None
