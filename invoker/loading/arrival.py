"""Images as their users see them: complete, or loading by one task."""

import asyncio
import traceback
from collections.abc import Sequence
from typing import Protocol

from invoker.base.errors import StartFailed
from invoker.host_tier.image_writer import ImageWriter
from invoker.host_tier.mapping import HostMapping, close_if_open, release
from invoker.loading.partial_image import PartialImage
from invoker.loading.progress import Progress
from rdmacast.errors import CastError
from registry.messages.images import ImageHolder
from registry.records.instance import StartKind


class ImageArrival:
    """An image, or a part of one, that is complete or loading; valid while it is open (see ImageLoader)."""

    def __init__(self, kind: StartKind, source: str) -> None:
        self.kind = kind
        self.source = source

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.kind} from {self.source}>"

    @property
    def is_complete(self) -> bool:
        """Return whether all of it has arrived, and is in its place."""
        return True

    async def wait_for(self, offset: int, nbytes: int) -> None:
        """Wait until the range may be read. Raises what the load failed with."""

    async def complete(self) -> None:
        """Wait until all of it is in its place. Raises what the load failed with."""


class HostArrival(Protocol):
    """An ImageArrival in host memory, with a `view` of the whole image."""

    kind: StartKind
    source: str
    view: memoryview

    @property
    def is_complete(self) -> bool: ...

    async def wait_for(self, offset: int, nbytes: int) -> None: ...

    async def complete(self) -> None: ...

    def open_file(self) -> int:
        """Return a new descriptor of its file, for reading; what has not arrived is not to be read."""
        ...


class MappedImage(ImageArrival):
    """A HostArrival that was complete when it was opened."""

    def __init__(self, kind: StartKind, mapping: HostMapping) -> None:
        super().__init__(kind, "host")
        self.mapping = mapping
        self.view = mapping.view

    def open_file(self) -> int:
        return self.mapping.reopen()


class ImageLoad(ImageArrival):
    """A load by one task of this process, which fills `target`."""

    def __init__(self, peers: Sequence[ImageHolder], source: str, target: PartialImage) -> None:
        super().__init__(StartKind.COLD, source)
        self.peers = peers
        self.target = target
        self.origins: set[str] = set()
        self.casts: set[str] = set()  # casts whose progress here has been published
        self.task: asyncio.Task[None]

    @property
    def is_complete(self) -> bool:
        return self.target.is_complete

    async def wait_for(self, offset: int, nbytes: int) -> None:
        try:
            await self.target.wait_for(offset, nbytes)
        except CastError:
            await self.complete()  # raises the cause
            raise

    async def complete(self) -> None:
        await asyncio.wait([self.task])
        if self.task.cancelled():
            raise StartFailed(f"the load of image {self.target.manifest.sha256[:12]} was cancelled")
        self.task.result()


class HostLoad(ImageLoad):
    """A HostArrival: a load into the host tier, shared by any number of users."""

    def __init__(
        self, peers: Sequence[ImageHolder], source: str, target: PartialImage, writer: ImageWriter
    ) -> None:
        super().__init__(peers, source, target)
        self.view = writer.view.toreadonly()
        self.watchers: list[Progress] = []
        self.users = 0
        self.writer = writer
        self.mapping: HostMapping | None = None

    @property
    def is_complete(self) -> bool:
        return self.mapping is not None

    def open_file(self) -> int:
        return self.writer.reopen() if self.mapping is None else self.mapping.reopen()

    def free_memory(self) -> None:
        """Free the memory after the load, without users; views being read stay valid."""
        release(self.view)
        self.target.release()
        close_if_open(self.mapping)


def host_view(arrival: HostArrival | ImageLoad) -> memoryview | None:
    """Return the image in host memory; None where it arrives in the arena itself."""
    return arrival.view if isinstance(arrival, MappedImage | HostLoad) else None


def release_views(error: BaseException) -> None:
    """Release views held by the traceback's frames: the error outlives the memory."""
    traceback.clear_frames(error.__traceback__)
