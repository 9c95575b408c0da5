"""What arrives on this node, for gateways whose users watch a load: nothing is counted while nobody does."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from itertools import islice

from invoker.instances.instance import Instance
from invoker.loading.partial_image import PartialImage
from registry.clock import Clock
from registry.images.manifest import UNIT_BYTES
from registry.messages.arrivals import MAX_ARRIVING, MAX_CELLS, Arrivals, ArrivingImage, ArrivingLayers
from registry.messages.live import encode_layer_set
from registry.records.instance import InstanceState

_LOADING = (InstanceState.STARTING, InstanceState.LOADING)


async def follow_arrivals(
    images: Callable[[], Iterable[PartialImage]],
    instances: Callable[[], Iterable[Instance]],
    clock: Clock,
    interval_s: float,
) -> AsyncGenerator[Arrivals, None]:
    """Yield what arrives now, and after each change, sampled every `interval_s`; ends with its caller.

    A block arrives every few milliseconds, so that a callback for each would cost the load more than this.
    """
    shown: tuple[tuple[ArrivingImage, ...], tuple[ArrivingLayers, ...]] | None = None
    while True:
        now = (
            tuple(map(_image, islice(images(), MAX_ARRIVING))),
            tuple(islice(_layers(instances()), MAX_ARRIVING)),
        )
        if now != shown:
            shown = now
            yield Arrivals(at=clock.wall_s(), images=now[0], instances=now[1])
        await asyncio.sleep(interval_s)


def cell_bytes(nbytes: int) -> int:
    """Return the size of the equal parts, at most MAX_CELLS, in which an image is reported: whole units."""
    units = -(-nbytes // UNIT_BYTES)
    return -(-units // MAX_CELLS) * UNIT_BYTES


def _image(target: PartialImage) -> ArrivingImage:
    field = target.bitfield(cell_bytes(target.nbytes))
    held = field.held.to_bytes((field.blocks + 7) // 8, "little")
    return ArrivingImage(image=target.manifest.sha256, cells=field.blocks, held=held)


def _layers(instances: Iterable[Instance]) -> Iterable[ArrivingLayers]:
    for instance in instances:
        if instance.state in _LOADING and instance.spec is not None:
            yield ArrivingLayers(
                instance_id=instance.id,
                layers=instance.spec.manifest.num_layers,
                held=encode_layer_set(instance.loaded_layers),
            )
