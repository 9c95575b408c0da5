"""The start of an instance, phase by phase: reserve, fetch, copy, bind, ready."""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from invoker.arena import Arena, Copied, copy_following, pinned
from invoker.arriving import HeldLayers, Piece, copy_arriving, pieces_of
from invoker.calls import StepsOf
from invoker.engine.contract import ComputeEngine, GenerateEngine, ModelSpec
from invoker.engine.runner import EngineRunner
from invoker.engines import Engines
from invoker.errors import BadWork, HandlerNotAllowed, OutOfDeviceMemory, StartFailed
from invoker.handlers.builtin import make_builtin
from invoker.handlers.process import handler_spec
from invoker.instance import Handler, Instance
from invoker.kv_budget import kv_cache_bytes
from invoker.loader import Arrival, ImageLoader, ProgressThrottle
from invoker.meter import GpuMeter
from invoker.residents import Resident, Residents, ResidentState
from invoker.threads import in_thread
from invoker.together import let_go_whole, together
from registry.clock import Clock
from registry.function import Task
from registry.images.manifest import Manifest
from registry.instance import InstanceState, StartKind
from registry.messages import ImageRef

log = logging.getLogger("invoker.starting")

MakeHandler = Callable[[Callable[[str], None]], Handler]


@dataclass(frozen=True, slots=True, kw_only=True)
class Equipment:
    """What starts are made with. `make_handler` is None where handlers are not allowed."""

    arena: Arena
    residents: Residents
    loader: ImageLoader
    engines: Engines
    make_handler: MakeHandler | None
    scratch_dir: Path
    clock: Clock
    meter: GpuMeter
    tell: Callable[[str, str], None]  # a function's name and a line for its log


async def start(instance: Instance, gear: Equipment) -> None:
    """Make the instance ready. Whatever it holds when this raises, `release` gives back."""
    request = instance.request
    if request.task == Task.HANDLER:
        await _start_handler(instance, gear)
    elif request.image is None:
        raise BadWork(f"{request.function}: a {request.task} function needs an image")
    else:
        await _start_model(instance, request.image, gear)
    instance.life = instance.life.ready(gear.clock.wall_s(), gear.clock.monotonic_s())


async def release(instance: Instance, gear: Equipment) -> None:
    """Free all that the instance occupies. Idempotent."""
    runner, instance.runner = instance.runner, None
    handler, instance.handler = instance.handler, None
    kv, instance.kv = instance.kv, None
    resident, instance.resident = instance.resident, None
    try:
        for part in tuple(instance.parts):
            await part.aclose()
        if runner is not None:
            await runner.aclose()
        if handler is not None:
            await handler.aclose()
    finally:
        if kv is not None:
            gear.residents.free_region(kv)
        if resident is not None:
            gear.residents.release(resident)


async def _start_handler(instance: Instance, gear: Equipment) -> None:
    request = instance.request
    spec = handler_spec(request.assets)
    if gear.make_handler is None and not spec.builtin:
        raise HandlerNotAllowed("this node runs no handlers: start it with --allow-handlers")
    _plan(instance, StartKind.COLD, "assets")
    _load(instance, gear)
    _enter(instance, "bind", gear)
    handler: Handler
    if spec.builtin or gear.make_handler is None:
        handler = make_builtin(spec.function)
    else:
        handler = gear.make_handler(lambda line: gear.tell(request.function, f"[handler] {line}"))
    instance.handler = handler
    await handler.start(request.assets, spec, gear.scratch_dir)
    _enter(instance, "ready", gear)


async def _start_model(instance: Instance, image: ImageRef, gear: Equipment) -> None:
    manifest = await gear.loader.manifest(image)
    spec = instance.spec = _spec(instance, manifest)
    steps = instance.steps = StepsOf(gear.meter, instance.account)
    loading = await _reserve(instance, image, spec, gear)
    _load(instance, gear)
    runner: EngineRunner | None = None
    async with let_go_whole() as stack:

        async def make() -> EngineRunner:
            engine = await _engine(instance, spec, gear)
            made = EngineRunner(engine, name=f"engine {instance.id[:12]}", meter=steps)
            stack.push_async_callback(made.aclose)
            return made

        async def make_early() -> None:
            nonlocal runner
            runner = await make()

        if loading is not None:
            bringing = _bring(instance, image, manifest, loading, gear)
            early = gear.engines.binds_early(spec)  # then nothing is left to do once the last block is here
            await (together(bringing, make_early()) if early else bringing)
        instance.held = (1 << manifest.num_layers) - 1
        _enter(instance, "bind", gear)
        instance.runner = runner or await make()
        stack.pop_all()
    _enter(instance, "ready", gear)


async def _engine(instance: Instance, spec: ModelSpec, gear: Equipment) -> GenerateEngine | ComputeEngine:
    assert instance.resident is not None
    region, concurrency = instance.resident.region, instance.request.max_concurrency
    return await in_thread(gear.engines.make, spec, region, instance.kv, concurrency, undo=_close_engine)


