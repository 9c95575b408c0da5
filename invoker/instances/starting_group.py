"""The start of a member of a group: it has a range of the layers, and one member runs the pipeline of all."""

from dataclasses import replace

from invoker.base.errors import InvalidWork, StartFailed
from invoker.instances.device_cache import DeviceImage
from invoker.instances.device_copy import copy_arriving, cut_spans
from invoker.instances.instance import Instance
from invoker.instances.start_context import (
    InstanceContext,
    enter_phase,
    model_spec,
    reserve_kv,
    set_loading,
    set_progress,
    set_source,
)
from invoker.loading.arena_writer import ArenaPlace
from invoker.loading.arrival import HostArrival, ImageLoad, host_view
from invoker.loading.progress import ProgressThrottle
from invoker.memory.arena import CopyReport
from rdmacast.aio.groups import run_all
from registry.images.manifest import Manifest, layer_extent
from registry.messages.images import ImageRef
from registry.records.instance import InstanceGroup


async def start_member(
    instance: Instance, image: ImageRef, group: InstanceGroup, context: InstanceContext
) -> None:
    """Load the member's layers; the leader then opens the pipeline, once the others have loaded theirs."""
    member = group.member(instance.id)
    manifest = await context.loader.manifest(image)
    if not 0 <= member.first < member.last <= manifest.num_layers:
        raise InvalidWork(
            f"layers [{member.first}, {member.last}) of a model with {manifest.num_layers} layers"
        )
    held = layer_extent(manifest, member.first, member.last)
    layers = member.first, member.last
    spec = instance.spec = replace(model_spec(instance, manifest), layers=layers, held=held)
    part = instance.device_image = context.device_cache.reserve_part(image.image, held[1] - held[0])
    await reserve_kv(instance, spec, context)
    set_loading(instance, context)
    await _load_part(instance, image, manifest, part, held, context)
    instance.loaded_layers = (1 << member.last) - (1 << member.first)
    enter_phase(instance, "bind", context)
    if group.leader is member:
        instance.runner = await context.open_group(instance)
    enter_phase(instance, "ready", context)


async def _load_part(
    instance: Instance,
    image: ImageRef,
    manifest: Manifest,
    part: DeviceImage,
    held: tuple[int, int],
    context: InstanceContext,
) -> None:
    """Load the bytes `held` of the image into the part's region."""
    report = ProgressThrottle(lambda fraction: set_progress(instance, fraction), context.clock.monotonic_s)
    enter_phase(instance, "fetch", context)
    start, end = held
    place = ArenaPlace(arena=context.arena, region=part.region, nbytes=image.nbytes, start=start, end=end)
    async with context.loader.open_for_arena(image, manifest, place, report, host_copy=False) as arrival:
        set_source(instance, arrival.kind, arrival.source)
        copied = await _copy(instance, arrival, part, held, context)
        set_source(instance, arrival.kind, arrival.source)
        if not arrival.is_complete:
            raise StartFailed("the image is incomplete")
    context.log_line(
        instance.request.function,
        instance.request.version,
        f"instance {instance.id}: {copied.nbytes} of {image.nbytes} bytes from {arrival.source}, "
        f"{copied.to(context.arena.device)}",
    )


async def _copy(
    instance: Instance,
    arrival: HostArrival | ImageLoad,
    part: DeviceImage,
    held: tuple[int, int],
    context: InstanceContext,
) -> CopyReport:
    start, end = held
    arena, results = context.arena, list[CopyReport]()
    pieces = cut_spans([(start, end, None)], arena.copy_bytes)

    async def fetched() -> None:
        await arrival.wait_for(start, end - start)
        enter_phase(instance, "copy", context)

    async def copied() -> None:
        view, region = host_view(arrival), part.region
        results.append(await copy_arriving(arena, region, view, pieces, arrival.wait_for, base=start))

    await run_all(fetched(), copied())
    return results[0]
