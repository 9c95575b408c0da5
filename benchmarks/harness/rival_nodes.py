"""What nodes of other systems have and ours do not: disks, group set-ups, devices that load at once."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from invoker.emulated.device_clock import DeviceClock
from invoker.emulated.profiles import DEVICES, H800, LinkRates
from invoker.engine.contract import ModelSpec
from invoker.engine.factory import EngineFactory
from invoker.loading.loader import LoadSources
from invoker.loading.store_access import StoreAccess
from rdmacast.cast.watch_link import OnBitfield, OnVerdict, RegionWatch, Watcher
from rdmacast.transport import PeerAddress
from registry.images.local_reader import LocalReader
from registry.images.local_store import LocalStore

FREE_DEVICE = "h800-free"  # an ideal: it loads models at once


def add_free_device() -> None:
    """Have emulated nodes of this process know the device that loads at once."""
    DEVICES[FREE_DEVICE] = (H800, LinkRates(host=1e6 * LinkRates().host))


class DelayedEngines:
    """Engines that delay each start before its model is loaded, where their memory needs are requested."""

    def __init__(self, engines: EngineFactory, wait_s: float) -> None:
        self._engines = engines
        self._wait_s = wait_s
        self.make = engines.make
        self.make_stage = engines.make_stage
        self.binds_early = engines.binds_early
        self.check = engines.check
        self.add_tokenizer = engines.add_tokenizer

    def kv_bytes(self, spec: ModelSpec, max_concurrency: int) -> tuple[int, int]:
        """Return the inner engines' KV bytes after the delay; called in a thread (see Engines)."""
        time.sleep(self._wait_s)
        return self._engines.kv_bytes(spec, max_concurrency)


class GroupWatcher:
    """A Watcher for casts that first set up a group of all their members."""

    def __init__(self, watcher: Watcher, group_s: float) -> None:
        self._watcher = watcher
        self._group_s = group_s

    @asynccontextmanager
    async def watch(
        self,
        peer: PeerAddress,
        region: str,
        block_bytes: int,
        on_bitfield: OnBitfield,
        on_verdict: OnVerdict | None = None,
    ) -> AsyncIterator[RegionWatch]:
        """Wait for the set-up, then watch: see Watcher."""
        await asyncio.sleep(self._group_s)
        async with self._watcher.watch(peer, region, block_bytes, on_bitfield, on_verdict) as watch:
            yield watch

    async def prepare(self, peer: PeerAddress) -> None:
        await self._watcher.prepare(peer)

    async def aclose(self) -> None:
        await self._watcher.aclose()


class EmulatedDiskReader(LocalReader):
    """A LocalReader, each read of which lasts until the disk, shared by all readers, has finished it."""

    def __init__(self, path: Path, clock: DeviceClock, bytes_per_s: float) -> None:
        super().__init__(path)
        self._clock = clock
        self._bytes_per_s = bytes_per_s

    @property
    def is_direct(self) -> bool:
        return False

    def cached(self, offset: int, nbytes: int) -> int | None:
        """Return None: what this machine caches of its files, the emulated one does not."""
        return None

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill `into`: see BlobReader."""
        super().read_into(offset, into)
        self._clock.run(len(into) / self._bytes_per_s)


def with_own_disk(sources: LoadSources, folder: Path, bytes_per_s: float) -> LoadSources:
    """Return sources of which the store is a folder's blobs, as if on the node's own disk."""
    reader = partial(EmulatedDiskReader, clock=DeviceClock(), bytes_per_s=bytes_per_s)
    return replace(sources, store=StoreAccess(store=LocalStore(folder, reader), label="disk"))


def with_group_setup(sources: LoadSources, group_s: float) -> LoadSources:
    """Return sources of which casts first set up a group of all their members."""
    if sources.casts is None:
        return sources
    links = sources.casts.links
    grouped = replace(links, watcher=GroupWatcher(links.watcher, group_s))
    return replace(sources, casts=replace(sources.casts, links=grouped))
