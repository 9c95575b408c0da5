"""One instance on this node: its life, what it occupies, and the work it has under way."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import msgspec

from invoker.arena import Region
from invoker.calls import StepsOf
from invoker.engine.contract import ModelSpec
from invoker.engine.runner import EngineRunner
from invoker.errors import Draining, NoSuchInstance
from invoker.handlers.running import HandlerOutput
from invoker.lifecycle import Lifecycle
from invoker.meter_accounts import Account
from invoker.residents import Resident
from invoker.stages.kv_choice import PrefillRate
from registry.function_yaml import HandlerSpec
from registry.instance import InstanceState
from registry.messages import StartInstance


class Handler(Protocol):
    """A user's own code in a process of its own (invoker/handlers)."""

    async def start(self, files: Mapping[str, bytes], spec: HandlerSpec, scratch_dir: Path) -> None: ...

    def invoke(
        self, request_id: str, body: bytes, timeout_s: float, over: Callable[[], None]
    ) -> AsyncIterator[HandlerOutput]:
        """Leaving the iterator early cancels the call; `over` is called once nothing works on it any more."""
        ...

    async def aclose(self) -> None: ...


class Part(Protocol):
    """What works with the instance's memory beside its own engine: a stage of a pipeline."""

    async def aclose(self) -> None:
        """End, and let go of the memory."""
        ...


class Instance:
    """Belongs to the event loop's thread. `life` is replaced at each step; `changed` is told of it."""

    def __init__(
        self,
        request: StartInstance,
        life: Lifecycle,
        account: Account,
        changed: Callable[["Instance"], None],
    ) -> None:
        self.request = request
        self.account = account
        self._life = life
        self._changed = changed
        self._bell: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._work = 0
        self.task: asyncio.Task[None] | None = None
        self.resident: Resident | None = None
        self.kv: Region | None = None
        self.runner: EngineRunner | None = None
        self.handler: Handler | None = None
        self.spec: ModelSpec | None = None
        self.steps: StepsOf | None = None
        self.prefill = PrefillRate()
        self.parts: set[Part] = set()
        self._held = 0
        self.failure: Exception | None = None  # what ended it, if not a stop
        self.ending = False  # its task is on its way out: a second cancellation would cut that short
        self.told: InstanceState | None = None  # the state that it is known to be in
        self.drained_by_s = math.inf  # the earliest end of all its stops' grace periods, by the loop's clock

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
        self._ring()
        self._changed(self)

    @property
    def held(self) -> int:
        """The layers whose bytes are on the accelerator, as bits; they only grow."""
        return self._held

    @held.setter
    def held(self, layers: int) -> None:
        self._held = layers
        self._ring()

    async def holds(self, first: int, last: int) -> None:
        """Return once the layers `[first, last)` are there. Raises NoSuchInstance at the instance's end."""
        wanted = (1 << last) - (1 << first)
        while wanted & ~self._held:
            if self._life.final or self.ending:
                raise NoSuchInstance(f"instance {self.id} has ended")
            await self.next_change()

    @property
    def work(self) -> int:
        """Requests under way."""
        return self._work

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count one request; refused unless the instance is ready. Raises Draining, NoSuchInstance."""
        if self.state is InstanceState.DRAINING:
            raise Draining(f"instance {self.id} is stopping")
        if self.state is not InstanceState.READY:
            raise NoSuchInstance(f"instance {self.id} is {self.state}, not ready")
        self._work += 1
        try:
            yield
        finally:
            self._work -= 1
            self._ring()

    def shed(self) -> None:
        """At its end, keep only what a repeated start is answered with: it is remembered for long."""
        self.request = msgspec.structs.replace(self.request, assets={}, image=None)
        self.task = self.spec = self.steps = None
        fault: BaseException | None = self.failure
        while fault is not None:  # a traceback holds all that its frames held
            fault.__traceback__ = None
            fault = fault.__cause__ or fault.__context__

    async def idle(self) -> None:
        """Return once no request is under way, or the instance is at its end."""
        while self._work and not self._life.final:
            await self.next_change()

    async def settled(self) -> None:
        """Return once the instance is ready or at its end."""
        while self.state in (InstanceState.STARTING, InstanceState.LOADING):
            await self.next_change()

    async def ended(self) -> None:
        """Return once the instance is at its end."""
        while not self._life.final:
            await self.next_change()

    async def next_change(self) -> None:
        await asyncio.shield(self._bell)

    def _ring(self) -> None:
        bell, self._bell = self._bell, asyncio.get_running_loop().create_future()
        bell.set_result(None)
