"""What is left to read of an image, and in which pieces."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from invoker.host_tier.image_writer import ImageWriter
from invoker.host_tier.tier import HostTier
from invoker.loading.partial_image import CHUNK_BYTES, PartialImage
from registry.images.manifest import UNIT_BYTES
from tests.fixtures.invoker import FakeImage, image_of

UNITS = 3 * CHUNK_BYTES // UNIT_BYTES + 2


@pytest.fixture(scope="module")
def image() -> FakeImage:
    return image_of(bytes(UNITS * UNIT_BYTES - 5))


@pytest.fixture(scope="module")
def writer(image: FakeImage) -> Iterator[ImageWriter]:
    with tempfile.TemporaryDirectory() as folder:
        tier = HostTier(Path(folder) / "h0", 2 * UNITS * UNIT_BYTES)
        writer = tier.begin(image.digest, len(image.data))
        assert isinstance(writer, ImageWriter)
        yield writer
        writer.abandon()
        tier.close()


@given(st.lists(st.tuples(st.integers(0, UNITS - 1), st.integers(1, UNITS)), max_size=4))
def test_chunks_are_what_is_missing_in_order(
    image: FakeImage, writer: ImageWriter, present: list[tuple[int, int]]
) -> None:
    target, missing = PartialImage(writer, image.manifest, lambda _: None), set(range(UNITS))
    for first, count in present:
        start, end = first * UNIT_BYTES, min((first + count) * UNIT_BYTES, target.nbytes)
        target.mark(start, end - start)
        missing -= set(range(first, first + count))
    chunks = list(target.missing_chunks())
    found = [
        unit
        for offset, nbytes in chunks
        for unit in range(offset // UNIT_BYTES, -(-(offset + nbytes) // UNIT_BYTES))
    ]
    assert found == sorted(missing)
    assert all(0 < nbytes <= CHUNK_BYTES and not offset % UNIT_BYTES for offset, nbytes in chunks)
    if not present:
        assert {nbytes for _, nbytes in chunks[:-1]} == {CHUNK_BYTES}
