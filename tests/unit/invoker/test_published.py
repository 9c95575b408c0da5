"""What a node publishes of an image that it serves, wherever it has it."""

import hashlib
import os
import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from invoker.host_tier.image_writer import ImageWriter
from invoker.host_tier.tier import HostTier
from invoker.loading.published import ImageRegion
from rdmacast.errors import RegionGone
from rdmacast.server.region import GrowingRegion

CONTENT = bytes(range(256)) * 40
DIGEST = hashlib.sha256(CONTENT).hexdigest()
BLOCK_BYTES = 1024
EVERYTHING = (1 << 10) - 1


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
    region = ImageRegion(DIGEST, len(CONTENT), tier, lambda _: None)
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
    region = ImageRegion(DIGEST, len(CONTENT), tier, lambda _: None)
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


async def test_what_only_a_gpu_has_is_not_told_but_read_there(tier: HostTier) -> None:
    pointer = 1 << 30
    here = {DIGEST: pointer}
    region = ImageRegion(DIGEST, len(CONTENT), tier, lambda _: None, here.get)
    assert region.bitfield(BLOCK_BYTES).held == 0 and region.shm_path is None
    await region.wait_for(100, 50)
    assert region.gpu_pointer(100, 50) == pointer + 100
    with pytest.raises(RegionGone, match="no longer on this node"):
        region.view(100, 50)  # what another transport than that of GPUs asks for
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
    here.clear()
    with pytest.raises(RegionGone, match="no longer on this node"):
        await region.wait_for(0, 1)


async def test_what_other_nodes_of_the_host_loaded_is_checked_when_served(tier: HostTier) -> None:
    checked: list[tuple[str, int]] = []
    region = ImageRegion(
        DIGEST, len(CONTENT), tier, lambda _: None, check=lambda *found: checked.append(found)
    )
    writer = tier.begin(DIGEST, len(CONTENT))
    assert isinstance(writer, ImageWriter)
    with closing(writer.publish()) as mapping:
        await region.wait_for(0, 1)
        region.view(0, 1).release()
        assert checked == [(DIGEST, mapping.inode)]
    region.close()
