"""The instances of this node: starting, stopping, and giving their work to them."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MappingProxyType

from invoker.counters import Counters
from invoker.engine.contract import EngineError
from invoker.errors import BadWork, Draining, InvokerError, NoSuchInstance, OutOfDeviceMemory
from invoker.handlers.errors import HandlerError
from invoker.instance import Instance
from invoker.lifecycle import accepted
from invoker.starting import Equipment, release, start
from rdmacast.errors import CastError
from registry.errors import RegistryError
from registry.instance import InstanceRecord, InstanceState, StartKind
from registry.messages import StartInstance

ENDED_KEPT = 128  # instances at their end that are remembered, so that a repeated start is answered

log = logging.getLogger("invoker.instances")

# What a start may fail with that is not a fault of ours.
_EXPECTED = (InvokerError, EngineError, HandlerError, RegistryError, CastError, OSError)


class Instances:
    """Belongs to the event loop's thread. `published` is told each new record, in order, and the meter
    each state."""

    def __init__(
        self,
        node: str,
        gear: Equipment,
        counters: Counters,
        published: Callable[[InstanceRecord], None],
    ) -> None:
        self._node = node
        self._gear = gear
        self._counters = counters
        self._published = published
        self._instances: dict[str, Instance] = {}
        self._stops: set[asyncio.Task[None]] = set()
        self._draining = False
        self._controller_epoch = 0

    def __repr__(self) -> str:
        return f"<Instances {list(self._instances.values())!r}>"

    def live(self) -> list[Instance]:
        """The instances that are not at their end."""
        return [one for one in self._instances.values() if not one.life.final]

    def start(self, request: StartInstance) -> Instance:
        """Begin a start, or join the one of the same id. The start goes on whoever waits for it.

        Raises Draining; BadWork if the id is that of another function, or the controller's lease has passed.
        """
        known = self._instances.get(request.instance_id)
        if known is not None:
            if (known.request.function, known.request.version) != (request.function, request.version):
                raise BadWork(f"instance {request.instance_id} is one of {known.request.function}")
            return known
        if self._draining:
            raise Draining(f"node {self._node} is leaving")
        if 0 < request.controller_epoch < self._controller_epoch:
            raise BadWork(f"controller {request.controller_epoch} has been succeeded by another")
        self._controller_epoch = max(self._controller_epoch, request.controller_epoch)
        life = accepted(
            request.instance_id,
            request.function,
            request.version,
            self._node,
            request.max_concurrency,
            wall_s=self._gear.clock.wall_s(),
            now_s=self._gear.clock.monotonic_s(),
        )
        account = self._gear.meter.enter(life.instance_id, life.function, life.version, life.state)
        instance = Instance(request, life, account, self._changed)
        self._instances[instance.id] = instance
        self._changed(instance)
        instance.task = asyncio.create_task(self._live(instance), name=f"instance {instance.id}")
        return instance

    def get(self, instance_id: str) -> Instance:
        """Raises NoSuchInstance."""
        try:
            return self._instances[instance_id]
        except KeyError:
            raise NoSuchInstance(f"no instance {instance_id} on node {self._node}") from None

    async def stop(self, instance_id: str, grace_s: float) -> None:
        """Let the work under way finish (at most `grace_s`), then free everything; returns when done.

        One that is still starting is stopped at once; one that is not here (any more) needs nothing.
        The stop goes on whoever waits for it; of several the one with the earliest end counts.
        """
        instance = self._instances.get(instance_id)
        if instance is None or instance.task is None:
            return
        stop = asyncio.create_task(self._stop(instance, instance.task, grace_s), name=f"stop {instance_id}")
        self._stops.add(stop)
        stop.add_done_callback(self._stops.discard)
        await asyncio.shield(stop)

    async def _stop(self, instance: Instance, life: asyncio.Task[None], grace_s: float) -> None:
        if instance.state is InstanceState.READY:
            instance.life = instance.life.moved(InstanceState.DRAINING, self._gear.clock.wall_s())
        if instance.state is InstanceState.DRAINING:
            end_s = asyncio.get_running_loop().time() + grace_s
            instance.drained_by_s = min(instance.drained_by_s, end_s)
            with suppress(TimeoutError):
                async with asyncio.timeout_at(instance.drained_by_s):
                    await instance.idle()
        if not instance.ending:
            if instance.work:
                self._tell(
                    instance, f"stopping with {instance.work} requests under way after its grace period"
                )
            instance.ending = True
            life.cancel()
        await instance.ended()

    async def drain(self, grace_s: float) -> None:
        """Take nothing new, and stop every instance; when this returns no stop is under way."""
        self._draining = True
        await asyncio.gather(*(self.stop(instance.id, grace_s) for instance in self.live()))
        if self._stops:
            await asyncio.wait(self._stops)

    async def _live(self, instance: Instance) -> None:
        """The life of one instance: start it, watch over its engine, and free what it held at the end."""
        state, error = InstanceState.STOPPED, ""
        try:
            await start(instance, self._gear)
            self._started(instance)
            await self._until_engine_fails(instance)
        except asyncio.CancelledError:
            # A stop cancels this task, and nobody else; a cancellation of something it waited for is a fault.
            if not instance.ending:
                state, error = InstanceState.FAILED, "something it waited for was cancelled"
        except _EXPECTED as fault:
            state, error = InstanceState.FAILED, str(fault) or type(fault).__name__
            instance.failure = fault
            if isinstance(fault, OutOfDeviceMemory) and instance.state is InstanceState.STARTING:
                instance.life = instance.life.lacked_room()
        except Exception as fault:  # ours; the instance fails, and its node serves on
            log.exception("instance %s failed unexpectedly", instance.id)
            state, error = InstanceState.FAILED, f"{type(fault).__name__}: {fault}"
            instance.failure = fault
        finally:
            await self._end(instance, state, error)

    async def _until_engine_fails(self, instance: Instance) -> None:
        if instance.runner is None:
            await asyncio.get_running_loop().create_future()  # a handler's process is its own watchman
        else:
            await instance.runner.wait_closed()
            raise EngineError(f"the engine failed: {instance.runner.failure}")

    async def _end(self, instance: Instance, state: InstanceState, error: str) -> None:
        instance.ending = True
        try:
            await release(instance, self._gear)
        finally:
            instance.life = instance.life.moved(state, self._gear.clock.wall_s(), error=error)
            instance.shed()
            self._forget_oldest()

    def _started(self, instance: Instance) -> None:
        life = instance.life
        kind = {StartKind.HOT: "starts_hot", StartKind.WARM: "starts_warm"}.get(
            life.start_kind, "starts_cold"
        )
        setattr(self._counters, kind, getattr(self._counters, kind) + 1)

    def _changed(self, instance: Instance) -> None:
        record = instance.life.record()
        told, instance.told = instance.told, record.state
        if told is not record.state:
            self._tell(instance, _describe(record))
            if told is not None:
                self._gear.meter.moved(instance.account, record.state, final=instance.life.final)
        self._published(record)

    def _tell(self, instance: Instance, line: str) -> None:
        log.info("instance %s of %s: %s", instance.id, instance.request.function, line)
        self._gear.tell(instance.request.function, f"instance {instance.id}: {line}")

    def _forget_oldest(self) -> None:
        ended = [one.id for one in self._instances.values() if one.life.final]
        for instance_id in ended[:-ENDED_KEPT]:
            del self._instances[instance_id]


_PLAIN: Mapping[InstanceState, str] = MappingProxyType(
    {
        InstanceState.STARTING: "accepted",
        InstanceState.LOADING: "loading",
        InstanceState.DRAINING: "draining",
        InstanceState.STOPPED: "stopped",
    }
)


def _describe(record: InstanceRecord) -> str:
    if record.state is InstanceState.FAILED:
        return f"failed: {record.error}"
    if record.state is InstanceState.READY:
        phases = ", ".join(f"{phase} {ms:.1f} ms" for phase, ms in record.phases_ms.items())
        return f"ready, a {record.start_kind} start from {record.source}: {phases}"
    return _PLAIN[record.state]
