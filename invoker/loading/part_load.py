"""Loads of a part of an image, for a member of a group: from its own sources, past the host tier."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec

from invoker.host_tier.image_writer import ImageWriter
from invoker.loading.arrival import ImageLoad, release_views
from invoker.loading.fetch_order import FetchOrder
from invoker.loading.partial_image import PartialImage
from invoker.loading.progress import Progress
from rdmacast.aio.groups import cancel_and_wait
from rdmacast.aio.threads import run_in_thread
from registry.images.manifest import Manifest
from registry.messages.images import ImageHolder, ImageRef


class PartLoad(ImageLoad):
    """The load of a part by this process, for one instance; it is not in the host tier at its end."""

    @property
    def is_complete(self) -> bool:
        return self.target.is_complete


@asynccontextmanager
async def part_load(
    ref: ImageRef,
    manifest: Manifest,
    wanted: tuple[int, int],
    make_writer: Callable[[], ImageWriter],
    peers: Sequence[ImageHolder],
    fetches: FetchOrder,
    progress: Progress,
) -> AsyncIterator[PartLoad]:
    """Load the bytes `wanted` of an image while the block lasts, which reads them as they arrive.

    They come from the same sources as whole images, but for casts: these bring all of it. Peers read nothing
    of them. `wait_for` and `complete` raise StartFailed with each source's failure, OSError without memory.
    """
    start, end = wanted

    def on_progress(arrived_bytes: int) -> None:
        progress(arrived_bytes / max(1, end - start))

    writer = await run_in_thread(make_writer, undo=lambda late: late.abandon())
    target = PartialImage(writer, manifest, on_progress, wanted=wanted)
    load = PartLoad(peers, "", target)

    async def fill() -> None:
        try:
            await fetches.fill(load, msgspec.structs.replace(ref, cast=None))
        except BaseException as error:
            target.fail(error)
            release_views(error)
            raise

    load.task = asyncio.create_task(fill(), name=f"load {start}-{end} of {ref.image[:12]}")
    try:
        yield load
    finally:
        await cancel_and_wait(load.task)
        if not load.task.cancelled():
            load.task.exception()  # retrieved: raised by `complete`
        load.free_memory()
