"""Links with a limited rate, on which bytes are corrupted at times."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from rdmacast.pacer import Pacer
from rdmacast.server.region import GrowingRegion
from rdmacast.transport import Link, OnStart, PeerAddress, Transport

_FLIPPED = 0x40

Check = Callable[[int, memoryview], Sequence[int]]


class BlockDamage:
    """Flips a byte in a fraction of the blocks read, and counts whether the checks find it."""

    def __init__(self, share: float, seed: str) -> None:
        self._share = share
        self._random = random.Random(seed)
        self._unseen: set[int] = set()  # offsets of damaged blocks not yet checked
        self.found = 0
        self.missed = 0

    def __repr__(self) -> str:
        return f"Damage({self._share:.1%}: {self.found} found, {self.missed} missed)"

    def do(self, offset: int, block: memoryview) -> None:
        self._unseen.discard(offset)
        if self._random.random() < self._share:
            block[self._random.randrange(len(block))] ^= _FLIPPED
            self._unseen.add(offset)

    def counting(self, check: Check) -> Check:
        """Wrap a check to count its results; damage dropped unchecked with its pull is not counted."""

        def watch(offset: int, view: memoryview) -> Sequence[int]:
            units = check(offset, view)
            if offset in self._unseen:
                self._unseen.discard(offset)
                self.found += bool(units)
                self.missed += not units
            return units

        return watch


class FaultyTransport:
    """A transport whose links corrupt blocks; `pacer` limits everything that arrives over them."""

    def __init__(self, inner: Transport, damage: BlockDamage, pacer: Pacer | None) -> None:
        self._inner = inner
        self._damage = damage
        self._pacer = pacer

    def __repr__(self) -> str:
        return f"FaultyTransport({self._inner!r}, {self._damage!r})"

    @property
    def name(self) -> str:
        return self._inner.name

    @asynccontextmanager
    async def connect(self, peer: PeerAddress) -> AsyncIterator[Link]:
        async with self._inner.connect(peer) as link:
            yield _FaultyLink(link, self._damage, self._pacer)


class _FaultyLink:
    def __init__(self, inner: Link, damage: BlockDamage, pacer: Pacer | None) -> None:
        self._inner = inner
        self._damage = damage
        self._pacer = pacer

    @property
    def transport(self) -> str:
        return self._inner.transport

    @property
    def received_bytes(self) -> int:
        return self._inner.received_bytes

    @property
    def is_reusable(self) -> bool:
        return self._inner.is_reusable

    async def read_into(
        self, region: str, offset: int, into: memoryview, began: OnStart | None = None
    ) -> None:
        if self._pacer is not None:
            await paced(self._pacer, len(into))
        await self._inner.read_into(region, offset, into, began)
        self._damage.do(offset, into)

    async def aclose(self) -> None:
        await self._inner.aclose()


class PacedRegion(GrowingRegion):
    """A region that releases its bytes at the pacer's rate, for readers that copy them directly."""

    def __init__(self, buffer: memoryview, *, shm_path: str, complete: bool, pacer: Pacer | None) -> None:
        super().__init__(buffer, shm_path=shm_path, complete=complete)
        self._pacer = pacer

    async def wait_for(self, offset: int, nbytes: int) -> None:
        await super().wait_for(offset, nbytes)
        if self._pacer is not None:
            await paced(self._pacer, nbytes)


async def paced(pacer: Pacer, nbytes: int) -> None:
    wait_s = pacer.reserve(asyncio.get_running_loop().time(), nbytes)
    if wait_s > 0:
        await asyncio.sleep(wait_s)
