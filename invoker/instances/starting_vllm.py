"""The start of vLLM, alone or with the node's own engine, which serves until vLLM is ready."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from invoker.base.errors import StartFailed
from invoker.engine.runner import EngineRunner
from invoker.instances.calls import InstanceSteps
from invoker.instances.instance import Instance
from invoker.instances.start_context import (
    InstanceContext,
    enter_phase,
    free_device,
    set_loading,
    set_progress,
    set_source,
)
from invoker.loading.progress import ProgressThrottle
from invoker.vllm.native_first import NativeFirst
from invoker.vllm.runner import VllmRunner
from rdmacast.aio.groups import cancel_and_wait, run_all
from rdmacast.aio.shielded import run_shielded, shielded_stack
from registry.messages.images import ImageRef
from registry.records.engine import EngineKind

NO_VLLM = "this node has no vLLM: start it with --vllm-python PATH"


async def start_vllm(instance: Instance, image: ImageRef, context: InstanceContext) -> None:
    """Start vLLM alone."""
    report = ProgressThrottle(lambda fraction: set_progress(instance, fraction), context.clock.monotonic_s)
    manifest = await context.loader.manifest(image)
    instance.steps = InstanceSteps(context.meter, instance.account)
    set_loading(instance, context)
    enter_phase(instance, "fetch", context)

    async def fetch() -> None:
        async with context.loader.open_image(image, manifest, report) as arrival:
            await arrival.complete()
            set_source(instance, arrival.kind, arrival.source)
        enter_phase(instance, "bind", context)

    async def make() -> None:
        instance.runner = await _vllm_runner(instance, image, context)

    await run_all(fetch(), make())
    enter_phase(instance, "ready", context)


async def start_native_first(
    instance: Instance, image: ImageRef, context: InstanceContext, start_native: Callable[[], Awaitable[None]]
) -> None:
    """Start the native engine, which serves at once, and vLLM beside it."""
    instance.steps = InstanceSteps(context.meter, instance.account)
    starting = asyncio.create_task(_vllm_runner(instance, image, context), name=f"vLLM of {instance.id}")
    try:
        await start_native()
    except BaseException:
        await run_shielded(_discard(starting))
        raise
    native = instance.runner
    assert isinstance(native, EngineRunner)

    def on_vllm() -> None:
        instance.life = instance.life.with_engine(EngineKind.VLLM)

    instance.runner = NativeFirst(
        native, starting, on_vllm=on_vllm, on_native_ended=lambda: free_device(instance, context)
    )


async def _discard(starting: "asyncio.Task[VllmRunner]") -> None:
    await cancel_and_wait(starting)
    if not starting.cancelled() and starting.exception() is None:
        await starting.result().aclose()


async def _vllm_runner(instance: Instance, image: ImageRef, context: InstanceContext) -> VllmRunner:
    """Return a vLLM server of the image once it is ready. Raises ServerFailed, StartFailed."""
    if context.vllm is None:
        raise StartFailed(NO_VLLM)
    request, steps = instance.request, instance.steps
    assert steps is not None
    log_line = partial(context.log_line, request.function, request.version)
    async with shielded_stack() as stack:
        stack.enter_context(context.engine_images.expecting(image))
        if not context.vllm.loads_arriving:
            manifest = await context.loader.manifest(image)
            arrival = await stack.enter_async_context(
                context.loader.open_image(image, manifest, lambda _: None)
            )
            await arrival.complete()
        server = await context.vllm.start(request, image, lambda line: log_line(f"[vllm] {line}"))
        try:
            await server.wait_ready()
        except BaseException:
            await run_shielded(server.aclose())
            raise
    return VllmRunner(server, steps, context.loads.notify)