async def _reserve(instance: Instance, image: ImageRef, spec: ModelSpec, gear: Equipment) -> Resident | None:
    """Give the instance its regions; returns the image's region if it is for this instance to fill."""
    while (found := gear.residents.acquire(image.image)) is not None:
        instance.resident = found
        hot = found.state is ResidentState.COMPLETE
        _plan(instance, StartKind.HOT if hot else StartKind.COLD, "arena")
        if not hot:
            await found.settled.wait()
        if found.state is ResidentState.COMPLETE:
            await _reserve_kv(instance, spec, gear)
            return None
        instance.resident = None
        gear.residents.release(found)
    resident = gear.residents.reserve(image.image, image.nbytes)
    instance.resident = resident
    try:
        await _reserve_kv(instance, spec, gear)
    except BaseException:
        gear.residents.settle(resident, loaded=False)
        raise
    return resident


async def _reserve_kv(instance: Instance, spec: ModelSpec, gear: Equipment) -> None:
    least, wanted = await in_thread(gear.engines.kv_bytes, spec, instance.request.max_concurrency)
    if not wanted:
        return
    free = gear.arena.largest_free_bytes
    nbytes = kv_cache_bytes(least_bytes=least, wanted_bytes=wanted, largest_free_bytes=free)
    try:
        instance.kv = gear.residents.reserve_region(nbytes)
    except OutOfDeviceMemory as error:
        raise OutOfDeviceMemory(
            f"the KV cache of one sequence of {spec.context_length} tokens takes {least} bytes: {error} "
            f"(raise --gpu-memory or lower the context length)"
        ) from error


async def _bring(
    instance: Instance, image: ImageRef, manifest: Manifest, resident: Resident, gear: Equipment
) -> None:
    """Fetch the image into host memory, and copy it to the accelerator behind its arrival."""
    report = ProgressThrottle(lambda fraction: _progress(instance, fraction), gear.clock.monotonic_s)
    loaded = False
    try:
        _enter(instance, "fetch", gear)
        async with gear.loader.arriving(image, manifest, report) as arrival:
            _plan(instance, arrival.kind, arrival.source)
            copied = await _copy(instance, manifest, arrival, resident, report, gear)
            _plan(instance, arrival.kind, arrival.source)
        loaded = True
        gear.tell(
            instance.request.function,
            f"instance {instance.id}: {image.nbytes} bytes from {arrival.source}, "
            f"copied to {gear.arena.device} at {copied.gb_per_s:.2f} GB/s",
        )
    finally:
        gear.residents.settle(resident, loaded=loaded)


async def _copy(
    instance: Instance,
    manifest: Manifest,
    arrival: Arrival,
    resident: Resident,
    report: ProgressThrottle,
    gear: Equipment,
) -> Copied:
    results: list[Copied] = []
    copied_bytes = 0
    total = max(1, resident.region.nbytes)

    def on_copied(nbytes: int) -> None:
        if instance.life.phase == "copy":
            report(nbytes / total)

    async def fetched() -> None:
        await arrival.complete()
        _enter(instance, "copy", gear)

    async def copied() -> None:
        region, view, wait_for = resident.region, arrival.view, arrival.wait_for
        if not (instance.request.live and manifest.num_layers):
            results.append(await copy_following(gear.arena, region, view, wait_for, on_copied))
            return
        pieces = pieces_of(manifest, gear.arena.copy_bytes, instance.request.first_layer)
        layers = HeldLayers(pieces, manifest.num_layers)

        def on_piece(piece: Piece) -> None:
            nonlocal copied_bytes
            copied_bytes += piece.end - piece.start
            on_copied(copied_bytes)
            if layers.copied(piece):
                instance.held = layers.bits

        results.append(await copy_arriving(gear.arena, region, view, pieces, wait_for, on_piece))

    async with pinned(gear.arena, arrival.view):
        await together(fetched(), copied())
    if not arrival.is_whole:
        raise StartFailed("the image did not come whole")
    return results[0]


def _spec(instance: Instance, manifest: Manifest) -> ModelSpec:
    request = instance.request
    return ModelSpec(
        manifest=manifest,
        config=_config(request.assets),
        dtype=request.dtype,
        context_length=request.context_length,
    )


def _config(assets: Mapping[str, bytes]) -> Mapping[str, object]:
    try:
        config = json.loads(assets["config.json"])
    except KeyError:
        raise StartFailed("the function has no config.json") from None
    except ValueError as error:
        raise StartFailed(f"config.json: {error}") from error
    if not isinstance(config, dict):
        raise StartFailed("config.json is not a JSON object")
    return config


def _plan(instance: Instance, kind: StartKind, source: str) -> None:
    instance.life = instance.life.planned(kind, source)


def _load(instance: Instance, gear: Equipment) -> None:
    instance.life = instance.life.moved(InstanceState.LOADING, gear.clock.wall_s())


def _enter(instance: Instance, phase: str, gear: Equipment) -> None:
    instance.life = instance.life.entered(phase, gear.clock.monotonic_s())


def _progress(instance: Instance, fraction: float) -> None:
    if instance.life.phase in ("fetch", "copy"):
        instance.life = instance.life.progressed(fraction)


def _close_engine(engine: GenerateEngine | ComputeEngine) -> None:
    engine.close()
