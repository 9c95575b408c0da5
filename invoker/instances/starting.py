"""The start of an instance, phase by phase: reserve, fetch, copy, bind, ready."""

from functools import partial

from invoker.base.errors import HandlerNotAllowed, InvalidWork, StartFailed
from invoker.engine.contract import ComputeEngine, GenerateEngine, ModelSpec, UnsupportedModel
from invoker.engine.runner import EngineRunner
from invoker.handlers.builtin import make_builtin
from invoker.handlers.process import handler_spec
from invoker.instances.calls import InstanceSteps
from invoker.instances.device_cache import DeviceCache, DeviceImage, DeviceImageState
from invoker.instances.device_copy import CopiedLayers, ImagePiece, copy_arriving, cut_spans, pieces_of
from invoker.instances.instance import Handler, Instance
from invoker.instances.start_context import (
    InstanceContext,
    close_attachments,
    enter_phase,
    freed_device,
    model_spec,
    parsed_config,
    reserve_kv,
    set_loading,
    set_progress,
    set_source,
)
from invoker.instances.starting_group import start_member
from invoker.instances.starting_vllm import NO_VLLM, start_native_first, start_vllm
from invoker.loading.arena_writer import ArenaPlace
from invoker.loading.arrival import HostArrival, ImageLoad, host_view
from invoker.loading.progress import ProgressThrottle
from invoker.memory.arena import CopyReport
from rdmacast.aio.groups import run_all
from rdmacast.aio.shielded import shielded_stack
from rdmacast.aio.threads import run_in_thread
from registry.images.manifest import Manifest
from registry.messages.images import CheckModel, ImageRef
from registry.records.engine import EngineKind
from registry.records.function import FunctionTask
from registry.records.instance import StartKind


async def start(instance: Instance, context: InstanceContext) -> None:
    """Make the instance ready; if this raises, `release` frees what the instance holds."""
    request = instance.request
    if request.task == FunctionTask.HANDLER:
        await _start_handler(instance, context)
    elif request.image is None:
        raise InvalidWork(f"{request.function}: a function of task {request.task} needs an image")
    else:
        steps = instance.steps = InstanceSteps(context.meter, instance.account)
        start_native = partial(_start_model, instance, request.image, steps, context)
        if request.group is not None:
            await start_member(instance, request.image, request.group, context)
        elif request.engine is EngineKind.NATIVE:
            await start_native()
        elif request.native_first:
            await start_native_first(instance, request.image, steps, context, start_native)
        else:
            await start_vllm(instance, request.image, steps, context)
    kv_tokens = 0 if instance.runner is None else instance.runner.kv_tokens[1]
    instance.life = instance.life.ready(context.clock.wall_s(), context.clock.monotonic_s(), kv_tokens)


async def release(instance: Instance, device_cache: DeviceCache) -> None:
    """Free all resources of the instance. Idempotent."""
    runner, instance.runner = instance.runner, None
    handler, instance.handler = instance.handler, None
    with freed_device(instance, device_cache):
        await close_attachments(instance)
        if runner is not None:
            await runner.aclose()
        if handler is not None:
            await handler.aclose()


async def _start_handler(instance: Instance, context: InstanceContext) -> None:
    request = instance.request
    spec = handler_spec(request.assets)
    if context.make_handler is None and not spec.builtin:
        raise HandlerNotAllowed("handlers are not enabled on this node: start it with --allow-handlers")
    set_source(instance, StartKind.COLD, "assets")
    set_loading(instance, context)
    enter_phase(instance, "bind", context)
    handler: Handler
    if spec.builtin or context.make_handler is None:
        handler = make_builtin(spec.function)
    else:
        log_line = partial(context.log_line, request.function, request.version)
        handler = context.make_handler(lambda line: log_line(f"[handler] {line}"))
    instance.handler = handler
    await handler.start(request.assets, spec, context.scratch_dir, request.secrets)
    enter_phase(instance, "ready", context)


async def _start_model(
    instance: Instance, image: ImageRef, steps: InstanceSteps, context: InstanceContext
) -> None:
    manifest = await context.loader.manifest(image)
    spec = instance.spec = model_spec(instance, manifest)
    loading = await _reserve(instance, image, spec, context)
    set_loading(instance, context)
    runner: EngineRunner | None = None
    async with shielded_stack() as stack:

        async def make() -> EngineRunner:
            engine = await _engine(instance, spec, context)
            name = f"engine {instance.id[:12]}"
            made = EngineRunner(engine, name=name, meter=steps, stepped=context.loads.notify)
            stack.push_async_callback(made.aclose)
            return made

        async def make_early() -> None:
            nonlocal runner
            runner = await make()

        if loading is not None:
            loading_image = _load_image(instance, image, manifest, loading, context)
            early = context.engines.binds_early(
                spec
            )  # then nothing is left to do once the last block is here
            await (run_all(loading_image, make_early()) if early else loading_image)
        instance.loaded_layers = (1 << manifest.num_layers) - 1
        enter_phase(instance, "bind", context)
        instance.runner = runner or await make()
        stack.pop_all()
    enter_phase(instance, "ready", context)


