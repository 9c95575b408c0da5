"""An image in a local store: read into a host tier as a cold start does it, and damaged on the disk."""

from collections.abc import AsyncIterator
from pathlib import Path

from invoker.counters import Counters
from invoker.fetch import Target, from_store
from invoker.filling import Filling
from registry.images.local_store import LocalStore
from registry.images.manifest import UNIT_BYTES
from tests.invoker_fixture import FakeImage


async def stored(folder: Path, image: FakeImage) -> LocalStore:
    """A store that has the image."""

    async def whole() -> AsyncIterator[bytes]:
        yield image.data

    store = LocalStore(folder)
    await store.append(image.digest, 0, whole(), total=len(image.data))
    return store


async def read_whole(store: LocalStore, image: FakeImage, filling: Filling, counters: Counters) -> None:
    """Read all of it. Raises CorruptImage."""
    target = Target(filling, image.manifest, lambda arrived: None)
    try:
        await from_store(store, target, counters, local=True)
        assert target.is_complete and filling.view == image.data
    finally:
        target.release()


def damage(blob: Path, unit: int) -> None:
    with blob.open("r+b") as file:
        file.seek(unit * UNIT_BYTES + 7)
        file.write(b"not it")
