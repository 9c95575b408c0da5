"""Images in host memory as their users see them: complete, or loading by one task that all users share."""

import asyncio
import traceback
from collections.abc import Sequence

from invoker.base.errors import StartFailed
from invoker.host_tier.mapping import HostMapping, close_if_open, release
from invoker.loading.partial_image import PartialImage
from invoker.loading.progress import Progress
from rdmacast.errors import CastError
from registry.messages.images import ImageHolder
from registry.records.instance import StartKind


class ImageArrival:
    """An image in host memory, complete or loading, valid while `ImageLoader.open_image` is open."""

    def __init__(self, kind: StartKind, source: str, view: memoryview) -> None:
        self.kind = kind
        self.source = source
        self.view = view.toreadonly()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.kind} from {self.source}>"

    @property
    def is_complete(self) -> bool:
        """Return whether all of it is in the host tier."""
        return True

    def open_file(self) -> int:
        """Return a new descriptor of its file, for reading; what has not arrived is not to be read."""
        raise NotImplementedError

    async def wait_for(self, offset: int, nbytes: int) -> None:
        """Wait until the range may be read. Raises what the load failed with."""

    async def complete(self) -> None:
        """Wait until the whole image is in the host tier. Raises what the load failed with."""


class MappedImage(ImageArrival):
    """An image that was complete when it was opened."""

    def __init__(self, kind: StartKind, mapping: HostMapping) -> None:
        super().__init__(kind, "host", mapping.view)
        self.mapping = mapping

    def open_file(self) -> int:
        return self.mapping.reopen()


class ImageLoad(ImageArrival):
    """A load by this process: one task, shared by any number of users."""

    def __init__(self, peers: Sequence[ImageHolder], source: str, target: PartialImage) -> None:
        super().__init__(StartKind.COLD, source, target.writer.view)
        self.peers = peers
        self.target = target
        self.watchers: list[Progress] = []
        self.users = 0
        self.origins: set[str] = set()
        self.casts: set[str] = set()  # casts whose progress here has been published
        self.mapping: HostMapping | None = None
        self.task: asyncio.Task[None]

    @property
    def is_complete(self) -> bool:
        return self.mapping is not None

    def open_file(self) -> int:
        return self.target.writer.reopen() if self.mapping is None else self.mapping.reopen()

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

    def free_memory(self) -> None:
        """Free the memory after the load, without users; views being read stay valid."""
        release(self.view)
        self.target.release()
        close_if_open(self.mapping)


def release_views(error: BaseException) -> None:
    """Release views held by the traceback's frames: the error outlives the memory."""
    traceback.clear_frames(error.__traceback__)