async def _engine(
    instance: Instance, spec: ModelSpec, context: InstanceContext
) -> GenerateEngine | ComputeEngine:
    assert instance.device_image is not None
    region, concurrency = instance.device_image.region, instance.request.max_concurrency
    return await run_in_thread(
        context.engines.make, spec, region, instance.kv, concurrency, undo=_close_engine
    )


async def _reserve(
    instance: Instance, image: ImageRef, spec: ModelSpec, context: InstanceContext
) -> DeviceImage | None:
    """Reserve the instance's regions; return the image's if this instance has to fill it."""
    while (found := context.device_cache.acquire(image.image)) is not None:
        instance.device_image = found
        hot = found.state is DeviceImageState.COMPLETE
        set_source(instance, StartKind.HOT if hot else StartKind.COLD, "arena")
        if not hot:
            await found.settled.wait()
        if found.state is DeviceImageState.COMPLETE:
            await reserve_kv(instance, spec, context)
            return None
        instance.device_image = None
        context.device_cache.release(found)
    device_image = context.device_cache.reserve(image.image, image.nbytes)
    instance.device_image = device_image
    try:
        await reserve_kv(instance, spec, context)
    except BaseException:
        context.device_cache.settle(device_image, loaded=False)
        raise
    return device_image


async def _load_image(
    instance: Instance,
    image: ImageRef,
    manifest: Manifest,
    device_image: DeviceImage,
    context: InstanceContext,
) -> None:
    """Load the image into the arena, or into host memory and copy it from there as it arrives."""
    report = ProgressThrottle(lambda fraction: set_progress(instance, fraction), context.clock.monotonic_s)
    request, region = instance.request, device_image.region
    place = ArenaPlace(arena=context.arena, region=region, nbytes=image.nbytes, start=0, end=image.nbytes)
    host_copy = request.host_copy or request.native_first  # vLLM maps it
    loaded = False
    try:
        enter_phase(instance, "fetch", context)
        async with context.loader.open_for_arena(
            image, manifest, place, report, host_copy=host_copy
        ) as arrival:
            set_source(instance, arrival.kind, arrival.source)
            copied = await _copy(instance, manifest, arrival, device_image, report, context)
            set_source(instance, arrival.kind, arrival.source)
            # Here: from the end of the block on, peers are served as the cache says.
            context.device_cache.settle(device_image, loaded=True)
            loaded = True
    finally:
        if not loaded:
            context.device_cache.settle(device_image, loaded=False)
    context.log_line(
        request.function,
        request.version,
        f"instance {instance.id}: {image.nbytes} bytes from {arrival.source}, {copied.to(region.device)}",
    )


async def _copy(
    instance: Instance,
    manifest: Manifest,
    arrival: HostArrival | ImageLoad,
    device_image: DeviceImage,
    report: ProgressThrottle,
    context: InstanceContext,
) -> CopyReport:
    results: list[CopyReport] = []
    arena, view, copied_bytes, total = context.arena, host_view(arrival), 0, manifest.nbytes
    if instance.request.live and manifest.num_layers:
        pieces = pieces_of(manifest, arena.copy_bytes, instance.request.first_layer)
    else:
        pieces = cut_spans([(0, total, None)], arena.copy_bytes)
    layers = CopiedLayers(pieces, manifest.num_layers)

    def on_copied(piece: ImagePiece) -> None:
        nonlocal copied_bytes
        copied_bytes += piece.end - piece.start
        if instance.life.phase == "copy":
            report(copied_bytes / total)
        if layers.add(piece):
            instance.loaded_layers = layers.bits

    async def fetched() -> None:
        await arrival.complete()
        enter_phase(instance, "copy", context)

    async def copied() -> None:
        region = device_image.region
        results.append(await copy_arriving(arena, region, view, pieces, arrival.wait_for, on_copied))

    await run_all(fetched(), copied())
    if not arrival.is_complete:
        raise StartFailed("the image is incomplete")
    return results[0]


async def check_model(request: CheckModel, context: InstanceContext) -> bool:
    """Return whether the node's own engine runs a model, if it has the engine. Raises UnsupportedModel."""
    config = parsed_config({"config.json": request.config})
    if request.engine is EngineKind.VLLM:
        if context.vllm is None:
            raise UnsupportedModel(NO_VLLM)
        await context.vllm.check(request.engine_args, config)
    spec = ModelSpec(
        manifest=await context.loader.manifest(request.image),
        config=config,
        dtype=request.dtype,
        context_length=request.context_length,
    )
    try:
        await run_in_thread(context.engines.check, spec)
    except UnsupportedModel:
        if request.engine is EngineKind.NATIVE:
            raise
        return False
    return True


def _close_engine(engine: GenerateEngine | ComputeEngine) -> None:
    engine.close()
