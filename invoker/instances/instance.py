"""One instance on this node: its life cycle, resources and running requests."""

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec

from invoker.base.errors import NodeDraining, NoSuchInstance
from invoker.engine.contract import EngineCall, ModelSpec, NewSequence, TokenOutput
from invoker.engine.engine_load import EngineLoad
from invoker.engine.kv.cache import KvShape
from invoker.engine.kv.entry import EntryFormat, LayerEntry
from invoker.engine.kv.slices import KvSlice
from invoker.handlers.running import HandlerOutput
from invoker.instances.calls import InstanceSteps
from invoker.instances.device_cache import DeviceImage
from invoker.instances.lifecycle import Lifecycle
from invoker.kv.choice import PrefillRate
from invoker.memory.arena import Region
from invoker.metering.accounts import MeterAccount
from registry.config.handler_spec import HandlerSpec
from registry.messages.forward import ForwardedChunk, ForwardedHead, ForwardRequest
from registry.messages.node import StartInstance
from registry.records.instance import InstanceState


class Handler(Protocol):
    """A user's handler in its own process (invoker/handlers)."""

    async def start(
        self,
        files: Mapping[str, bytes],
        spec: HandlerSpec,
        scratch_dir: Path,
        secrets: Mapping[str, str],
    ) -> None: ...

    def invoke(
        self, request_id: str, body: bytes, timeout_s: float, on_ended: Callable[[], None]
    ) -> AsyncIterator[HandlerOutput]:
        """Invoke the handler; closing the iterator cancels it. `over` is called once it has really ended."""
        ...

    async def aclose(self) -> None: ...


class ModelRunner(Protocol):
    """An engine of a model as the loop sees it: an EngineRunner, or another engine's process."""

    @property
    def kv_shape(self) -> KvShape | None: ...

    @property
    def entry_format(self) -> EntryFormat | None:
        """The format of the entries that `generate` uses; None if it ignores them."""
        ...

    @property
    def kv_tokens(self) -> tuple[int, int]: ...

    @property
    def load(self) -> EngineLoad | None: ...

    @property
    def failure(self) -> Exception | None: ...

    def generate(
        self,
        sequence: NewSequence,
        call: EngineCall,
        kv: Sequence[KvSlice] = (),
        *,
        entry: LayerEntry | None = None,
    ) -> AsyncGenerator[TokenOutput, None]: ...

    async def wait_closed(self) -> None: ...

    async def aclose(self) -> None: ...


@runtime_checkable
class Forwarder(Protocol):
    """An engine with a server of its own, through which requests pass."""

    def forward(
        self, request: ForwardRequest, call: EngineCall
    ) -> AsyncGenerator[ForwardedHead | ForwardedChunk, None]: ...


class InstanceAttachment(Protocol):
    """A user of the instance's memory beside its engine: a pipeline or a stage of one."""

    async def aclose(self) -> None:
        """End, and release the memory."""
        ...


class Instance:
    """One instance; `changed` is called after each replacement of `life`.

    Belongs to the event loop's thread.
    """

    def __init__(
        self,
        request: StartInstance,
        life: Lifecycle,
        account: MeterAccount,
        changed: Callable[["Instance"], None],
    ) -> None:
        self.request = request
        self.account = account
        self._life = life
        self._changed = changed
        self._next_change: asyncio.Future[None] | None = None  # None while nothing waits for it
        self._work = 0
        self.task: asyncio.Task[None] | None = None
        self.device_image: DeviceImage | None = None
        self.kv: Region | None = None
        self.runner: ModelRunner | None = None
        self.handler: Handler | None = None
        self.spec: ModelSpec | None = None
        self.steps: InstanceSteps | None = None
        self.prefill = PrefillRate()
        self.attachments: set[InstanceAttachment] = set()
        self._loaded_layers = 0
        self.failure: Exception | None = None  # why it ended, if it was not stopped
        self.rejected: Exception | None = None  # its image is not genuine
        self.ending = False  # its task is cleaning up: cancelling it again would interrupt that
        self.published_state: InstanceState | None = None
        self.drain_deadline_s = (
            math.inf
        )  # the earliest end of all its stops' grace periods, by the loop's clock

    def __repr__(self) -> str:
        return f"<Instance {self.id} {self._life.state} {self._life.phase} work={self._work}>"

    @property
    def id(self) -> str:
        return self.request.instance_id

    @property
    def state(self) -> InstanceState:
        return self._life.state

    @property
    def life(self) -> Lifecycle:
        return self._life

    @life.setter
    def life(self, life: Lifecycle) -> None:
        self._life = life
        self._notify()
        self._changed(self)

    @property
    def loaded_layers(self) -> int:
        """Return the bitmap of layers on the accelerator; bits are never cleared."""
        return self._loaded_layers

    @loaded_layers.setter
    def loaded_layers(self, layers: int) -> None:
        self._loaded_layers = layers
        self._notify()

    async def wait_for_layers(self, first: int, last: int) -> None:
        """Wait until layers `[first, last)` are loaded. Raises NoSuchInstance at the instance's end."""
        wanted = (1 << last) - (1 << first)
        while wanted & ~self._loaded_layers:
            if self._life.final or self.ending:
                raise NoSuchInstance(f"instance {self.id} has ended")
            await self.next_change()

    @property
    def work(self) -> int:
        """Return the number of running requests."""
        return self._work

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count one request while the block lasts. Raises NodeDraining, NoSuchInstance unless ready."""
        self.begin_work()
        try:
            yield
        finally:
            self.end_work()

    def begin_work(self) -> None:
        """Count one request until `end_work`. Raises NodeDraining, NoSuchInstance unless ready."""
        state = self._life.state
        if state is not InstanceState.READY:
            if state is InstanceState.DRAINING:
                raise NodeDraining(f"instance {self.id} is stopping")
            raise NoSuchInstance(f"instance {self.id} is {state}, not ready")
        self._work += 1

    def end_work(self) -> None:
        self._work -= 1
        self._notify()

    def release_references(self) -> None:
        """Drop all but what a repeated start request needs: an ended instance is kept for long."""
        self.request = msgspec.structs.replace(self.request, assets={}, image=None)
        self.task = self.spec = self.steps = None
        fault: BaseException | None = self.failure
        while fault is not None:  # a traceback references all locals of its frames
            fault.__traceback__ = None
            fault = fault.__cause__ or fault.__context__

    async def wait_idle(self) -> None:
        """Wait until no request is running or the instance has ended."""
        while self._work and not self._life.final:
            await self.next_change()

    async def wait_settled(self) -> None:
        """Wait until the instance is ready or has ended."""
        while self.state in (InstanceState.STARTING, InstanceState.LOADING):
            await self.next_change()

    async def wait_ended(self) -> None:
        """Wait until the instance has ended."""
        while not self._life.final:
            await self.next_change()

    async def next_change(self) -> None:
        if self._next_change is None:
            self._next_change = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._next_change)

    def _notify(self) -> None:
        if self._next_change is not None:
            bell, self._next_change = self._next_change, None
            bell.set_result(None)
