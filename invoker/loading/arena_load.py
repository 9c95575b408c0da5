"""Loads into the arena itself, past the host tier: of whole images, and of parts for members of groups."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from invoker.loading.arena_writer import ArenaPlace, ArenaWriter
from invoker.loading.arrival import ImageLoad, release_views
from invoker.loading.fetch_order import FetchOrder
from invoker.loading.partial_image import PartialImage
from invoker.loading.progress import Progress
from rdmacast.aio.groups import cancel_and_wait
from registry.images.manifest import Manifest
from registry.messages.images import ImageHolder, ImageRef


@asynccontextmanager
async def arena_load(
    ref: ImageRef,
    manifest: Manifest,
    place: ArenaPlace,
    peers: Sequence[ImageHolder],
    source: str,
    fetches: FetchOrder,
    progress: Progress,
) -> AsyncIterator[ImageLoad]:
    """Load what the place is for while the block lasts; at its end nothing writes to the arena any more.

    `wait_for` and `complete` raise StartFailed with each source's failure, OSError without memory.
    """

    def on_progress(arrived_bytes: int) -> None:
        progress(arrived_bytes / max(1, place.end - place.start))

    load = ImageLoad(peers, source, PartialImage(ArenaWriter(place), manifest, on_progress))

    async def fill() -> None:
        try:
            await fetches.fill(load, ref)
        except BaseException as error:
            load.target.fail(error)
            release_views(error)
            raise

    load.task = asyncio.create_task(fill(), name=f"load {ref.image[:12]} into {place.region.device}")
    try:
        yield load
    finally:
        await cancel_and_wait(load.task)
        if not load.task.cancelled():
            load.task.exception()  # retrieved: raised by `complete`
        load.target.release()
