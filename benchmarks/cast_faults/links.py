"""Links as slow as they are meant to be, on which bytes are damaged at times."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from rdmacast.pacer import Pacer
from rdmacast.region import GrowingRegion
from rdmacast.transport import Began, Link, PeerAddress, Transport

_FLIPPED = 0x40

Check = Callable[[int, memoryview], Sequence[int]]


class Damage:
    """Flips a byte in a share of the blocks that are read, and sees whether the checks find it."""

    def __init__(self, share: float, seed: str) -> None:
        self._share = share
        self._random = random.Random(seed)
        self._unseen: set[int] = set()  # offsets of damaged blocks that were not checked yet
        self.found = 0
        self.missed = 0

    def __repr__(self) -> str:
        return f"Damage({self._share:.1%}: {self.found} found, {self.missed} missed)"

    def do(self, offset: int, block: memoryview) -> None:
        self._unseen.discard(offset)
        if self._random.random() < self._share:
            block[self._random.randrange(len(block))] ^= _FLIPPED
            self._unseen.add(offset)

    def watched(self, check: Check) -> Check:
        """That check, with its verdicts counted; damage that is dropped with its pull, unchecked, is not."""

        def watch(offset: int, view: memoryview) -> Sequence[int]:
            units = check(offset, view)
            if offset in self._unseen:
                self._unseen.discard(offset)
                self.found += bool(units)
                self.missed += not units
            return units

        return watch


class FaultyTransport:
    """Makes links of another transport worse; `pacer` is of all that comes over them."""

    def __init__(self, inner: Transport, damage: Damage, pacer: Pacer | None) -> None:
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
    def __init__(self, inner: Link, damage: Damage, pacer: Pacer | None) -> None:
        self._inner = inner
        self._damage = damage
        self._pacer = pacer

    @property
    def transport(self) -> str:
        return self._inner.transport

    @property
    def received_bytes(self) -> int:
        return self._inner.received_bytes

    async def read_into(self, region: str, offset: int, into: memoryview, began: Began | None = None) -> None:
        if self._pacer is not None:
            await paced(self._pacer, len(into))
        await self._inner.read_into(region, offset, into, began)
        self._damage.do(offset, into)

    async def aclose(self) -> None:
        await self._inner.aclose()


class PacedRegion(GrowingRegion):
    """Gives its bytes out at the pacer's rate, for readers who copy them by themselves."""

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
