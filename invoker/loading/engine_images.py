"""Images for engines in other processes: which one a request means, and who has it."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from invoker.base.errors import InvalidWork
from invoker.loading.arrival import HostArrival
from invoker.loading.loader import ImageLoader
from registry.images.manifest import Manifest
from registry.messages.images import ImageHolder, ImageRef
from registry.records.node import NodeRecord, Tier
from registry.state import State

_MAX_HOLDERS = 64


class EngineImages:
    """The images that engines of this machine may attach to."""

    def __init__(self, loader: ImageLoader, state: State, node: str) -> None:
        self._loader = loader
        self._state = state
        self._node = node
        self._expected: dict[str, list[ImageRef]] = {}

    def __repr__(self) -> str:
        return f"<EngineImages {len(self._expected)} expected>"

    @contextmanager
    def expecting(self, ref: ImageRef) -> Iterator[None]:
        """Let engines attach to this image by its digest while the block lasts."""
        self._expected.setdefault(ref.image, []).append(ref)
        try:
            yield
        finally:
            refs = self._expected[ref.image]
            refs.remove(ref)
            if not refs:
                del self._expected[ref.image]

    @asynccontextmanager
    async def open(self, request: dict[str, str]) -> AsyncIterator[tuple[Manifest, HostArrival]]:
        """Open the image of `{"image": SHA256}`, which is expected, or `{"model": NAME[:VERSION]}`.

        Raises InvalidWork, RegistryError, StartFailed.
        """
        if "image" in request:
            known = self._expected.get(request["image"])
            if known is None:
                raise InvalidWork(f"no engine of this node is to load the image {request['image'][:64]}")
            ref = known[-1]
        elif "model" in request:
            ref = await self._of_model(request["model"])
        else:
            raise InvalidWork('a request must have "model" or "image"')
        manifest = await self._loader.manifest(ref)
        async with self._loader.open_image(ref, manifest, lambda _: None) as arrival:
            yield manifest, arrival

    async def _of_model(self, model: str) -> ImageRef:
        """Return the image of a function's version. Raises NotFound, InvalidWork."""
        name, _, number = model.partition(":")
        if number and not number.isdigit():
            raise InvalidWork(f"{model[:80]!r} is not NAME or NAME:VERSION")
        version = await self._state.version(name, int(number) if number else None)
        if version.image is None or version.manifest is None:
            raise InvalidWork(f"{name} has a handler, no model")
        nodes = [up.record for up in (await self._state.snapshot()).nodes]
        return ImageRef(
            image=version.image,
            manifest=version.manifest,
            nbytes=version.image_bytes,
            holders=_holders(version.image, [node for node in nodes if node.id != self._node]),
        )


def _holders(image: str, nodes: list[NodeRecord]) -> tuple[ImageHolder, ...]:
    """Return the other nodes that have the image, from host memory where they can."""
    found = []
    for node in nodes:
        tiers = {tier for holding in node.holdings if holding.image == image for tier in holding.tiers}
        if tiers & {Tier.HOST, Tier.GPU}:
            tier = Tier.HOST if Tier.HOST in tiers else Tier.GPU
            found.append(ImageHolder(node=node.id, host=node.host, cast=node.cast, tier=tier.value))
    return tuple(found[:_MAX_HOLDERS])
