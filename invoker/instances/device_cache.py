"""Images on the accelerator: who uses which, and which idle one makes room."""

import asyncio
import logging
from collections.abc import Callable
from enum import StrEnum

from invoker.arena import Arena, Region
from invoker.errors import OutOfDeviceMemory
from registry.clock import Clock

log = logging.getLogger("invoker.residents")


class ResidentState(StrEnum):
    LOADING = "loading"  # the bytes are on their way; one user fills the region
    COMPLETE = "complete"  # whole: instances may bind to it
    GONE = "gone"  # its load failed, or it was freed


class Resident:
    """One image in the arena. Changed by `Residents` only."""

    def __init__(self, image: str, region: Region, now_s: float) -> None:
        self.image = image
        self.region = region
        self.state = ResidentState.LOADING
        self.users = 1
        self.last_used_s = now_s
        self.settled: asyncio.Event = asyncio.Event()
        self.expiry: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Resident {self.image[:12]} {self.state} users={self.users}>"


class Residents:
    """The arena's images. Belongs to the event loop's thread.

    Every `acquire`, `reserve` and `join` is paired with one `release`. An image without users is freed
    `keep_hot_s` after its last use, or earlier if its room is needed.
    """

    def __init__(self, arena: Arena, keep_hot_s: float, clock: Clock, changed: Callable[[], None]) -> None:
        self._arena = arena
        self._keep_hot_s = keep_hot_s
        self._clock = clock
        self._changed = changed
        self._by_image: dict[str, Resident] = {}
        self.evictions = 0

    def __repr__(self) -> str:
        return f"<Residents {list(self._by_image.values())!r}>"

    def complete(self) -> list[Resident]:
        """The images that are whole on the accelerator."""
        return [one for one in self._by_image.values() if one.state is ResidentState.COMPLETE]

    def holds(self, image: str) -> bool:
        found = self._by_image.get(image)
        return found is not None and found.state is ResidentState.COMPLETE

    def buffer(self, image: str) -> memoryview | None:
        """The bytes of a complete image where the processor can address them, else None."""
        return self._by_image[image].region.buffer if self.holds(image) else None

    def gpu_pointer(self, image: str) -> int | None:
        """Where a complete image lies that the processor cannot address, else None."""
        if not self.holds(image):
            return None
        region = self._by_image[image].region
        return region.pointer if region.buffer is None else None

    def acquire(self, image: str) -> Resident | None:
        """Use a complete image, or join one that is loading (await its `settled`); None if it is not here."""
        found = self._by_image.get(image)
        if found is None:
            return None
        found.users += 1
        self._stop_expiry(found)
        return found

    def reserve(self, image: str, nbytes: int) -> Resident:
        """A region for an image that is not here, to be filled. Raises OutOfDeviceMemory."""
        assert image not in self._by_image, f"{image} is here already"
        resident = Resident(image, self.reserve_region(nbytes), self._clock.monotonic_s())
        self._by_image[image] = resident
        return resident

    def reserve_region(self, nbytes: int) -> Region:
        """A region for anything; idle images make room, least recently used first."""
        while True:
            try:
                region = self._arena.reserve(nbytes)
            except OutOfDeviceMemory:
                idle = self._idle()
                if not idle or not self._could_fit(nbytes):
                    raise
                self.evictions += 1
                log.info("evicting idle image %s from the arena", idle[0].image[:12])
                self._free(idle[0])
            else:
                self._changed()
                return region

    def free_region(self, region: Region) -> None:
        """Give back a region from `reserve_region`."""
        self._arena.free(region)
        self._changed()

    def settle(self, resident: Resident, *, loaded: bool) -> None:
        """The load of a reserved image ended; those who joined it learn of it."""
        resident.state = ResidentState.COMPLETE if loaded else ResidentState.GONE
        if not loaded:
            del self._by_image[resident.image]
        resident.settled.set()
        self._changed()

    def release(self, resident: Resident) -> None:
        """End one use."""
        assert resident.users > 0, f"{resident} is not in use"
        resident.users -= 1
        resident.last_used_s = self._clock.monotonic_s()
        if resident.users:
            return
        if resident.state is ResidentState.COMPLETE and self._keep_hot_s > 0:
            loop = asyncio.get_running_loop()
            resident.expiry = loop.call_later(self._keep_hot_s, self._free, resident)
        else:
            self._free(resident)

    def drop(self, image: str) -> bool:
        """Free an idle image now; False if it is in use or not here."""
        found = self._by_image.get(image)
        if found is None or found.users:
            return False
        self._free(found)
        return True

    def _idle(self) -> list[Resident]:
        idle = [one for one in self._by_image.values() if not one.users]
        return sorted(idle, key=lambda one: one.last_used_s)

    def _could_fit(self, nbytes: int) -> bool:
        return nbytes <= self._arena.free_bytes + sum(one.region.span.nbytes for one in self._idle())

    def _free(self, resident: Resident) -> None:
        self._stop_expiry(resident)
        if self._by_image.get(resident.image) is resident:
            del self._by_image[resident.image]
        resident.state = ResidentState.GONE
        self._arena.free(resident.region)
        self._changed()

    def _stop_expiry(self, resident: Resident) -> None:
        if resident.expiry is not None:
            resident.expiry.cancel()
            resident.expiry = None
