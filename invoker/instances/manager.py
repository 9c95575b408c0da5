"""Starts, stops and looks up the instances of this node."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from invoker.base.counters import Counters
from invoker.base.errors import (
    InvalidWork,
    InvokerError,
    NodeDraining,
    NoSuchInstance,
    OutOfDeviceMemory,
    PipelineLost,
)
from invoker.engine.contract import EngineError
from invoker.handlers.errors import HandlerError
from invoker.instances.instance import Instance
from invoker.instances.lifecycle import accepted
from invoker.instances.start_context import InstanceContext
from invoker.instances.starting import check_model, release, start
from rdmacast.aio.threads import run_in_thread
from rdmacast.errors import CastError
from registry.errors import CorruptImage, RegistryError
from registry.messages.images import AddTokenizer, CheckModel
from registry.messages.node import StartInstance
from registry.records.fence import NO_FENCE, Fence
from registry.records.instance import InstanceRecord, InstanceState, StartKind

ENDED_KEPT = 128  # ended instances kept to answer repeated start requests

log = logging.getLogger("invoker.instances")

# Failures of a start that are not bugs.
_EXPECTED = (InvokerError, EngineError, HandlerError, RegistryError, CastError, OSError)


class Instances:
    """The instances of this node. Belongs to the event loop's thread.

    `published` receives each new record, in order; the meter receives each state.
    """

    def __init__(
        self,
        node: str,
        context: InstanceContext,
        counters: Counters,
        published: Callable[[InstanceRecord], None],
    ) -> None:
        self._node = node
        self._context = context
        self._counters = counters
        self._published = published
        self._instances: dict[str, Instance] = {}
        self._stops: set[asyncio.Task[None]] = set()
        self._draining = False
        self.controller = NO_FENCE  # the greatest one that started an instance

    def __repr__(self) -> str:
        return f"<Instances {list(self._instances.values())!r}>"

    def live(self) -> list[Instance]:
        """Return the instances that have not ended."""
        return [one for one in self._instances.values() if not one.life.final]

    @property
    def is_starting(self) -> bool:
        """Return whether an instance is being started."""
        return any(one.state in (InstanceState.STARTING, InstanceState.LOADING) for one in self.live())

    def start(self, request: StartInstance) -> Instance:
        """Start an instance, or join the start of the same id; callers may leave without stopping it.

        Raises NodeDraining; InvalidWork if the id belongs to another function or the controller has lost its
        lease.
        """
        known = self._instances.get(request.instance_id)
        if known is not None:
            if (known.request.function, known.request.version) != (request.function, request.version):
                raise InvalidWork(
                    f"instance {request.instance_id} belongs to function {known.request.function}"
                )
            return known
        if self._draining:
            raise NodeDraining(f"node {self._node} is leaving")
        self._check_fence(request)
        clock = self._context.clock
        life = accepted(request, self._node, wall_s=clock.wall_s(), now_s=clock.monotonic_s())
        account = self._context.meter.open_account(
            request.instance_id, request.function, request.version, life.state
        )
        instance = Instance(request, life, account, self._changed)
        self._instances[instance.id] = instance
        self._changed(instance)
        instance.task = asyncio.create_task(self._run(instance), name=f"instance {instance.id}")
        return instance

    async def check(self, request: CheckModel) -> bool:
        """Check that there is an engine; return whether the node's own runs it. Raises UnsupportedModel."""
        return await check_model(request, self._context)

    async def add_tokenizer(self, request: AddTokenizer) -> None:
        """Keep a tokenizer for sequences with a grammar. Raises EngineError."""
        await run_in_thread(self._context.engines.add_tokenizer, request.digest, request.content)

    def _check_fence(self, request: StartInstance) -> None:
        if not request.controller_epoch:
            return
        # An earlier release sends no incarnation: only its epoch counts.
        fence = Fence(request.controller_incarnation or self.controller.incarnation, request.controller_epoch)
        if fence < self.controller:
            raise InvalidWork(f"controller {fence.epoch} has been replaced by a newer one")
        self.controller = fence

    def get(self, instance_id: str) -> Instance:
        """Return an instance by its id. Raises NoSuchInstance."""
        try:
            return self._instances[instance_id]
        except KeyError:
            raise NoSuchInstance(f"no instance {instance_id} on node {self._node}") from None

    async def stop(self, instance_id: str, grace_s: float) -> None:
        """Let running requests finish for at most `grace_s`, then free the instance; return when done.

        A starting instance is stopped at once; an unknown or ended one is ignored. The stop continues if the
        caller leaves; of several stops the earliest deadline counts.
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
            instance.life = instance.life.with_state(InstanceState.DRAINING, self._context.clock.wall_s())
        if instance.state is InstanceState.DRAINING:
            end_s = asyncio.get_running_loop().time() + grace_s
            instance.drain_deadline_s = min(instance.drain_deadline_s, end_s)
            with suppress(TimeoutError):
                async with asyncio.timeout_at(instance.drain_deadline_s):
                    await instance.wait_idle()
        if not instance.ending:
            if instance.work:
                self._log(instance, f"stopped with {instance.work} requests running after its grace period")
            instance.ending = True
            life.cancel()
        await instance.wait_ended()

    def reject(self, image: str) -> None:
        """Fail all instances of an image that is not genuine."""
        for instance in self.live():
            used = instance.request.image
            if used is not None and used.image == image and instance.task and not instance.ending:
                instance.rejected = CorruptImage(f"image {image[:12]} does not have its SHA-256")
                instance.task.cancel()

    async def drain(self, grace_s: float) -> None:
        """Refuse new instances and stop all; return when all stops are done."""
        self._draining = True
        await asyncio.gather(*(self.stop(instance.id, grace_s) for instance in self.live()))
        if self._stops:
            await asyncio.wait(self._stops)

    async def _run(self, instance: Instance) -> None:
        """Start one instance, wait for its engine's failure or a stop, and free its resources."""
        state, error = InstanceState.STOPPED, ""
        try:
            await start(instance, self._context)
            self._started(instance)
            await self._until_engine_fails(instance)
        except asyncio.CancelledError:
            # Only a stop cancels this task; the cancellation of something that it awaits is a failure.
            if not instance.ending:
                state, error = InstanceState.FAILED, "the start was cancelled internally"
                if instance.rejected is not None:
                    error, instance.failure = str(instance.rejected), instance.rejected
        except _EXPECTED as fault:
            state, error = InstanceState.FAILED, str(fault) or type(fault).__name__
            instance.failure = fault
            if isinstance(fault, PipelineLost) and instance.state is InstanceState.LOADING:
                state = InstanceState.STOPPED  # the member that failed reports why
            if isinstance(fault, OutOfDeviceMemory) and instance.state is InstanceState.STARTING:
                instance.life = instance.life.without_room()
        except Exception as fault:  # a bug: the instance fails, the node serves on
            log.exception("instance %s failed unexpectedly", instance.id)
            state, error = InstanceState.FAILED, f"{type(fault).__name__}: {fault}"
            instance.failure = fault
        finally:
            await self._end(instance, state, error)

    async def _until_engine_fails(self, instance: Instance) -> None:
        if instance.runner is None:  # a handler watches its own process, a group's leader its members
            await asyncio.get_running_loop().create_future()
        else:
            await instance.runner.wait_closed()
            raise EngineError(f"the engine failed: {instance.runner.failure}")

    async def _end(self, instance: Instance, state: InstanceState, error: str) -> None:
        instance.ending = True
        try:
            await release(instance, self._context.device_cache)
        finally:
            instance.life = instance.life.with_state(state, self._context.clock.wall_s(), error=error)
            instance.release_references()
            self._forget_oldest()

    def _started(self, instance: Instance) -> None:
        start_kind = instance.life.record.start_kind
        kind = {StartKind.HOT: "starts_hot", StartKind.WARM: "starts_warm"}.get(start_kind, "starts_cold")
        setattr(self._counters, kind, getattr(self._counters, kind) + 1)

    def _changed(self, instance: Instance) -> None:
        record = instance.life.record
        previous, instance.published_state = instance.published_state, record.state
        if previous is not record.state:
            self._log(instance, _describe(record))
            if previous is not None:
                self._context.meter.change_state(instance.account, record.state, final=instance.life.final)
            self._context.loads.notify()
        self._published(record)

    def _log(self, instance: Instance, line: str) -> None:
        log.info("instance %s of %s: %s", instance.id, instance.request.function, line)
        request = instance.request
        self._context.log_line(request.function, request.version, f"instance {instance.id}: {line}")

    def _forget_oldest(self) -> None:
        ended = [one.id for one in self._instances.values() if one.life.final]
        for instance_id in ended[:-ENDED_KEPT]:
            del self._instances[instance_id]


def _describe(record: InstanceRecord) -> str:
    if record.state is InstanceState.FAILED:
        return f"failed: {record.error}"
    if record.state is InstanceState.READY:
        phases = ", ".join(f"{phase} {ms:.1f} ms" for phase, ms in record.phases_ms.items())
        return f"ready, a {record.start_kind} start from {record.source}: {phases}"
    return "accepted" if record.state is InstanceState.STARTING else record.state
