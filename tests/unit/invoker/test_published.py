"""What a node publishes of an image that it serves, wherever it has it."""

import hashlib
import os
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from benchmarks.harness.no_server import EmptyArena
from invoker.host_tier.image_writer import ImageWriter
from invoker.host_tier.tier import HostTier
from invoker.loading.published import ImageRegion
from rdmacast.errors import NotShared, RegionGone
from rdmacast.server.region import GrowingRegion

CONTENT = bytes(range(256)) * 40
DIGEST = hashlib.sha256(CONTENT).hexdigest()
BLOCK_BYTES = 1024
EVERYTHING = (1 << 10) - 1
POINTER = 1 << 30


@pytest.fixture
def tier() -> Iterator[HostTier]:
    tier = HostTier(
        Path("/dev/shm") / f"published-test-{os.getpid()}-{random.getrandbits(32):08x}" / "h", 1 << 20
    )
    yield tier
    tier.close()


def begin(tier: HostTier, region: ImageRegion) -> tuple[ImageWriter, GrowingRegion]:
    writer = tier.begin(DIGEST, len(CONTENT))
    assert isinstance(writer, ImageWriter)
    arriving = GrowingRegion(writer.view, shm_path=str(writer.path))
    region.load_started(arriving)
    return writer, arriving


async def test_an_image_that_was_evicted_is_told_of_anew(tier: HostTier) -> None:
    """Peers add up what is published under one epoch: they would ask it for blocks that it has no more."""
    region = ImageRegion(DIGEST, len(CONTENT), tier, EmptyArena())
    writer, arriving = begin(tier, region)
    writer.view[:] = CONTENT
    arriving.mark(0, 3 * BLOCK_BYTES)
    early = region.bitfield(BLOCK_BYTES)
    arriving.complete()
    writer.publish().close()
    region.load_ended()
    whole = region.bitfield(BLOCK_BYTES)
    assert (early.held, whole.held) == (0b111, EVERYTHING) and early.epoch == whole.epoch
    assert tier.evict(DIGEST)
    gone = region.bitfield(BLOCK_BYTES)
    assert (gone.held, gone.pending) == (0, 0) and gone.epoch > whole.epoch
    assert region.bitfield(BLOCK_BYTES) == gone
    writer, arriving = begin(tier, region)
    writer.view[:BLOCK_BYTES] = CONTENT[:BLOCK_BYTES]
    arriving.mark(0, BLOCK_BYTES)
    again = region.bitfield(BLOCK_BYTES)
    assert again.held == 1 and again.epoch == gone.epoch
    writer.abandon()
    region.load_ended()
    assert region.bitfield(BLOCK_BYTES).epoch > again.epoch


async def test_one_that_comes_again_before_anybody_asked_is_told_of_anew_too(tier: HostTier) -> None:
    region = ImageRegion(DIGEST, len(CONTENT), tier, EmptyArena())
    writer, arriving = begin(tier, region)
    writer.view[:] = CONTENT
    arriving.complete()
    writer.publish().close()
    region.load_ended()
    whole = region.bitfield(BLOCK_BYTES)
    assert tier.evict(DIGEST)
    writer, _ = begin(tier, region)
    again = region.bitfield(BLOCK_BYTES)
    assert (again.held, again.pending) == (0, EVERYTHING) and again.epoch > whole.epoch
    writer.abandon()
    region.load_ended()


class GpuImages(EmptyArena):
    """CONTENT on a GPU, from POINTER on, while it is `here`."""

    here = True

    def gpu_pointer(self, image: str) -> int | None:
        return POINTER if self.here else None

    @asynccontextmanager
    async def staged(self, image: str, offset: int, nbytes: int) -> AsyncIterator[memoryview]:
        yield memoryview(CONTENT)[offset : offset + nbytes]


async def test_what_only_a_gpu_has_is_published_and_read_there_or_through_host_memory(tier: HostTier) -> None:
    gpu = GpuImages()
    region = ImageRegion(DIGEST, len(CONTENT), tier, gpu)
    assert region.bitfield(BLOCK_BYTES).held == EVERYTHING and region.shm_path is None
    await region.wait_for(100, 50)
    assert region.gpu_pointer(100, 50) == POINTER + 100
    async with region.staged(100, 50) as copy:
        assert copy == CONTENT[100:150]
    with pytest.raises(NotShared, match="in the memory of a GPU only"):
        region.view(100, 50)  # what a transport asks for that shares host memory
    writer, arriving = begin(tier, region)
    assert region.gpu_pointer(0, 1) is None
    writer.view[:] = CONTENT
    arriving.complete()
    writer.publish().close()
    region.load_ended()
    await region.wait_for(0, 1)
    assert region.gpu_pointer(0, 1) is None and region.view(0, 1) == CONTENT[:1]
    region.close()
    assert tier.evict(DIGEST)
    gpu.here = False
    with pytest.raises(RegionGone, match="no longer on this node"):
        await region.wait_for(0, 1)


async def test_what_other_nodes_of_the_host_loaded_is_checked_when_served(tier: HostTier) -> None:
    checked: list[tuple[str, int]] = []
    region = ImageRegion(DIGEST, len(CONTENT), tier, EmptyArena(), check=lambda *found: checked.append(found))
    writer = tier.begin(DIGEST, len(CONTENT))
    assert isinstance(writer, ImageWriter)
    with closing(writer.publish()) as mapping:
        await region.wait_for(0, 1)
        region.view(0, 1).release()
        assert checked == [(DIGEST, mapping.inode)]
    region.close()
