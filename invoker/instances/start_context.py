"""What starts of instances need, and the phases that they go through."""

import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from invoker.base.errors import OutOfDeviceMemory, StartFailed
from invoker.engine.contract import ModelSpec
from invoker.engine.factory import EngineFactory
from invoker.instances.device_cache import DeviceCache
from invoker.instances.instance import Handler, Instance, ModelRunner
from invoker.instances.load_feed import LoadFeed
from invoker.loading.engine_images import EngineImages
from invoker.loading.loader import ImageLoader
from invoker.memory.arena import Arena
from invoker.metering.meter import GpuMeter
from invoker.vllm.host import VllmHost
from rdmacast.aio.threads import run_in_thread
from registry.clock import Clock
from registry.images.manifest import Manifest
from registry.records.instance import InstanceState, StartKind

MakeHandler = Callable[[Callable[[str], None]], Handler]
OpenGroup = Callable[[Instance], Awaitable[ModelRunner]]


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceContext:
    """Dependencies of instances. `make_handler` is None if handlers are not allowed.

    `open_group` returns the engine of the group that an instance leads (see invoker/live/groups.py).
    """

    arena: Arena
    device_cache: DeviceCache
    loader: ImageLoader
    engines: EngineFactory
    make_handler: MakeHandler | None
    scratch_dir: Path
    clock: Clock
    meter: GpuMeter
    loads: LoadFeed
    log_line: Callable[[str, int, str], None]  # function, version, line for its log
    engine_images: EngineImages
    open_group: OpenGroup
    vllm: VllmHost | None = None


@contextmanager
def freed_device(instance: Instance, device_cache: DeviceCache) -> Iterator[None]:
    """Free what the instance has of the arena after the block, in which all that uses it is ended.

    From the block's start on an attachment that opens finds nothing to use.
    """
    kv, instance.kv = instance.kv, None
    device_image, instance.device_image = instance.device_image, None
    try:
        yield
    finally:
        if kv is not None:
            device_cache.free_region(kv)
        if device_image is not None:
            device_cache.release(device_image)


async def close_attachments(instance: Instance) -> None:
    """End the pipelines and stages that use the instance's memory."""
    for part in tuple(instance.attachments):
        await part.aclose()


async def free_device(instance: Instance, device_cache: DeviceCache) -> None:
    """Free what the instance has of the arena, which its engine no longer uses."""
    with freed_device(instance, device_cache):
        await close_attachments(instance)


def set_source(instance: Instance, kind: StartKind, source: str) -> None:
    instance.life = instance.life.with_source(kind, source)


def set_loading(instance: Instance, context: InstanceContext) -> None:
    instance.life = instance.life.with_state(InstanceState.LOADING, context.clock.wall_s())


def enter_phase(instance: Instance, phase: str, context: InstanceContext) -> None:
    instance.life = instance.life.with_phase(phase, context.clock.monotonic_s())


def set_progress(instance: Instance, fraction: float) -> None:
    if instance.life.phase in ("fetch", "copy"):
        instance.life = instance.life.with_progress(fraction)


def model_spec(instance: Instance, manifest: Manifest) -> ModelSpec:
    """Return the model of the instance, whole. Raises StartFailed."""
    request = instance.request
    return ModelSpec(
        manifest=manifest,
        config=parsed_config(request.assets),
        dtype=request.dtype,
        context_length=request.context_length,
    )


def parsed_config(assets: Mapping[str, bytes]) -> Mapping[str, object]:
    """Return the model's config.json. Raises StartFailed."""
    try:
        config = json.loads(assets["config.json"])
    except KeyError:
        raise StartFailed("the function has no config.json") from None
    except ValueError as error:
        raise StartFailed(f"config.json: {error}") from error
    if not isinstance(config, dict):
        raise StartFailed("config.json is not a JSON object")
    return config


async def reserve_kv(instance: Instance, spec: ModelSpec, context: InstanceContext) -> None:
    """Reserve the KV cache of the spec's layers. Raises OutOfDeviceMemory, EngineError."""
    minimum, wanted = await run_in_thread(context.engines.kv_bytes, spec, instance.request.max_concurrency)
    if not wanted:
        return
    try:
        instance.kv = context.device_cache.reserve_kv(minimum, wanted)
    except OutOfDeviceMemory as error:
        raise OutOfDeviceMemory(
            f"the KV cache of one sequence of {spec.context_length} tokens takes {minimum} bytes: {error} "
            f"(raise --gpu-memory or lower the context length)"
        ) from error
