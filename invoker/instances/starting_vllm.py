"""The start of vLLM, alone or with the node's own engine, which serves until vLLM is ready."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

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


async def start_vllm(
    instance: Instance, image: ImageRef, steps: InstanceSteps, context: InstanceContext
) -> None:
    """Start vLLM alone."""
    report = ProgressThrottle(lambda fraction: set_progress(instance, fraction), context.clock.monotonic_s)
    manifest = await context.loader.manifest(image)
    set_loading(instance, context)
    enter_phase(instance, "fetch", context)

    async def fetch() -> None:
        async with context.loader.open_image(image, manifest, report) as arrival:
            await arrival.complete()
            set_source(instance, arrival.kind, arrival.source)
        enter_phase(instance, "bind", context)

    async def make() -> None:
        instance.runner = await _vllm_runner(instance, image, steps, context)

    await run_all(fetch(), make())
    enter_phase(instance, "ready", context)


async def start_native_first(
    instance: Instance,
    image: ImageRef,
    steps: InstanceSteps,
    context: InstanceContext,
    start_native: Callable[[], Coroutine[Any, Any, None]],
) -> None:
    """Start the native engine, which serves at once, and vLLM beside it."""
    starting = asyncio.create_task(
        _vllm_runner(instance, image, steps, context), name=f"vLLM of {instance.id}"
    )
    loading = asyncio.create_task(start_native(), name=f"native engine of {instance.id}")
    try:
        await asyncio.wait([starting, loading], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()  # its failure is one of this start
        await loading
    except BaseException:
        await run_shielded(_discard(starting, loading))
        raise
    native = instance.runner
    assert isinstance(native, EngineRunner)

    def on_vllm() -> None:
        instance.life = instance.life.with_engine(EngineKind.VLLM)

    on_native_ended = partial(free_device, instance, context.device_cache)
    instance.runner = NativeFirst(native, starting, on_vllm=on_vllm, on_native_ended=on_native_ended)


async def _discard(starting: "asyncio.Task[VllmRunner]", loading: "asyncio.Task[None]") -> None:
    await cancel_and_wait(starting, loading)
    if not starting.cancelled() and starting.exception() is None:
        await starting.result().aclose()
    if not loading.cancelled():
        loading.exception()  # marks it as retrieved: the start fails with the first of both


async def _vllm_runner(
    instance: Instance, image: ImageRef, steps: InstanceSteps, context: InstanceContext
) -> VllmRunner:
    """Return a vLLM server of the image once it is ready. Raises ServerFailed, StartFailed."""
    if context.vllm is None:
        raise StartFailed(NO_VLLM)
    request = instance.request
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
            return VllmRunner(server, steps)
        except BaseException:
            await run_shielded(server.aclose())
            raise
